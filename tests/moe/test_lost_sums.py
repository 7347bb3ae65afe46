"""Sums of tokens whose rank was lost after their dispatch: NaN, or what is left."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch

import moe_p2p
from tests.support import cases
from tests.support.cases import make
from tests.support.mask_cases import given_by, last_step, step, tokens_by
from tests.support.ranks import DiedError, Rank, run_processes, run_threads

FIELDS = {"num_experts": 9, "mask_lost_ranks": True, "timeout_s": 20.0}


def run_lost(rank: Rank, lost: str | None, ranks_per_node: int | None) -> int:
    """Rank 1 is killed between a dispatch and its combine."""
    with make(rank, ranks_per_node=ranks_per_node, lost=lost, **FIELDS) as comm:
        for seed in range(3):
            step(comm, seed, [])
        comm.check()

        def die() -> None:
            if rank.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        poisoned = lost == "poison"
        lacking = last_step(comm, 4, [], [1], die, poisoned=poisoned)
        assert comm.lost_tokens == lacking
        assert lacking > 0
        if poisoned:
            text = rf"step 3 lost rank 1: the sums of {lacking} tokens lack"
            with pytest.raises(moe_p2p.PeerDeadError, match=text):
                comm.check()
        comm.check()  # once
        step(comm, 5, [1])  # a step that begins without it loses nothing
        comm.check()
        assert comm.lost_tokens == lacking
        return lacking


@pytest.mark.parametrize("ranks_per_node", [None, 1])
@pytest.mark.parametrize("lost", [None, "drop", "poison"])
def test_a_rank_that_is_lost_within_a_step(lost: str | None, ranks_per_node: int | None) -> None:
    results = run_processes(3, run_lost, lost, ranks_per_node, return_errors=True)
    assert isinstance(results.pop(1), DiedError)
    assert all(isinstance(result, int) for result in results), results


def run_training(rank: Rank, lost: str, when: str) -> str:
    """Rank 1 is lost within a step that autograd records."""
    comm = make(rank, lost=lost, **FIELDS)
    mine = tokens_by(comm, 0)
    x = mine.x.clone().requires_grad_()
    received = comm.dispatch(x, mine.topk_idx, mine.topk_weights, layout="grouped")

    def lose() -> None:
        if rank.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    if when == "combine":
        lose()
    try:
        out = comm.combine(received.x * 2.0, received)
        rank.store.add("combined", 1)
        while when == "backward" and int(rank.store.add("combined", 0)) < 3:
            pass
        if when == "backward":
            lose()
            out.sum().backward()
        text = "no error"
    except moe_p2p.MoeP2pError as error:
        text = f"{type(error).__name__}: {error}"
    rank.store.set(f"{rank.rank} is done", "")
    rank.store.wait(["0 is done", "2 is done"], timedelta(seconds=60))
    comm.close()
    return text


@pytest.mark.parametrize(("lost", "when"), [("poison", "combine"), ("drop", "backward")])
def test_autograd_raises(lost: str, when: str) -> None:
    results = run_processes(3, run_training, lost, when, return_errors=True)
    assert isinstance(results.pop(1), DiedError)
    wanted = "lost rank 1: the sums of 3 tokens", "no error"  # rank 2 has no token that lacks rows
    if when == "backward":
        wanted = ("rank 1 was lost or came back between a combine and its backward",) * 2
    for text, part in zip(results, wanted, strict=True):
        assert part in text, results


def test_another_word_is_refused() -> None:
    with pytest.raises(moe_p2p.InvalidArgumentError, match="lost"):
        moe_p2p.AllToAllConfig(**cases.SMALL, lost="raise")  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ["topk", "rows"])
def test_sums_in_every_order_are_poisoned(order: str) -> None:
    """Masked by the caller between the halves: for these tokens it is lost as well."""

    def body(rank: Rank) -> None:
        fields: dict[str, Any] = FIELDS | {"lost": "poison", "combine_rows": 3}
        with make(rank, **fields) as comm:
            mine = tokens_by(comm, 0)
            received = comm.dispatch(**given_by(comm, 0))
            rank.store.add("dispatched", 1)
            while int(rank.store.add("dispatched", 0)) < 3:
                pass
            if rank.rank == 1:
                return
            comm.mask_ranks([1])
            options = moe_p2p.CombineOptions(order=order, weighted=order != "rows")  # type: ignore[arg-type]
            out = comm.combine(received.x, received, options=options)
            lacking = ((mine.topk_idx >= 3) & (mine.topk_idx < 6)).any(1)
            assert torch.equal(out.isnan().all(1), lacking)
            assert lacking.any() or not len(lacking)

    run_threads(3, body)
