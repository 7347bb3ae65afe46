"""Time in the store when W ranks meet: `python benchmarks/bench_setup.py --ranks 1024`.

Ranks are threads without engines, each with its own connection to one TCPStore of this process.
They make AllToAll's exchanges on GPUs, with payloads of real sizes: the ranks' facts, and random
bytes for the addresses of NICs and memory, which do not compress. Connecting to the store is not
measured; the ranks wait for each other before the clock starts.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from moe_p2p import AllToAllConfig
from moe_p2p.fleet.bootstrap import Bootstrap
from moe_p2p.machine.transport import Choice
from moe_p2p.moe.rendezvous.agreement import Facts, Offer

GPUS_PER_HOST = 8
# An engine of 2 NICs and the region that it writes to: 697 bytes with the software NIC.
ADDRESS_BYTES = 1024


def payloads(rank: int) -> list[tuple[str, bytes]]:
    """Returns (name, payload) of each exchange."""
    host = f"{rank // GPUS_PER_HOST:08x}-3783-45fd-a6ff-430cd84173e7.27.1"
    config = AllToAllConfig(num_experts=256, hidden_dim=7168, topk=8, max_tokens=128)
    choice = Choice("verbs", "the RDMA devices mlx5_0 to mlx5_7 are active", automatic=True)
    return [
        ("the transports", Offer(host, choice).encode()),
        ("the configurations", Facts(config.agreed(), host, 0).encode()),
        ("keys for device memory", secrets.token_hex(16).encode()),
        ("the addresses", os.urandom(ADDRESS_BYTES)),
        ("all ranks to be connected", b""),
    ]


def measure(world_size: int, repeats: int) -> tuple[list[float], int]:
    """Returns seconds of each meeting, from the first start to the last end, and keys left."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = server.num_keys()
    start = threading.Barrier(world_size + 1)

    def run(rank: int) -> None:
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
        brought = payloads(rank)
        for _ in range(repeats):
            start.wait()
            with Bootstrap(store, rank=rank, world_size=world_size, timeout_s=120.0) as meeting:
                for what, payload in brought:
                    assert meeting.exchange(payload, what)[rank] == payload
            start.wait()

    seconds = []
    with ThreadPoolExecutor(world_size) as pool:
        ranks = [pool.submit(run, rank) for rank in range(world_size)]
        for _ in range(repeats):
            start.wait()
            began = time.monotonic()
            start.wait()
            seconds.append(time.monotonic() - began)
        for rank in ranks:
            rank.result()
    return seconds, server.num_keys() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    # Threads that wait for the interpreter lock request it at this interval: a thousand threads at
    # 5 ms, the default, take both cores. Ranks of a real job are processes.
    sys.setswitchinterval(1.0)
    seconds, left = measure(given.ranks, given.repeats)
    print(
        f"{given.ranks} ranks, {len(payloads(0))} exchanges: "
        f"{', '.join(f'{one:.2f}' for one in seconds)} s; keys left: {left}"
    )


if __name__ == "__main__":
    main()
