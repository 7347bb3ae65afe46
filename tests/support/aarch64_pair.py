"""Two ranks on CPUs, forked: dispatch, plain and in fp8, and combine against the closed form.

A program for the emulated host (aarch64.py): nothing but torch and the wheel is there. qemu shows
a process its own start time a little wrong, and a rank would take its peer for one that has ended;
the file that qemu does not touch has the right one.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import traceback

import torch
from torch.distributed import FileStore

from moe_p2p import AllToAll, AllToAllConfig
from moe_p2p.fleet import neighbours

WORLD_SIZE, TOKENS, HIDDEN, TOPK, EXPERTS = 2, 16, 256, 2, 8


def start(process: int) -> str:
    with open(f"/proc/{process}/task/{process}/stat") as file:
        return file.read().rpartition(")")[2].split()[19]


def main(rank: int, path: str) -> None:
    config = AllToAllConfig(
        num_experts=EXPERTS,
        hidden_dim=HIDDEN,
        topk=TOPK,
        max_tokens=TOKENS,
        ranks_per_node=1,  # so that bytes go through proxies and the software NIC, too
        transport="loopback",
        timeout_s=120,
    )
    store = FileStore(path, WORLD_SIZE)
    with AllToAll(store, config, rank=rank, world_size=WORLD_SIZE) as all_to_all:
        torch.manual_seed(rank)
        for quantize in (False, True):
            x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
            weights, topk_idx = torch.rand(TOKENS, EXPERTS).softmax(dim=-1).topk(TOPK, dim=-1)
            received = all_to_all.dispatch(
                x, topk_idx, weights, layout="grouped", quantize=quantize
            )
            rows = received.x
            if quantize:
                blocks = rows.float().unflatten(1, (-1, 128)) * received.scales.unsqueeze(-1)
                rows = blocks.flatten(1).bfloat16()
            out = all_to_all.combine(rows * 2, received)
            expected = 2 * x.float() * weights.sum(dim=-1, keepdim=True)
            # bf16 rounds three times, 2^-9 each; an fp8 value has 3 bits behind its first: 2^-4.
            close = 2**-4 + 2**-6 if quantize else 2**-6
            torch.testing.assert_close(out.float(), expected, rtol=close, atol=close)
    print(f"rank {rank}: {platform.machine()}, torch {torch.__version__}", flush=True)


def forked(rank: int, path: str) -> int:
    child = os.fork()
    if child:
        return child
    try:
        main(rank, path)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    neighbours._start_of = start
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        children = [forked(rank, f"{folder}/store") for rank in range(WORLD_SIZE)]
        ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(max(map(abs, ended)))
