"""fabric-check over RDMA devices: run in the machine of vm.py.

    python tests/rdma/fabric.py [OPTIONS of fabric-check]

Two ranks, each a host of its own, at the two ends of the wire between rxe0 and rxe1. One process
imports what they need, and they are copies of it: importing torch takes long in there. In the end
it prints the tables of the bundle, and a line for each step.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fabric_bundles  # type: ignore[import-not-found]

from moe_p2p.bench import fabric, fabric_ranks
from moe_p2p.tools import launch

PORT = 29591
SLOWER = 6  # than two cores: the machine is emulated
SMALL = ("--hidden=256", "--topk=2", "--experts=4", "--tokens=4,8")


def rank_of(rank: int, *options: str) -> int:
    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{PORT}"}
    os.environ |= {"MOE_P2P_TRANSPORT": "verbs"}
    os.environ |= {"MOE_P2P_TRANSPORT_SETTINGS": f"timeout=16,devices=rxe{rank}"}
    return fabric.main(["--quick", "--device=cpu", *SMALL, *options])


def main(*options: str) -> int:
    copies = SimpleNamespace(get_context=lambda _: multiprocessing.get_context("fork"))
    fabric_ranks.multiprocessing = copies  # type: ignore[assignment]
    launch.start_fork_server = lambda _: None  # it would import torch again
    fabric_ranks.MEET_S = fabric_ranks.SILENT_S = 300.0
    limits = {name: SLOWER * limit for name, limit in fabric.QUICK.of_step.items()}
    fabric.QUICK = fabric.QUICK._replace(total_s=SLOWER * fabric.QUICK.total_s, of_step=limits)
    ranks = []
    with tempfile.TemporaryDirectory() as out:
        for rank in range(2):
            if process := os.fork():
                ranks.append(process)
                continue
            status = rank_of(rank, f"--out={out}", *options)
            sys.stdout.flush()
            os._exit(status)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        body = fabric_bundles.read(Path(out, "bundle.tar.gz"))
    for part in (fabric_bundles.machines, fabric_bundles.rails, fabric_bundles.pairs):
        print(part({"soft-RoCE": body}))
    for step in body["steps"]:
        print(f"step {step['kind']}: {step['how']}, {step['seconds']} s {step['why']}")
    print(f"{len(body['check'])} checks, wrong: {body['wrong']}")
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
