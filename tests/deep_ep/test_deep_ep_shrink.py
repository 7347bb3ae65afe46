"""enable_shrink: ranks that are lost before the first low-latency call of a shape, in the middle of
one, and before the buffer is cleaned, as DeepEP's own shrink test loses them."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_p2p
from moe_p2p import AllToAll, AllToAllConfig
from moe_p2p.deep_ep import Buffer
from moe_p2p.moe import pool
from tests.support.ranks import DiedError, Rank, StoreGroup, run_processes, run_threads

T, H, K, LOCAL = 8, 256, 4, 3  # tokens of a rank, hidden size, top-k, experts of a rank


def buffer_of(rank: Rank, **options: Any) -> Buffer:
    options = {"low_latency_mode": True, "explicitly_destroy": True, "timeout_s": 20.0} | options
    group: Any = StoreGroup(rank)
    return Buffer(group, enable_shrink=options.pop("enable_shrink", True), **options)


def routing(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    scores = torch.rand(T, world_size * LOCAL, generator=generator)
    return scores.topk(K).indices, torch.rand(T, K, generator=generator)


def step(buffer: Buffer, lost: set[int], *, leaves_between: bool = False) -> bool:
    """A dispatch and a combine, checked against what the living ranks should get."""
    world_size = buffer.group_size
    topk_idx, weights = routing(buffer.rank, world_size)
    x = torch.full((T, H), float(buffer.rank + 1), dtype=torch.bfloat16)
    arguments = (x, topk_idx, T, world_size * LOCAL)
    rows, counts, handle, _, _ = buffer.low_latency_dispatch(*arguments, use_fp8=False)
    assert isinstance(rows, Tensor)
    for expert in range(LOCAL):
        number = buffer.rank * LOCAL + expert
        wanted = [
            source + 1.0
            for source in range(world_size)
            if source not in lost
            for _ in range(int((routing(source, world_size)[0] == number).sum()))
        ]
        assert rows[expert, : int(counts[expert]), 0].tolist() == wanted
    if leaves_between:
        return False
    combined, _, _ = buffer.low_latency_combine(rows, topk_idx, weights, handle)
    gone = torch.tensor([int(owner) in lost for owner in (topk_idx // LOCAL).flatten()])
    kept = weights.masked_fill(gone.view(T, K), 0).sum(dim=1)
    # Partial sums are rounded to bfloat16 once, sums once more.
    assert torch.allclose(combined[:, 0].float(), kept * (buffer.rank + 1), rtol=2**-6)
    return True


def masked(buffer: Buffer) -> set[int]:
    status = torch.zeros(buffer.group_size, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    return set(status.nonzero().flatten().tolist())


def shrink(rank: Rank) -> None:
    """Ranks 1, 3 and 5 leave before the dispatch, the combine and the cleaning, and destroy."""
    buffer = buffer_of(rank)
    if rank.rank != 1:
        if rank.rank == 3:
            topk_idx, _ = routing(3, 6)
            x = torch.full((T, H), 4.0, dtype=torch.bfloat16)
            buffer.low_latency_dispatch(x, topk_idx, T, 6 * LOCAL, use_fp8=False)
        else:
            survive(buffer, rank.rank)
    buffer.destroy()


def survive(buffer: Buffer, rank: int) -> None:
    topk_idx, weights = routing(rank, 6)
    x = torch.full((T, H), float(rank + 1), dtype=torch.bfloat16)
    arguments = (x, topk_idx, T, 6 * LOCAL)
    rows, _, handle, _, _ = buffer.low_latency_dispatch(*arguments, use_fp8=False)
    assert masked(buffer) - {3} == {1}
    buffer.low_latency_combine(rows, topk_idx, weights, handle)
    assert masked(buffer) == {1, 3}
    if rank == 5:
        return
    buffer.clean_low_latency_buffer(T, H, 6 * LOCAL)
    assert masked(buffer) == {1, 3, 5}
    for _ in range(3):
        step(buffer, {1, 3, 5})


@pytest.mark.parametrize("per_node", [6, 1])
def test_ranks_are_lost_as_deep_eps_shrink_test_loses_them(
    per_node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 destroyed its buffer while the others met: a JSONDecodeError that named nobody."""
    monkeypatch.setattr(pool, "find_ranks_per_node", lambda *_: per_node)
    began = time.monotonic()
    run_threads(6, shrink)
    assert time.monotonic() - began < 15, "a rank that departed is not waited for"


def killed(rank: Rank, lost: int) -> set[int]:
    buffer = buffer_of(rank, timeout_s=60.0)
    if rank.rank == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(2):
        step(buffer, {lost})
    return masked(buffer)


@pytest.mark.parametrize("lost", [0, 2])
def test_a_killed_rank_is_masked_by_the_first_call(lost: int) -> None:
    results = run_processes(3, killed, lost, return_errors=True)
    assert isinstance(results.pop(lost), DiedError)
    assert results == [{lost}, {lost}]


def test_a_rank_that_does_not_come_is_masked_and_learns_of_it() -> None:
    def body(rank: Rank) -> Any:
        buffer = buffer_of(rank, timeout_s=1.0)
        if rank.rank == 1:
            while not rank.store.check(["over"]):
                time.sleep(0.02)
            return step(buffer, set())
        step(buffer, {1})
        rank.store.set("over", "")
        return masked(buffer)

    first, late, last = run_threads(3, body, return_errors=True)
    assert (first, last) == ({1}, {1})
    assert isinstance(late, moe_p2p.AbortedError)
    assert "rank 1: the others went on with a communicator without this rank" in str(late)


def test_without_shrink_the_lost_rank_is_named() -> None:
    def body(rank: Rank) -> None:
        buffer = buffer_of(rank, enable_shrink=False, timeout_s=5.0)
        if rank.rank != 1:
            step(buffer, set())
        buffer.destroy()

    for error in run_threads(3, body, return_errors=True):
        assert "rank 1 for all ranks to destroy their buffers" in str(error)


def test_an_object_of_its_own_masks_a_rank_that_does_not_come() -> None:
    config = AllToAllConfig(
        num_experts=9, hidden_dim=64, topk=2, max_tokens=4, mask_lost_ranks=True, timeout_s=1.0
    )

    def body(rank: Rank) -> Any:
        if rank.rank == 0:
            return None
        with AllToAll(rank.store, config, rank=rank.rank, world_size=3) as comm:
            x = torch.ones(4, 64, dtype=config.dtype)
            received = comm.dispatch(x, torch.tensor([[0, 3 * rank.rank]] * 4))
            sums = comm.combine(received.x, received)
            assert torch.equal(sums, x), "the lost rank's share is absent"
            return comm.masked.tolist()

    assert run_threads(3, body) == [None, [1, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize("lost", [0, 1, 3])
@pytest.mark.parametrize("transport", ["loopback", "timed", "libfabric"])
def test_between_nodes_of_one_rank_it_is_masked_too(transport: str, lost: int) -> None:
    """It was named only, although masks work between such nodes once calls run."""
    config = AllToAllConfig(
        num_experts=8,
        hidden_dim=64,
        topk=2,
        max_tokens=4,
        mask_lost_ranks=True,
        ranks_per_node=1,
        transport=transport,
        transport_settings="provider=tcp,interfaces=lo" if transport == "libfabric" else "",
        timeout_s=30.0,
    )

    def body(rank: Rank) -> Any:
        if rank.rank == lost:
            return None
        place = {"rank": rank.rank, "world_size": 4}
        with AllToAll(rank.store, config, **place, gone=lambda other: other == lost) as comm:
            x = torch.full((4, 64), 1.0 + rank.rank, dtype=config.dtype)
            for turn in range(5):  # more than steps_in_flight; the word alone brings no rank back
                if turn == 3:
                    comm.masked[lost] = 0
                received = comm.dispatch(x, torch.tensor([[2 * rank.rank, 2 * lost]] * 4))
                counts = received.counts.tolist()
                assert counts == [4, 0], f"rows of rank {rank.rank} alone"
                sums = comm.combine(received.x, received)
                assert torch.equal(sums, x), "the lost rank's share is absent"
                other = (rank.rank + 1) % 4
                other = (other + 1) % 4 if other == lost else other
                received = comm.dispatch(x, torch.tensor([[2 * other, 2 * lost + 1]] * 4))
                assert torch.equal(comm.combine(received.x, received), x)
            return comm.masked.tolist()

    results = run_threads(4, body)
    wanted = [int(each == lost) for each in range(4)]
    assert results == [None if each == lost else wanted for each in range(4)]
