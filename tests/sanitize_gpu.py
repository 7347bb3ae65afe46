"""A small case for compute-sanitizer: two ranks as threads on one GPU, on one node and on two.

    compute-sanitizer --error-exitcode 9 python tests/sanitize_gpu.py
    compute-sanitizer --tool racecheck --kernel-regex kns=moe_p2p python tests/sanitize_gpu.py

Exit code 0: right results and no error; 1: a wrong result; 9, as asked for: the tool found something.
Not a test of the suite: kernels run many times slower under the tool.

  --nodes N     only with both ranks on 1 node, or each on its own of 2
  --timeout S   deadline of a wait; kernels of both ranks must run at the same time, which a tool
                that runs one kernel after the other turns into a timeout
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import torch

from cases import Wanted, run_step
from gpu_ranks import MAX_TOKENS, World, make, prepare, run
from ranks import Rank
from test_gpu import call

LONG = 2 * MAX_TOKENS + 3


def body(rank: Rank, world: World, wanted: list[Wanted], timeout_s: float) -> None:
    sizes = {"chunk_tokens": MAX_TOKENS, "max_tokens": LONG}
    with make(rank, world, timeout_s=timeout_s, **sizes) as comm:
        prepare(rank, comm, wanted)
        for step in wanted:
            run_step(comm, step, zero_padding=True)


def check(num_nodes: int, timeout_s: float) -> None:
    world = World(2, 2 // num_nodes)
    wanted = [
        call(world, 0),
        call(world, 2, quantize=True, layout="grouped", alignment=4),
        call(world, 1, dtype=torch.bfloat16),
        call(world, 3, max_tokens=LONG, counts=[LONG, 5], layout="grouped"),
        call(world, 0),
    ]
    run(world, body, wanted, timeout_s, deadline_s=60 + 20 * timeout_s)
    print(f"{num_nodes} node(s): {len(wanted)} calls, results are those of the reference")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, choices=(1, 2))
    parser.add_argument("--timeout", type=float, default=60.0)
    given = parser.parse_args()
    for num_nodes in (given.nodes,) if given.nodes else (1, 2):
        check(num_nodes, given.timeout)


if __name__ == "__main__":
    main()
