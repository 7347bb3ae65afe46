"""fabric-check over RDMA devices: run in the machine of vm.py.

    python tests/rdma/fabric.py FOLDER [OPTIONS of fabric-check]

Two ranks, each a host of its own, at the two ends of the wire between rxe0 and rxe1. One process
imports what they need, and they are copies of it: importing torch takes long in there.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moe_p2p.bench import fabric, fabric_ranks
from moe_p2p.tools import launch

PORT = 29591


def main(folder: str, *options: str) -> int:
    copies = SimpleNamespace(get_context=lambda _: multiprocessing.get_context("fork"))
    fabric_ranks.multiprocessing = copies
    launch.start_fork_server = lambda _: None  # it would import torch again
    fabric_ranks.MEET_S = fabric_ranks.SILENT_S = 300.0
    ranks = []
    for rank in range(2):
        if process := os.fork():
            ranks.append(process)
            continue
        os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        os.environ |= {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"MASTER_PORT": f"{PORT}", "MOE_P2P_TRANSPORT": "verbs"}
        os.environ["MOE_P2P_TRANSPORT_SETTINGS"] = f"timeout=16,devices=rxe{rank}"
        status = fabric.main(["--quick", "--device=cpu", f"--out={folder}", *options])
        sys.stdout.flush()
        os._exit(status)
    return max(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
