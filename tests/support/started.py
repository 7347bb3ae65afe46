"""Ranks as children of a process that has not used a GPU (test_ambient.py).

Nothing imported here may use one: torch refuses GPUs in a forked child if its parent used one.
"""

from __future__ import annotations

import multiprocessing

import torch
import torch.distributed as dist

from moe_p2p.tools import launch
from tests.support.ambient_cases import Made, W, given_to
from tests.support.ranks import Rank


def in_process(rank: int, port: int, device: str) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(launch.gpu_of(rank))
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    made = Made(Rank(rank, W, store), device)
    made.results(given_to(rank, device))
    made.close()


def start(how: str, device: str) -> None:
    """Ranks as children of this process, which has used neither an engine nor a GPU."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context(how)
    children = [
        context.Process(target=in_process, args=(rank, server.port, device)) for rank in range(W)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * W
