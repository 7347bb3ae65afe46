"""Options of moe_soak.py, transports it runs over, and limits of what its ranks may hold."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from soak_rank import MOMENTS

from tests.support import hosts

# ofi_rxm gives each NIC a ring of 262,144 completions of 48 bytes, allocated at once but touched
# page by page during the first lap (34,000 steps here); a rank has two rings.
GROWTH_MIB, RINGS_MIB = 8.0, 24.0
# By name: transport, settings of a host (its number, seed), timeout_s.
OVER: dict[str, tuple[str, Callable[[int, int], str], float]] = {
    "tcp": ("libfabric", lambda *_: "provider=tcp,interfaces=eth0:eth1,timeout_ms=8000", 20.0),
    "lo": ("libfabric", lambda *_: "provider=tcp,interfaces=lo", 20.0),
    "shm": ("libfabric", lambda *_: "provider=shm", 20.0),
    "loopback": ("loopback", lambda _, seed: f"seed={seed}", 20.0),
    "roce": ("verbs", lambda i, _: f"timeout=18,devices=rxe{2 * i}:rxe{2 * i + 1}", 40.0),
}


def parse(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--minutes", type=float, default=30.0)
    add("--least-deaths", type=int, default=0, help="go on until there were so many (0)")
    add("--least-flaps", type=int, default=0, help="likewise of links (0)")
    add("--over", choices=OVER, default="tcp")
    add("--hosts", type=int, default=3)
    add("--ranks-per-host", type=int, default=1)
    add("--replace-every-s", type=float, default=60.0, help="a rank is killed; 0: none is (60)")
    add("--moments", nargs="+", choices=MOMENTS, default=MOMENTS, help="of deaths (all)")
    add("--flap-every-s", type=float, default=10.0, help="a link goes down; 0: none does (10)")
    add("--timeout-s", type=float, default=0.0, help="of set-up and calls (20; roce 40)")
    add("--keep-s", type=float, default=10.0, help="most that a communicator is kept (10)")
    add("--max-growth-mib", type=float, help="of a rank's resident memory (8; libfabric's tcp 32)")
    add("--max-more-allocated-mib", type=float, default=1.0, help="that malloc gave out (1)")
    add("--max-more-descriptors", type=int, default=0, help="that a rank may hold later (0)")
    add("--seed", type=int, default=1)
    return parser.parse_args()


def why_not(arguments: argparse.Namespace) -> str:
    """Returns why it cannot run here; empty when it can."""
    if arguments.over == "roce" and not os.environ.get("MOE_P2P_RDMA_MACHINE"):
        return "links of devices go down only in the machine of tests/rdma/vm.py"
    if arguments.over == "tcp" and (reason := hosts.why_not()):
        return f"{reason}; without hosts: --over lo"
    if arguments.over == "shm" and arguments.replace_every_s:
        return "libfabric's shm notices no dead peer: --replace-every-s 0"
    return ""


def wrong(arguments: argparse.Namespace, summary: dict[str, Any]) -> str:
    if summary["left_behind"]:
        return "something is left in /dev/shm"
    rings = RINGS_MIB if arguments.over in ("tcp", "lo") else 0.0
    limits = (
        arguments.max_more_descriptors,
        0,
        arguments.max_growth_mib or GROWTH_MIB + rings,
        arguments.max_more_allocated_mib,
    )
    if summary["growth"] and any(a > b for a, b in zip(summary["growth"], limits, strict=True)):
        return "ranks hold more and more: descriptors, threads, MiB resident, MiB allocated"
    return ""
