"""What a communicator takes of a GPU's memory is what the plan says, and all of it comes back."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_gpu import call
from tests.support.cases import run_step
from tests.support.gpu_ranks import World, make, meet, run, worlds
from tests.support.ranks import Rank

pytestmark = pytest.mark.gpu

MIB = 1 << 20
JOB = {
    "num_experts": 256,
    "hidden_dim": 7168,
    "topk": 8,
    "max_tokens": 128,
    "dtype": torch.bfloat16,
    "combine_dtype": None,
    "extra_bytes": 0,
}
# Beside the regions: rounding up to the 2 MiB that the driver hands out, and expert tables and
# state in blocks of torch's allocator, which is why it may be 2 MiB more.
SLACK = 4 * MIB


def taken(rank: Rank, world: World, name: str) -> int:
    """Bytes of the device that all ranks together hold, once all have come."""
    meet(rank, f"{name}, before")
    free, total = torch.cuda.mem_get_info()
    meet(rank, f"{name}, after")
    return total - free


def memory(rank: Rank, world: World) -> tuple[int, int, int]:
    """Bytes that all communicators take, what their plans say, and what is left after close."""
    with make(rank, world, **JOB):  # kernels, streams and torch's blocks stay
        pass
    before = taken(rank, world, "at first")
    with make(rank, world, **JOB) as comm:
        plan = comm.config.plan(world_size=world.ranks, ranks_per_node=world.per_node)
        held = taken(rank, world, "open") - before
        assert comm.broken == ""
        meet(rank, "measured")
    left = taken(rank, world, "closed") - before
    on_device = sum(size for line, size in plan.items() if line != "signals")
    return held, world.ranks * on_device, left


@pytest.mark.parametrize("world", worlds((4, 4), (4, 2)))
def test_memory_is_the_memory_of_the_plan(world: World) -> None:
    for held, planned, left in run(world, memory):
        assert planned - MIB <= held <= planned + world.ranks * SLACK
        assert abs(left) <= SLACK


def again_and_again(rank: Rank, world: World, rounds: int) -> list[int]:
    found = []
    wanted = call(world, 0)
    for i in range(rounds):
        with make(rank, world) as comm:
            run_step(comm, wanted)
            meet(rank, f"ran {i}")
        found.append(taken(rank, world, f"round {i}"))
    return found


@pytest.mark.parametrize("world", worlds((2, 2), (2, 1)))
def test_communicators_that_come_and_go_leave_nothing(world: World) -> None:
    for found in run(world, again_and_again, 6):
        assert max(found[1:]) - found[1] <= SLACK, found
