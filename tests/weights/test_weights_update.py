"""Updates over real engines and the software NIC that reorders: every byte, versions, failures."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from moe_p2p.weights import WeightGenerator, WeightTrainer, agree_in
from tests.support.ranks import Rank, run_processes
from tests.support.weights_fleet import GENERATORS, MODELS, TRAINERS, engine_of, fleet


@pytest.mark.parametrize("mode", ["shadow", "in_place"])
@pytest.mark.parametrize("name", MODELS)
def test_every_byte_of_twenty_updates_equals_the_reference(name: str, mode: str) -> None:
    with fleet(MODELS[name], mode=mode, poison=True) as found:
        for version in range(1, 21 if mode == "shadow" else 6):
            if mode == "in_place":
                for generator in found.generators:
                    generator.begin()
            found.finish(found.train(version, verify=version % 2 == 0))
            found.check(version)
        assert found.trainers[0].live() == {version: 2}


def _of_two_jobs(rank: Rank) -> tuple[int, list[int | None]]:
    """Trainers and generators in processes of their own; generators are one inference engine."""
    model, number = MODELS["mixed"], rank.rank - TRAINERS
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", rank.store), rank=rank.rank,
                            world_size=rank.world_size)  # fmt: skip
    group = dist.new_group(range(TRAINERS, TRAINERS + GENERATORS), backend="gloo")
    store = dist.PrefixStore("two jobs", rank.store)
    engine = engine_of(f"rank {rank.rank}", rank.rank)
    layouts, seen = model.layouts, []
    if number < 0:
        tensors = model.trainer_tensors(rank.rank, model.values(0))
        trainer = WeightTrainer(engine, store, layouts[0], rank.rank, tensors)
        for version in (1, 2):
            trainer.update(version, model.trainer_tensors(rank.rank, model.values(version)))
        dist.destroy_process_group()
        return 2, []
    live = model.empty(number)
    generator = WeightGenerator(engine, store, layouts[1], number, live,
                                engine_ranks=(0, 1), agree=agree_in(group))  # fmt: skip
    while generator.version != 2:
        seen.append(generator.step())  # a forward pass follows
        if generator.version is not None:
            generator.check_equal(model.wanted(number, model.values(generator.version)))
    dist.destroy_process_group()
    return 2, seen


def test_two_jobs_with_a_store_between_them() -> None:
    results = run_processes(TRAINERS + GENERATORS, _of_two_jobs)
    passes = [seen for _, seen in results[TRAINERS:]]
    assert passes[0] == passes[1]  # of each pass the same version
    assert passes[0][-1] == 2
