"""Ranks close on their own: what they have sent arrives, and who waits for more learns why.

Every rank is a node here, or two are, so that all of it goes through NICs.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch

import moe_p2p
from tests.support.cases import check_step, make, make_tokens
from tests.support.ranks import Rank, on_ranks, run_threads

PATIENCE = timedelta(seconds=30)


def wait_for(rank: Rank, *keys: str) -> None:
    rank.store.wait(list(keys), PATIENCE)


@pytest.mark.parametrize("settings", ["gbps=0.02", "latency_us=300000"])
def test_a_rank_that_closes_first_takes_nothing_of_others_along(settings: str) -> None:
    """Much of rank 1 is under way to rank 2 when its last write, an empty one to rank 0, fails."""

    def body(rank: Rank) -> int:
        shape = {"num_experts": 3, "topk": 1, "max_tokens": 512, "hidden_dim": 1024}
        with make(rank, ranks_per_node=1, transport_settings=settings, **shape) as comm:
            num_tokens = 512 if rank.rank == 1 else 0
            x = torch.ones(num_tokens, 1024)
            to_rank_2 = torch.full((num_tokens, 1), 2)
            received = comm.dispatch(x, to_rank_2, layout="grouped")
            if rank.rank == 1:
                wait_for(rank, "closed")
            comm.release(received)
            num_rows = int(received.counts.sum())
            assert bool((received.x[:num_rows] == 1).all())
            if rank.rank == 0:
                comm.close()
                rank.store.set("closed", "")
        return num_rows

    assert run_threads(3, body) == [0, 0, 512]


@pytest.mark.parametrize("last", ["release", "combine", "gather_counts"])
@on_ranks(3)
def test_no_order_of_the_network_loses_what_was_sent_before_closing(rank: Rank, last: str) -> None:
    for turn in range(8):
        seed = random.Random(turn).getrandbits(40)
        apart = replace(rank, store=torch.distributed.PrefixStore(f"{turn}", rank.store))
        shape = {"num_experts": 6, "max_tokens": 12, "chunk_tokens": 3, "steps_in_flight": 4}
        settings = f"ring_kib=64,seed={seed}"
        with make(apart, ranks_per_node=1, transport_settings=settings, **shape) as comm:
            tokens = [make_tokens(turn, r, 4 * r, num_experts=6) for r in range(3)]
            if last == "combine":
                check_step(comm, tokens)
                continue
            t = tokens[rank.rank]
            comm.release(comm.dispatch(t.x, t.topk_idx, t.topk_weights))
            if last == "gather_counts":
                given = torch.tensor([rank.rank], dtype=torch.int32)
                assert comm.gather_counts(given).tolist() == [[0], [1], [2]]


@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(3, 1), (4, 2)])
@pytest.mark.parametrize("call", ["dispatch", "gather_counts"])
def test_a_rank_that_closes_early_is_named(call: str, world_size: int, ranks_per_node: int) -> None:
    def body(rank: Rank) -> str:
        comm = make(rank, ranks_per_node=ranks_per_node, num_experts=12, timeout_s=60.0)
        check_step(comm, [make_tokens(0, r, 5, num_experts=12) for r in range(world_size)])
        if rank.rank == world_size - 1:
            comm.close()
            return ""
        began = time.monotonic()
        t = make_tokens(1, rank.rank, 5, num_experts=12)
        calls = {
            "dispatch": lambda: comm.dispatch(t.x, t.topk_idx),
            "gather_counts": lambda: comm.gather_counts(torch.ones(1, dtype=torch.int32)),
        }
        with comm, pytest.raises(moe_p2p.MoeP2pError) as caught:
            calls[call]()
        assert time.monotonic() - began < 30  # not 60
        return str(caught.value)

    *errors, _ = run_threads(world_size, body)
    lost = world_size - 1
    for error in errors:
        # Those who learn it first close too; others may meet them first.
        assert "has closed its communicator" in error or "gave up" in error, error
        waits = "dispatch of step 1 waits for" if call == "dispatch" else "waits for"
        assert waits in error, error
    assert any(f"rank {lost}" in error.split(";")[0] for error in errors), errors


def test_a_rank_that_fails_reports_it_to_other_nodes() -> None:
    def body(rank: Rank) -> str:
        timeout_s = 0.5 if rank.rank == 1 else 60.0
        comm = make(rank, ranks_per_node=1, num_experts=6, timeout_s=timeout_s)
        t = make_tokens(0, rank.rank, 5, num_experts=6)
        if rank.rank == 1:
            with comm, pytest.raises(moe_p2p.TimeoutError):
                comm.dispatch(t.x, t.topk_idx)
            rank.store.set("failed", "")
            return ""
        wait_for(rank, "failed")
        began = time.monotonic()
        received = comm.dispatch(t.x, t.topk_idx)
        with comm, pytest.raises(moe_p2p.PeerDeadError) as caught:
            comm.combine(received.x, received)
        assert time.monotonic() - began < 30  # not 60
        return str(caught.value)

    first, _, last = run_threads(3, body)
    for error in (first, last):
        assert "gave up and closed its communicator; see its error" in error
        assert "combine of step 0 waits for rank" in error
    assert any("rank 1 (node 1) gave up" in error for error in (first, last))
