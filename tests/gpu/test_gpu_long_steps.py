"""Kernels of long steps: rows go through registers and slots and sums have flags of their own.

Steps of more than 256 tokens run so. Here, but for two tests, short ones do: the calls are those of
other files. Ranks are threads that share one GPU (gpu_ranks.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moe_p2p.machine import launches
from moe_p2p.moe.gpu import launch_shape
from tests.gpu.test_gpu import ALL_WORLDS, call, every_format, of_calls, steps
from tests.gpu.test_gpu_calls import (
    CHUNKED,
    LONG,
    LONG_COUNTS,
    halves,
    solo_then_two_halves,
)
from tests.gpu.test_gpu_layouts import BY_RANK, rows_of_every_type
from tests.support import gpu_ranks
from tests.support.cases import finish
from tests.support.gpu_ranks import MAX_TOKENS, PAYLOADS, Payload, World
from tests.support.ranks import Rank

pytestmark = pytest.mark.gpu

LONG_STEP = 300  # tokens; up to launch_shape.BULK_STEP rows flag themselves
PARTS = {"part_bytes": 1500}
PLACES = (
    *((launch_shape, n) for n in ("BULK_STEP", "FEW_BULK_STEP", "_TINY_STEP", "_SMALL_STEP")),
    (launches, "_FEW_SMS"),
)
SHIPPED = [(module, name, getattr(module, name)) for module, name in PLACES]


@pytest.fixture(scope="module", autouse=True)
def _every_step_is_long() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # Ranks that share a GPU have few multiprocessors each: none are few, or rows go in bulk.
        for module, name in PLACES:
            patch.setattr(module, name, 0)
        by_rank = [payload._replace(by_rank=True) for payload in PAYLOADS]
        gpu_ranks.compile_ahead(
            [(World(*shape), {}) for shape in ALL_WORLDS], [*PAYLOADS, *by_rank]
        )
        gpu_ranks.compile_ahead(
            [(World(*shape), CHUNKED) for shape in ALL_WORLDS], [Payload(torch.float32)]
        )
        gpu_ranks.compile_ahead([(World(4, 2), PARTS)], [Payload(torch.float32)])
        yield


@pytest.mark.parametrize("world", gpu_ranks.worlds(*ALL_WORLDS))
def test_every_format_is_the_reference_bit_for_bit(world: World) -> None:
    gpu_ranks.run(world, steps, every_format(world), {"transport_settings": f"seed={world.ranks}"})


@pytest.mark.parametrize("world", gpu_ranks.worlds(*ALL_WORLDS))
def test_rows_by_rank_are_the_reference_bit_for_bit(world: World) -> None:
    gpu_ranks.run(world, steps, rows_of_every_type(world), {})


@pytest.mark.parametrize("world", gpu_ranks.worlds(*ALL_WORLDS))
def test_long_calls_run_in_chunks(world: World) -> None:
    wanted = [
        call(world, 0, max_tokens=LONG, counts=LONG_COUNTS),
        call(world, 2, max_tokens=3, counts=[3, 0, 1, 2] * 2, layout="grouped"),
        call(world, 3, max_tokens=LONG, counts=LONG_COUNTS[::-1], layout="grouped", alignment=4),
        call(world, 7, max_tokens=LONG, counts=[0] * 8),
    ]
    gpu_ranks.run(world, steps, wanted, CHUNKED)


@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (2, 1), (4, 2), (3, 3)))
def test_halves_of_two_steps_overlap(world: World) -> None:
    gpu_ranks.run(world, halves, [[call(world, 2 * i), call(world, 2 * i + 1)] for i in range(4)])


@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2)))
def test_a_plain_sending_half_takes_the_slot_of_a_solo_dispatch(world: World) -> None:
    """It looks for free slots before it knows its step (EarlyRoutes in dispatch/route.cuh)."""
    gpu_ranks.run(world, solo_then_two_halves, [call(world, seed) for seed in range(3)], True)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_hostile_network_changes_nothing(seed: int) -> None:
    world = World(4, 2)
    wanted = [call(world, step, **of_calls(PARTS)) for step in range(10)]
    config = PARTS | {"transport_settings": f"seed={seed}", "nics_per_rank": 3}
    gpu_ranks.run(world, steps, wanted, config)


def test_parts_over_a_slow_link() -> None:
    """Half a millisecond for each token: who takes rows before their part is here finds others."""
    world = World(4, 2)
    wanted = [call(world, step, counts=[MAX_TOKENS] * 4) for step in range(6)]
    gpu_ranks.run(world, steps, wanted, PARTS | {"transport_settings": "gbps=0.02"})


@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (4, 2), (3, 1)))
def test_steps_of_three_hundred_tokens(world: World) -> None:
    """As users have them, without the patches of this file."""
    options: dict[str, Any] = {"max_tokens": LONG_STEP, "counts": [LONG_STEP, 1, 40, 257]}
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in SHIPPED:
            patch.setattr(module, name, value)
        wanted = [
            call(world, 0, **options),
            call(world, 1, layout="grouped", **options),
            call(world, 2, **BY_RANK, **options),
        ]
        num_sms = launches._FEW_SMS + 1 if world.per_node == world.ranks else 32
        gpu_ranks.run(world, steps, wanted, {"max_tokens": LONG_STEP, "num_sms": num_sms})


def far_rows(rank: Rank, world: World) -> None:
    """Tokens go to the first expert and the last one, whose rows begin behind 2^31 values."""
    num_experts, num_tokens, hidden = 48, 8192, 7168
    wide: dict[str, Any] = {
        "hidden_dim": hidden,
        "dtype": torch.bfloat16,
        "extra_bytes": 0,
        "num_sms": None,
    }
    sizes = {"num_experts": num_experts, "max_tokens": num_tokens, "topk": 2}
    with gpu_ranks.make(rank, world, **(wide | sizes), combine_dtype=None) as comm:
        x = torch.randn(num_tokens, hidden, device=comm.config.device).bfloat16()
        idx = torch.tensor([0, num_experts - 1], device=comm.config.device).repeat(num_tokens, 1)
        weights = torch.tensor([0.5, 0.25], device=comm.config.device).repeat(num_tokens, 1)
        got = comm.dispatch(x, idx, weights)
        assert got.x.numel() - num_tokens * hidden > 2**31
        for expert in (0, num_experts - 1):
            assert torch.equal(got.x[expert, :num_tokens], x)
        out = comm.combine(got.x, got)
        finish(comm)
        assert torch.equal(out, (0.5 * x.float() + 0.25 * x.float()).bfloat16())


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.mem_get_info()[1] < 24 << 30,
    reason="needs a GPU of 24 GiB",
)
def test_rows_behind_two_to_the_thirty_first_value() -> None:
    gpu_ranks.run(World(1, 1), far_rows)
