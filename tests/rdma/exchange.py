"""Dispatch and combine over RDMA devices, against the reference: run in the machine of vm.py.

    python tests/rdma/exchange.py verbs|libfabric|verbs,libfabric [steps [steps with loss [flags]]]

Two ranks, each a process and a node of its own. With verbs they are at the ends of the wire between
rxe0 and rxe1, rank 0 has both devices as NICs and rank 1 has one: rails are matched, not required
equal. libfabric's verbs;ofi_rxm connects within one device only, so both ranks have both. With
verbs, strangers connect to the ports of rank 0 between steps, and in another world rank 1 sleeps in
set-up and in each half of a step, 100 times as long as a step takes, or 10 s. Then again, and rank
1 is killed: rank 0 names it at once, not at its deadline. Then over verbs with links that lose and
reorder packets. At last, if asked for, kernels of an emulated GPU wait for flags (gpu_flags.py),
over such links, too. One process does all of it, and ranks are copies of it: importing torch takes
most of the time in there.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moe_p2p import AllToAll, PeerDeadError
from moe_p2p.moe.reference import Tokens
from moe_p2p.tools import fence_probe
from tests.faults import calls
from tests.rdma import gpu_flags
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
NETEM = "loss 1% delay 200us 100us reorder 25%"


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


def own_ports() -> list[int]:
    """The TCP ports on which this process listens."""
    links = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder's own, closed meanwhile
            links.add(os.readlink(f"/proc/self/fd/{fd}"))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, address, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in links:
                found.append(int(address.rpartition(":")[2], 16))
    return found


def meet_strangers(ports: list[int]) -> int:
    """Connects to each NIC as anybody may who finds its port, until it is thrown out; how often."""
    messages = [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 5000]
    for port in ports:
        for text in messages:
            with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as stranger:
                with suppress(ConnectionError):
                    stranger.sendall(text)
                with suppress(OSError):  # closed already
                    stranger.shutdown(socket.SHUT_WR)
                with suppress(ConnectionError):
                    while stranger.recv(4096):
                        pass  # a nonce, then the end
    return len(ports) * len(messages)


def exchange(rank: Rank, transport: str, num_steps: int) -> None:
    inherited = own_ports()  # of the process that this one is a copy of: its store's
    with open_rank(rank, transport) as comm:
        assert comm.refused_connections == 0
        refused = 0
        for number, tokens in enumerate(steps(num_steps)):
            if (rank.rank, transport, number) == (0, "verbs", num_steps // 2):
                refused = meet_strangers([p for p in own_ports() if p not in inherited])
                assert refused == 3 * len(comm.counters())
            check_step(comm, tokens)
        assert comm.refused_connections == refused
        assert comm.broken == ""
        assert all(nic["bytes_written"] > 0 for nic in comm.counters())


def exchange_with_a_slow_rank(rank: Rank, transport: str) -> float:
    """Returns the seconds of one sleep: 100 times what the fastest step took, up to 10 s."""
    times = list[float]()

    def nap_s() -> float:
        return min(100 * min(times, default=0.05), 10.0)

    def nap() -> None:
        if rank.rank == 1:
            time.sleep(nap_s())

    with calls.before_connecting(nap), open_rank(rank, transport) as comm:
        for seed in range(10):
            began = time.monotonic()
            calls.step(comm, seed, lambda half: None)
            times.append(time.monotonic() - began)
        for seed, slow in enumerate(calls.HALVES, 10):
            calls.step(comm, seed, lambda half, slow=slow: nap() if half == slow else None)
        calls.step(comm, 14, lambda half: None)
    return nap_s()


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


def check_with_loss(num_steps: int) -> None:
    for link in ("rn0", "rn1"):
        command = f"tc qdisc replace dev {link} root netem limit 20000 {NETEM}"
        subprocess.run(command.split(), check=True)
    run_processes(WORLD_SIZE, exchange, "verbs", num_steps, deadline_s=300.0, fork=True)
    print(f"verbs with {NETEM}: {num_steps} steps equal the reference")


def check(transport: str, num_steps: int) -> None:
    run_processes(WORLD_SIZE, exchange, transport, num_steps, deadline_s=300.0, fork=True)
    print(f"{transport}: {num_steps} steps equal the reference")
    if transport == "verbs":
        _, slept_s = run_processes(
            WORLD_SIZE, exchange_with_a_slow_rank, transport, deadline_s=300.0, fork=True
        )
        print(f"verbs: right with a rank that sleeps {slept_s:.1f} s in each half")
    survivor, killed = run_processes(
        WORLD_SIZE, lose_a_rank, transport, deadline_s=200.0, return_errors=True, fork=True
    )
    assert isinstance(killed, DiedError), killed
    assert not isinstance(survivor, BaseException), survivor
    took_s, text = survivor
    print(f"{transport}: reported after {took_s:.1f} s: {text}")
    assert took_s < TIMEOUT_S / 2
    assert "rank 1" in text


def flags(_: Rank) -> None:
    gpu_flags.check("verbs", ("write",))


def check_fence() -> None:
    outcome = fence_probe.probe("rxe0", "host", rounds=3)
    print(f"fence by queue pair:{outcome.text()}")
    assert outcome.good


if __name__ == "__main__":
    check_fence()
    for used in sys.argv[1].split(","):
        check(used, int(sys.argv[2]) if len(sys.argv) > 2 else 50)
    if len(sys.argv) > 3:
        check_with_loss(int(sys.argv[3]))
    if "flags" in sys.argv:  # in a copy: it replaces the GPU
        run_processes(1, flags, deadline_s=300.0, fork=True)
