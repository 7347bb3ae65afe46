"""What processes have said leaves the store with them, however often they begin anew, and nobody
takes what was said by the one before for the new one's."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from moe_p2p import MoeP2pError
from moe_p2p.fleet.store_keys import StoreKeys
from moe_p2p.integrations.weights.engine import EngineWeights, Fleet
from moe_p2p.weights import Param, WeightEngineRank, WeightLayout, WeightTrainer, job
from tests.support.weights_fleet import BF16, engine_of
from tests.weights import test_weights_identity as identity
from tests.weights.test_weights_senders import Loaded

LONG_S = 60.0
LIMITS = {"timeout_s": 20.0, "lease_s": 0.4}
RESTARTS = 20


def layout_of(rows: int, ranks: int = 1) -> WeightLayout:
    """rows: of the whole, as many bytes with any."""
    return WeightLayout([Param("w", (rows, 24 // rows), BF16, range(ranks))], ranks)


LAYOUT = layout_of(4)


class World:
    """A trainer, and engine ranks by their names; threads of this process."""

    def __init__(self, stack: ExitStack, store: Any = None) -> None:
        self.stack, self.store = stack, store or HashStore()
        self.pool = stack.enter_context(ThreadPoolExecutor(8))
        self.trainer: Any = None
        self.engine_ranks = dict[str, Any]()

    def begin(self, kind: Any, rank: int = 0, layout: WeightLayout = LAYOUT, **how: Any) -> Any:
        engine = self.stack.enter_context(engine_of(f"{kind.__name__} {rank}", rank))
        tensors = {"w": torch.zeros(layout.params[0].shape, dtype=torch.bfloat16)}
        given = (engine, self.store, layout, rank, tensors)

        def make() -> Any:
            found = kind(*given, **{**LIMITS, **how})
            self.stack.callback(found.close)
            return found

        return self.pool.submit(make)

    def join(self, replica: str) -> None:
        self.engine_ranks[replica] = self.begin(WeightEngineRank, replica=replica).result(LONG_S)

    def set_up(self) -> None:
        engine_rank = self.begin(WeightEngineRank)
        self.trainer = self.begin(WeightTrainer).result(LONG_S)
        self.engine_ranks[""] = engine_rank.result(LONG_S)

    def update(self, version: int) -> None:
        self.trainer._tensors["w"].fill_(version)
        running = self.pool.submit(self.trainer.update, version)
        waits = [self.pool.submit(each.wait) for each in self.engine_ranks.values()]
        for each in [running, *waits]:
            each.result(LONG_S)
        for each in self.engine_ranks.values():
            assert each.version == version
            assert each._tensors["w"].unique().tolist() == [version]


def kill(rank: Any) -> None:
    """It says and renews nothing any more."""
    rank._member._beat.stopped.set()
    rank._words.client.close()
    rank.engine.close()


def close(rank: Any) -> None:
    rank.close()


def restart_engine_rank(found: World, number: int, end: Callable[[Any], None]) -> None:
    end(found.engine_ranks.pop(""))
    found.engine_ranks[""] = found.begin(WeightEngineRank).result(LONG_S)


def restart_trainers(found: World, number: int, end: Callable[[Any], None]) -> None:
    end(found.trainer)
    found.trainer = found.begin(WeightTrainer).result(LONG_S)


def restart_all(found: World, number: int, end: Callable[[Any], None]) -> None:
    end(found.trainer)
    end(found.engine_ranks.pop(""))
    found.set_up()


def join_and_leave(found: World, number: int, end: Callable[[Any], None]) -> None:
    """Each by a name of its own."""
    for before in found.engine_ranks.keys() - {""}:
        end(found.engine_ranks.pop(before))
    found.join(f"late {number}")


@pytest.mark.parametrize(
    ("restart", "end"),
    [
        (restart_engine_rank, close),
        (restart_engine_rank, kill),
        (restart_trainers, close),
        (restart_trainers, kill),
        (restart_all, kill),
        (join_and_leave, close),
    ],
)
def test_nothing_in_the_store_grows_with_restarts(
    restart: Callable[..., None], end: Callable[[Any], None]
) -> None:
    counts = list[int]()
    with ExitStack() as stack:
        found = World(stack)
        found.set_up()
        for number in range(1, RESTARTS + 1):
            found.update(number)
            counts.append(found.store.num_keys())
            restart(found, number, end)
        assert counts[-1] <= counts[3] + 1, sorted(found.store.list_keys())


def test_all_that_stays_when_a_fleet_has_left_is_of_the_name() -> None:
    with ExitStack() as stack:
        found = World(stack)
        found.set_up()
        found.update(1)
        ids = [each._member.id for each in (found.trainer, found.engine_ranks[""])]
        found.trainer.close()
        found.engine_ranks[""].close()
        assert not [key for key in found.store.list_keys() if any(each in key for each in ids)]
        assert not [key for key in found.store.list_keys() if key.endswith(" is")]


@pytest.mark.parametrize("kind", ["hash", "tcp", "prefix"])
def test_words_are_listed_and_dropped_in_each_store(kind: str) -> None:
    store: Any = HashStore()
    if kind == "tcp":
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    elif kind == "prefix":
        store = PrefixStore("of others", PrefixStore("ours", store))
    words, other = StoreKeys(store, "fleet"), StoreKeys(store, "other")
    for each in (words, other):
        each.put("old/1", 1)
        each.put("new", 2)
    words.sweep(lambda key: key.startswith("old/"))
    assert [each.get("old/1") for each in (words, other)] == [None, 1]
    assert [each.get("new") for each in (words, other)] == [2, 2]
    for each in (words, other):
        each.client.close()


def test_workers_of_engines_that_were_killed_leave_no_layouts() -> None:
    """They are large, and each set-up has a name of its own."""
    counts = list[int]()
    with ExitStack() as stack:
        found = World(stack)
        fleet = Fleet(host="", port=0, timeout_s=LONG_S / 2)
        layout = WeightLayout([Param("w", (4, 4), BF16, (0,))], 1)
        for number in range(6):
            model = Loaded()
            given = (model, model.load_weights, fleet, 0, 1)
            made = found.pool.submit(EngineWeights, *given, store=found.store, set_up=f"{number}")
            if number == 0:
                found.trainer = found.begin(WeightTrainer, layout=layout).result(LONG_S)
            worker = made.result(LONG_S)
            counts.append(found.store.num_keys())
            worker._set_up.client.close()
            kill(worker.engine_rank)
        assert counts[-1] <= counts[1]


def test_the_layout_of_engine_ranks_that_were_there_before_is_not_the_new_ones() -> None:
    """All were killed, and begin anew with other ranks; the first of them is the last to come."""
    with ExitStack() as stack:
        found = World(stack)
        found.set_up()
        found.update(1)
        kill(found.trainer)
        kill(found.engine_ranks.pop(""))
        words = StoreKeys(found.store, job.prefix_of("weights"), alone=True)
        old = job.current(words)
        first = found.begin(WeightTrainer, layout=layout_of(6))
        until = time.monotonic() + LONG_S
        while (now := job.current(words)) is None or now == old:
            assert not first.done(), first.result()
            assert time.monotonic() < until
        second, third = (found.begin(WeightEngineRank, i, layout=layout_of(6, 2)) for i in (1, 0))
        found.trainer = first.result(LONG_S)
        found.engine_ranks = {"1": second.result(LONG_S), "0": third.result(LONG_S)}
        assert found.trainer.plan.target.world_size == 2
        found.update(2)


def test_ranks_of_an_engine_with_layouts_that_differ_are_not_written_to() -> None:
    """One began anew by another layout, and they are written to by one plan."""
    two = layout_of(4, 2)
    with ExitStack() as stack:
        found = World(stack)
        made = [found.begin(WeightEngineRank, i, layout=two) for i in range(2)]
        found.trainer = found.begin(WeightTrainer).result(LONG_S)
        found.engine_ranks = {f"{i}": each.result(LONG_S) for i, each in enumerate(made)}
        found.update(1)
        found.engine_ranks.pop("1").close()
        other = WeightLayout([Param("w", (4, 6), BF16, (0, 1), tensor="w", order=(1, 0))], 2)
        late = found.begin(WeightEngineRank, 1, layout=other).result(LONG_S)
        with pytest.raises(MoeP2pError, match=r"generator [01] has another layout than"):
            found.trainer.update(2)
        late.close()


def test_trainers_begin_beside_founders_of_a_job_that_never_met() -> None:
    """Its trainers were killed behind their roll."""
    with ExitStack() as stack:
        found = identity.World(stack)
        words = StoreKeys(found.store, job.prefix_of("weights"))
        job.open_job(words, identity.SOURCE)
        roll = {
            "ids": ["a", "b"],
            "nics": [1, 1],
            "source": identity.SOURCE.digest,
            "founded": False,
        }
        words.decide(f"{words.get(job.NOW)['job']}/roll", roll)
        engine_rank = found.begin_engine_rank().result(60)
        found.engine_ranks.append(engine_rank)
        making = [found.begin_trainer(i, 0.0) for i in range(2)]
        while not all(each.done() for each in making):
            engine_rank.step()
        found.trainers = [each.result() for each in making]
        found.update(1)
        found.check(1)
