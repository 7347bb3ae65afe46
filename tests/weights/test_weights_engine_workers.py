"""Workers of an inference engine: pipeline stages and experts of each, its own loader, set-ups that
follow each other, and what is not done yet when an engine asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from moe_p2p import AbortedError, MoeP2pError, ProtocolError, TimeoutError
from moe_p2p.integrations.weights import engine as engine_weights
from moe_p2p.integrations.weights.engine import EngineWeights, Fleet
from moe_p2p.weights import Param, Shard, WeightLayout, WeightTrainer, job
from tests.support.weights_fleet import BF16, engine_of

LONG_S = 60.0
STAGES, EXPERT_RANKS, EXPERTS, WIDTH = 2, 2, 4, 8
FLEET = Fleet(host="", port=0, timeout_s=LONG_S / 2)


def checkpoint(version: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(version)
    names = {"embed": (6, WIDTH)}
    for layer in range(STAGES):
        names[f"layers.{layer}.norm"] = (WIDTH,)
        names |= {f"layers.{layer}.experts.{e}.up": (3, WIDTH) for e in range(EXPERTS)}
    return {n: torch.randn(s, generator=generator).bfloat16() for n, s in names.items()}


class Part(torch.nn.Module):
    """A worker's part of a model: a layer of its pipeline stage, with every second expert; the
    first stage has the embedding. What belongs to others its loader passes over, as vLLM's does."""

    def __init__(self, worker: int) -> None:
        super().__init__()
        stage, first = divmod(worker, EXPERT_RANKS)
        mine = range(first, EXPERTS, EXPERT_RANKS)
        self.shapes = {f"layers.{stage}.norm": (WIDTH,),
                       f"layers.{stage}.experts.up": (len(mine), 3, WIDTH)}  # fmt: skip
        if stage == 0:
            self.shapes["embed"] = (6, WIDTH)
        self.slots = {f"layers.{stage}.experts.{e}.up": i for i, e in enumerate(mine)}
        self.weights = {n: torch.zeros(s, dtype=torch.bfloat16) for n, s in self.shapes.items()}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for name, each in self.weights.items():
            yield name, torch.nn.Parameter(each, requires_grad=False)

    def load_weights(self, named: list[tuple[str, Tensor]]) -> None:
        for name, tensor in named:
            if name in self.weights:
                self.weights[name].copy_(tensor)
            elif name in self.slots:
                stacked = f"{name.partition('.experts')[0]}.experts.up"
                self.weights[stacked][self.slots[name]].copy_(tensor)

    def holds(self, version: int) -> bool:
        wanted = {n: torch.zeros_like(t) for n, t in self.weights.items()}
        ours, self.weights = self.weights, wanted
        self.load_weights(list(checkpoint(version).items()))
        self.weights = ours
        return all(torch.equal(ours[name], each) for name, each in wanted.items())


def trainers_layout(extra: tuple[str, ...] = ()) -> WeightLayout:
    """Experts on one trainer each, the rest in rows of both."""
    params = [
        Param(n, tuple(t.shape), BF16, (int(n.split(".")[3]) % 2,)) if "experts" in n
        else Param(n, tuple(t.shape), BF16, (0, 1), placements=(Shard(0),))
        for n, t in checkpoint(0).items()
    ]  # fmt: skip
    return WeightLayout([*params, *(Param(n, (4,), BF16, (0,)) for n in extra)], 2)


class World:
    """Two trainers, and an engine's workers, threads of this process."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.pool, self.store = pool, HashStore()
        self.trainers: list[WeightTrainer] = []
        self.workers: list[EngineWeights] = []
        self.opened: list[Any] = []

    def begin_workers(self, models: list[Any], **how: Any) -> list[Any]:
        given = {"store": self.store, **how}
        fleet = given.pop("fleet", FLEET)
        return [self.pool.submit(EngineWeights, model, model.load_weights, fleet, i, len(models),
                                 **given) for i, model in enumerate(models)]  # fmt: skip

    def train(self, layout: WeightLayout) -> None:
        def made(rank: int) -> WeightTrainer:
            names = {p.name: p for p in layout.params if rank in p.ranks}
            tensors = {n: torch.zeros(p.shape, dtype=torch.bfloat16) if len(p.ranks) == 1
                       else torch.zeros(p.shape, dtype=torch.bfloat16).chunk(2)[rank].clone()
                       for n, p in names.items()}  # fmt: skip
            engine = engine_of(f"trainer {rank}", rank)
            self.opened.append(engine)
            limits = {"timeout_s": LONG_S / 2, "lease_s": 2.0}
            return WeightTrainer(engine, self.store, layout, rank, tensors, **limits)

        running = [self.pool.submit(made, rank) for rank in range(layout.world_size)]
        self.trainers = [each.result(LONG_S) for each in running]

    def send(self, version: int, during: Callable[[], None] = lambda: None) -> list[int | None]:
        for each in self.workers:
            each.begin()
        for each in self.trainers:
            for name, tensor in each._tensors.items():
                whole = checkpoint(version)[name]
                alike = tensor.shape == whole.shape
                tensor.copy_(whole if alike else whole.chunk(2)[each.rank])
        for done in [self.pool.submit(each.update, version) for each in self.trainers]:
            done.result(LONG_S)
        for each in self.workers:
            each.settle()
        during()
        done = [self.pool.submit(each.commit) for each in self.workers]
        return [each.result(LONG_S) for each in done]


@contextmanager
def world(models: list[Any], **how: Any) -> Iterator[World]:
    with ThreadPoolExecutor(16) as pool:
        found = World(pool)
        made = found.begin_workers(models, **how)
        found.train(trainers_layout())
        found.workers = [each.result(LONG_S) for each in made]
        try:
            yield found
        finally:
            for each in [*found.workers, *found.trainers, *found.opened]:
                each.close()


@pytest.mark.parametrize("mode", ["shadow", "in_place"])
def test_workers_of_stages_with_experts_of_their_own_are_one_layout(mode: Any) -> None:
    models = [Part(worker) for worker in range(STAGES * EXPERT_RANKS)]
    fleet = Fleet(host="", port=0, timeout_s=LONG_S / 2, mode=mode)
    with world(models, fleet=fleet) as found:
        for version in (1, 2):
            assert found.send(version) == [version] * len(models)
            assert all(model.holds(version) for model in models)
        plan = found.trainers[0].plan
        assert plan.gathered == ()
        received = [sum(each.nbytes for each in plan.of_target(i).values()) for i in range(4)]
        assert received == [2 * sum(map(torch.Tensor.numel, m.weights.values())) for m in models]


def test_a_parameter_that_lands_nowhere_is_named_to_workers_and_trainers() -> None:
    models = [Part(worker) for worker in range(STAGES * EXPERT_RANKS)]
    with ThreadPoolExecutor(16) as pool:
        found = World(pool)
        made = found.begin_workers(models)
        training = pool.submit(found.train, trainers_layout(("layers.1.bias",)))
        for each in made:  # by its own set-up, or by another's
            with pytest.raises(MoeP2pError, match=r"no worker.*layers\.1\.bias.*leave it"):
                each.result(LONG_S)
        with pytest.raises(AbortedError, match=r"set-up failed: .*no worker.*layers\.1\.bias"):
            training.result(LONG_S / 4)
        for each in found.opened:
            each.close()


def test_an_engine_that_loads_by_itself_takes_no_version_from_a_peer() -> None:
    """A peer's tensors have nothing of what its loader made, and the joiner's are as they were."""
    models = [Part(0), Part(0)]
    late = Fleet(host="", port=0, timeout_s=LONG_S / 2, replica="late")
    with world(models[:1], direct=False) as found:
        assert found.send(1) == [1]
        found.workers += [each.result(LONG_S) for each in
                          found.begin_workers(models[1:], direct=False, fleet=late)]  # fmt: skip
        assert found.workers[1].version is None
        assert not models[1].holds(1)
        assert found.send(2) == [2, 2]
        assert [model.holds(2) for model in models] == [True, True]


def test_what_was_decided_and_is_given_up_is_neither_taken_nor_loaded() -> None:
    """Trainers begin anew between the decision and the engine's commit."""
    model = Part(0)
    with world([model], direct=False) as found:
        found.send(1)
        old = found.trainers

        def restart() -> None:
            found.train(trainers_layout())
            engine_rank = found.workers[0].engine_rank
            until = time.monotonic() + LONG_S
            while engine_rank._job.number != found.trainers[0]._job.number:
                assert time.monotonic() < until
                engine_rank.step()

        with pytest.raises(AbortedError, match="is given up: its trainers were replaced"):
            found.send(2, during=restart)
        assert model.holds(1)
        found.workers[0].require_clean()
        for each in old:
            each.close()
        assert found.send(3) == [3]
        assert model.holds(3)


@pytest.mark.parametrize("mode", ["shadow", "in_place"])
def test_what_an_engine_has_not_loaded_yet_is_no_version(mode: Any) -> None:
    """In place other tensors have new bytes once the fleet has decided, and the engine may never be
    told to load the rest. A shadow's have the old ones, all of them."""
    model, seen = Part(0), list[str]()
    with world([model], direct=False, fleet=replace(FLEET, mode=mode)) as found:
        worker = found.workers[0]

        def before_commit() -> None:
            if mode == "shadow":
                worker.require_clean()
                return
            with pytest.raises(ProtocolError, match="the engine's loader has not ended"):
                worker.require_clean()
            assert dict(found.trainers[0].live()) == {None: 1}
            seen.append("dirty")

        for version in (1, 2):
            assert found.send(version, before_commit) == [version]
            worker.require_clean()
            assert model.holds(version)
            until = time.monotonic() + LONG_S
            while dict(found.trainers[0].live()) != {version: 1}:  # it is not waited for
                assert time.monotonic() < until
                worker.engine_rank.step()
    assert len(seen) == (2 if mode == "in_place" else 0)


def test_a_session_that_is_not_over_is_not_settled() -> None:
    model, go_on = Part(0), threading.Event()
    with world([model], direct=False) as found:
        worker = found.workers[0]
        worker._run = lambda *_: go_on.wait(LONG_S)  # type: ignore[method-assign,assignment]
        worker.fleet = Fleet(host="", port=0, timeout_s=0.05)
        worker.begin()
        with pytest.raises(TimeoutError, match=r"the session was not over within 0\.1 s"):
            worker.settle()
        go_on.set()
        worker.settle()


def test_workers_that_set_up_again_take_no_word_of_those_before() -> None:
    """The store still has what the workers before them said in their set-up."""
    models = [Part(worker) for worker in range(STAGES * EXPERT_RANKS)]
    with world(models, set_up="first") as found:
        found.send(1)
        words = engine_weights.StoreKeys(found.store, job.prefix_of("weights"))
        keys = [f"params /set-up first/{i}" for i in range(len(models))]
        assert all(map(words.get, keys))
        for each in found.workers:
            each.close()
        assert not any(map(words.get, keys)), "what was said leaves with who said it"
        before = found.workers[1].engine_rank.plan.target
        words.put(keys[1], WeightLayout((), before.world_size).to_bytes().hex())
        models = [Part(worker) for worker in range(STAGES * EXPERT_RANKS)]
        made = found.begin_workers(models, set_up="second")
        found.workers = [each.result(LONG_S) for each in made]
        assert found.send(2) == [2] * len(models)
        assert all(model.holds(2) for model in models)
