"""What travels with tokens and comes back: types, fp8 and its scales, extras, scalars of rows.

As in test_all_to_all.py ranks are threads, compared with the reference bit for bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch

from moe_p2p import DispatchOptions
from moe_p2p.moe import reference
from tests.support import cases
from tests.support.cases import COUNTS, GROUPS, HIDDEN_DIM, LAYOUTS
from tests.support.ranks import Rank, on_ranks, run_threads


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("alignment", [1, 4])
def test_types_and_alignment(dtype: torch.dtype, alignment: int) -> None:
    options = {"layout": "grouped", "alignment": alignment, "dtype": dtype}
    run_threads(4, cases.run_steps, {"ranks_per_node": 2, "dtype": dtype}, options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_by_rank_of_other_types(dtype: torch.dtype) -> None:
    config = {"ranks_per_node": 2, "dtype": dtype}
    run_threads(4, cases.run_steps, config, {"layout": "by_rank", "dtype": dtype})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scale_format", ["float32", "power_of_two", "ue8m0"])
@pytest.mark.parametrize("column_scales", [False, True])
def test_quantizes_as_the_reference_does(
    layout: str, scale_format: str, column_scales: bool
) -> None:
    # 5 blocks, the last one short: the second word of ue8m0 has one byte and three zeros.
    config = {"ranks_per_node": 2, "dtype": torch.bfloat16, "hidden_dim": 560}
    options = {"quantize": True, "scale_format": scale_format, "column_scales": column_scales}

    def body(rank: Rank) -> None:
        with cases.make(rank, **config) as comm:
            for seed, counts in enumerate(COUNTS):
                tokens = [
                    cases.make_tokens(seed, r, counts[r], dtype=torch.bfloat16, hidden_dim=560)
                    for r in range(4)
                ]
                got, _ = cases.check_step(
                    comm, tokens, layout=layout, zero_padding=bool(seed % 2), **options
                )
                assert got.scales is not None
                *lead, capacity, width = got.scales.shape
                ld = -(-capacity // 4) * 4
                stride = (width * ld, 1, ld) if column_scales else (capacity * width, width, 1)
                assert got.scales.stride() == stride[-len(lead) - 2 :]

    run_threads(4, body)


def patterns(dtype: torch.dtype, *, finite: bool) -> torch.Tensor:
    """[rows, 256]: every value of a 16-bit type; of float32, those of 16 leading bits."""
    words = torch.arange(1 << 16, dtype=torch.int32)
    x = (words << 16).view(dtype) if dtype == torch.float32 else words.to(torch.int16).view(dtype)
    if finite:
        x = x[torch.isfinite(x)]
    x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))]
    return x[: len(x) // 256 * 256].view(-1, 256)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale_format", ["float32", "power_of_two", "ue8m0"])
@pytest.mark.parametrize("finite", [True, False])
def test_every_number_is_quantized_to_the_bits_of_the_reference(
    finite: bool, dtype: torch.dtype, scale_format: Literal["float32", "power_of_two", "ue8m0"]
) -> None:
    """torch.equal takes -0.0 for 0.0; the bytes differ."""
    x = patterns(dtype, finite=finite)
    expected, scales = reference.quantize(x, scale_format)
    assert (cases.bits(expected) == 0x80).any()
    assert finite == bool(scales.isfinite().all())
    if scale_format == "ue8m0":
        scales = reference.pack_ue8m0(scales)
    config = {"num_experts": 1, "topk": 1, "hidden_dim": 256, "max_tokens": len(x), "dtype": dtype}
    with cases.make(Rank(0, 1, torch.distributed.HashStore()), **config) as comm:
        got = comm.dispatch(
            x,
            torch.zeros(len(x), 1, dtype=torch.int64),
            options=DispatchOptions(layout="grouped", quantize=True, scale_format=scale_format),
        )
        assert torch.equal(cases.bits(got.x), cases.bits(expected))
        assert got.scales is not None
        assert torch.equal(cases.bits(got.scales), cases.bits(scales))


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(4)
def test_no_number_comes_of_what_is_none(rank: Rank, layout: str) -> None:
    with cases.make(rank, ranks_per_node=2, dtype=torch.bfloat16) as comm:
        for seed, quantize in enumerate([False, True]):
            tokens = [
                cases.with_no_numbers(cases.make_tokens(seed, r, 12, dtype=torch.bfloat16), r)
                for r in range(4)
            ]
            _, out = cases.check_step(comm, tokens, layout=layout, quantize=quantize)
            named = (tokens[comm.rank].topk_idx >= 0).any(1)
            assert bool(out[0].isnan().any()) == bool(named[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@on_ranks(4)
def test_a_sum_of_negative_zeros_has_the_sign_of_the_reference(
    rank: Rank, dtype: torch.dtype
) -> None:
    """Sums begin at 0.0: so the specification says, and so it is at every stage."""
    with cases.make(rank, ranks_per_node=2, dtype=dtype) as comm:
        tokens = [cases.make_tokens(1, r, 12, dtype=dtype) for r in range(4)]
        wanted = cases.expect(
            cases.topology_of(comm), tokens, max_tokens=12, experts=cases.negative_zeros
        )
        _, out = cases.run_step(comm, wanted)
        assert torch.equal(cases.bits(out), cases.bits(wanted.out[comm.rank]))
        assert not cases.bits(out).any()


@on_ranks(2)
def test_float8_of_the_caller_with_scales_and_without(rank: Rank) -> None:
    with cases.make(rank, ranks_per_node=1, dtype=torch.float8_e4m3fn) as comm:
        for seed, with_scales in enumerate([True, False]):
            tokens = []
            for r in range(2):
                t = cases.make_tokens(seed, r, 5 + r)
                q, scales = reference.quantize(t.x)
                tokens.append(replace(t, x=q, scales=scales if with_scales else None))
            cases.check_step(comm, tokens)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("column_scales", [False, True])
@on_ranks(2)
def test_scales_of_the_caller_may_be_opaque_words(
    rank: Rank, layout: str, column_scales: bool
) -> None:
    with cases.make(rank, ranks_per_node=1, dtype=torch.float8_e4m3fn, extra_bytes=64) as comm:
        for width in (1, 3, 7):
            tokens = []
            for r in range(2):
                t = cases.make_tokens(width, r, 5 + r)
                words = torch.arange(t.x.shape[0] * width, dtype=torch.int32) - (1 << 30) * r
                q, _ = reference.quantize(t.x)
                tokens.append(replace(t, x=q, scales=words.reshape(-1, width)))
            cases.check_received(comm, tokens, layout=layout, column_scales=column_scales)


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(4)
def test_extras_travel_as_bytes(rank: Rank, layout: str) -> None:
    with cases.make(rank, ranks_per_node=2, extra_bytes=64) as comm:
        tokens = []
        for r in range(4):
            t = cases.make_tokens(1, r, 4 + r)
            count = t.x.shape[0]
            numbers = torch.arange(count * 3, dtype=torch.int64).reshape(count, 3) + 100 * r
            flags = (numbers % 2 == 0)[:, :1].contiguous()
            halves = torch.full((count, 2), float(r), dtype=torch.float16)
            tokens.append(replace(t, extras=(numbers, flags, halves)))
        got, _ = cases.check_step(comm, tokens, layout=layout)
        assert [extra.dtype for extra in got.extras] == [
            torch.int64,
            torch.bool,
            torch.float16,
        ]


@on_ranks(2)
def test_empty_padding_is_zero_when_asked(rank: Rank) -> None:
    with cases.make(rank) as comm:
        t = cases.make_tokens(2, rank.rank, 4)
        for layout in LAYOUTS:
            options = DispatchOptions(layout=layout, zero_padding=True, solo=True)
            got = comm.dispatch(t.x, t.topk_idx, t.topk_weights, options=options)
            tokens = [cases.make_tokens(2, r, 4) for r in range(2)]
            routing = reference.route(cases.topology_of(comm), tokens, layout=layout, max_tokens=12)
            want = reference.dispatch(routing, rank.rank)
            assert torch.equal(got.x, want.x)
            assert torch.equal(got.row_weights, want.row_weights)


@pytest.mark.parametrize(("world_size", "ranks_per_node"), GROUPS)
def test_scalars_of_rows_by_rank_add_up(world_size: int, ranks_per_node: int) -> None:
    def body(rank: Rank) -> None:
        with cases.make(rank, ranks_per_node=ranks_per_node, num_experts=12) as comm:
            for seed, counts in enumerate(COUNTS):
                tokens = [
                    cases.make_tokens(seed, r, counts[r], num_experts=12) for r in range(world_size)
                ]
                wanted = cases.expect(
                    cases.topology_of(comm), tokens, max_tokens=12, layout="by_rank"
                )
                routing = reference.route(
                    cases.topology_of(comm), tokens, layout="by_rank", max_tokens=12
                )
                received = comm.dispatch(**cases.dispatch_arguments(comm, wanted))
                scalars = [
                    torch.rand(r.row_weights.shape, generator=torch.Generator().manual_seed(i))
                    for i, r in enumerate(wanted.received)
                ]
                arguments = cases.combine_arguments(comm, wanted)
                out, back = comm.combine(
                    dispatched=received, row_scalars=scalars[rank.rank], **arguments
                )
                assert torch.equal(out, wanted.out[rank.rank])
                assert torch.equal(back, reference.combine_scalars(routing, rank.rank, scalars))

    run_threads(world_size, body)


@on_ranks(4)
def test_combine_returns_scalars_to_their_place(rank: Rank) -> None:
    with cases.make(rank, ranks_per_node=2) as comm:
        tokens = [cases.make_tokens(5, r, 3 + r) for r in range(4)]
        mine = tokens[rank.rank]
        routing = reference.route(cases.topology_of(comm), tokens, max_tokens=12)
        rows = [reference.dispatch(routing, r) for r in range(4)]
        scalars = [r.x.reshape(-1, HIDDEN_DIM)[:, 0].contiguous() for r in rows]
        received = comm.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
        out, back = comm.combine(
            rows[rank.rank].x, received, weighted=False, row_scalars=scalars[rank.rank]
        )
        assert torch.equal(back, reference.combine_scalars(routing, rank.rank, scalars))
        want = reference.combine(
            routing, rank.rank, [r.x for r in rows], out_dtype=torch.float32, weighted=False
        )
        assert torch.equal(out, want)
