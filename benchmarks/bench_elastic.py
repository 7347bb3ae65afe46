"""What it takes to replace a killed rank, and what a world that changes costs its steps.

    python -m benchmarks.bench_elastic [ranks] [turns]

The last of `ranks` (8) CPU ranks of one node is killed between two steps of a small shape; its new
process, forked from a server that has imported torch, takes its place while the others make steps.
Prints, of each of `turns` (3) worlds and the least of them:

    first_step_s  from the newcomer's first request to the store to the end of its first step with
                  all, and entered_s, until it may make steps
    detected_ms   the step in which the others find the loss
    gap_ms        the longest step of the others while it joins, the commit included, less alone_ms,
                  the longest of as many steps before the loss
    bits          whether all steps behind the change are those of a fixed world, bit for bit
    full_percent  what a pair takes more than in a fixed world, with all ranks in the world that
                  changes; the least of blocks in turns
    half_percent  with half of the ranks, against a fixed world of so many
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from moe_p2p import AllToAll, AllToAllConfig
from tests.support.ranks import DiedError, Rank, run_processes

TOKENS, HIDDEN, LOCAL_EXPERTS = 16, 64, 2
BLOCK, BLOCKS = 10, 20  # steps of a block, and blocks of each world


def config_of(seats: int) -> AllToAllConfig:
    return AllToAllConfig(
        num_experts=LOCAL_EXPERTS * seats,
        hidden_dim=HIDDEN,
        topk=2,
        max_tokens=TOKENS,
        mask_lost_ranks=True,
        num_threads=1,
        timeout_s=60.0,
    )


def step(comm: AllToAll, present: int, seed: int) -> tuple[float, Sequence[Tensor]]:
    """A dispatch and a combine to experts of the first `present` ranks: seconds, and results."""
    random = torch.Generator().manual_seed(1000 * seed + comm.rank)
    x = torch.randn(TOKENS, HIDDEN, generator=random).to(torch.bfloat16)
    scores = torch.rand(TOKENS, LOCAL_EXPERTS * present, generator=random)
    weights, topk = scores.topk(2)
    began = time.perf_counter()
    received = comm.dispatch(x, topk, weights)
    out = comm.combine(received.x, received)
    took = time.perf_counter() - began
    rows = torch.cat([x[:n] for x, n in zip(received.x, received.counts.tolist(), strict=True)])
    return took, (rows, received.counts, out)


def longest(comm: AllToAll, present: int, count: int) -> float:
    return max(step(comm, present, seed)[0] for seed in range(count))


def until_staged(comm: AllToAll, store: Any, members: int) -> list[float]:
    """Steps beside staging; all leave behind the same one."""
    found = list[float]()
    while True:
        ready = f"ready {len(found)}"
        if comm.members_staged():
            store.add(ready, 1)
        found.append(step(comm, members, len(found))[0])  # all others have added by then
        if int(store.add(ready, 0)) == members:
            return found


def percent(first: AllToAll, second: AllToAll, present: int) -> float:
    """What a pair of `first` takes more than one of `second`, of blocks that take turns."""
    taken: dict[AllToAll, list[float]] = {first: [], second: []}
    for _ in range(BLOCKS):
        for comm, blocks in taken.items():
            blocks.append(sum(step(comm, present, seed)[0] for seed in range(BLOCK)))
    elastic, fixed = (min(blocks) for blocks in taken.values())
    return 100 * (elastic / fixed - 1)


def replaced(store: Any, seats: int, rank: int) -> tuple[AllToAll, dict[str, float]]:
    """The road of one rank, or of the newcomer, whose number is `seats`."""
    last = seats - 1
    seat = min(rank, last)
    who: dict[str, Any] = {"rank": seat, "world_size": seats}
    if rank == seats:
        store.wait(["come"])
        began = time.perf_counter()
        comm = AllToAll(store, config_of(seats), join=True, **who)
        found = {"entered_s": time.perf_counter() - began}
        step(comm, seats, 0)
        return comm, found | {"first_step_s": time.perf_counter() - began}
    comm = AllToAll(store, config_of(seats), members=range(seats), **who)
    longest(comm, seats, 20)
    alone = longest(comm, seats, 400)
    store.add("killed", 1)
    if rank == last:
        while int(store.add("killed", 0)) < seats:  # no combine of the last step may be missing
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    while not comm.masked[last]:
        detected = step(comm, last, 0)[0]
    comm.stage_members(add=[last])
    store.set("come", "")
    steps = until_staged(comm, store, last)
    began = time.perf_counter()
    comm.commit_members()
    steps.append(step(comm, seats, 0)[0] + time.perf_counter() - began)
    found = {"detected_ms": 1e3 * detected, "alone_ms": 1e3 * alone, "steps": len(steps)}
    return comm, found | {"joining_ms": 1e3 * max(steps), "gap_ms": 1e3 * (max(steps) - alone)}


def body(rank: Rank, seats: int) -> dict[str, float]:
    comm, found = replaced(rank.store, seats, rank.rank)
    half = seats // 2
    with AllToAll(
        PrefixStore("fixed", rank.store), config_of(seats), rank=comm.rank, world_size=seats
    ) as fixed:
        same = [
            torch.equal(a, b)
            for seed in range(20)
            for a, b in zip(step(comm, seats, seed)[1], step(fixed, seats, seed)[1], strict=True)
        ]
        found["bits"] = float(all(same))
        found["full_percent"] = percent(comm, fixed, seats)
    comm.update_members(remove=range(half, seats))
    if comm.rank < half:
        with AllToAll(
            PrefixStore("half", rank.store), config_of(half), rank=comm.rank, world_size=half
        ) as fixed:
            found["half_percent"] = percent(comm, fixed, half)
    comm.close()
    return found


def main() -> None:
    seats, turns = (int(given) for given in (sys.argv[1:] + ["8", "3"][len(sys.argv) - 1 :])[:2])
    worlds = list[dict[str, float]]()
    for _ in range(turns):
        results = run_processes(seats + 1, body, seats, return_errors=True)
        assert isinstance(results.pop(seats - 1), DiedError)
        found = dict[str, float]()
        for each in results:
            if isinstance(each, BaseException):
                raise each
            for name, value in each.items():
                worst = min if name == "bits" else max
                found[name] = worst(found.get(name, value), value)
        worlds.append(found)
    for name in worlds[0]:
        values = [found[name] for found in worlds]
        print(f"{name:13} least {min(values):8.3f}  of", *(f"{value:.3f}" for value in values))
    assert all(found["bits"] for found in worlds), "steps differ from those of a fixed world"


if __name__ == "__main__":
    main()
