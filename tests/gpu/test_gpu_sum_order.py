"""Sums in the order of top-k on a GPU, bit for bit as the reference has them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_p2p.moe.options import SumOrder
from tests.gpu.test_gpu import call
from tests.gpu.test_gpu_calls import LONG, LONG_COUNTS
from tests.moe.test_sum_order import ordered, run_ordered
from tests.support.cases import Wanted
from tests.support.gpu_ranks import World, make, prepare, run, worlds
from tests.support.ranks import Rank

pytestmark = pytest.mark.gpu

ORDERS = ["topk", "rows"]


def summed_steps(
    rank: Rank,
    world: World,
    wanted: list[Wanted],
    wants: list[list[Tensor]],
    take: Callable[..., None],
    kernel: tuple[bool, int],
    config: dict[str, Any],
) -> None:
    """take: of a step, what it gives and the number of biases. kernel: by_topk and partials."""
    with make(rank, world, **config) as comm:
        if comm._device is not None:
            for dtype in dict.fromkeys(w.out_dtype for w in wanted):
                comm._device.prepare_combine(dtype, dtype, *kernel)
        prepare(rank, comm, wanted)
        for i, (step, want) in enumerate(zip(wanted, wants, strict=True)):
            take(comm, step, want, num_biases=i % 3)


def world_rows(world: World) -> int:
    """Most rows of a token at one rank."""
    return min(3, world.topology().max_local_experts())


def check(world: World, wanted: list[Wanted], order: SumOrder, **config: Any) -> None:
    wants = [ordered(world.topology(), step, order, i % 3) for i, step in enumerate(wanted)]
    take = functools.partial(run_ordered, order=order)
    config["combine_rows"] = world_rows(world)
    run(world, summed_steps, wanted, wants, take, (True, 0), config)


@pytest.mark.parametrize("world", worlds((1, 1), (2, 2), (4, 4)))
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_in_the_order_of_topk(world: World, order: SumOrder, dtype: torch.dtype) -> None:
    layouts = ("padded", "grouped", "by_rank")
    wanted = [call(world, seed, dtype=dtype, layout=layouts[seed % 3]) for seed in range(6)]
    check(world, wanted, order)


# Steps of 300 tokens have flags of their own, and go in bulk where multiprocessors are few; steps
# of a masking communicator too.
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", ["flags", "bulk", "masks", "chunks"])
def test_however_rows_arrive(order: SumOrder, way: str) -> None:
    ways: dict[str, dict[str, Any]] = {
        "flags": {"max_tokens": 300, "chunk_tokens": 300},
        "bulk": {"max_tokens": 300, "chunk_tokens": 300, "num_sms": 8},
        "masks": {"mask_lost_ranks": True},
        "chunks": {"max_tokens": LONG, "chunk_tokens": 4},
    }
    world = World(2, 2)
    more: dict[str, Any] = {"max_tokens": LONG, "counts": LONG_COUNTS} if way == "chunks" else {}
    wanted = [call(world, seed, layout="grouped", **more) for seed in range(3)]
    check(world, wanted, order, **ways[way])
