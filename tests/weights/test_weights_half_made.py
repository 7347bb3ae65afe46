"""What is raised in the middle of a step, as where memory is gone, leaves nothing half made: the
update, or the set-up, fails by name, what it took is given back, and the next one succeeds."""

from __future__ import annotations

import itertools
import time
import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from moe_p2p import Engine, MoeP2pError
from moe_p2p.engine.transfers import Memory
from moe_p2p.weights import Param, Shard, WeightLayout, WeightTrainer, trainer_buffers
from moe_p2p.weights.conversion import Conversions
from moe_p2p.weights.engine_buffers import EngineBuffers
from moe_p2p.weights.joining import Lent
from tests.support.weights_fleet import BF16, MODELS, Fleet, engine_of, fleet
from tests.weights.test_weights_members import of_one, update
from tests.weights.test_weights_store import LAYOUT as OF_PAIR
from tests.weights.test_weights_store import LIMITS, pair

GONE = torch.OutOfMemoryError("no memory is left")
LONG_S = 60.0


def once(of: Any, name: str, monkeypatch: pytest.MonkeyPatch, at: int = 0) -> list[int]:
    """Call number `at` from now on raises. Returns the numbers of calls so far."""
    call, calls, count = getattr(of, name), list[int](), itertools.count()

    def fails(*given: Any, **how: Any) -> Any:
        calls.append(next(count))
        if calls[-1] == at:
            raise GONE
        return call(*given, **how)

    monkeypatch.setattr(of, name, fails)
    return calls


def all_fail(found: Fleet, version: int, *more: Any) -> None:
    waits = [found.pool.submit(each.wait) for each in (*found.engine_ranks, *more)]
    for each in [*found.train(version), *waits]:
        with pytest.raises((MoeP2pError, torch.OutOfMemoryError), match="no memory is left"):
            each.result(LONG_S)


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("where", ["allocate", "ring", "out", "in"])
def test_updates_go_on_after_memory_for_a_replica_was_gone(
    where: str, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one trainer, which has given back by then what it had for the replicas before."""
    with fleet(MODELS["fp8"]) as found:
        update(found, 1)
        alone, live = of_one(found, dtype="float64")
        if where == "allocate":
            calls = once(Conversions, "allocate", monkeypatch)
        else:
            at = ("ring", "out", "in").index(where)
            calls = once(found.trainers[1].engine, "register", monkeypatch, at)
        all_fail(found, 2, alone)
        assert calls
        if not stays:
            alone.close()
        for version in (3, 4):
            more = [found.pool.submit(alone.wait)] if stays else []
            update(found, version)
            found.check(version)
            for each in more:
                each.result(LONG_S)
                assert torch.equal(live["w"], found.model.values(version)["w"].double())


def test_copies_are_given_back_before_their_memory_is_taken_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, allocate = dict[int, weakref.ref[torch.Tensor]](), Conversions.allocate

    def counted(self: Conversions) -> None:
        assert before[id(self._tensors)]() is None
        allocate(self)

    with fleet(MODELS["fp8"]) as found:
        update(found, 1)
        for each in found.trainers:
            before[id(each._buffers._tensors)] = weakref.ref(each._buffers._conversions.buffer)
        monkeypatch.setattr(Conversions, "allocate", counted)
        alone, _ = of_one(found, dtype="float64")
        waits = [found.pool.submit(alone.wait)]
        update(found, 2)
        waits[0].result(LONG_S)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[Memory]:
    """Memory that is registered at any engine."""
    found = list[Memory]()
    register, unregister = Engine.register, Memory.unregister

    def counted(engine: Engine, tensor: torch.Tensor, **more: bool) -> Memory:
        found.append(register(engine, tensor, **more))
        return found[-1]

    def given_back(memory: Memory) -> None:
        unregister(memory)
        found[:] = [each for each in found if each is not memory]

    monkeypatch.setattr(Engine, "register", counted)
    monkeypatch.setattr(Memory, "unregister", given_back)
    return found


def test_what_could_not_be_registered_leaves_nothing_registered(
    registered: list[Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A set-up that is tried again would find its second buffer's memory taken."""
    source = WeightLayout([Param("w", (18, 24), BF16, (0, 1), placements=(Shard(0),))], 2)
    target, tensors = MODELS["fp8"].layouts[1], MODELS["fp8"].empty(0)
    plan = trainer_buffers.weight_plan(source, target)
    ours = {"w": torch.zeros(9, 24, dtype=torch.bfloat16)}
    with engine_of("generator", 0) as engine:

        def trainer() -> Any:
            buffers = trainer_buffers.TrainerBuffers(
                engine, 0, plan, ours, torch.device("cpu"), None
            )
            try:
                buffers.exchange([target.digest])
            except BaseException:
                buffers.close()
                raise
            return buffers

        def in_place() -> Any:
            how: dict[str, Any] = {"shadow": False, "finalize": None}
            return EngineBuffers(engine, plan, 0, tensors, **how)

        for make in (trainer, in_place, lambda: Lent(engine, tensors)):
            calls = once(engine, "register", monkeypatch, 99)
            make().close()
            monkeypatch.delattr(engine, "register")
            assert calls
            for at in calls:
                once(engine, "register", monkeypatch, at)
                with pytest.raises(torch.OutOfMemoryError):
                    make()
                monkeypatch.delattr(engine, "register")
                assert not registered, (make, at)


def test_a_key_that_was_granted_before_another_one_failed_is_revoked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = WeightLayout([Param("w", (18, 24), BF16, (0, 1), placements=(Shard(0),))], 2)
    target, tensors = MODELS["fp8"].layouts[1], MODELS["fp8"].empty(0)
    plan = trainer_buffers.weight_plan(source, target)
    with engine_of("generator", 0) as engine:
        buffers = EngineBuffers(engine, plan, 0, tensors, shadow=False, finalize=None)
        granted, grant = list[Any](), engine.grant

        def noted(*given: Any) -> Any:
            if granted:
                raise GONE
            granted.append(grant(*given))
            return granted[-1]

        monkeypatch.setattr(engine, "grant", noted)
        with pytest.raises(torch.OutOfMemoryError):
            buffers.lend([0, 1])
        buffers.fence()
        assert "revoked" in repr(granted[0])
        buffers.close()


@pytest.mark.parametrize("what", ["lend", "poison"])
def test_an_engine_rank_follows_new_trainers_after_an_error_on_the_way(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LIMITS, "timeout_s", LONG_S)
    store = HashStore()
    with pair(store, poison=True) as found, engine_of("2", 2) as engine:
        found.update(1)
        engine_rank = found.engine_rank
        found.trainer.close()
        once(engine_rank._buffers, what, monkeypatch)
        tensors = {"w": torch.zeros(4, 4, dtype=torch.bfloat16)}
        begun = found.pool.submit(WeightTrainer, engine, store, OF_PAIR, 0, tensors, **LIMITS)
        until, raised = time.monotonic() + LONG_S, 0
        while not begun.done():
            assert time.monotonic() < until
            try:
                engine_rank.step()
            except torch.OutOfMemoryError:
                raised += 1
            time.sleep(0.001)
        with begun.result() as found.trainer:
            with suppress(torch.OutOfMemoryError):
                engine_rank.step()
            found.update(2)
        assert raised <= 1


def test_an_engine_in_place_begins_again_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIMITS, "timeout_s", LONG_S)
    with pair(HashStore(), mode="in_place", poison=True) as found:
        once(found.engine_rank._buffers, "poison", monkeypatch)
        with pytest.raises(torch.OutOfMemoryError):
            found.engine_rank.begin()
        assert found.engine_rank.dirty
        found.engine_rank.begin()
        running = found.pool.submit(found.trainer.update, 1)
        assert found.engine_rank.wait() == 1
        running.result(LONG_S)
        assert not found.engine_rank.dirty
