"""Two hosts with two ranks each and two interfaces per rank: torchrun across them, over tcp.

One run is left in peace, in another an interface is lost for good. The hosts are network namespaces
(hosts.py). This file is also the program that their ranks run.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import hosts

if TYPE_CHECKING:
    import torch.distributed as dist

    from moe_p2p import AllToAll

ROOT = Path(__file__).resolve().parents[2]
PORT = 29533
NUM_STEPS = 50
SETTINGS = "provider=tcp,interfaces=eth0:eth1,timeout_ms=10000"
TIMEOUT_S = 60.0
LOSS_TIMEOUT_S = 8.0  # of ranks that lose an interface


def why_not() -> str:
    import moe_p2p

    try:
        moe_p2p.Engine(
            moe_p2p.EngineConfig(
                transport="libfabric",
                nics_per_rank=1,
                transport_settings="provider=tcp,interfaces=lo",
            )
        ).close()
    except moe_p2p.UnavailableError as error:
        return str(error)
    return hosts.why_not()


def _torchrun(host: int, *arguments: str) -> list[str]:
    return [
        *("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"),
        *(f"--node-rank={host}", f"--master-addr={hosts.Hosts.address(0)}"),
        *(f"--master-port={PORT}", __file__, *arguments),
    ]


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _run(*arguments: str, deadline_s: float) -> list[str]:
    with hosts.Hosts(2, num_interfaces=2) as both:
        processes = [
            both.start(host, *_torchrun(host, *arguments), env=_environment()) for host in range(2)
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
    if reason := why_not():
        pytest.skip(reason)
    outputs = _run(deadline_s=170.0)
    for host, output in enumerate(outputs):
        for rank in (2 * host, 2 * host + 1):
            assert f"rank {rank}: {NUM_STEPS} steps, nodes of 2" in output, outputs


def test_an_interface_that_stays_down_is_reported_on_every_rank() -> None:
    if reason := why_not():
        pytest.skip(reason)
    outputs = _run("lose eth1", deadline_s=170.0)
    for host, output in enumerate(outputs):
        for rank in (2 * host, 2 * host + 1):
            reported = re.search(rf"rank {rank}: reported after ([\d.]+) s: (.*)", output)
            assert reported, output
            assert float(reported[1]) < 3 * LOSS_TIMEOUT_S, reported[0]
            # Whose part did not come, or could not be sent: never only that something failed.
            assert any(f"rank {other}" in reported[2] for other in range(4)), reported[0]


def _exchange(comm: AllToAll) -> str:
    """All steps, over both interfaces."""
    from tests.support.cases import check_step, make_tokens

    counts = random.Random(3)
    for seed in range(NUM_STEPS):
        sizes = [counts.choice([0, 12, counts.randint(0, 12)]) for _ in range(comm.world_size)]
        check_step(comm, [make_tokens(seed, r, size) for r, size in enumerate(sizes)])
    written = [nic["bytes_written"] for nic in comm.counters()]
    assert min(written) > 0, written
    return f"{NUM_STEPS} steps, nodes of {comm.ranks_per_node}"


def _lose_interface(comm: AllToAll, store: dist.Store) -> str:
    """Rank 0 takes its host's second interface down after everybody's first step.

    Then until the text is reported.
    """
    from moe_p2p import MoeP2pError
    from tests.support.cases import check_step, make_tokens

    tokens = [make_tokens(1, r, 12) for r in range(comm.world_size)]
    check_step(comm, tokens)
    store.set(f"connected {comm.rank}", "")
    if comm.rank == 0:
        store.wait([f"connected {r}" for r in range(comm.world_size)])
        subprocess.run(["ip", "link", "set", "eth1", "down"], check=True)
    began = time.monotonic()
    try:
        for _ in range(10_000):
            check_step(comm, tokens)
    except MoeP2pError as error:
        return f"reported after {time.monotonic() - began:.1f} s: {error}".replace("\n", " ")
    raise AssertionError("10000 steps over an interface that is down")


def _rank(is_lossy: bool) -> None:
    """One rank: its host's ranks are found by host identity."""
    import torch.distributed as dist

    from tests.support.cases import make
    from tests.support.ranks import Rank

    number, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        PORT + 1,
        world_size,
        is_master=number == 0,
        timeout=timedelta(seconds=60),
    )
    with make(
        Rank(number, world_size, store),
        transport="libfabric",
        transport_settings=SETTINGS,
        nics_per_rank=2,
        timeout_s=LOSS_TIMEOUT_S if is_lossy else TIMEOUT_S,
    ) as comm:
        outcome = _lose_interface(comm, store) if is_lossy else _exchange(comm)
        # One write: an unbuffered print of several ranks to one pipe mixes their lines.
        sys.stdout.write(f"rank {number}: {outcome}\n")
        sys.stdout.flush()
    store.set(f"done {number}", "")
    if number == 0:  # the store lives here: its rank leaves last
        store.wait([f"done {r}" for r in range(world_size)], timedelta(seconds=60))


if __name__ == "__main__":
    _rank(is_lossy=len(sys.argv) > 1)
