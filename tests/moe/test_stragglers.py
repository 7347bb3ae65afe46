"""A rank that others wait for is named long before their deadline, once; a healthy one never."""

from __future__ import annotations

import re
import socket
import threading
import time
from typing import Any

import pytest
import torch

from moe_p2p import AllToAll
from moe_p2p.moe.counts import Counts
from tests.support.cases import check_step, make, make_tokens
from tests.support.ranks import Rank, run_threads

LATE, WORLD = 2, 4
DEADLINE_S = 8.0  # a rank is named after a quarter of it


def named(comms: list[AllToAll], by: int, source: int = LATE) -> int:
    return Counts.of(comms[by]._comm).waits[source][1]


def steps_with_a_late_rank(
    rank: Rank, comms: list[AllToAll], lock: threading.Lock, given: dict[str, Any]
) -> Counts:
    """In step 2 rank LATE goes on once all others have named it."""
    comm = make(rank, timeout_s=DEADLINE_S, **given)
    with lock:
        comms[rank.rank] = comm
    for step in range(4):
        if rank.rank == LATE and step == 2:
            others = [i for i in range(WORLD) if i != LATE]
            while not all(named(comms, i) for i in others):
                time.sleep(0.01)
        check_step(comm, [make_tokens(step, r, 5) for r in range(WORLD)])
    counts = Counts.of(comm._comm)
    comm.close()
    return counts


@pytest.mark.parametrize(
    "given", [{}, {"ranks_per_node": 2}, {"ranks_per_node": 1, "mask_lost_ranks": True}]
)
def test_a_late_rank_is_named_once_and_again_when_it_came(
    given: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    comms: list[AllToAll] = [None] * WORLD  # type: ignore[list-item]
    found = run_threads(WORLD, steps_with_a_late_rank, comms, threading.Lock(), given)
    lines = capfd.readouterr().err.splitlines()
    host = re.escape(socket.gethostname())
    for rank in (0, 1, 3):
        own = [line for line in lines if f"] rank {rank} on {socket.gethostname()} " in line]
        assert len(own) == 2, lines
        late = rf"rank {rank} on {host} has waited \d+ ms, of at most 8000, for rank 2 on {host}"
        assert re.search(rf"{late}: dispatch of step 2 waits for rank 2 \(node \d", own[0]), own
        over = rf"rank {rank} on {host} goes on after \d+ ms: rank 2 on {host} came \(dispatch of"
        assert re.search(rf"{over} step 2 waits for rank 2 ", own[1]), own
        seconds, times = zip(*found[rank].waits, strict=True)
        assert times == (0, 0, 1, 0)
        assert seconds[LATE] >= 1.9  # most of a quarter of the deadline
    assert len(lines) == 6
    assert [times for _, times in found[LATE].waits] == [0] * WORLD
    assert not any(counts.deadlines for counts in found)


def test_nobody_is_named_in_a_healthy_run(capfd: pytest.CaptureFixture[str]) -> None:
    def body(rank: Rank) -> list[int]:
        with make(rank, ranks_per_node=2, timeout_s=30.0) as comm:
            for step in range(6):
                check_step(comm, [make_tokens(step, r, 5) for r in range(WORLD)])
            return [times for _, times in Counts.of(comm._comm).waits]

    assert run_threads(WORLD, body) == [[0] * WORLD] * WORLD
    assert "waited" not in capfd.readouterr().err


def test_a_rank_that_is_masked_is_not_said_to_have_come(capfd: pytest.CaptureFixture[str]) -> None:
    def body(rank: Rank) -> tuple[int, int]:
        comm = make(rank, timeout_s=1.0, mask_lost_ranks=True, num_experts=8)
        if rank.rank == 1:
            gone.wait(60)
        else:
            check_alone(comm)
            gone.set()
        counts = Counts.of(comm._comm)
        comm.close()
        return counts.deadlines, counts.waits[1][1]

    gone = threading.Event()
    assert run_threads(2, body)[0] == (1, 1)
    err = capfd.readouterr().err
    assert re.search(r"rank 0 on \S+ goes on after \d+ ms: rank 1 on \S+ masked \(dispatch of", err)
    assert "came" not in err.replace("immediates came", "")


def check_alone(comm: AllToAll) -> None:
    tokens = make_tokens(0, 0, 3)
    got = comm.dispatch(tokens.x, tokens.topk_idx, tokens.topk_weights)
    comm.combine(got.x, got)
    assert comm.masked.tolist() == [0, 1]


def test_a_deadline_that_was_missed_is_counted_and_its_error_is_the_last_word(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def body(rank: Rank) -> Any:
        comm = make(rank, timeout_s=1.0)
        if rank.rank == 0:
            tokens = make_tokens(0, 0, 3)
            try:
                with pytest.raises(
                    RuntimeError, match=r"timed out after 1000 ms: dispatch of step"
                ):
                    comm.dispatch(tokens.x, tokens.topk_idx, tokens.topk_weights)
            finally:
                over.set()
        over.wait(60)
        counts = Counts.of(comm._comm)
        comm.close()
        return counts.deadlines, [named for _, named in counts.waits]

    over = threading.Event()
    assert run_threads(2, body)[0] == (1, [0, 1])
    err = capfd.readouterr().err
    assert "for rank 1 on" in err
    assert "goes on" not in err


def test_what_a_rank_does_between_steps_is_no_wait() -> None:
    """Time is charged to ranks that are missing while a call waits, and to nobody else."""

    def body(rank: Rank) -> float:
        with make(rank) as comm:
            for step in range(3):
                barrier.wait(60)
                check_step(comm, [make_tokens(step, r, 5) for r in range(2)])
                torch.randn(256, 256).mm(torch.randn(256, 256))
                time.sleep(0.2)
            return sum(seconds for seconds, _ in Counts.of(comm._comm).waits)

    barrier = threading.Barrier(2)
    began = time.monotonic()
    waited = run_threads(2, body)
    assert all(0 <= each < time.monotonic() - began - 0.5 for each in waited)
