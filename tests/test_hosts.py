"""Two hosts with two ranks each and two interfaces per rank: torchrun across them, over tcp.

The hosts are network namespaces (hosts.py). This file is also the program that their ranks run.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

import hosts

ROOT = Path(__file__).resolve().parents[1]
PORT = 29533
NUM_STEPS = 50
SETTINGS = "provider=tcp,interfaces=eth0:eth1,timeout_ms=10000"


def _why_not() -> str:
    import moe_p2p

    try:
        moe_p2p.Engine("libfabric", 1, settings="provider=tcp,interfaces=lo").close()
    except moe_p2p.UnavailableError as error:
        return str(error)
    return hosts.why_not()


def _torchrun(host: int, *arguments: str) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"),
        *(f"--node-rank={host}", f"--master-addr={hosts.Hosts.address(0)}"),
        *(f"--master-port={PORT}", __file__, *arguments),
    ]


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def _run(*arguments: str, deadline_s: float) -> list[str]:
    with hosts.Hosts(2, num_interfaces=2) as both:
        processes = [
            both.start(host, _torchrun(host, *arguments), env=_environment()) for host in range(2)
        ]
        ends = time.monotonic() + deadline_s
        outputs = []
        for process in processes:
            try:
                output, _ = process.communicate(timeout=max(1.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                output = f"did not end within {deadline_s} s\n{process.communicate()[0]}"
            outputs.append(output)
    for process in processes:
        assert process.returncode == 0, "\n---\n".join(outputs)
    return outputs


def test_ranks_of_two_hosts_with_two_interfaces_each() -> None:
    if reason := _why_not():
        pytest.skip(reason)
    outputs = _run(deadline_s=170.0)
    for host, output in enumerate(outputs):
        for rank in (2 * host, 2 * host + 1):
            assert f"rank {rank}: {NUM_STEPS} steps, nodes of 2" in output, outputs


def _rank() -> None:
    """One rank: its host's ranks are found by host identity, and both interfaces carry bytes."""
    import torch.distributed as dist

    from cases import check_step, make, make_tokens
    from ranks import Rank

    number, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        PORT + 1,
        world_size,
        is_master=number == 0,
        timeout=timedelta(seconds=60),
    )
    rank = Rank(number, world_size, store)
    counts = random.Random(3)
    with make(
        rank,
        transport="libfabric",
        transport_settings=SETTINGS,
        nics_per_rank=2,
        timeout_s=60.0,
    ) as comm:
        for seed in range(NUM_STEPS):
            sizes = [counts.choice([0, 12, counts.randint(0, 12)]) for _ in range(world_size)]
            check_step(comm, [make_tokens(seed, r, size) for r, size in enumerate(sizes)])
        written = [nic["bytes_written"] for nic in comm.counters()]
        assert min(written) > 0, written
        print(f"rank {number}: {NUM_STEPS} steps, nodes of {comm.ranks_per_node}", flush=True)
    store.set(f"done {number}", "")
    if number == 0:  # the store lives here: its rank leaves last
        store.wait([f"done {r}" for r in range(world_size)], timedelta(seconds=60))


if __name__ == "__main__":
    _rank()
