"""moe_p2p.nixl_ep on GPUs: a fixed world works, and what is for CPUs only so far is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moe_p2p
from tests.support import gpu_ranks
from tests.support import nixl_ep_cases as cases
from tests.support.gpu_ranks import World
from tests.support.ranks import Rank

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


def fixed(rank: Rank, world: World) -> None:
    """All ranks from the beginning; the last one is masked by hand, and taken back."""
    options: dict[str, Any] = {"timeout_ms": 60_000}
    buffer = cases.begin(rank.store, rank.rank, world.ranks, **options)
    everyone = range(world.ranks)
    buffer.connect_ranks([r for r in everyone if r != rank.rank])
    for seed in range(6):
        cases.step(buffer, seed, None, device="cuda")
    assert cases.masked(buffer, "cuda") == []
    last = world.ranks - 1
    if rank.rank != last:
        buffer.update_mask_buffer(last, True)
        for seed in range(6, 8):
            cases.step(buffer, seed, world.ranks * cases.E, device="cuda")
        assert cases.masked(buffer, "cuda") == [last]
    gpu_ranks.meet(rank, "masked")
    buffer.clean_mask_buffer()
    for seed in range(8, 10):
        cases.step(buffer, seed, None, device="cuda")
    buffer.barrier()
    buffer.disconnect_ranks([r for r in everyone if r != rank.rank])
    with pytest.raises(moe_p2p.UnavailableError, match="ranks come and go for CPU tensors only"):
        buffer.connect_ranks([0, 1])
    with pytest.raises(moe_p2p.UnavailableError, match="ranks come and go for CPU tensors only"):
        cases.step(buffer, 10, None, device="cuda")
    torch.cuda.synchronize()
    buffer.destroy()


@pytest.mark.parametrize("world", gpu_ranks.worlds((3, 3)))
def test_a_fixed_world(world: World) -> None:
    gpu_ranks.run(world, fixed, processes=True, deadline_s=350.0)


def refused(rank: Rank, world: World) -> None:
    buffer = cases.begin(rank.store, rank.rank, world.ranks + 1)
    buffer.connect_ranks([r for r in range(world.ranks) if r != rank.rank])
    with pytest.raises(moe_p2p.UnavailableError, match="on GPUs connect all ranks of"):
        cases.step(buffer, 0, None, device="cuda")
    buffer.destroy()


@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2)))
def test_fewer_ranks_than_there_may_be_are_refused(world: World) -> None:
    gpu_ranks.run(world, refused, processes=True, deadline_s=200.0)
