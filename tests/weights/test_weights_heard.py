"""What fails on one rank before its part of an update begins is heard by all, and not at their
deadline: over each adapter, without the engines."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing, contextmanager
from typing import Any, NamedTuple

import pytest
import torch

from moe_p2p.fleet.store_keys import StoreKeys
from moe_p2p.integrations.weights import slime, torchtitan, verl
from moe_p2p.integrations.weights import vllm as vllm_weights
from moe_p2p.integrations.weights.engine import Fleet
from moe_p2p.integrations.weights.sglang import SglangUpdates
from moe_p2p.weights import Param, Shard, WeightEngineRank, WeightLayout, WeightTrainer
from moe_p2p.weights.job import prefix_of
from tests.engines.scenarios import free_port
from tests.support.weights_fleet import BF16, engine_of
from tests.weights.test_weights_senders import Client, Sender, Source

LONG_S = 120.0  # the deadline of all
SOON_S = 20.0  # a second, on a machine that does much besides
WHY = "out of luck"
LAYOUT = WeightLayout([Param("w", (8, 8), BF16, (0, 1), placements=(Shard(0),))], 2)
WHOLE = WeightLayout([Param("w", (8, 8), BF16, (0,))], 1)
# Of a rank, in an update: True: this one fails.
Call = Callable[[int, bool], object]


class Ends(NamedTuple):
    calls: list[Call]
    pool: ThreadPoolExecutor

    def run(self, version: int, failing: int | None = None) -> list[str]:
        """Returns what each rank raises."""
        made = [self.pool.submit(call, version, rank == failing)
                for rank, call in enumerate(self.calls)]  # fmt: skip
        found = [each.exception(LONG_S) for each in made]
        return ["" if each is None else str(each) for each in found]


def fail_if(fails: bool) -> None:
    if fails:
        raise OSError(WHY)


def half() -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(4, 8, dtype=torch.bfloat16)}


@contextmanager
def generating(fleet: Fleet, stack: ExitStack, pool: ThreadPoolExecutor) -> Iterator[None]:
    """An engine rank that goes on from step to step."""
    over, made = threading.Event(), half()["w"].repeat(2, 1)

    def generate() -> None:
        with engine_of("generator", 2) as engine, WeightEngineRank(
            engine, fleet.store(), WHOLE, 0, {"w": made}, timeout_s=LONG_S
        ) as engine_rank:  # fmt: skip
            while not over.wait(0.002):
                engine_rank.step()

    running = pool.submit(generate)
    try:
        yield
    finally:
        over.set()
        running.result(LONG_S)


def trainers_of(fleet: Fleet, store: Any, stack: ExitStack, pool: Any) -> list[WeightTrainer]:
    engines = [stack.enter_context(engine_of(f"trainer {i}", i)) for i in range(2)]
    made = [pool.submit(WeightTrainer, engine, store, LAYOUT, i, half(), timeout_s=LONG_S)
            for i, engine in enumerate(engines)]  # fmt: skip
    return [stack.enter_context(each.result(LONG_S)) for each in made]


@contextmanager
def world() -> Iterator[tuple[Fleet, ExitStack, ThreadPoolExecutor]]:
    fleet = Fleet(host="127.0.0.1", port=free_port(), timeout_s=LONG_S)
    with ThreadPoolExecutor(6) as pool, ExitStack() as stack:
        yield fleet, stack, pool


@contextmanager
def of_sglang() -> Iterator[Ends]:
    """SGLang refuses to begin."""
    with world() as (fleet, stack, pool):
        store = fleet.store(serves=True)
        with generating(fleet, stack, pool):
            first, second = trainers_of(fleet, store, stack, pool)
            updates, refuses = SglangUpdates("http://127.0.0.1:1", fleet), [False]
            updates._call = lambda name, **fields: fail_if(refuses[0] and "begin" in name)
            updates._raise_errors = lambda do: None  # type: ignore[method-assign]

            def send(version: int, fails: bool) -> None:
                refuses[0] = fails
                updates.send(version, lambda: first.update(version))

            yield Ends([send, lambda version, fails: second.update(version)], pool)
            updates._answers.client.close()


class FailingSource(Source):
    fails = False

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        fail_if(self.fails)
        yield "w", self.w


@contextmanager
def of_vllm() -> Iterator[Ends]:
    with world() as (fleet, stack, pool), generating(fleet, stack, pool):
        sources = [FailingSource(), FailingSource()]

        def made(rank: int) -> Any:
            init = vllm_weights.TrainerInit(
                rank=rank, world_size=2, host=fleet.host, port=fleet.port, timeout_s=LONG_S
            )
            return Sender.trainer_init(init, client=Client(), source=sources[rank])

        senders = [each.result(LONG_S) for each in [pool.submit(made, i) for i in range(2)]]

        def call(rank: int) -> Call:
            def send(version: int, fails: bool) -> None:
                sources[rank].fails = fails
                senders[rank].send_weights()

            return send

        yield Ends([call(0), call(1)], pool)
        for each in senders:
            each.shutdown()


@contextmanager
def of_torchtitan() -> Iterator[Ends]:
    with world() as (fleet, stack, pool):
        store = fleet.store(serves=True)
        with generating(fleet, stack, pool):

            def call(trainer: WeightTrainer) -> Call:
                pushes = torchtitan.Pushes()
                pushes._host = dict(trainer._tensors)
                pushes.__dict__["_trainer"] = trainer

                def push(version: int, fails: bool) -> None:
                    pushes._sending = None
                    try:
                        pushes.put(
                            {"w": torch.ones(4, 8), **({WHY: torch.ones(1)} if fails else {})}
                        )
                    except KeyError as error:
                        raise OSError(str(error)) from error
                    assert pushes._sending is not None
                    pushes._sending.result(LONG_S)

                return push

            yield Ends([call(each) for each in trainers_of(fleet, store, stack, pool)], pool)


@contextmanager
def of_torchtitans_pull() -> Iterator[Ends]:
    """The generator's rank is the third."""
    with world() as (fleet, stack, pool):
        store = fleet.store(serves=True)
        engine, pulls = stack.enter_context(engine_of("generator", 2)), torchtitan.Pulls()
        pulls._landed = {"w": torch.zeros(8, 8, dtype=torch.bfloat16)}
        pulls._words = StoreKeys(fleet.store(), prefix_of(fleet.name))
        made = pool.submit(WeightEngineRank, engine, fleet.store(), WHOLE, 0, pulls._landed,
                           mode="in_place", timeout_s=LONG_S)  # fmt: skip
        trainers = trainers_of(fleet, store, stack, pool)
        pulls._generator = stack.enter_context(made.result(LONG_S))

        def pull(version: int, fails: bool) -> None:
            given = {"w": torch.zeros(8, 8, dtype=torch.bfloat16)}
            pulls.get({**given, WHY: torch.zeros(1)} if fails else given, True)

        def update(trainer: WeightTrainer) -> Call:
            return lambda version, fails: trainer.update(version)

        yield Ends([*map(update, trainers), pull], pool)
        pulls._words.client.close()


class _Unlucky(torch.Tensor):
    def detach(self) -> Any:
        raise OSError(WHY)


@contextmanager
def of_verl() -> Iterator[Ends]:
    """Two actors and a worker, which takes a tensor of two buckets; a group for each update."""
    with world() as (_, _, pool):
        ends = [verl.Checkpoint(64, "cpu", LONG_S) for _ in range(3)]
        weights = [("a", torch.ones(16)), ("b", torch.ones(16))]
        meet, meetings = threading.Barrier(3), list[Any]()

        def call(rank: int) -> Call:
            side, number = ("worker", 0) if rank == 2 else ("actor", rank)
            end = ends[rank]

            async def take() -> AsyncIterator[None]:
                async with aclosing(end.receive_weights()) as pairs:  # type: ignore[type-var]
                    async for _ in pairs:
                        yield

            async def receive(fails: bool) -> None:
                async with aclosing(take()) as each:  # type: ignore[type-var]
                    async for _ in each:
                        fail_if(fails)

            def run(version: int, fails: bool) -> None:
                if rank == 2:
                    meetings.append(end.prepare() | {"host": "127.0.0.1"})
                meet.wait(LONG_S)
                end.init_process_group(side, number, 2, 1, meetings[-1])
                given = list(weights)
                if fails:
                    given[1] = ("b", torch.ones(16).as_subclass(_Unlucky))
                asyncio.run(receive(fails) if rank == 2 else end.send_weights(given))

            return run

        yield Ends([call(rank) for rank in range(3)], pool)
        for each in ends:
            each.finalize()


@contextmanager
def of_slime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    """Rank 0 gathers, rank 1 gathers, and rank 2 does nothing but wait for both."""
    said, meet, at = [b""] * 3, threading.Barrier(3), threading.local()

    def everyones(data: bytes, group: Any) -> list[bytes]:
        said[at.rank] = data
        meet.wait(LONG_S)
        found = list(said)
        meet.wait(LONG_S)
        return found

    class Base:
        weight_version, quantization_config, fails = 0, None, False

        def _send_weights(self, bar: None) -> None:
            fail_if(self.fails)

    made: Any = type("Updater", (slime.Updater, Base), {})
    distributed = type("", (), {"get_gloo_group": staticmethod(lambda: None)})
    monkeypatch.setattr(slime, "required", lambda *_: distributed)
    monkeypatch.setattr(slime, "everyones", everyones)
    with world() as (fleet, stack, pool):
        store = fleet.store(serves=True)
        with generating(fleet, stack, pool):
            trainers = trainers_of(fleet, store, stack, pool)

            def call(rank: int) -> Call:
                updater = made()
                updater._is_set_up = True
                updater._trainer = trainers[rank] if rank < 2 else None

                def update(version: int, fails: bool) -> None:
                    at.rank, updater.fails = rank, fails
                    updater.update_weights()

                return update

            yield Ends([call(rank) for rank in range(3)], pool)


@pytest.mark.parametrize(
    ("adapter", "failing"),
    [
        ("sglang", 0),
        ("vllm", 0),
        ("vllm", 1),
        ("verl", 1),
        ("verl", 2),
        ("slime", 0),
        ("slime", 2),
        ("torchtitan", 1),
        ("torchtitans_pull", 2),
    ],
)
def test_all_ranks_hear_at_once_what_fails_on_one(
    adapter: str, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = globals()[f"of_{adapter}"]
    with made(monkeypatch) if adapter == "slime" else made() as ends:
        good = [""] * len(ends.calls)
        assert ends.run(1) == good
        began = time.monotonic()
        for version in (2, 3):  # also where it fails again
            heard = ends.run(version, failing)
            assert all(WHY in text or "takes no more" in text for text in heard), heard
            assert WHY in heard[failing]
        assert time.monotonic() - began < 2 * SOON_S
        assert ends.run(4) == good
