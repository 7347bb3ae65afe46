"""Masked ranks that are taken back on the same memory, on CPUs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import moe_p2p
from moe_p2p import AllToAll
from tests.support import clean_cases as cases
from tests.support.cases import make
from tests.support.mask_cases import masks_of, step
from tests.support.ranks import Rank, on_ranks, run_threads


def masking(rank: Rank, **overrides: Any) -> AllToAll:
    """timeout_s is so long that who waits for it fails the test."""
    fields = {"num_experts": 3 * rank.world_size, "mask_lost_ranks": True, "timeout_s": 40.0}
    return make(rank, **fields | overrides)


def meeting(rank: Rank, without: int = 0) -> cases.Together:
    """Of all ranks, or so many fewer."""

    def together(name: str) -> None:
        if rank.store.add(f"came to {name}", 1) == rank.world_size - without:
            rank.store.set(name, "")
        rank.store.wait([name], timedelta(seconds=60))

    return together


def run(world_size: int, case: Any, **overrides: Any) -> None:
    def body(rank: Rank) -> None:
        with masking(rank, **overrides) as comm:
            case(comm, meeting(rank))

    run_threads(world_size, body)


@pytest.mark.parametrize("steps_in_flight", [2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_that_made_different_calls_agree_again(world_size: int, steps_in_flight: int) -> None:
    run(world_size, cases.apart, steps_in_flight=steps_in_flight)


@pytest.mark.parametrize("steps_in_flight", [2, 3])
def test_open_calls_end(steps_in_flight: int) -> None:
    run(3, cases.halves, steps_in_flight=steps_in_flight)


def test_a_slow_rank_is_taken_back() -> None:
    run(3, cases.slow, timeout_s=1.0)


def test_who_calls_before_others_have_cleaned_masks_them() -> None:
    run(3, cases.not_cleaned, timeout_s=1.0)


@on_ranks(3)
def test_a_rank_that_is_gone_is_masked_again(rank: Rank) -> None:
    together = meeting(rank)
    comm = masking(rank)
    step(comm, 0, [])
    together("all have combined")
    if rank.rank == 1:
        comm.close()
        return
    for seed in range(4):
        step(comm, seed, [1])
        if seed == 1:
            meeting(rank, without=1)("the others have combined")
            cases.clean(comm)
    assert masks_of(comm) == [1]
    comm.close()


@on_ranks(2)
def test_where_masks_are_not_cleaned(rank: Rank) -> None:
    with make(rank) as comm:
        with pytest.raises(moe_p2p.InvalidArgumentError, match="has no masks; make it with"):
            comm.clean_masks()
        step(comm, 0, [])
    with masking(rank, ranks_per_node=1) as comm:
        with pytest.raises(moe_p2p.UnavailableError, match="several nodes are not taken back"):
            comm.clean_masks()
        step(comm, 0, [])
