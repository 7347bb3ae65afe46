"""Updates over real engines and the software NIC that reorders: every byte, versions, failures."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from moe_p2p import weights
from moe_p2p.errors import AbortedError
from moe_p2p.weights import Blocks, Param, Shard, WeightEngineRank, WeightLayout, WeightTrainer
from tests.support import weights_fleet
from tests.support.ranks import Rank, run_processes
from tests.support.weights_fleet import BF16, ENGINE_RANKS, FP8, MODELS, TRAINERS


@pytest.mark.parametrize("mode", ["shadow", "in_place"])
@pytest.mark.parametrize("name", MODELS)
def test_every_byte_of_twenty_updates_equals_the_reference(name: str, mode: str) -> None:
    with weights_fleet.fleet(MODELS[name], mode=mode, poison=True) as found:
        for version in range(1, 21 if mode == "shadow" else 6):
            if mode == "in_place":
                for engine_rank in found.engine_ranks:
                    engine_rank.begin()
            found.finish(found.train(version, verify=version % 2 == 0))
            found.check(version)
        assert found.trainers[0].live() == {version: 2}


def _of_two_jobs(rank: Rank) -> tuple[int, list[int | None]]:
    """Trainers and engine ranks in processes of their own; engine ranks are one inference
    engine."""
    model, number = MODELS["mixed"], rank.rank - TRAINERS
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", rank.store), rank=rank.rank,
                            world_size=rank.world_size)  # fmt: skip
    group = dist.new_group(range(TRAINERS, TRAINERS + ENGINE_RANKS), backend="gloo")
    store = dist.PrefixStore("two jobs", rank.store)
    engine = weights_fleet.engine_of(f"rank {rank.rank}", rank.rank)
    layouts, seen = model.layouts, []
    if number < 0:
        tensors = model.trainer_tensors(rank.rank, model.values(0))
        trainer = WeightTrainer(engine, store, layouts[0], rank.rank, tensors)
        for version in (1, 2):
            trainer.update(version, model.trainer_tensors(rank.rank, model.values(version)))
        dist.destroy_process_group()
        return 2, []
    live = model.empty(number)
    engine_rank = WeightEngineRank(engine, store, layouts[1], number, live,
                                engine_ranks=(0, 1), agree=weights.agree_in(group))  # fmt: skip
    while engine_rank.version != 2:
        seen.append(engine_rank.step())  # a forward pass follows
        if engine_rank.version is not None:
            engine_rank.check_equal(model.wanted(number, model.values(engine_rank.version)))
    dist.destroy_process_group()
    return 2, seen


def test_two_jobs_with_a_store_between_them() -> None:
    results = run_processes(TRAINERS + ENGINE_RANKS, _of_two_jobs)
    passes = [seen for _, seen in results[TRAINERS:]]
    assert passes[0] == passes[1]  # of each pass the same version
    assert passes[0][-1] == 2


def under_a_default_device(rank: Rank) -> int | None:
    """A model's own default device and type: all tensors of updates name theirs."""
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    store = dist.PrefixStore("default device", rank.store)
    engine, host = weights_fleet.engine_of(f"rank {rank.rank}", rank.rank), {"device": "cpu"}
    source = WeightLayout([Param("w", (10, 8), BF16, range(2), placements=(Shard(0),))], 2)
    blocks = Blocks("s", shape=(4, 4))
    target = WeightLayout([Param("w", (10, 8), FP8, (0,), tensor="q", blocks=blocks)], 1)
    if rank.rank < 2:
        mine = {"w": torch.ones(5, 8, dtype=torch.bfloat16, **host)}
        with WeightTrainer(engine, store, source, rank.rank, mine) as trainer:
            for version in (1, 2):
                mine["w"].fill_(version)
                trainer.update(version, verify=True)
        return trainer.version
    q = torch.zeros(80, dtype=torch.uint8, **host).view(torch.float8_e4m3fn)
    live = {"q": q, "s": torch.zeros(6, dtype=torch.float32, **host)}
    with WeightEngineRank(engine, store, target, 0, live) as engine_rank:
        while engine_rank.step() != 2:
            pass
        assert live["q"].float().eq(448).all()
        assert torch.equal(live["s"], torch.full((6,), 2 / 448, dtype=torch.float32, **host))
    return engine_rank.version


def test_a_default_device_changes_nothing() -> None:
    assert run_processes(3, under_a_default_device) == [2, 2, 2]


@pytest.mark.parametrize("mode", ["shadow", "in_place"])
def test_a_trainer_that_has_no_new_weights_fails_the_update_everywhere(mode: str) -> None:
    with weights_fleet.fleet(MODELS["fused"], mode=mode) as found:

        def begin() -> None:
            for engine_rank in found.engine_ranks if mode == "in_place" else []:
                engine_rank.begin()

        begin()
        found.finish(found.train(1))
        begin()
        first, *others = found.trainers
        tensors = [found.model.trainer_tensors(i.rank, found.model.values(2)) for i in others]
        running = [
            found.pool.submit(each.update, 2, its)
            for each, its in zip(others, tensors, strict=True)
        ]
        waits = [found.pool.submit(each.wait) for each in found.engine_ranks]
        first.abort("out of memory")
        for each in [*running, *waits]:
            with pytest.raises(AbortedError, match=f"trainer {first.rank}: out of memory"):
                each.result(60)
        begin()
        found.finish(found.train(3))
        found.check(3)
