"""Small cases for compute-sanitizer: one rank alone, and two as threads on one GPU.

    PYTHONPATH=. compute-sanitizer --report-api-errors no --kernel-name kns=moe_p2p \\
        --error-exitcode 9 python tests/sanitize_gpu.py
    PYTHONPATH=. compute-sanitizer --tool racecheck --kernel-name kns=moe_p2p \\
        --error-exitcode 9 python tests/sanitize_gpu.py alone
    PYTHONPATH=. compute-sanitizer --report-api-errors no --kernel-name kns=moe_p2p \\
        --kernel-name kns=grouped --error-exitcode 9 python tests/sanitize_gpu.py --overflow alone

Exit code 0: right results and no error; 1: a wrong result; 9, as asked for: the tool found
something. --bulk: as few multiprocessors carry long steps. --overflow: experts behind a dispatch
that ran out of room, which write to their rows alone. Not a test of the suite: kernels run many
times slower under the tool. Kernels of two ranks wait for each other; with a tool that lets only
one run at a time they time out, and only "alone" can be checked.
"""

from __future__ import annotations

import argparse
import contextlib

import pytest
import torch

from moe_p2p import ResourceExhaustedError
from moe_p2p.layer import Experts, local_experts
from moe_p2p.moe.gpu import launch_shape
from tests.gpu.test_gpu import call
from tests.gpu.test_gpu_layouts import BY_RANK
from tests.support.cases import Wanted, dispatch_arguments, run_step
from tests.support.gpu_ranks import DEVICE, HIDDEN_DIM, MAX_TOKENS, World, make, meet, prepare, run
from tests.support.ranks import Rank

LONG = 2 * MAX_TOKENS + 3


def body(rank: Rank, world: World, wanted: list[Wanted], timeout_s: float) -> None:
    sizes = {"chunk_tokens": MAX_TOKENS, "max_tokens": LONG}
    with make(rank, world, timeout_s=timeout_s, **sizes) as comm:
        prepare(rank, comm, wanted)
        for step in wanted:
            run_step(comm, step, zero_padding=True)


WORLDS = {"alone": World(1, 1), "node": World(2, 2), "nodes": World(2, 1)}


def check(world: World, timeout_s: float) -> None:
    wanted = [
        call(world, 0),
        call(world, 2, quantize=True, layout="grouped", alignment=4),
        call(world, 1, dtype=torch.bfloat16),
        call(world, 3, max_tokens=LONG, counts=[LONG, 5], layout="grouped"),
        call(world, 4, **BY_RANK),
        call(world, 0),
    ]
    run(world, body, wanted, timeout_s, deadline_s=60 + 20 * timeout_s)
    print(f"{world}: {len(wanted)} calls, results are those of the reference")


def behind_overflow(rank: Rank, world: World, wanted: Wanted, timeout_s: float) -> None:
    """What a layer does with counts and offsets of too little capacity, before anybody knows."""
    with make(rank, world, timeout_s=timeout_s) as comm:
        prepare(rank, comm, [wanted])
        experts = Experts(local_experts(comm), HIDDEN_DIM, ffn_dim=128, seed=0).to(DEVICE)
        got = comm.dispatch(**(dispatch_arguments(comm, wanted) | {"capacity": 2}))
        with torch.no_grad():
            y = experts(got.x.flatten(0, -2), got.counts, got.offsets)
            with contextlib.suppress(ResourceExhaustedError):  # the host may know by now
                comm.combine(y, got, out_dtype=wanted.out_dtype)
        torch.cuda.current_stream().synchronize()
        with pytest.raises(ResourceExhaustedError, match="capacity is 2"):
            comm.check()
        meet(rank, "reported")


def check_overflow(world: World, timeout_s: float) -> None:
    for layout in ("padded", "grouped"):
        wanted = call(world, 2, layout=layout)
        run(world, behind_overflow, wanted, timeout_s, deadline_s=60 + 20 * timeout_s)
        print(f"{world}, {layout}: experts behind an overflow stay within their rows")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("worlds", nargs="*", help=f"of {', '.join(WORLDS)}; none: all")
    parser.add_argument("--bulk", action="store_true", help="by copies of whole rows")
    parser.add_argument("--overflow", action="store_true", help="experts behind too little room")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that a kernel waits")
    given = parser.parse_args()
    if given.bulk:
        launch_shape.BULK_STEP = 0  # other nodes are not reached that way, however long a step is
    for name in given.worlds or WORLDS:
        (check_overflow if given.overflow else check)(WORLDS[name], given.timeout)


if __name__ == "__main__":
    main()
