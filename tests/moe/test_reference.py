"""The specification itself: tiny cases worked by hand, and a dense oracle that knows no ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_p2p.moe import reference
from moe_p2p.moe.reference import Received, Tokens, Topology, wire

TWO_BY_TWO = Topology(world_size=4, ranks_per_node=2, num_experts=8)


def expert(e: int, x: Tensor) -> Tensor:
    """Different for every expert, and no two of them commute."""
    return (x.float() * (0.5 + 0.25 * e) + math.sin(e)).to(x.dtype)


def apply_experts(topology: Topology, rank: int, received: Received) -> Tensor:
    """Expert outputs in the rows of `received`; the other rows hold one that must not leak."""
    y = torch.full_like(received.x.reshape(-1, received.x.shape[-1]), 1e4)
    flat = received.x.reshape(y.shape)
    for i, e in enumerate(topology.local_experts(rank).tolist()):
        start = int(received.offsets[i])
        rows = slice(start, start + int(received.counts[i]))
        y[rows] = expert(e, flat[rows])
    return y


def dense(tokens: Tokens, function: Callable[[int, Tensor], Tensor], num_experts: int) -> Tensor:
    """Weighted sum over experts computed expert by expert, in float64."""
    out = torch.zeros(tokens.x.shape, dtype=torch.float64)
    weights = torch.ones(tokens.topk_idx.shape)
    if tokens.topk_weights is not None:
        weights = tokens.topk_weights
    for e in range(num_experts):
        share = (weights.double() * (tokens.topk_idx == e)).sum(dim=1)
        out += share[:, None] * function(e, tokens.x).double()
    out[tokens.count :] = 0
    return out


def random_tokens(
    generator: torch.Generator, counts: list[int], *, dtype: torch.dtype, topk: int = 3
) -> list[Tokens]:
    made = []
    for count in counts:
        scores = torch.rand(count, 8, generator=generator)
        weights, idx = scores.topk(topk, dim=1)
        idx[torch.rand(idx.shape, generator=generator) < 0.2] = -1
        x = torch.randn(count, 48, generator=generator).to(dtype)
        made.append(Tokens(x=x, topk_idx=idx, topk_weights=weights))
    return made


def test_rows_by_hand() -> None:
    topology = Topology(world_size=2, ranks_per_node=1, num_experts=4)
    tokens = [
        Tokens(
            x=torch.tensor([[1.0], [2.0]]),
            topk_idx=torch.tensor([[3, 2], [2, -1]]),
            topk_weights=torch.tensor([[0.5, 0.25], [2.0, 9.0]]),
        ),
        Tokens(
            x=torch.tensor([[3.0]]),
            topk_idx=torch.tensor([[2, 0]]),
            topk_weights=torch.tensor([[4.0, 1.0]]),
        ),
    ]
    routing = reference.route(topology, tokens, layout="grouped", capacity=8, alignment=2)
    got = reference.dispatch(routing, 1)
    # expert 2: tokens 0 and 1 of rank 0, token 0 of rank 1; padded to 4 rows. expert 3: token 0.
    assert got.counts.tolist() == [3, 1]
    assert got.offsets.tolist() == [0, 4, 6]
    assert got.x.flatten().tolist() == [1, 2, 3, 0, 1, 0, 0, 0]
    assert got.row_weights.tolist() == [0.25, 2, 4, 0, 0.5, 0, 0, 0]
    assert got.source[got.rows()].tolist() == [[0, 0], [0, 1], [1, 0], [0, 0]]
    assert reference.dispatch(routing, 0).counts.tolist() == [1, 0]
    y = [reference.dispatch(routing, rank).x for rank in range(2)]
    assert reference.combine(routing, 0, y, out_dtype=torch.float32).tolist() == [[0.75], [4.0]]
    assert reference.combine(routing, 1, y, out_dtype=torch.float32).tolist() == [[15.0]]


def test_padded_rows_start_at_capacity() -> None:
    topology = Topology(world_size=1, ranks_per_node=1, num_experts=2)
    tokens = [Tokens(x=torch.tensor([[1.0], [2.0]]), topk_idx=torch.tensor([[1], [1]]))]
    got = reference.dispatch(reference.route(topology, tokens, layout="padded"), 0)
    assert got.x.tolist() == [[[0.0], [0.0]], [[1.0], [2.0]]]
    assert got.offsets.tolist() == [0, 2, 4]
    assert got.row_weights.tolist() == [0, 0, 1, 1]


def test_stages_round_where_documented() -> None:
    """bf16 keeps 8 bits: 256 + 1 rounds to 256, so the places of rounding show."""
    topology = Topology(world_size=4, ranks_per_node=2, num_experts=4)
    idx = torch.tensor([[0, 1, 2, 3]])
    empty = Tokens(x=torch.zeros(0, 1), topk_idx=torch.zeros(0, 4, dtype=torch.int64))
    tokens = [Tokens(x=torch.ones(1, 1), topk_idx=idx), empty, empty, empty]
    routing = reference.route(topology, tokens, layout="grouped", capacity=1)
    value = [torch.tensor([[v]]) for v in (256.0, 1.0, 256.0, 1.0)]
    # own node: 256 + 1 in fp32; other node: round(256 + 1) = 256; 257 + 256 = 513, rounds to 512.
    assert reference.combine(routing, 0, value, out_dtype=torch.bfloat16).item() == 512
    value[1] = torch.tensor([[3.0]])
    # 259 + 256 = 515 lies nearer to 516 than to 512.
    assert reference.combine(routing, 0, value, out_dtype=torch.bfloat16).item() == 516
    assert reference.combine(routing, 0, value, out_dtype=torch.float32).item() == 516
    # The other node loses the 1 before the source adds: 2 + round(256 + 1) = 258, where adding all
    # four in fp32 would give 259, which rounds to 260.
    value = [torch.tensor([[v]]) for v in (1.0, 0.0, 256.0, 1.0)]
    assert reference.combine(routing, 0, value, out_dtype=torch.bfloat16).item() == 256
    value = [torch.tensor([[v]]) for v in (2.0, 0.0, 256.0, 1.0)]
    assert reference.combine(routing, 0, value, out_dtype=torch.bfloat16).item() == 258


@pytest.mark.parametrize("layout", ["padded", "grouped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_equals_dense_moe(layout: reference.Layout, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    for counts in ([5, 0, 3, 9], [1, 1, 1, 1], [0, 0, 0, 4]):
        tokens = random_tokens(generator, counts, dtype=dtype)
        routing = reference.route(TWO_BY_TWO, tokens, layout=layout, alignment=4)
        received = [reference.dispatch(routing, rank) for rank in range(4)]
        y = [apply_experts(TWO_BY_TWO, rank, r) for rank, r in enumerate(received)]
        # Three roundings to dtype of sums below 16, on top of what fp32 loses.
        atol = 3 * 16 * torch.finfo(dtype).eps
        for source in range(4):
            out = reference.combine(routing, source, y, out_dtype=dtype)
            want = dense(tokens[source], expert, 8)
            torch.testing.assert_close(out.double(), want, rtol=0, atol=atol)


def test_any_expert_placement_gives_the_same_sum() -> None:
    generator = torch.Generator().manual_seed(3)
    tokens = random_tokens(generator, [4, 4, 4, 4], dtype=torch.float32)
    uneven = Topology(
        world_size=4, ranks_per_node=2, num_experts=8, expert_rank=(3, 0, 0, 3, 1, 3, 0, 3)
    )
    assert uneven.local_experts(3).tolist() == [0, 3, 5, 7]
    assert uneven.local_experts(2).tolist() == []
    assert uneven.max_local_experts() == 4
    outs = []
    for topology in (TWO_BY_TWO, uneven):
        routing = reference.route(topology, tokens, layout="grouped")
        y = [apply_experts(topology, r, reference.dispatch(routing, r)) for r in range(4)]
        outs.append([reference.combine(routing, s, y, out_dtype=torch.float32) for s in range(4)])
    for one, other in zip(*outs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-5)  # fp32 sums of 3, reordered


def test_num_tokens_and_extras() -> None:
    generator = torch.Generator().manual_seed(5)
    base = random_tokens(generator, [4, 4, 4, 4], dtype=torch.float32)
    tokens = [
        Tokens(
            x=t.x,
            topk_idx=t.topk_idx,
            topk_weights=t.topk_weights,
            num_tokens=2,
            extras=(torch.arange(4, dtype=torch.int32) + 100 * rank, t.x[:, :2].clone()),
        )
        for rank, t in enumerate(base)
    ]
    routing = reference.route(TWO_BY_TWO, tokens, layout="grouped")
    received = [reference.dispatch(routing, rank) for rank in range(4)]
    for got in received:
        rows = got.rows()
        origin = got.source[rows]
        assert bool((origin[:, 1] < 2).all())
        assert torch.equal(got.extras[0][rows], origin[:, 1] + 100 * origin[:, 0])
        assert torch.equal(got.extras[1][rows], got.x[rows, :2])
    y = [r.x for r in received]
    assert not reference.combine(routing, 0, y, out_dtype=torch.float32)[2:].any()


def test_scalars_return_to_their_place() -> None:
    generator = torch.Generator().manual_seed(9)
    tokens = random_tokens(generator, [4, 0, 2, 4], dtype=torch.float32)
    routing = reference.route(TWO_BY_TWO, tokens)
    weights = [reference.dispatch(routing, rank).row_weights for rank in range(4)]
    for source, t in enumerate(tokens):
        got = reference.combine_scalars(routing, source, weights)
        assert t.topk_weights is not None
        assert torch.equal(got, t.topk_weights.where(t.topk_idx >= 0, 0.0))


def test_quantize_by_hand() -> None:
    x = torch.zeros(1, 130)
    x[0, 0], x[0, 1], x[0, 128] = 2.0, 1.0, -0.5
    q, scales = reference.quantize(x)
    assert q.float()[0, [0, 1, 2, 128, 129]].tolist() == [448, 224, 0, -448, 0]
    torch.testing.assert_close(scales, torch.tensor([[2 / 448, 0.5 / 448]]), rtol=1e-7, atol=0)
    torch.testing.assert_close(reference.dequantize(q, scales), x, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale_format", ["float32", "power_of_two", "ue8m0"])
def test_a_block_that_holds_no_number_is_none_as_a_whole(
    scale_format: reference.ScaleFormat,
) -> None:
    x = torch.ones(3, 256, dtype=torch.bfloat16)
    x[0, 1], x[1, 2], x[2, 3] = torch.nan, -torch.inf, -0.0
    x[:2, 4] = -7
    q, scales = reference.quantize(x, scale_format)
    codes = q.view(torch.uint8)
    assert scales[:2, 0].tolist() == [torch.inf] * 2
    assert codes[:2, [0, 1, 2, 4]].tolist() == [[0, 0x7F, 0, 0x80], [0, 0, 0x7F, 0x80]]
    assert codes[2, 3] == 0x80
    if scale_format == "ue8m0":
        scales = reference.pack_ue8m0(scales)
        assert scales.view(torch.uint8)[:2, 0].tolist() == [255, 255]
    rows = reference.dequantize(q, scales)
    assert rows[:2, :128].isnan().all()
    assert rows[:2, 128:].isfinite().all()
    assert rows[2].isfinite().all()


def test_quantize_error_is_half_a_step() -> None:
    x = torch.randn(16, 300, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    q, scales = reference.quantize(x)
    error = (reference.dequantize(q, scales) - x.float()).abs()
    # e4m3 has 3 mantissa bits: half a step is 1/16 of the value, or of the smallest normal 2**-6.
    bound = torch.maximum(x.float().abs() / 16, scales.repeat_interleave(128, 1)[:, :300] / 1024)
    assert bool((error <= bound * 1.0001).all())
    assert q.dtype == torch.float8_e4m3fn


def test_quantized_dispatch_carries_scales() -> None:
    generator = torch.Generator().manual_seed(2)
    tokens = random_tokens(generator, [3, 1, 0, 2], dtype=torch.bfloat16)
    routing = reference.route(TWO_BY_TWO, tokens, layout="grouped", quantized=True)
    for rank in range(4):
        got = reference.dispatch(routing, rank)
        assert got.scales is not None
        for row in got.rows().tolist():
            source, token = got.source[row].tolist()
            q, scales = reference.quantize(tokens[source].x)
            assert torch.equal(got.x[row].view(torch.uint8), q[token].view(torch.uint8))
            assert torch.equal(got.scales[row], scales[token])


def test_capacity_too_small_is_refused() -> None:
    topology = Topology(world_size=1, ranks_per_node=1, num_experts=2)
    tokens = [Tokens(x=torch.ones(3, 1), topk_idx=torch.zeros(3, 1, dtype=torch.int64))]
    with pytest.raises(ValueError, match="rank 0 gets 3 rows, capacity is 2"):
        reference.route(topology, tokens, layout="padded", capacity=2)


def test_bytes_by_hand() -> None:
    # Rank 0's token 0 has both experts on the other node, token 1 one there, token 2 none.
    idx = torch.tensor([[4, 6], [0, 7], [1, 2]])
    empty = Tokens(x=torch.zeros(0, 64), topk_idx=torch.zeros(0, 2, dtype=torch.int64))
    tokens = [Tokens(x=torch.zeros(3, 64), topk_idx=idx), empty, empty, empty]
    routing = reference.route(TWO_BY_TWO, tokens)
    got = wire.wire_bytes(routing, 0, combine_dtype=torch.bfloat16)
    # dispatch: header 128 + counts 2 ranks * 2 experts * 4 -> 128, two slots of 128 + 256.
    assert got.dispatch == 128 + 128 + 2 * 384
    assert got.combine == 128 + 2 * 128
    assert got.pair == got.dispatch + got.combine
    least = wire.floor_bytes(routing, 0, combine_dtype=torch.bfloat16)
    assert (least.dispatch, least.combine) == (2 * 256, 2 * 128)
    flat = wire.floor_bytes(routing, 0, combine_dtype=torch.bfloat16, dedup=False)
    assert (flat.dispatch, flat.combine) == (3 * 256, 3 * 128)
    scalars = wire.wire_bytes(routing, 0, combine_dtype=torch.bfloat16, scalars=True)
    assert scalars.combine == 128 + 2 * 256  # 128 + 2 scalars of 4 bytes, in lines
    steps = wire.wire_bytes(routing, 0, combine_dtype=torch.bfloat16, num_steps=3)
    # Each further step repeats header and counts; with several, each has an empty other half.
    assert steps.dispatch == got.dispatch + 2 * 256 + 3 * 128
    assert steps.combine == got.combine + 2 * 128 + 3 * 128
    silent = wire.wire_bytes(routing, 1, combine_dtype=torch.bfloat16)
    assert silent.pair == 128 + 128 + 128


@pytest.mark.parametrize(("topk", "head"), [(1, 128), (8, 128), (12, 128), (13, 256), (32, 384)])
def test_slot_head_grows_in_lines(topk: int, head: int) -> None:
    assert wire.slot_head_bytes(topk) == head
