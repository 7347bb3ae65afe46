"""moe_p2p.nixl_ep on GPUs: ranks come, go, are killed and replaced, and are masked by hand.

Ranks are processes, with a GPU each where there are as many; on the emulated GPU they are threads,
and nobody is killed.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.nixl_ep.test_nixl_ep_plans import NICS, PLANS, ends
from tests.support import gpu_ranks
from tests.support import nixl_ep_cases as cases
from tests.support.gpu_ranks import DEADLINE_S, World
from tests.support.ranks import DiedError, Rank

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

EMULATED = "MOE_P2P_EMULATED_GPU" in os.environ
OPTIONS: dict[str, Any] = {"timeout_ms": 1000 * int(DEADLINE_S)}


def by_hand(rank: Rank, world: World) -> None:
    """All ranks from the beginning; the last one is masked by hand, and taken back."""
    device, everyone = gpu_ranks.DEVICE, range(world.ranks)
    buffer = cases.begin(rank.store, rank.rank, world.ranks, **OPTIONS)
    buffer.connect_ranks([r for r in everyone if r != rank.rank])
    for seed in range(6):
        cases.step(buffer, seed, None, device=device)
    assert cases.masked(buffer, device) == []
    last = world.ranks - 1
    gpu_ranks.meet(rank, "all have combined")
    if rank.rank != last:
        buffer.update_mask_buffer(last, True)
        for seed in range(6, 8):
            cases.step(buffer, seed, world.ranks * cases.E, device=device)
        assert cases.masked(buffer, device) == [last]
    else:  # alone, in a world of its own
        for peer in everyone[:-1]:
            buffer.update_mask_buffer(peer, True)
        cases.step(buffer, 6, None, device=device)
    gpu_ranks.meet(rank, "masked")
    buffer.clean_mask_buffer()
    for seed in range(8, 10):
        cases.step(buffer, seed, None, device=device)
    buffer.barrier()
    buffer.destroy()


@pytest.mark.parametrize("world", gpu_ranks.worlds((3, 3)))
def test_masks_by_hand(world: World) -> None:
    gpu_ranks.run(world, by_hand, processes=not EMULATED, deadline_s=350.0)


def planned(rank: Rank, _: World, name: str, options: dict[str, Any]) -> str:
    plan, processes = PLANS[name]
    return cases.run_plan(rank, plan, processes, options, gpu_ranks.DEVICE)


@pytest.mark.parametrize("options", [{}, NICS], ids=["memory", "NICs"])
@pytest.mark.parametrize("name", PLANS)
def test_each_phase_is_that_of_its_ranks(name: str, options: dict[str, Any]) -> None:
    wanted = ends(name)
    if EMULATED and "killed" in wanted:
        pytest.skip("ranks are threads here, and nobody can be killed")
    world = World(len(wanted), len(wanted))
    more = {"processes": not EMULATED, "return_errors": True, "deadline_s": 350.0}
    # Between nodes it is the deadline that tells that a rank is lost.
    soon = {"timeout_ms": 1000 * int(gpu_ranks.LATER_S)} if options and not EMULATED else OPTIONS
    results = gpu_ranks.run(world, planned, name, options | soon, **more)
    assert ["killed" if isinstance(r, DiedError) else r for r in results] == wanted, results
