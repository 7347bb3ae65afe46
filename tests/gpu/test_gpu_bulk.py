"""Kernels that carry rows through shared memory, as few multiprocessors do for long steps.

The calls are those of other files: here they go that way however short their steps are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_p2p import AllToAll
from moe_p2p.moe.gpu import launch_shape
from moe_p2p.moe.options import SCALE_FORMATS
from moe_p2p.moe.reference import Tokens
from tests.gpu.test_gpu import (
    call,
    every_format,
    in_fp8,
    of_changing_counts,
    steps,
    to_one_expert,
)
from tests.gpu.test_gpu_calls import CHUNKED, LONG, LONG_COUNTS, halves
from tests.gpu.test_gpu_failures import settle
from tests.gpu.test_gpu_layouts import BY_RANK, columns, rows_of_every_type
from tests.support import cases, gpu_ranks
from tests.support.cases import Wanted
from tests.support.gpu_ranks import DEVICE, MAX_TOKENS, PAYLOADS, SOON_S, Payload, World
from tests.support.ranks import Rank

pytestmark = pytest.mark.gpu

SHAPES = ((1, 1), (2, 2), (3, 3), (4, 4), (8, 8))  # of one node
WORLDS = gpu_ranks.worlds(*SHAPES)
WIDE = {"hidden_dim": 7168, "dtype": torch.bfloat16, "extra_bytes": 0}


@pytest.fixture(scope="module", autouse=True)
def _every_step_in_bulk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_shape, "BULK_STEP", 0)
        by_rank = [payload._replace(by_rank=True) for payload in PAYLOADS]
        gpu_ranks.compile_ahead([(World(*shape), {}) for shape in SHAPES], [*PAYLOADS, *by_rank])
        gpu_ranks.compile_ahead(
            [(World(*shape), CHUNKED) for shape in SHAPES],
            [Payload(torch.float32, by_rank=by_rank) for by_rank in (False, True)],
        )
        yield


@pytest.mark.parametrize("world", WORLDS)
def test_every_format_is_the_reference_bit_for_bit(world: World) -> None:
    gpu_ranks.run(world, steps, every_format(world), {})


@pytest.mark.parametrize("world", WORLDS)
def test_rows_by_rank_are_the_reference_bit_for_bit(world: World) -> None:
    gpu_ranks.run(world, steps, rows_of_every_type(world), {})


@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (4, 4)))
def test_rows_of_seven_thousand_values(world: World) -> None:
    wide = {"hidden_dim": 7168, "layout": "grouped", "dtype": torch.bfloat16}
    wanted = [call(world, step // 2 * 2, **wide, quantize=step % 2 == 1) for step in range(4)]
    assert all(t.x.shape[0] for w in wanted for t in w.tokens[:2])
    gpu_ranks.run(world, steps, wanted, WIDE)


@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (4, 4)))
def test_rows_by_rank_of_seven_thousand_values(world: World) -> None:
    """With scales, without, and quantized inside."""
    wide: dict[str, Any] = {"hidden_dim": 7168, "dtype": torch.bfloat16, **BY_RANK}
    counts = [MAX_TOKENS] * world.ranks
    wanted = [
        call(world, 0, in_fp8(True), counts=counts, **wide),
        call(world, 2, in_fp8(False), counts=counts, **wide),
        call(world, 3, quantize=True, counts=counts, **wide),
        call(world, 0, in_fp8(True), counts=[1] * world.ranks, **wide),
        call(world, 2, in_fp8(True), counts=counts, **wide | {"layout": "grouped"}),
    ]
    gpu_ranks.run(world, steps, wanted, WIDE)


@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2)))
def test_scales_in_columns_and_of_one_byte(world: World) -> None:
    fields: dict[str, Any] = {"capacity": MAX_TOKENS * world.ranks + 1, **BY_RANK}
    quantized = fields | {"dtype": torch.bfloat16, "quantize": True}
    wanted = [
        call(world, 2, in_fp8(True), **fields),
        call(world, 2, **quantized, scale_format="power_of_two"),
        call(world, 0, **quantized, scale_format="ue8m0"),
    ]
    gpu_ranks.run(world, steps, wanted, {}, columns)


# A warp routes 32 tokens at once, and no block has 22 warps.
LONGER: dict[str, Any] = {
    "max_tokens": 704,
    "chunk_tokens": 704,
    "hidden_dim": 16,
    "num_sms": 4,
    "extra_bytes": 0,
}


@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2)))
def test_more_tokens_than_a_block_routes_at_once(world: World) -> None:
    longer = {"hidden_dim": 16, "max_tokens": LONGER["max_tokens"], "dtype": torch.bfloat16}
    for counts in ([704, 690], [5, 700]):
        wanted = [call(world, 0, counts=counts, **layout, **longer) for layout in (BY_RANK, {})]
        gpu_ranks.run(world, steps, wanted, LONGER)


MANY = {"max_tokens": 128, "num_sms": 2}  # for each worker more than Progress::kItems


@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2)))
def test_a_worker_waits_for_room_for_flags(world: World) -> None:
    many: dict[str, Any] = {"max_tokens": MANY["max_tokens"], "counts": [MANY["max_tokens"]] * 2}
    wanted = [call(world, 0, **many), call(world, 1, quantize=True, layout="grouped", **many)]
    gpu_ranks.run(world, steps, wanted, MANY)


def with_weights_of_one(t: Tokens, rank: int) -> Tokens:
    return replace(t, topk_weights=torch.ones_like(t.topk_weights))


ONE_BLOCK = WIDE | {"topk": 6, "num_sms": 2}  # for each half, so that a worker has many sums


def unweighted(comm: AllToAll, step: Wanted) -> None:
    live = comm.dispatch(**cases.dispatch_arguments(comm, step))
    cases.finish(comm)  # copies to the device wait for each other, across ranks
    out = comm.combine(dispatched=live, weighted=False, **cases.combine_arguments(comm, step))
    cases.finish(comm)
    cases.assert_combined(out.cpu(), step.out[comm.rank])


@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (4, 4)))
def test_rows_that_need_no_sum_between_sums(world: World) -> None:
    wide = {"hidden_dim": 7168, "dtype": torch.bfloat16, "topk": 6}
    wide["counts"] = [MAX_TOKENS] * world.ranks
    wanted = [
        call(world, 0, with_weights_of_one, layout="grouped", **wide),
        call(world, 1, with_weights_of_one, **BY_RANK, **wide),
        call(world, 2, with_weights_of_one, **wide),
    ]
    owners = torch.cat([t.topk_idx for t in wanted[0].tokens]) // 4
    alone = [(owners == rank).sum(1) == 1 for rank in range(world.ranks)]
    assert all(0 < slots.sum() < (owners == rank).any(1).sum() for rank, slots in enumerate(alone))
    gpu_ranks.run(world, steps, wanted, ONE_BLOCK, unweighted)


@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (4, 4)))
def test_sums_of_negative_zeros_are_zeros(world: World) -> None:
    """Also where the row of a token is the only one: a copy of it would have another sign."""
    wide = {"hidden_dim": 7168, "dtype": torch.bfloat16, "topk": 6, "experts": cases.negative_zeros}
    wide["counts"] = [MAX_TOKENS] * world.ranks
    wanted = [
        call(world, 0, with_weights_of_one, layout="grouped", **wide),
        call(world, 1, to_one_expert(0), **BY_RANK, **wide),
    ]
    gpu_ranks.run(world, steps, wanted, ONE_BLOCK, unweighted)


@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (3, 3)))
def test_no_number_comes_of_what_is_none(world: World) -> None:
    common: dict[str, Any] = {"dtype": torch.bfloat16, "quantize": True}
    wanted = [
        call(world, 2, cases.with_no_numbers, scale_format=scale_format, **common)
        for scale_format in SCALE_FORMATS
    ]
    wanted.append(call(world, 2, cases.with_no_numbers, quantize=True, **BY_RANK))
    gpu_ranks.run(world, steps, wanted, {})


@pytest.mark.parametrize("world", WORLDS)
def test_long_calls_run_in_chunks(world: World) -> None:
    wanted = [
        call(world, 0, max_tokens=LONG, counts=LONG_COUNTS),
        call(world, 1, max_tokens=LONG, counts=LONG_COUNTS[::-1], **BY_RANK),
        call(world, 2, max_tokens=3, counts=[3, 0, 1, 2] * 2, layout="grouped"),
        call(world, 3, max_tokens=LONG, counts=[0] * 8),
        call(world, 4, to_one_expert(2), max_tokens=LONG, counts=LONG_COUNTS, layout="grouped"),
    ]
    gpu_ranks.run(world, steps, wanted, CHUNKED)


@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (3, 3)))
def test_halves_of_two_steps_overlap(world: World) -> None:
    gpu_ranks.run(world, halves, [[call(world, 2 * i), call(world, 2 * i + 1)] for i in range(4)])


@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (4, 4)))
def test_a_hundred_steps_of_changing_counts(world: World) -> None:
    gpu_ranks.run(world, steps, of_changing_counts(world, 100), {}, deadline_s=100.0)


def without_a_flag(rank: Rank, world: World, wanted: Wanted) -> None:
    """Rank 0 gets counts of all ranks, and the slots of the last one but for one flag."""
    with gpu_ranks.make(rank, world, timeout_s=SOON_S) as comm:
        gpu_ranks.prepare(rank, comm, [wanted])
        assert comm._device is not None
        pending = comm.dispatch_send(**cases.dispatch_arguments(comm, wanted))
        settle(comm)
        gpu_ranks.meet(rank, "sent")
        if rank.rank == 0:
            plan = comm.config.plan(world_size=world.ranks, ranks_per_node=world.per_node)
            regions, slots = world.ranks * 2, comm.config.steps_in_flight
            assert slots * world.ranks == regions
            memory: torch.Tensor = comm._device._memory_bytes  # type: ignore[attr-defined]
            first = -memory.data_ptr() % 4096 + plan["inbox"] // slots
            flags = memory[first : first + plan["inbox_flags"] // slots].view(torch.int32)
            of_last = flags.view(world.ranks, -1)[-1]
            assert of_last[2] == 1
            of_last[2] = 0
        got = comm.dispatch_recv(pending)
        text = settle(comm)
        if rank.rank == 0:
            assert f"rank {world.ranks - 1}" in text
            rows = cases.on_cpu(got)
            assert torch.equal(rows.counts, wanted.received[0].counts)
            assert rows.x.isnan().all()
        gpu_ranks.meet(rank, "received")


@pytest.mark.skipif(DEVICE != "cpu", reason="needs memory of the device that the host can write")
@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2)))
def test_a_slot_that_does_not_arrive_is_named(world: World) -> None:
    gpu_ranks.run(world, without_a_flag, call(world, 2, **BY_RANK))
