"""Arrival flags that RDMA devices store into an emulated GPU's memory: run by exchange.py.

    python tests/rdma/gpu_flags.py    # over the software NIC; compiles the kernels for it

Two ranks, threads of one process, each with both devices as NICs, so that each NIC's writes cross
the wire between them. Every way to learn of arrivals is taken (EngineConfig.arrivals).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support import emulated_gpu, gpu_ranks
from tests.support.cases import expect, make_tokens, run_step
from tests.support.ranks import Rank

# Settings of each rank. dmabuf=0: this GPU's memory is the host's.
RDMA = [f"timeout=16,dmabuf=0,devices={devices}" for devices in ("rxe0:rxe1", "rxe1:rxe0")]
WORLD = gpu_ranks.World(2, 1)
WAYS = ("write", "gdrcopy", "relay")
COUNTS = [(5, 3), (0, 12), (12, 1)]
TIMEOUT_S, DEADLINE_S = 100.0, 250.0


def exchange(rank: Rank, world: gpu_ranks.World, transport: str, way: str) -> None:
    orders, settings = "ordered=1", ""
    if transport == "verbs":
        orders, settings = "ordered_writes=1", RDMA[rank.rank]
    if way == "write":
        settings = ",".join(filter(None, (settings, orders)))
    wanted = [
        expect(
            world.topology(),
            [
                make_tokens(
                    seed,
                    r,
                    counts[r],
                    num_experts=world.num_experts,
                    hidden_dim=gpu_ranks.HIDDEN_DIM,
                )
                for r in range(world.ranks)
            ],
            max_tokens=gpu_ranks.MAX_TOKENS,
        )
        for seed, counts in enumerate(COUNTS)
    ]
    with gpu_ranks.make(
        rank,
        world,
        transport=transport,
        transport_settings=f"{settings},arrival_flags={way}".lstrip(","),
        timeout_s=TIMEOUT_S,
    ) as comm:
        assert comm.arrival_flags == way
        gpu_ranks.prepare(rank, comm, wanted)
        for step in wanted:
            run_step(comm, step)
        assert comm.broken == ""
        assert all(nic["bytes_written"] > 0 for nic in comm.counters())


def check(transport: str, ways: tuple[str, ...] = WAYS) -> None:
    """Replaces the GPU of this process for good."""
    os.environ["MOE_P2P_EMULATED_GPU"] = "1"
    emulated_gpu.install(pytest.MonkeyPatch())
    emulated_gpu.gdrcopy()
    gpu_ranks.DEVICE = "cpu"
    torch.set_num_threads(1)
    for way in ways:
        gpu_ranks.run(WORLD, exchange, transport, way, deadline_s=DEADLINE_S)
        print(f"{transport}: {len(COUNTS)} steps with flags by {way} equal the reference")


if __name__ == "__main__":
    check(sys.argv[1] if len(sys.argv) > 1 else "loopback")
