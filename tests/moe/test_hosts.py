"""Two hosts with two ranks each and two interfaces per rank, over tcp.

One run is left in peace, in another an interface is lost for good. The hosts are network namespaces
(hosts.py). Ranks are copies of the fork server, or torchrun across the hosts starts this file.
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
from tests.support.ranks import Rank, run_processes

if TYPE_CHECKING:
    import torch.distributed as dist

    from moe_p2p import AllToAll

ROOT = Path(__file__).resolve().parents[2]
PORT = 29533
NUM_STEPS = 50
SETTINGS = "provider=tcp,interfaces=eth0:eth1,timeout_ms=10000"
TIMEOUT_S = 60.0
LOSS_TIMEOUT_S = 8.0  # of ranks that lose an interface


def _torchrun(host: int) -> list[str]:
    return [
        *("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"),
        *(f"--node-rank={host}", f"--master-addr={hosts.Hosts.address(0)}"),
        *(f"--master-port={PORT}", __file__),
    ]


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def _torchrun_outputs(deadline_s: float) -> list[str]:
    with hosts.Hosts(2, num_interfaces=2) as both:
        for host in range(2):
            both.start(host, *_torchrun(host), env=_environment())
        outcomes = both.outcomes(deadline_s)
    outputs = [output for _, output in outcomes]
    assert all(status == 0 for status, _ in outcomes), "\n---\n".join(outputs)
    return outputs


def _on_its_host(rank: Rank, places: list[hosts.Place], is_lossy: bool) -> str:
    places[rank.rank // 2].enter()
    return _rank(rank.rank, rank.world_size, hosts.Hosts.address(0), is_lossy)


def _outcomes(*, is_lossy: bool) -> list[str]:
    with hosts.Hosts(2, num_interfaces=2) as both:
        places = [both.place(host) for host in range(2)]
        return run_processes(4, _on_its_host, places, is_lossy, deadline_s=100.0)


def test_ranks_of_two_hosts_with_two_interfaces_each() -> None:
    if reason := hosts.why_no_tcp():
        pytest.skip(reason)
    assert _outcomes(is_lossy=False) == [f"{NUM_STEPS} steps, nodes of 2"] * 4


@pytest.mark.more
def test_torchrun_across_two_hosts() -> None:
    if reason := hosts.why_no_tcp():
        pytest.skip(reason)
    for host, output in enumerate(_torchrun_outputs(deadline_s=170.0)):
        for rank in (2 * host, 2 * host + 1):
            assert f"rank {rank}: {NUM_STEPS} steps, nodes of 2" in output, output


def test_an_interface_that_stays_down_is_reported_on_every_rank() -> None:
    if reason := hosts.why_no_tcp():
        pytest.skip(reason)
    for outcome in _outcomes(is_lossy=True):
        reported = re.search(r"reported after ([\d.]+) s: (.*)", outcome)
        assert reported, outcome
        assert float(reported[1]) < 3 * LOSS_TIMEOUT_S, outcome
        # Whose part did not come, or could not be sent: never only that something failed.
        assert any(f"rank {other}" in reported[2] for other in range(4)), outcome


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


def _rank(number: int, world_size: int, master: str, is_lossy: bool) -> str:
    """One rank: its host's ranks are found by host identity."""
    import torch.distributed as dist

    from tests.support.cases import make

    minute = timedelta(seconds=60)
    is_first = number == 0
    store = dist.TCPStore(master, PORT + 1, world_size, is_master=is_first, timeout=minute)
    with make(
        Rank(number, world_size, store),
        transport="libfabric",
        transport_settings=SETTINGS,
        nics_per_rank=2,
        timeout_s=LOSS_TIMEOUT_S if is_lossy else TIMEOUT_S,
    ) as comm:
        outcome = _lose_interface(comm, store) if is_lossy else _exchange(comm)
    store.set(f"done {number}", "")
    if is_first:  # the store lives here: its rank leaves last
        store.wait([f"done {r}" for r in range(world_size)], minute)
    return outcome


if __name__ == "__main__":
    number, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    outcome = _rank(number, world_size, os.environ["MASTER_ADDR"], is_lossy=False)
    # One write: an unbuffered print of several ranks to one pipe mixes their lines.
    sys.stdout.write(f"rank {number}: {outcome}\n")
