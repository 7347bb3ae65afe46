"""Dispatch and combine over RDMA devices, against the reference: run in the machine of vm.py.

    python tests/rdma/exchange.py [steps]

Two ranks, each a process and a node of its own, at the ends of the wire between rxe0 and rxe1. Rank
0 has both devices as NICs and rank 1 has one: rails are matched, not required equal.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

from cases import check_step, make, make_tokens  # noqa: E402
from ranks import Rank, run_processes  # noqa: E402

DEVICES = ("rxe0:rxe1", "rxe1")
MAX_TOKENS = 12


def exchange(rank: Rank, num_steps: int) -> None:
    devices = DEVICES[rank.rank]
    settings = f"timeout=16,devices={devices}"
    options = {"transport": "verbs", "transport_settings": settings, "ranks_per_node": 1}
    counts = random.Random(1)
    with make(rank, **options, nics_per_rank=devices.count(":") + 1, timeout_s=60.0) as comm:
        for seed in range(num_steps):
            tokens = [
                make_tokens(seed, other, counts.choice([0, 1, counts.randint(0, MAX_TOKENS)]))
                for other in range(rank.world_size)
            ]
            check_step(comm, tokens)
        assert comm.broken == ""


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    run_processes(len(DEVICES), exchange, steps, deadline_s=300.0)
    print(f"{steps} steps equal the reference")
