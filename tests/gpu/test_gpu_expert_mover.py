"""Moves of experts in GPU memory. Ranks are threads that share one GPU (gpu_ranks.py)."""

from __future__ import annotations

import random

import pytest
import torch

from tests.support import gpu_ranks
from tests.support.expert_cases import alone, drawn, make_layer
from tests.support.gpu_ranks import DEVICE, World
from tests.support.ranks import Rank

pytestmark = pytest.mark.gpu

EXPERTS, SLOTS = 5, 3


def moves(rank: Rank, world: World, limit: int | None) -> None:
    """Each move begins while the stream has not reached the copies of the one before."""
    rng = random.Random(7)
    placements = [drawn(rng, SLOTS * world.ranks, EXPERTS, 0.3) for _ in range(12)]
    device = "cuda:0" if DEVICE == "cuda" else DEVICE
    layer = make_layer(rank, placements[0], EXPERTS, device=device)
    gpu_ranks.meet(rank, "filled")
    with alone(rank, [layer], staging_slots=SLOTS, bytes_per_step=limit) as mover:
        step = 0
        for placement in placements[1:]:
            mover.move(placement)
            swapped = False
            while not swapped:
                if DEVICE == "cuda":
                    torch.cuda._sleep(1_000_000)
                step += 1
                swapped = mover.step(step)
        if DEVICE == "cuda":
            torch.cuda.current_stream().synchronize()
        layer.check()
        assert layer.table.placement == placements[-1]
        assert int(layer.table.counts.cpu().sum()) == len(placements[-1]) - placements[-1].count(-1)
    gpu_ranks.meet(rank, "moved")


@pytest.mark.parametrize("limit", [None, 50])
@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (4, 4)))
def test_slots_have_what_the_last_of_many_moves_says(world: World, limit: int | None) -> None:
    gpu_ranks.run(world, moves, limit)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), devices=True))
def test_slots_between_gpus(world: World) -> None:
    gpu_ranks.run(world, moves_between, None, processes=True)


def moves_between(rank: Rank, world: World, limit: int | None) -> None:
    placement = [*range(SLOTS * world.ranks)]
    layer = make_layer(
        rank, placement, len(placement), device=f"cuda:{torch.cuda.current_device()}"
    )
    torch.cuda.current_stream().synchronize()
    with alone(rank, [layer], staging_slots=SLOTS, bytes_per_step=limit) as mover:
        for number in range(6):
            mover.move(placement[number:] + placement[:number])
            assert mover.step(1000 * number, wait=True)
            layer.check()
