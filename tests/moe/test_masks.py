"""Communicators that mask ranks: one that is gone or does not come is left out, the others go on.

What they get is compared with the reference without that rank, at least 20 steps long.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

import moe_p2p
from moe_p2p import AllToAll
from moe_p2p.library import call
from tests.support.cases import make
from tests.support.mask_cases import (
    check_sums,
    expect_without,
    given_by,
    last_step,
    lose_before_backward,
    masks_of,
    step,
)
from tests.support.ranks import DiedError, Rank, on_ranks, run_processes, run_threads

ENDED = torch.ops.moe_p2p.all_to_all_ended.default
STEPS = 21  # after a rank is gone


def masking(rank: Rank, ranks_per_node: int, **overrides: Any) -> AllToAll:
    """timeout_s is so long that who waits for it fails the test."""
    fields = {"num_experts": 3 * rank.world_size, "mask_lost_ranks": True, "timeout_s": 40.0}
    return make(rank, ranks_per_node=ranks_per_node, **fields | overrides)


def meet(rank: Rank, name: str, ranks: int) -> None:
    """Returns when so many ranks have come."""
    if rank.store.add(f"came to {name}", 1) == ranks:
        rank.store.set(name, "")
    rank.store.wait([name], timedelta(seconds=40))


@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(1, 1), (3, 3), (3, 1)])
def test_nothing_changes_while_all_are_there(world_size: int, ranks_per_node: int) -> None:
    def body(rank: Rank) -> None:
        with masking(rank, ranks_per_node) as comm:
            for seed in range(8):
                step(comm, seed, [])
            assert masks_of(comm) == []
            meet(rank, "done", world_size)

    run_threads(world_size, body)


# --- processes that are killed ---


def run_and_lose(rank: Rank, ranks_per_node: int, deaths: dict[int, int]) -> float:
    """Rank r is killed within step deaths[r], the second such rank before it dispatches."""
    comm = masking(rank, ranks_per_node)
    gone: list[int] = []
    began = time.monotonic()
    for seed in range(max(deaths.values()) + 1 + STEPS):
        dying = [r for r, at in deaths.items() if at == seed]
        if dying and gone:  # between nodes its sums of the step before may not have left yet
            meet(rank, f"step {seed}", rank.world_size - len(gone))
        if rank.rank in dying:
            if not gone:
                comm.dispatch(**given_by(comm, seed))
            os.kill(os.getpid(), signal.SIGKILL)
        if dying:
            last_step(comm, seed, gone, dying)
            gone += dying
        else:
            step(comm, seed, gone)
    assert masks_of(comm) == sorted(gone)
    assert comm.broken == ""
    took = time.monotonic() - began
    meet(rank, "done", rank.world_size - len(gone))
    comm.close()
    return took


@pytest.mark.parametrize("ranks_per_node", [4, 1])
@pytest.mark.parametrize("deaths", [{1: 3}, {3: 2, 0: 6}, {2: 4, 1: 4}], ids=str)
def test_processes_that_are_killed_are_masked(ranks_per_node: int, deaths: dict[int, int]) -> None:
    results = run_processes(4, run_and_lose, ranks_per_node, deaths, return_errors=True)
    for rank, result in enumerate(results):
        if rank in deaths:
            assert isinstance(result, DiedError), result
        else:
            assert isinstance(result, float), result
            assert result < 30, "it took a deadline of 40 s"


# --- ranks that are alive ---


@pytest.mark.parametrize("ranks_per_node", [3, 1])
@on_ranks(3)
def test_a_slow_rank_is_masked_and_masks_the_others(rank: Rank, ranks_per_node: int) -> None:
    """It comes back within a step, while the others go on: each side is right for itself."""
    with masking(rank, ranks_per_node, timeout_s=6.0) as comm:
        slow = rank.rank == 1
        others = [0, 2]
        for seed in range(3):
            step(comm, seed, [])
        live = comm.dispatch(**given_by(comm, 3))
        if slow:
            rank.store.wait(["masked by 0", "masked by 2"], timedelta(seconds=40))
        else:
            # It dispatched, so its tokens are here; what its experts make of ours is not.
            here = expect_without(comm, 3, [])
            lost = expect_without(comm, 3, [1])
            out = comm.combine(here.y[rank.rank], live, out_dtype=here.out_dtype)
            assert torch.equal(out, lost.out[rank.rank])
            assert masks_of(comm) == [1]
            rank.store.set(f"masked by {rank.rank}", "")
        if slow:
            # What the others said before they masked it is here: all of their dispatch.
            here = expect_without(comm, 3, [])
            out = comm.combine(here.y[1], live, out_dtype=here.out_dtype)
            assert torch.equal(out, expect_without(comm, 3, others).out[1])
        for seed in range(4, 4 + STEPS):
            step(comm, seed, others if slow else [1])
        assert masks_of(comm) == (others if slow else [1])
        meet(rank, "done", 3)


@pytest.mark.parametrize("ranks_per_node", [3, 1])
@on_ranks(3)
def test_masks_set_by_hand_are_not_waited_for(rank: Rank, ranks_per_node: int) -> None:
    with masking(rank, ranks_per_node) as comm:
        for seed in range(3):
            step(comm, seed, [])
        meet(rank, "all have combined", 3)  # a mask drops what is still on its way
        if rank.rank != 2:
            comm.mask_ranks([2])
            assert masks_of(comm) == [2]
            began = time.monotonic()
            for seed in range(3, 3 + STEPS):
                step(comm, seed, [2])
            assert time.monotonic() - began < 20
        meet(rank, "done", 3)


@pytest.mark.parametrize("ranks_per_node", [3, 1])
def test_a_rank_that_closes_is_masked(ranks_per_node: int) -> None:
    # Its neighbours notice; to ranks of other nodes it is one that does not come.
    timeout_s = 40.0 if ranks_per_node > 1 else 6.0

    def body(rank: Rank) -> None:
        with masking(rank, ranks_per_node, timeout_s=timeout_s) as comm:
            for seed in range(3):
                step(comm, seed, [])
            meet(rank, "all have combined", 3)
            if rank.rank == 0:
                comm.close()
                return
            began = time.monotonic()
            for seed in range(3, 3 + STEPS):
                step(comm, seed, [0])
            assert time.monotonic() - began < 20
            meet(rank, "done", 2)

    run_threads(3, body)


@pytest.mark.parametrize("ranks_per_node", [3, 1])
@on_ranks(3)
def test_halves_in_flight_and_releases(rank: Rank, ranks_per_node: int) -> None:
    with masking(rank, ranks_per_node) as comm:
        step(comm, 0, [])
        meet(rank, "all have combined", 3)
        gone = [0]
        if rank.rank != 0:
            comm.mask_ranks(gone)
            for seed in range(1, 1 + STEPS):
                first = comm.dispatch_send(**given_by(comm, seed))
                second = comm.dispatch_send(**given_by(comm, seed + 1))
                got = comm.dispatch_recv(first)
                comm.release(second)
                check_sums(comm, got, expect_without(comm, seed, gone), seed)
        meet(rank, "done", 3)


@on_ranks(3)
def test_objects_may_share_their_masks(rank: Rank) -> None:
    with masking(rank, 3) as one, masking(rank, 3, masked=one.masked) as two:
        if rank.rank != 1:
            one.mask_ranks([1])
            step(two, 0, [1])
            assert masks_of(two) == [1]
        meet(rank, "done", 3)


# --- what is refused ---


@on_ranks(1)
def test_ranks_that_cannot_be_masked(rank: Rank) -> None:
    with masking(rank, 1) as comm:
        for wrong in (0, 1, -1):
            with pytest.raises(moe_p2p.InvalidArgumentError, match=f"rank {wrong} cannot be"):
                comm.mask_ranks([wrong])
        with pytest.raises(moe_p2p.InvalidArgumentError, match="gather_counts is for all"):
            comm.gather_counts(torch.zeros(1, dtype=torch.int32))
        step(comm, 0, [])


@on_ranks(2)
def test_masks_must_be_asked_for(rank: Rank) -> None:
    expected = pytest.raises(moe_p2p.InvalidArgumentError, match="mask_lost_ranks=True")
    with make(rank) as comm, expected:
        comm.mask_ranks([0])


def test_worlds_that_cannot_lose_a_rank() -> None:
    def nodes(rank: Rank) -> None:
        masking(rank, 2)

    for error in run_threads(4, nodes, return_errors=True):
        assert isinstance(error, moe_p2p.InvalidArgumentError)
        assert "Pass ranks_per_node=1" in str(error)

    def chunks(rank: Rank) -> None:
        masking(rank, 1, chunk_tokens=4)

    with pytest.raises(AssertionError, match="must be at least max_tokens 12"):
        run_threads(1, chunks)


def test_all_ranks_mask_or_none() -> None:
    def body(rank: Rank) -> None:
        make(rank, mask_lost_ranks=rank.rank == 0)

    for error in run_threads(2, body, return_errors=True):
        assert isinstance(error, moe_p2p.InvalidArgumentError)
        assert "mask_lost_ranks differs between ranks" in str(error)


@pytest.mark.parametrize("by_rank", [False, True])
@pytest.mark.parametrize("ranks_per_node", [3, 1])
def test_a_rank_lost_before_a_backward_pass(ranks_per_node: int, by_rank: bool) -> None:
    def body(rank: Rank) -> None:
        with masking(rank, ranks_per_node) as comm:
            lose_before_backward(rank, comm, by_rank)

    run_threads(3, body)


@pytest.mark.parametrize("odd", [1, ["x"], [1.0], None])
def test_who_is_masked_is_given_as_ranks(odd: Any) -> None:
    def body(rank: Rank) -> None:
        with (
            masking(rank, 1) as comm,
            pytest.raises(moe_p2p.InvalidArgumentError, match=r"ranks is .*must be (ranks|an int)"),
        ):
            comm.mask_ranks(odd)

    run_threads(1, body)


def see_ends(rank: Rank) -> list[list[int]]:
    """Rank 1 closes and ends, rank 2 is killed."""
    comm = masking(rank, 4)
    seen = [call(ENDED, comm._comm)]
    meet(rank, "made", 4)
    if rank.rank == 1:
        comm.close()
        rank.store.set("closed", "")
        return []
    rank.store.wait(["closed"], timedelta(seconds=40))
    if rank.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + 40
    while not (now := call(ENDED, comm._comm)) and time.monotonic() < deadline:
        time.sleep(0.01)
    meet(rank, "both have seen it", 2)
    comm.close()
    return [*seen, now]


def test_only_who_ends_without_closing_has_ended() -> None:
    results = run_processes(4, see_ends, return_errors=True)
    assert isinstance(results[2], DiedError)
    assert [results[0], results[1], results[3]] == [[[], [2]], [], [[], [2]]]
