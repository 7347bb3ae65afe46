"""How long a newcomer takes to its first complete step, and what it costs the steps of the others.

    python -m benchmarks.bench_elastic [ranks]

The last of `ranks` (8) CPU ranks of one node comes while the others make steps of a small shape;
its process was forked from a server that has imported torch. Prints the time from its first request
to the store to the end of its first step with all, and the longest step of the others: in 400 steps
without a newcomer, while it joins, and the step behind the commit.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from moe_p2p import AllToAll, AllToAllConfig
from tests.support.ranks import Rank, run_processes

MEASURED = 400


def step(comm: AllToAll, rank: int) -> float:
    began = time.perf_counter()
    x = torch.full((16, 64), float(rank), dtype=torch.bfloat16)
    topk = torch.arange(16).unsqueeze(1) % comm.config.num_experts
    received = comm.dispatch(x, topk)
    comm.combine(received.x, received)
    return time.perf_counter() - began


def body(rank: Rank) -> dict[str, float]:
    store, last = rank.store, rank.world_size - 1
    config = AllToAllConfig(
        num_experts=2 * rank.world_size,
        hidden_dim=64,
        topk=1,
        max_tokens=16,
        mask_lost_ranks=True,
        num_threads=1,
        timeout_s=60.0,
    )
    given: dict[str, Any] = {"rank": rank.rank, "world_size": rank.world_size}
    if rank.rank == last:
        store.wait(["come"])
        began = time.perf_counter()
        comm = AllToAll(store, config, join=True, **given)
        entered = time.perf_counter() - began
        step(comm, rank.rank)
        found = {"entered_s": entered, "first_step_s": time.perf_counter() - began}
    else:
        comm = AllToAll(store, config, members=range(last), **given)
        for _ in range(20):
            step(comm, rank.rank)
        found = {"alone_ms": 1e3 * max(step(comm, rank.rank) for _ in range(MEASURED))}
        comm.stage_members(add=[last])
        store.set("come", "")
        steps, number = [], 0
        while True:
            ready = f"ready {number}"
            if comm.members_staged():
                store.add(ready, 1)
            steps.append(step(comm, rank.rank))
            if number % 8 == 7 and int(store.add(f"ready {number - 7}", 0)) == last:
                break
            number += 1
        began = time.perf_counter()
        comm.commit_members()
        steps.append(step(comm, rank.rank) + time.perf_counter() - began)
        found |= {"joining_ms": 1e3 * max(steps), "commit_ms": 1e3 * steps[-1], "steps": number}
    for _ in range(20):
        step(comm, rank.rank)
    comm.close()
    return found


def main() -> None:
    results = run_processes(int(sys.argv[1]) if len(sys.argv) > 1 else 8, body)
    for name, value in results[-1].items():
        print(f"{name} {value:.3f}")
    for name in results[0]:
        print(f"{name} {max(found[name] for found in results[:-1]):.3f}")


if __name__ == "__main__":
    main()
