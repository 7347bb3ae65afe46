"""Dispatch and combine over RDMA devices, against the reference: run in the machine of vm.py.

    python tests/rdma/exchange.py [steps]

Two ranks, each a process and a node of its own, at the ends of the wire between rxe0 and rxe1. Rank
0 has both devices as NICs and rank 1 has one: rails are matched, not required equal. Then again,
and rank 1 is killed: rank 0 is told at once by whom, not at its deadline.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

from cases import check_step, make, make_tokens  # noqa: E402
from moe_p2p import AllToAll, PeerDeadError  # noqa: E402
from moe_p2p.reference import Tokens  # noqa: E402
from ranks import DiedError, Rank, run_processes  # noqa: E402

DEVICES = ("rxe0:rxe1", "rxe1")
MAX_TOKENS = 12
TIMEOUT_S = 60.0


def open_rank(rank: Rank) -> AllToAll:
    devices = DEVICES[rank.rank]
    return make(
        rank,
        transport="verbs",
        transport_settings=f"timeout=16,devices={devices}",
        nics_per_rank=devices.count(":") + 1,
        ranks_per_node=1,
        timeout_s=TIMEOUT_S,
    )


def steps(num_steps: int) -> Iterator[list[Tokens]]:
    """The tokens of all ranks, of changing counts: often none, or one."""
    counts = random.Random(1)
    for seed in range(num_steps):
        yield [
            make_tokens(seed, rank, counts.choice([0, 1, counts.randint(0, MAX_TOKENS)]))
            for rank in range(len(DEVICES))
        ]


def exchange(rank: Rank, num_steps: int) -> None:
    with open_rank(rank) as comm:
        for tokens in steps(num_steps):
            check_step(comm, tokens)
        assert comm.broken == ""


def lose_a_rank(rank: Rank) -> tuple[float, str]:
    """Rank 1 is killed after some steps; how long rank 0 took to notice, and its story."""
    comm = open_rank(rank)
    for tokens in steps(5):
        check_step(comm, tokens)
    began = time.monotonic()
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for tokens in steps(1000):
            check_step(comm, tokens)
    except PeerDeadError as error:
        return time.monotonic() - began, str(error)
    raise AssertionError("1000 steps with a rank that is dead")


if __name__ == "__main__":
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    run_processes(len(DEVICES), exchange, number, deadline_s=300.0)
    print(f"{number} steps equal the reference")
    survivor, killed = run_processes(
        len(DEVICES), lose_a_rank, deadline_s=200.0, return_errors=True
    )
    assert isinstance(killed, DiedError), killed
    assert not isinstance(survivor, BaseException), survivor
    took_s, story = survivor
    print(f"told after {took_s:.1f} s: {story}")
    assert took_s < TIMEOUT_S / 2
    assert "rank 1" in story
