"""Ranks that join, leave and are lost, over real engines and the software NIC that reorders."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from moe_p2p import InvalidArgumentError, MoeP2pError, TimeoutError
from moe_p2p.engine.transfers import Memory
from moe_p2p.fleet.store_keys import StoreKeys
from moe_p2p.weights import (
    Blocks,
    Param,
    Shard,
    WeightEngineRank,
    WeightLayout,
    block_amax,
    quantize,
    scales,
    weight_plan,
)
from moe_p2p.weights import engine_rank as engine_rank_module
from moe_p2p.weights.engine_buffers import EngineBuffers
from moe_p2p.weights.joining import Lent
from moe_p2p.weights.trainer import WeightTrainer
from tests.support.weights_fleet import BF16, ENGINE_RANKS, FP8, MODELS, Fleet, engine_of, fleet
from tests.support.weights_oracle import check as check_plan

QUICK = {"lease_s": 0.4}


def update(found: Fleet, version: int, **how: Any) -> None:
    found.finish(found.train(version, **how))


def test_two_engine_ranks_join_and_leave_in_twenty_updates() -> None:
    with fleet(MODELS["fp8"], mode="shadow") as found:
        founders = list(found.engine_ranks)
        joined: list[WeightEngineRank] = []
        for version in range(1, 21):
            if version in (5, 9):
                joined.append(found.join(f"late-{version}", 0, engine_ranks=()))
                found.join(f"late-{version}", 1)
                assert joined[-1].version == version - 1  # from a peer, before the next update
                found.check(version - 1)
            if version in (12, 16):
                first = joined.pop(0)
                for each in [
                    e for e in found.engine_ranks if e.name.split("/")[0] == first.name[:-2]
                ]:
                    found.leave(each)
            update(found, version, verify=version % 3 == 0)
            found.check(version)
        assert [each.totals["failed"] for each in founders] == [0, 0]
        assert [each.totals["updates"] for each in founders] == [20, 20]
        assert found.trainers[0].live() == {20: 2}
        assert found.trainers[0].totals["failed"] == 0


@pytest.mark.parametrize("mode", ["shadow", "in_place"])
def test_nobody_may_write_before_kernels_that_fill_memory_are_over(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory is a GPU's, what arrives would be overwritten by poison, or by a copy."""
    events: list[str] = []
    poison, put = EngineBuffers.poison, StoreKeys.put

    def settled(tensors: Iterable[torch.Tensor]) -> None:
        events.append(f"settled {len(list(tensors)) > 1}")

    def poisoned(self: EngineBuffers) -> None:
        events.append("poisoned")
        poison(self)

    def told(self: StoreKeys, key: str, value: Any, **how: Any) -> None:
        if "ready" in key:
            events.append("ready")
        put(self, key, value, **how)

    monkeypatch.setattr(engine_rank_module, "settle", settled)
    monkeypatch.setattr(EngineBuffers, "poison", poisoned)
    monkeypatch.setattr(StoreKeys, "put", told)
    with fleet(MODELS["fp8"], mode=mode, poison=True) as found:
        for engine_rank in found.engine_ranks if mode == "in_place" else ():
            engine_rank.begin()
        update(found, 1)
    offers = " ".join(events)
    assert events.count("ready") >= ENGINE_RANKS
    assert offers.count("settled True") == events.count("ready"), offers
    assert events.index("poisoned") < events.index("settled True") < events.index("ready"), offers


@pytest.mark.parametrize("name", ["mixed", "derived"])
def test_a_rank_that_joins_has_all_tensors_derived_ones_too(name: str) -> None:
    with fleet(MODELS[name], mode="in_place") as found:
        for engine_rank in found.engine_ranks:
            engine_rank.begin()
        update(found, 1)
        late = found.join("late", 1)
        assert (late.version, late.dirty) == (1, False)
        found.check(1)
        assert late.totals["joins"] == 1
        assert late.totals["join_ms"] > 0
        for engine_rank in found.engine_ranks:
            engine_rank.begin()
        update(found, 2)
        found.check(2)


def of_one(
    found: Fleet, dtype: str = BF16, **how: Any
) -> tuple[WeightEngineRank, dict[str, torch.Tensor]]:
    """An engine rank that holds all of w in this type: nobody else has these tensors."""
    live = {"w": torch.zeros(18, 24, dtype=getattr(torch, dtype))}
    layout = WeightLayout([Param("w", (18, 24), dtype, (0,))], 1)
    engine = found.stack.enter_context(engine_of("alone", 9))
    given = {**found.how, **how}
    return WeightEngineRank(engine, found.store, layout, 0, live, replica="alone", **given), live


def test_another_layout_comes_from_the_trainers() -> None:
    with fleet(MODELS["fp8"]) as found:
        update(found, 1)
        alone, live = of_one(found)
        assert alone.version is None
        running = [found.pool.submit(each.admit) for each in found.trainers]
        waits = [found.pool.submit(alone.wait)]
        for each in [*running, *waits]:
            each.result(60)
        assert alone.version == 1
        assert torch.equal(live["w"], found.model.values(1)["w"])
        for each in found.engine_ranks:
            assert each.step() == 1
        assert [each.totals["updates"] for each in found.engine_ranks] == [1, 1]
        ends = found.train(2)
        waits = [found.pool.submit(each.wait) for each in (*found.engine_ranks, alone)]
        for each in [*ends, *waits]:
            each.result(60)
        assert torch.equal(live["w"], found.model.values(2)["w"])
        alone.close()


def test_trainers_that_could_not_meet_for_maxima_meet_in_the_next_update() -> None:
    """A replica joins with another layout; one trainer fails before it has said where its inbox
    is, so the others have not met it either."""
    with fleet(MODELS["fp8"]) as found:
        update(found, 1)
        alone, live = of_one(found)
        failing = found.trainers[1]
        put = failing._words.put

        def fail(key: str, value: Any, **how: Any) -> None:
            if "maxima of" in key:
                failing._words.put = put  # type: ignore[method-assign]
                raise OSError("not yet")
            put(key, value, **how)

        failing._words.put = fail  # type: ignore[method-assign]
        running, waits = found.train(2), [found.pool.submit(alone.wait)]
        waits += [found.pool.submit(each.wait) for each in found.engine_ranks]
        for each in [*running, *waits]:
            with pytest.raises((MoeP2pError, OSError), match="not yet"):
                each.result(60)
        running, waits = found.train(3), [found.pool.submit(alone.wait)]
        waits += [found.pool.submit(each.wait) for each in found.engine_ranks]
        for each in [*running, *waits]:
            each.result(60)
        found.check(3)
        assert torch.equal(live["w"], found.model.values(3)["w"])


def test_updates_go_on_without_a_replica_whose_copies_do_not_fit() -> None:
    watermark = 1024 + 32 * 6 + 512  # of a copy, its blocks, and a ring of one in fp8
    with fleet(MODELS["fp8"], training={"watermark": watermark}) as found:
        update(found, 1)
        alone, _ = of_one(found, dtype="float64")
        for version in (2, 3):
            running = found.train(version)
            for each in [*running, *(found.pool.submit(g.wait) for g in found.engine_ranks)]:
                with pytest.raises(MoeP2pError, match=r"converting w takes .* raise watermark"):
                    each.result(60)
        alone.close()
        update(found, 4)
        found.check(4)


def test_trainers_share_maxima_again_after_a_replica_that_does_not_fit_on_one_of_them() -> None:
    """The others know its layout then, and this one does not."""
    with fleet(MODELS["fp8"], timeout_s=15.0) as found:
        update(found, 1)
        found.trainers[1]._buffers._watermark = 1024 + 32 * 6 + 512  # as above
        alone, _ = of_one(found, dtype="float64")
        running = found.train(2)
        for each in [*running, *(found.pool.submit(g.wait) for g in found.engine_ranks)]:
            with pytest.raises(MoeP2pError, match=r"converting w takes .* raise watermark"):
                each.result(60)
        alone.close()
        for version in (3, 4):
            update(found, version)
            found.check(version)


def test_trainers_share_maxima_of_replicas_that_they_met_in_another_order() -> None:
    """One was away while replicas came and went, and maxima of all are exchanged together."""
    blocks = {"x": (4, 8), "y": (6, 12), "z": (7, 8)}  # of two neighbours each: one owns two
    layouts = {
        name: WeightLayout([Param("w", (18, 24), FP8, (0,), blocks=Blocks("scale", 0, shape))], 1)
        for name, shape in blocks.items()
    }
    with fleet(MODELS["fp8"], timeout_s=15.0) as found:
        update(found, 1)
        for each in found.trainers:
            for name in ("xyz", "zyx")[each.rank % 2]:
                each._buffers.add(name, layouts[name])
        values = found.model.values(2)["w"]
        maxima = {name: block_amax(values, (0, 0), shape) for name, shape in blocks.items()}
        joined, lives = [], {}
        for seed, (name, layout) in enumerate(layouts.items()):
            engine = found.stack.enter_context(engine_of(name, 20 + seed))
            lives[name] = {"w": torch.zeros(18, 24, dtype=torch.float8_e4m3fn),
                           "scale": torch.zeros_like(maxima[name])}  # fmt: skip
            how = {**found.how, "replica": name}
            joined.append(WeightEngineRank(engine, found.store, layout, 0, lives[name], **how))
        running = found.train(2)
        waits = [found.pool.submit(each.wait) for each in (*found.engine_ranks, *joined)]
        for each in [*running, *waits]:
            each.result(60)
        found.check(2)
        for name, live in lives.items():
            wanted = quantize(values, (0, 0), maxima[name], blocks[name])
            assert torch.equal(live["scale"], scales(maxima[name]))
            assert torch.equal(live["w"].view(torch.uint8), wanted.view(torch.uint8))
        for each in joined:
            each.close()


def test_close_that_could_not_take_memory_back_is_called_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer may still answer a read into it, over software providers of libfabric."""
    with fleet(MODELS["fp8"]) as found:
        update(found, 1)
        engine_rank = found.engine_ranks[0]
        of_it = [*engine_rank._lent._memory.values(), *engine_rank._buffers._memory]
        unregister, late = Memory.unregister, {id(of_it[0]), id(of_it[-1])}

        def once(self: Memory) -> None:
            if id(self) in late:
                late.remove(id(self))
                raise TimeoutError("may still answer a read")
            unregister(self)

        monkeypatch.setattr(Memory, "unregister", once)
        with pytest.raises(TimeoutError, match="may still answer"):
            engine_rank.close()
        assert any(each.registered for each in of_it)
        engine_rank.close()
        assert not any(each.registered for each in of_it)
        engine_rank.close()


def test_it_joins_while_an_update_is_under_way_and_ends_with_its_version() -> None:
    hold = threading.Event()
    with fleet(MODELS["fused"]) as found:
        update(found, 1)
        writer = found.trainers[1]._buffers.writer
        write, begun = writer.write, threading.Event()

        def held(*args: Any) -> Any:
            begun.set()
            assert hold.wait(20)
            return write(*args)

        writer.write = held  # type: ignore[method-assign]
        running = found.train(2)
        waits = [found.pool.submit(each.wait) for each in found.engine_ranks]
        assert begun.wait(20)
        late = found.join("late", 0)
        assert late.version == 1
        assert late.step() == 1
        hold.set()
        for each in [*running, *waits]:
            each.result(60)
        while late.step() != 2:
            pass
        found.check(2)
        update(found, 3)
        found.check(3)


def test_a_version_that_changes_while_it_is_read_is_not_taken() -> None:
    """The word says so: a peer that copies in the middle of a read is read again, or left."""
    with fleet(MODELS["fused"]) as found:
        update(found, 1)
        for engine_rank in found.engine_ranks:
            engine_rank._lent.shut()
        late = found.join("late", 0)
        assert late.version is None
        for engine_rank in found.engine_ranks:
            engine_rank._lent.open(engine_rank._stamp, 1)
        assert found.join("later", 0).version == 1


def test_a_word_is_odd_while_tensors_change() -> None:
    engine = engine_of("word", 0)
    lent = Lent(engine, {"w": torch.zeros(4)})
    seen = [lent._word.tolist()]
    for step in (lambda: lent.open(70, 7), lent.shut, lent.shut, lambda: lent.open(80, 8)):
        step()
        seen.append(lent._word.tolist())
    assert [count % 2 for count, _, _ in seen] == [1, 0, 1, 1, 0]
    assert seen[-1][1:] == [80, 8]
    engine.close()


# --- lost ranks ---


def lose(rank: WeightTrainer | WeightEngineRank) -> None:
    """Its process is gone: the lease is no longer renewed."""
    rank._member._beat.stopped.set()
    rank.engine.close()


def test_an_engine_rank_that_is_lost_is_left_out() -> None:
    with fleet(MODELS["fp8"], training=QUICK, **QUICK) as found:
        update(found, 1)
        lost = found.engine_ranks.pop()
        found.live.pop()
        lose(lost)
        update(found, 2)
        found.check(2)
        assert found.trainers[0].totals["failed"] == 1
        update(found, 3)  # now nobody waits for it
        found.check(3)
        assert found.trainers[0].totals["failed"] == 1
        assert found.trainers[0].live() == {3: 1}


@pytest.mark.parametrize("rank", [0, 3])
def test_another_holder_sends_for_a_lost_trainer(rank: int) -> None:
    with fleet(MODELS["replicas"], training=QUICK, **QUICK) as found:
        update(found, 1)
        lose(found.trainers.pop(rank))
        update(found, 2, verify=True)
        found.check(2)
        update(found, 3)
        found.check(3)
        assert found.trainers[0].totals["failed"] == 1
        assert found.trainers[0].version == 3


def test_without_another_holder_the_update_fails_by_name() -> None:
    with fleet(MODELS["fp8"], training=QUICK, **QUICK) as found:
        update(found, 1)
        lose(found.trainers.pop(2))
        running = found.train(2)
        waits = [found.pool.submit(each.wait) for each in found.engine_ranks]
        for each in [*running, *waits]:
            with pytest.raises(MoeP2pError, match=r"trainer 2 is lost.* w: of source ranks 2, "):
                each.result(60)
        found.check(1)


def test_a_trainer_that_was_taken_for_lost_is_told() -> None:
    with fleet(MODELS["replicas"], training=QUICK, **QUICK) as found:
        update(found, 1)
        late = found.trainers.pop(1)
        late._member._beat.stopped.set()
        update(found, 2)
        with pytest.raises(MoeP2pError, match="trainer 1 was taken for lost"):
            late.update(2)
        found.check(2)
        late.close()


def test_an_engine_rank_that_was_taken_for_lost_catches_up() -> None:
    """It was stopped, and goes on: the lease is there again."""
    with fleet(MODELS["fused"], training=QUICK, **QUICK) as found:
        update(found, 1)
        late, live = found.join("late", 0), found.live[-1]
        update(found, 2)
        at = found.engine_ranks.index(late)
        found.engine_ranks.pop(at)
        found.live.pop(at)
        late._member._beat.record["joining"] = True  # as others see one that is away
        late._member._beat.renew()
        found.trainers[0]._members = None
        update(found, 3)
        while late.step() != 3:
            pass
        found.engine_ranks.append(late)
        found.live.append(live)
        found.check(3)


# --- plans without some sources ---


@pytest.mark.parametrize("lost", [(0,), (3,), (0, 3), (1, 2)])
def test_other_sources_send_every_byte(lost: tuple[int, ...]) -> None:
    model = MODELS["replicas"]
    plan = weight_plan(*model.layouts).without(lost)
    for rank in lost:
        assert not list(plan.of_source(rank))
    for rank in range(ENGINE_RANKS):
        assert not {write.source_rank for write in plan.writes_to(rank)} & set(lost)
        assert {w.source_rank for w in plan.writes_to(rank)} <= set(plan.writers_to(rank))
    check_plan(plan, model.values(5))


def test_a_shard_that_nobody_else_holds_is_named() -> None:
    plan = weight_plan(*MODELS["replicas"].layouts)
    with pytest.raises(InvalidArgumentError, match=r"w: of source ranks 0, 2, .* none is left"):
        plan.without((0, 2))
    tied = [
        Param("t", (4, 4), BF16, (0, 1), placements=(Shard(0),)),
        Param("t", (4, 4), BF16, (2,)),
    ]
    one = weight_plan(WeightLayout(tied, 3), WeightLayout([Param("t", (4, 4), BF16, (0,))], 1))
    with pytest.raises(InvalidArgumentError, match="t: of source ranks 1, "):
        one.without((1,))
