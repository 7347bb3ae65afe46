"""Rows by rank, formats and places of scales, ranges and wait times of dispatch on a GPU.

Bit for bit as the reference has them. Ranks are threads that share one GPU (gpu_ranks.py).

Symbols: W ranks, T tokens, K top-k, P scales of a token, E_local experts of a rank.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_p2p import AllToAll, Dispatched, DispatchOptions
from moe_p2p.moe import reference
from moe_p2p.moe.layouts import RowLayout
from moe_p2p.moe.options import SCALE_FORMATS
from moe_p2p.moe.reference import Received, Tokens
from tests.gpu.test_gpu import (
    ALL_WORLDS,
    SHAPES,
    Change,
    call,
    in_fp8,
    int32_ids,
    of_calls,
    padding,
    steps,
    to_one_expert,
    with_extras,
)
from tests.gpu.test_gpu_calls import CHUNKED, CHUNKED_WORLDS, LONG, LONG_COUNTS, halves
from tests.support import cases, gpu_ranks
from tests.support.cases import Wanted
from tests.support.every_value import MAXIMA, every_value
from tests.support.gpu_ranks import FLOATS, HIDDEN_DIM, MAX_TOKENS, Payload, World
from tests.support.ranks import Rank

pytestmark = pytest.mark.gpu

BY_RANK: dict[str, Any] = {"layout": "by_rank"}
RANK_WORLDS = [*ALL_WORLDS, (8, 1)]
FEW_WORLDS = gpu_ranks.worlds((2, 2), (2, 1), (4, 2), (3, 3))
FORMATS = range(len(SCALE_FORMATS))
PAYLOADS = [
    Payload(torch.float32),
    *[Payload(dtype, by_rank=True) for dtype in (*FLOATS, torch.float8_e4m3fn)],
    *[Payload(dtype, True, by_rank=True) for dtype in FLOATS],
]
FEW_PAYLOADS = [Payload(torch.float32, by_rank=True), Payload(torch.float32, True, by_rank=True)]
ROUNDED = [
    Payload(torch.bfloat16, True, scale_format, by_rank)
    for scale_format, by_rank in itertools.product(FORMATS, (False, True))
]
WIDE: dict[str, Any] = {"hidden_dim": 7168, "dtype": torch.bfloat16}


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    gpu_ranks.compile_ahead([(World(*shape), {}) for shape in RANK_WORLDS], PAYLOADS)
    gpu_ranks.compile_ahead(SHAPES.values(), FEW_PAYLOADS)
    few: list[World] = [param.values[0] for param in FEW_WORLDS]
    gpu_ranks.compile_ahead(
        [(world, {}) for world in few], [*ROUNDED, Payload(torch.float8_e4m3fn)]
    )
    gpu_ranks.compile_ahead([(World(4, 2), WIDE | {"extra_bytes": 0})], ROUNDED)
    chunked = [(World(*shape), CHUNKED) for shape in CHUNKED_WORLDS]
    gpu_ranks.compile_ahead(chunked, [*FEW_PAYLOADS, Payload(torch.bfloat16, by_rank=True)])


# --- rows by rank ---


def rows_of_every_type(world: World) -> list[Wanted]:
    return [
        call(world, 0, **BY_RANK),
        call(world, 1, **BY_RANK),
        call(world, 2, int32_ids, **BY_RANK),
        call(world, 3, dtype=torch.bfloat16, **BY_RANK),
        call(world, 4, quantize=True, **BY_RANK),
        call(world, 0, with_extras, dtype=torch.float16, **BY_RANK),
        call(world, 2, dtype=torch.bfloat16, quantize=True, **BY_RANK),
        call(world, 0, in_fp8(True), **BY_RANK),
        call(world, 2, in_fp8(False), **BY_RANK),
        call(world, 2, to_one_expert(1), **BY_RANK),
        call(world, 0),  # the layouts take turns in the same memory
        call(world, 0, with_extras, dtype=torch.float16, quantize=True, **BY_RANK),
    ]


@pytest.mark.parametrize("world", gpu_ranks.worlds(*RANK_WORLDS))
def test_rows_by_rank_are_the_reference_bit_for_bit(world: World) -> None:
    settings = {"transport_settings": f"seed={world.ranks}"}
    gpu_ranks.run(world, steps, rows_of_every_type(world), settings)


@pytest.mark.parametrize("name", SHAPES)
def test_rows_by_rank_of_shape(name: str) -> None:
    world, config = SHAPES[name]
    fields = of_calls(config) | BY_RANK
    wanted = [call(world, seed, **fields) for seed in range(3)]
    gpu_ranks.run(world, steps, [*wanted, call(world, 2, quantize=True, **fields)], config)


@pytest.mark.parametrize("world", gpu_ranks.worlds(*CHUNKED_WORLDS))
def test_long_calls_by_rank_run_in_chunks(world: World) -> None:
    wanted = [
        call(world, 0, max_tokens=LONG, counts=LONG_COUNTS, **BY_RANK),
        call(world, 1, max_tokens=3, counts=[3, 0, 1, 2] * 2, **BY_RANK),
        call(world, 2, max_tokens=7, counts=[7, 4, 0, 1] * 2, dtype=torch.bfloat16, **BY_RANK),
        call(world, 3, max_tokens=LONG, counts=LONG_COUNTS[::-1], quantize=True, **BY_RANK),
        call(world, 4, max_tokens=LONG, counts=[0] * 8, **BY_RANK),
        call(world, 5, to_one_expert(2), max_tokens=LONG, counts=LONG_COUNTS, **BY_RANK),
    ]
    gpu_ranks.run(world, steps, wanted, CHUNKED)


@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (2, 1), (4, 2)))
def test_halves_by_rank_of_two_steps_overlap(world: World) -> None:
    pairs = [[call(world, 2 * i + j, **BY_RANK) for j in range(2)] for i in range(4)]
    gpu_ranks.run(world, halves, pairs)


@pytest.mark.parametrize("world", gpu_ranks.worlds((4, 4), (4, 2)))
def test_two_hundred_steps_by_rank(world: World) -> None:
    wanted = [
        call(
            world,
            seed,
            counts=[(seed * 7 + rank * 11) % (MAX_TOKENS + 1) for rank in range(8)],
            **BY_RANK,
        )
        for seed in range(5)
    ]
    gpu_ranks.run(world, steps, wanted * 40, {})


def entries_past_the_last_row(comm: AllToAll, step: Wanted) -> None:
    got, _ = cases.run_step(comm, step)
    theirs = step.received[comm.rank]
    assert got.row_topk is not None
    assert theirs.row_topk is not None
    assert got.row_topk.dtype == step.tokens[comm.rank].topk_idx.dtype
    assert torch.equal(got.row_topk, theirs.row_topk)  # -1 there
    assert torch.equal(got.row_weights, theirs.row_weights)  # 0 there


@pytest.mark.parametrize("world", FEW_WORLDS)
def test_rows_past_the_last_name_no_expert(world: World) -> None:
    wanted = [
        call(world, 2, **BY_RANK),
        call(world, 0, int32_ids, **BY_RANK),
        call(world, 1, **BY_RANK),
    ]
    gpu_ranks.run(world, steps, wanted, {}, entries_past_the_last_row)


@pytest.mark.parametrize("world", FEW_WORLDS)
def test_empty_padding_by_rank_is_zero_when_asked(world: World) -> None:
    wanted = [call(world, 2, **BY_RANK), call(world, 0, dtype=torch.bfloat16, **BY_RANK)]
    gpu_ranks.run(world, steps, wanted, {}, padding)


# --- scales ---


@pytest.mark.parametrize("world", FEW_WORLDS)
def test_scales_of_every_format_in_every_layout(world: World) -> None:
    layouts: list[dict[str, Any]] = [{}, {"layout": "grouped", "alignment": 4}, BY_RANK]
    common: dict[str, Any] = {"dtype": torch.bfloat16, "quantize": True}
    wanted = [
        call(world, seed % 2 * 2, **common, scale_format=name, **layout)
        for seed, (name, layout) in enumerate(itertools.product(SCALE_FORMATS, layouts))
    ]
    gpu_ranks.run(world, steps, wanted, {})


@pytest.mark.parametrize("scale_format", SCALE_FORMATS)
def test_scales_of_seven_thousand_values(scale_format: str) -> None:
    world = World(4, 2)
    options = WIDE | {"quantize": True, "scale_format": scale_format}
    wanted = [call(world, 2, **options), call(world, 2, **options, **BY_RANK)]
    gpu_ranks.run(world, steps, wanted, WIDE | {"extra_bytes": 0})


def beside_powers_of_two(t: Tokens, rank: int) -> Tokens:
    """Gives each block an amax whose scale is a power of two, or up to two ulps beside one."""
    x, row, block = t.x.clone(), torch.arange(len(t.x))[:, None], torch.arange(HIDDEN_DIM // 128)
    amax = (448.0 * 2.0**row).view(torch.int32) + (row + block + rank) % 4 - 1
    x[row, 128 * block + row] = amax.int().view(torch.float32)
    return replace(t, x=x)


def test_scales_beside_powers_of_two() -> None:
    world, formats = World(2, 2), ("power_of_two", "ue8m0")
    options: list[dict[str, Any]] = [{"quantize": True, "scale_format": name} for name in formats]
    wanted = [call(world, 2, beside_powers_of_two, **option) for option in options]
    gpu_ranks.run(world, steps, wanted, {})


@pytest.mark.parametrize("maximum", MAXIMA)
def test_every_value_in_a_block(maximum: float) -> None:
    """Two blocks of each token hold what is left of every_value()."""
    world, blocks, each = World(2, 2), every_value(maximum), 2 * MAX_TOKENS

    def part_of(step: int) -> Change:
        def change(t: Tokens, rank: int) -> Tokens:
            first = (step * world.ranks + rank) * each % len(blocks)
            x = t.x.clone()
            x[:, :256] = blocks.roll(-first, 0)[:each].view(MAX_TOKENS, 256)
            return replace(t, x=x)

        return change

    options: dict[str, Any] = {"quantize": True, "dtype": torch.bfloat16}
    counts = [MAX_TOKENS] * world.ranks
    num_steps = -(-len(blocks) // (each * world.ranks))
    wanted = [call(world, 2, part_of(i), counts=counts, **options) for i in range(num_steps)]
    gpu_ranks.run(world, steps, wanted, {})


@pytest.mark.parametrize("world", FEW_WORLDS)
def test_no_number_comes_of_what_is_none(world: World) -> None:
    wanted = [
        call(world, 2, cases.with_no_numbers, dtype=dtype, layout=layout, **options)
        for dtype, layout, options in [
            *[
                (torch.bfloat16, "grouped", {"quantize": True, "scale_format": f})
                for f in SCALE_FORMATS
            ],
            (torch.bfloat16, "by_rank", {"quantize": True, "scale_format": "ue8m0"}),
            (torch.float16, "padded", {"quantize": True}),
            (torch.float32, "padded", {"quantize": True, "scale_format": "power_of_two"}),
            (torch.float32, "padded", {}),
        ]
    ]
    assert not any(
        step.out[rank].isfinite().all() for step in wanted for rank in range(world.ranks)
    )
    gpu_ranks.run(world, steps, wanted, {})


def assert_columns(got: Dispatched, capacity: int) -> None:
    """Strides (P * ld, 1, ld), the first only when padded."""
    assert got.scales is not None
    column = (capacity + 3) // 4 * 4
    strides = (got.scales.shape[-1] * column, 1, column)
    assert got.scales.stride() == strides[-got.scales.dim() :]


def columns(comm: AllToAll, step: Wanted, padded: bool = False) -> None:
    how = {"zero_padding": padded, "column_scales": True, "solo": True}
    live = comm.dispatch(**cases.dispatch_arguments(comm, step, **how))
    cases.finish(comm)
    assert_columns(live, live.call.capacity)
    theirs = step.received[comm.rank]
    got = cases.on_cpu(live)
    cases.assert_received(got, theirs)
    if padded:
        assert got.scales is not None
        assert theirs.scales is not None
        assert torch.equal(got.scales, theirs.scales)


@pytest.mark.parametrize("padded", [False, True], ids=["rows", "and padding"])
@pytest.mark.parametrize("world", FEW_WORLDS)
def test_column_scales_in_every_layout(world: World, padded: bool) -> None:
    odd = MAX_TOKENS * world.ranks + 1  # a column ends with room for three rows
    quantized: dict[str, Any] = {"dtype": torch.bfloat16, "quantize": True, "capacity": odd}
    wanted = [
        call(world, 0, **quantized),
        call(world, 2, **quantized, **BY_RANK),
        call(world, 0, **quantized, scale_format="ue8m0"),
        call(world, 2, **quantized, scale_format="power_of_two", **BY_RANK),
        call(world, 2, **quantized | {"capacity": 3 * odd}, scale_format="ue8m0", layout="grouped"),
        call(world, 0, in_fp8(True), capacity=odd),
    ]
    gpu_ranks.run(world, steps, wanted, {}, functools.partial(columns, padded=padded))


def opaque(world: World, seed: int, num_scales: int, dtype: torch.dtype) -> list[Tokens]:
    """fp8 tokens with P words of any bits."""

    def tokens(rank: int) -> Tokens:
        made = cases.make_tokens(
            seed, rank, 1 + 2 * rank, num_experts=world.num_experts, hidden_dim=HIDDEN_DIM
        )
        generator = torch.Generator().manual_seed(rank)
        shape = (len(made.x), num_scales)
        words = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator)
        q, _ = reference.quantize(made.x)
        return replace(made, x=q, scales=words.to(torch.int32).view(dtype))

    return [tokens(rank) for rank in range(world.ranks)]


Expected = tuple[list[Tokens], dict[str, Any], list[Received]]


def opaque_scales(rank: Rank, world: World, wanted: Sequence[Expected]) -> None:
    with gpu_ranks.make(rank, world) as comm:
        if comm._device is not None:
            for by_rank in (False, True):
                layout: RowLayout = "by_rank" if by_rank else "padded"
                variant = DispatchOptions(layout=layout).number
                comm._device.prepare_dispatch(torch.float8_e4m3fn, variant)
        gpu_ranks.meet(rank, "prepared")
        for tokens, options, received in wanted:
            mine = tokens[rank.rank]
            live = comm.dispatch(
                cases.on_device(comm, mine.x),
                cases.on_device(comm, mine.topk_idx),
                cases.on_device(comm, mine.topk_weights),
                scales=cases.on_device(comm, mine.scales),
                **cases.in_options(**options, solo=True),
            )
            cases.finish(comm)
            got = cases.on_cpu(live)
            cases.assert_received(got, received[rank.rank])
            assert got.scales is not None
            assert mine.scales is not None
            assert got.scales.dtype == mine.scales.dtype


@pytest.mark.parametrize("world", FEW_WORLDS)
def test_given_scales_travel_as_they_are(world: World) -> None:
    layouts: list[dict[str, Any]] = [{}, {"layout": "grouped", "alignment": 4}, BY_RANK]
    wanted = []
    # One word, and more than a worker has threads.
    for num_scales, layout, column in itertools.product((1, 7, 150), layouts, (False, True)):
        dtype = torch.int32 if num_scales % 2 else torch.float32
        tokens = opaque(world, num_scales, num_scales, dtype)
        routing = reference.route(world.topology(), tokens, **layout, max_tokens=MAX_TOKENS)
        received = [reference.dispatch(routing, rank) for rank in range(world.ranks)]
        wanted.append((tokens, layout | {"column_scales": column}, received))
    gpu_ranks.run(world, opaque_scales, wanted)


# --- what else dispatch returns ---


def ranges(comm: AllToAll, step: Wanted) -> None:
    got, _ = cases.run_step(comm, step, with_ranges=True)
    assert got.ranges is not None
    assert got.source is not None
    first, count = got.ranges >> 32, got.ranges & 0xFFFFFFFF
    assert torch.equal(count.sum(dim=1), got.counts.long())
    sources = got.source.view(got.x.shape[0], -1, 2)[:, :, 0]
    for e, source in itertools.product(range(len(sources)), range(comm.world_size)):
        begin, rows = int(first[e, source]), int(count[e, source])
        assert (sources[e, begin : begin + rows] == source).all()


@pytest.mark.parametrize("world", gpu_ranks.worlds((1, 1), (2, 2), (2, 1), (4, 2), (3, 3), (8, 2)))
def test_ranges_are_the_rows_of_each_source(world: World) -> None:
    gpu_ranks.run(world, steps, [call(world, seed) for seed in range(5)], {}, ranges)


def late_rank(rank: Rank, world: World, wanted: Wanted, late: int) -> list[int]:
    with gpu_ranks.make(rank, world) as comm:
        gpu_ranks.prepare(rank, comm, [wanted])
        cases.run_step(comm, wanted)
        arguments = cases.dispatch_arguments(comm, wanted, with_wait_ticks=True)
        gpu_ranks.meet(rank, "ready")
        if rank.rank == late:
            gpu_ranks.meet(rank, "all others wait")
            time.sleep(0.2)  # their kernels are launched; other processes may have the GPU
        got = comm.dispatch(**arguments)
        if rank.rank != late:
            gpu_ranks.meet(rank, "all others wait")
        cases.finish(comm)
        comm.release(got)
        cases.finish(comm)
        assert got.wait_ticks is not None
        ticks: list[int] = got.wait_ticks.tolist()
        return ticks


@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (2, 1), (4, 4), (4, 2)))
def test_wait_ticks_name_the_rank_that_comes_late(world: World) -> None:
    late = world.ranks - 1
    results = gpu_ranks.run(world, late_rank, call(world, 0), late)
    for rank, ticks in enumerate(results):
        assert len(ticks) == world.ranks
        assert min(ticks) >= 0
        if rank != late:
            assert ticks[late] > ticks[rank], results


def several_outputs(comm: AllToAll, step: Wanted) -> Dispatched:
    wanted = {"with_ranges": True, "with_wait_ticks": True, "copy_topk": True}
    how = {"column_scales": True, "solo": True}
    arguments = cases.dispatch_arguments(comm, step, **wanted, **how)
    got = comm.dispatch(**arguments)
    assert got.topk_idx is not arguments["topk_idx"]
    return got


def outputs(comm: AllToAll, step: Wanted) -> None:
    got = several_outputs(comm, step)
    cases.finish(comm)
    cases.assert_received(cases.on_cpu(got), step.received[comm.rank])
    assert got.ranges is not None
    assert torch.equal(got.ranges.cpu(), step.received[comm.rank].ranges)
    assert torch.equal(got.topk_idx.cpu(), step.tokens[comm.rank].topk_idx)


@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (4, 2)))
def test_all_outputs_of_one_call(world: World) -> None:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "quantize": True, "scale_format": "ue8m0"}
    wanted = [call(world, seed, with_extras, **options) for seed in range(3)]
    gpu_ranks.run(world, steps, wanted, {}, outputs)
