"""Dispatch and combine over RDMA devices, against the reference: run in the machine of vm.py.

    python tests/rdma/exchange.py verbs|libfabric|verbs,libfabric [steps]

Two ranks, each a process and a node of its own. With verbs they are at the ends of the wire between
rxe0 and rxe1, rank 0 has both devices as NICs and rank 1 has one: rails are matched, not required
equal. libfabric's verbs;ofi_rxm connects within one device only, so both ranks have both. Then
again, and rank 1 is killed: rank 0 names it at once, not at its deadline. One process does
both transports: importing torch takes most of the time in there.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moe_p2p import AllToAll, PeerDeadError
from moe_p2p.reference import Tokens
from tests.support.cases import check_step, make, make_tokens
from tests.support.ranks import DiedError, Rank, run_processes

# Settings and number of NICs of each rank.
NICS = {
    "verbs": [("timeout=16,devices=rxe0:rxe1", 2), ("timeout=16,devices=rxe1", 1)],
    "libfabric": [("provider=verbs;ofi_rxm,interfaces=10.77.0.1:10.77.0.2", 2)] * 2,
}
WORLD_SIZE = 2
MAX_TOKENS = 12
TIMEOUT_S = 60.0


def open_rank(rank: Rank, transport: str) -> AllToAll:
    settings, num_nics = NICS[transport][rank.rank]
    return make(
        rank,
        transport=transport,
        transport_settings=settings,
        nics_per_rank=num_nics,
        ranks_per_node=1,
        timeout_s=TIMEOUT_S,
    )


def steps(num_steps: int) -> Iterator[list[Tokens]]:
    """The tokens of all ranks, of changing counts: often none, or one."""
    counts = random.Random(1)
    for seed in range(num_steps):
        yield [
            make_tokens(seed, rank, counts.choice([0, 1, counts.randint(0, MAX_TOKENS)]))
            for rank in range(WORLD_SIZE)
        ]


def exchange(rank: Rank, transport: str, num_steps: int) -> None:
    with open_rank(rank, transport) as comm:
        for tokens in steps(num_steps):
            check_step(comm, tokens)
        assert comm.broken == ""
        assert all(nic["bytes_written"] > 0 for nic in comm.counters())


def lose_a_rank(rank: Rank, transport: str) -> tuple[float, str]:
    """Rank 1 is killed after some steps; how long rank 0 took to notice, and the error text.

    By then it has all of rank 0's next dispatch: no write fails that rank 0 has to make.
    """
    comm = open_rank(rank, transport)
    for tokens in steps(5):
        check_step(comm, tokens)
    began = time.monotonic()
    if rank.rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for tokens in steps(1000):
            check_step(comm, tokens)
    except PeerDeadError as error:
        return time.monotonic() - began, str(error)
    raise AssertionError("1000 steps with a rank that is dead")


def check(transport: str, num_steps: int) -> None:
    run_processes(WORLD_SIZE, exchange, transport, num_steps, deadline_s=300.0)
    print(f"{transport}: {num_steps} steps equal the reference")
    survivor, killed = run_processes(
        WORLD_SIZE, lose_a_rank, transport, deadline_s=200.0, return_errors=True
    )
    assert isinstance(killed, DiedError), killed
    assert not isinstance(survivor, BaseException), survivor
    took_s, text = survivor
    print(f"{transport}: reported after {took_s:.1f} s: {text}")
    assert took_s < TIMEOUT_S / 2
    assert "rank 1" in text


if __name__ == "__main__":
    for used in sys.argv[1].split(","):
        check(used, int(sys.argv[2]) if len(sys.argv) > 2 else 50)
