"""Dispatch and combine for a long time over a network that misbehaves: nothing lost, memory flat.

    python benchmarks/soak.py --minutes 30              two hosts, two interfaces, links that flap
    python benchmarks/soak.py --minutes 5 --over lo     on this host; or shm; no flaps
    python tests/rdma/vm.py --devices 4 --timeout 2400 -- python benchmarks/soak.py --over roce

Over tcp, as root, hosts are network namespaces (tests/hosts.py); over roce they are pairs of
soft-RoCE devices in the machine of tests/rdma/vm.py, used through libibverbs. Every few seconds a
link goes down for a moment. Ranks pause at random. Every result is compared with what the rank
works out alone: experts differ by a factor, so wrong rows, weights and stale slots show. Ends with
exit status 1 when a step was wrong or failed, or when a rank's memory grew by more than
--max-growth-mib after the first quarter. Run by tests/test_soak.py for some seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import hosts  # noqa: E402
from moe_p2p import AllToAll, AllToAllConfig  # noqa: E402

STEPS_PER_ROUND = 50
NUM_EXPERTS, TOPK, HIDDEN_DIM, MAX_TOKENS = 16, 4, 256, 64
PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20
START_S = 400.0  # most that ranks need before their first step and after the last
# Transport and the settings of each host's ranks.
OVER = {
    "tcp": ("libfabric", ["provider=tcp,interfaces=eth0:eth1,timeout_ms=20000"] * 2),
    "lo": ("libfabric", ["provider=tcp,interfaces=lo"] * 2),
    "shm": ("libfabric", ["provider=shm"] * 2),
    "roce": ("verbs", ["timeout=18,devices=rxe0:rxe1", "timeout=18,devices=rxe2:rxe3"]),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--over", choices=OVER, default="tcp")
    parser.add_argument("--flap-every-s", type=float, default=10.0)
    parser.add_argument("--max-growth-mib", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--port", type=int, default=29571)
    parser.add_argument("--rank", type=int, default=-1, help="used by the ranks themselves")
    parser.add_argument("--address", default="127.0.0.1", help="of rank 0")
    parser.add_argument("--connected", type=Path, help="a file that the rank makes, likewise")
    return parser.parse_args()


def factor(expert: Tensor) -> Tensor:
    return 0.5 + 0.125 * expert.float()


def step(comm: AllToAll, generator: torch.Generator) -> None:
    """One dispatch and combine of a random number of tokens, checked."""
    count = int(torch.randint(0, MAX_TOKENS + 1, (1,), generator=generator))
    x = torch.randn(count, HIDDEN_DIM, generator=generator)
    weights, experts = torch.rand(count, NUM_EXPERTS, generator=generator).topk(TOPK, dim=1)
    received = comm.dispatch(x, experts, weights, layout="grouped")
    y = received.x.clone()
    first = comm.rank * comm.num_local_experts
    for i in range(comm.num_local_experts):
        start = int(received.offsets[i])
        y[start : start + int(received.counts[i])] *= factor(torch.tensor(first + i))
    out = comm.combine(y, received)
    expected = x * (weights * factor(experts)).sum(dim=1, keepdim=True)
    # Sums of four fp32 products in another order: a few units in the last place.
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def run_rank(arguments: argparse.Namespace, world_size: int) -> None:
    """Rounds of steps until rank 0 says that time is up; prints one line of JSON."""
    rank = arguments.rank
    transport, settings = OVER[arguments.over]
    store = dist.TCPStore(
        arguments.address,
        arguments.port,
        world_size,
        is_master=rank == 0,
        timeout=timedelta(seconds=START_S),
    )
    config = AllToAllConfig(
        num_experts=NUM_EXPERTS,
        hidden_dim=HIDDEN_DIM,
        topk=TOPK,
        max_tokens=MAX_TOKENS,
        dtype=torch.float32,
        ranks_per_node=arguments.ranks_per_host,
        transport=transport,
        transport_settings=settings[rank // arguments.ranks_per_host],
        nics_per_rank=2,
        timeout_s=60.0,
        num_threads=1,
    )
    pauses = random.Random(arguments.seed + rank)
    generator = torch.Generator().manual_seed(arguments.seed + rank)
    memory_mib: list[float] = []
    ends = time.monotonic() + 60 * arguments.minutes
    with AllToAll(store, config, rank=rank, world_size=world_size) as comm:
        arguments.connected.touch()
        for number in range(10**9):
            if rank == 0:
                store.set(f"round {number}", "stop" if time.monotonic() > ends else "go")
            if store.get(f"round {number}") == b"stop":
                break
            for _ in range(STEPS_PER_ROUND):
                if pauses.random() < 0.1:
                    time.sleep(pauses.random() * 0.02)  # a rank that is late
                step(comm, generator)
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            memory_mib.append(pages * PAGE_MIB)
        assert comm.broken == "", comm.broken
        store.set(f"done {rank}", "")
        store.wait([f"done {r}" for r in range(world_size)])
    quarter = len(memory_mib) // 4
    early, late = memory_mib[quarter : 2 * quarter + 1], memory_mib[-max(1, quarter) :]
    print(
        json.dumps(
            {
                "rank": rank,
                "steps": len(memory_mib) * STEPS_PER_ROUND,
                "memory_mib": round(memory_mib[-1], 1),
                "growth_mib": round(max(late) - max(early), 2),
            }
        ),
        flush=True,
    )


def flap_device(device: int, down_s: float) -> None:
    """Takes the far end of a soft-RoCE device's cable down and up again."""
    subprocess.run(["ip", "link", "set", f"rp{device}", "down"], check=True)
    time.sleep(down_s)
    subprocess.run(["ip", "link", "set", f"rp{device}", "up"], check=True)


def flap_until_done(
    flap: Callable[[random.Random], None],
    processes: list[subprocess.Popen[str]],
    connected: list[Path],
    arguments: argparse.Namespace,
) -> int:
    """Takes links down for a moment until the ranks have ended; returns how often.

    Not before all ranks are connected: a NIC without a link cannot be opened.
    """
    choices = random.Random(arguments.seed)
    ends = time.monotonic() + 60 * arguments.minutes + START_S
    next_flap = time.monotonic() + arguments.flap_every_s
    num_flaps = 0
    while any(process.poll() is None for process in processes) and time.monotonic() < ends:
        if not all(file.exists() for file in connected):
            next_flap = time.monotonic() + arguments.flap_every_s
        if time.monotonic() > next_flap:
            flap(choices)
            num_flaps += 1
            next_flap = time.monotonic() + arguments.flap_every_s
        time.sleep(0.1)
    return num_flaps


def why_not(over: str) -> str:
    """Why there are no links to take down here; empty when there are, or none are needed."""
    if over == "roce" and not os.environ.get("MOE_P2P_RDMA_MACHINE"):
        return "links of devices go down only in the machine of tests/rdma/vm.py"
    if over == "tcp" and (reason := hosts.why_not()):
        return f"{reason}; without hosts: --over lo"
    return ""


def start_ranks(
    network: hosts.Hosts, connected: list[Path], arguments: argparse.Namespace
) -> list[subprocess.Popen[str]]:
    own = [sys.executable, *sys.argv]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = []
    for rank, file in enumerate(connected):
        command = [*own, f"--rank={rank}", f"--connected={file}"]
        if arguments.over == "tcp":
            command.append(f"--address={hosts.Hosts.address(0)}")
            host = rank // arguments.ranks_per_host
            processes.append(network.start(host, command, env=environment))
        else:
            processes.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
            )
    return processes


def run_all(arguments: argparse.Namespace) -> int:
    if reason := why_not(arguments.over):
        print(reason)
        return 2
    num_flaps = 0
    num_hosts = 2 if arguments.over == "tcp" else 0
    with (
        tempfile.TemporaryDirectory() as folder,
        hosts.Hosts(num_hosts, num_interfaces=2) as network,
    ):
        connected = [Path(folder, str(rank)) for rank in range(2 * arguments.ranks_per_host)]
        flaps: dict[str, Callable[[random.Random], None]] = {
            "tcp": lambda draw: network.flap(
                draw.randrange(2), f"eth{draw.randrange(2)}", down_s=draw.random()
            ),
            "roce": lambda draw: flap_device(draw.randrange(4), draw.random()),
        }
        processes = start_ranks(network, connected, arguments)
        if arguments.over in flaps:
            num_flaps = flap_until_done(flaps[arguments.over], processes, connected, arguments)
        texts = [
            process.communicate(timeout=60 * arguments.minutes + START_S)[0]
            for process in processes
        ]
    print("".join(texts), end="")
    print(f"{num_flaps} flaps")
    results = [json.loads(line) for text in texts for line in text.splitlines() if line[:1] == "{"]
    failed = any(process.returncode for process in processes) or len(results) != len(processes)
    grown = any(result["growth_mib"] > arguments.max_growth_mib for result in results)
    print("FAILED" if failed else "memory grew" if grown else "ok")
    return int(failed or grown)


if __name__ == "__main__":
    parsed = parse()
    if parsed.rank >= 0:
        run_rank(parsed, 2 * parsed.ranks_per_host)
    else:
        sys.exit(run_all(parsed))
