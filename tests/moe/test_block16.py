"""block16, partial sums with a scale for 8 values: its error, and what becomes of odd values.

What travels bit for bit as the reference has it, in every form of call: test_int10.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moe_p2p import CombineOptions, InvalidArgumentError
from moe_p2p.moe import reference
from moe_p2p.moe.reference import Tokens, Topology, block16
from tests.support import cases
from tests.support.ranks import Rank, run_threads

LARGEST = torch.finfo(torch.float32).max
STEPS = 10922  # a block's largest value is at least so many of its scales
MOST = 1.5 * 2.0**45 * (1 - 2.0**-23 * 0x5FF / 1.5)  # a value so large makes NaN of its block
GATE = 8 * 2.0**-8  # CollectiveX's, of |error| / max(|expected|, 0.02)


def of_any_bits(seed: int, rows: int, hidden: int) -> Tensor:
    """fp32 of random bits: all exponents, denormals, NaN and infinities among them."""
    bits = torch.randint(-(1 << 31), 1 << 31, (rows, hidden), generator=_generator(seed))
    return bits.to(torch.int32).view(torch.float32)


def near(seed: int, rows: int, hidden: int) -> Tensor:
    """Blocks whose values differ by up to 2^12, at random sizes, with halfway cases."""
    generator = _generator(seed)
    sizes = torch.randint(-140, 128, (rows, hidden // 8, 1), generator=generator).double()
    down = torch.randint(0, 13, (rows, hidden // 8, 8), generator=generator)
    steps = torch.randint(-(1 << 13), 1 << 13, (rows, hidden // 8, 8), generator=generator)
    values = steps.double() * 2.0**-13 * torch.exp2(sizes - down)
    return values.flatten(1).to(torch.float32)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("draw", [of_any_bits, near])
def test_a_value_is_as_close_as_its_block_allows(draw: object) -> None:
    for seed in range(4):
        x = draw(seed, 64, 512)  # type: ignore[operator]
        blocks = x.unflatten(1, (-1, 8)).double()
        most = blocks.abs().amax(-1, keepdim=True)
        got = block16.round_trip(x).unflatten(1, (-1, 8)).double()
        good = most < MOST
        assert bool(got.isnan().all(-1, keepdim=True).eq(~good).all())
        error = (got - blocks).abs()
        bound = (most / STEPS).clamp_min(2.0**-95) / 2
        assert bool((error <= bound)[good.expand(error.shape)].all())
        again = block16.round_trip(got.flatten(1).float())
        assert torch.equal(again.nan_to_num(7.0), got.flatten(1).float().nan_to_num(7.0))


def test_a_block_at_the_edge_of_a_scale_rounds_once() -> None:
    """Where the largest value is rounded across the edge, its scale must not change."""
    edges = torch.tensor([0x3F800000, 0x3FC00000], dtype=torch.int32)  # 1.0, 1.5
    bits = (edges[:, None] + torch.arange(-2200, 200, dtype=torch.int32)).flatten()
    largest = bits.view(torch.float32)
    x = torch.stack(
        [largest, *[largest * factor for factor in (0.3, -0.7, 0.11, 1, -1, 0.5, 0)]], 1
    )
    got = block16.round_trip(x)
    integers, _ = block16.quantize(x)
    assert integers.abs().max() == 16382
    assert torch.equal(block16.round_trip(got), got)


def test_odd_values_are_kept_or_seen() -> None:
    def of(*values: float) -> list[float]:
        block = torch.tensor([[*values, *[0.0] * (8 - len(values))]])
        got: list[float] = block16.round_trip(block)[0].tolist()
        return got[: len(values)]

    assert of(0.0, -0.0) == [0.0, 0.0]
    assert of(1.5, 3 * 2.0**-13, -1.5) == [1.5, 3 * 2.0**-13, -1.5]  # a scale of 2^-13
    assert of(1.0, 2.0**-17) == [1.5 * 2.0**-14 * 10923, 0.0]  # one of 1.5 * 2^-14
    assert of(1.5 * 2.0**31 * 10923) == [1.5 * 2.0**31 * 10923]  # the largest scale
    assert of(2.0**-95, 2.0**-96, -(2.0**-97), 1e-44) == [2.0**-95, 0.0, 0.0, 0.0]
    for lost in (2.0**46, LARGEST, math.inf, -math.inf, math.nan):
        assert all(math.isnan(value) for value in of(1.0, lost, 2.0))
    x = torch.ones(1, 24)
    x[0, 8] = math.nan
    assert block16.round_trip(x).isnan().tolist()[0] == [False] * 8 + [True] * 8 + [False] * 8


@pytest.mark.parametrize("draw", [of_any_bits, near])
def test_a_row_travels_as_the_reference_has_it(draw: object) -> None:
    hidden = 1024  # whole blocks of the sums' accumulators, twice

    def sent(rank: Rank) -> None:
        with cases.make(rank, hidden_dim=hidden, num_experts=1, topk=1) as comm:
            for seed in range(8):
                y = draw(seed, 12, hidden)  # type: ignore[operator]
                idx = torch.zeros(12, 1, dtype=torch.int64)
                got = comm.dispatch(y, idx, layout="grouped", capacity=12)
                options = CombineOptions(partials="block16", weighted=False)
                out = comm.combine(y, got, options=options)
                want = block16.round_trip(y)
                assert torch.equal(out.isnan(), want.isnan())
                assert torch.equal(out.nan_to_num(7.0), want.nan_to_num(7.0))

    run_threads(1, sent)


def test_a_width_of_no_whole_blocks_is_refused_by_name() -> None:
    def refused(rank: Rank) -> None:
        with cases.make(rank, hidden_dim=12) as comm:
            tokens = cases.make_tokens(0, 0, 3, hidden_dim=12)
            got = comm.dispatch(tokens.x, tokens.topk_idx)
            text = "partials is block16 and hidden_dim 12, must be a multiple of 8"
            with pytest.raises(InvalidArgumentError, match=text):
                comm.combine(got.x, got, options=CombineOptions(partials="block16"))

    run_threads(1, refused)


# --- beside CollectiveX's oracle: experts that are affine functions, sums that cancel ---


def _oracle(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, H], and expert ids and weights [T, K]: lattice values, weights that add up to 1."""
    generator = _generator(seed)
    hidden, experts = 7168, 256
    token = torch.arange(tokens)[:, None]
    x = ((token * 131 + torch.arange(hidden) * 17 + seed * 19) % 257 - 128) / 64
    idx = torch.rand(tokens, experts, generator=generator).topk(8, dim=1).indices
    weights = torch.randint(1, 65536, (tokens, 8), generator=generator).double()
    return x.bfloat16(), idx, (weights / weights.sum(1, keepdim=True)).float()


def _row(x: Tensor, expert: Tensor) -> Tensor:
    """What experts [T] make of x [T, H]."""
    scale = ((expert * 17 + 5) % 31 + 1) / 32
    shift = ((expert * 29 + 7) % 37 - 18) / 64
    slope = ((expert * 43 + 11) % 41 - 20) / 128
    column = (torch.arange(x.shape[1]) * 13 % 17 - 8) / 8
    return (x.float() * scale[:, None] + shift[:, None] + slope[:, None] * column).bfloat16()


def _worst(world: int, kind: str | None, seed: int) -> float:
    """The largest error of one source's tokens, relative as CollectiveX has it."""
    x, idx, weights = _oracle(64, seed)
    topology = Topology(world_size=world, ranks_per_node=min(world, 8), num_experts=256)
    empty = Tokens(x=x[:0], topk_idx=idx[:0], topk_weights=weights[:0])
    tokens = [Tokens(x=x, topk_idx=idx, topk_weights=weights), *[empty] * (world - 1)]
    routing = reference.route(topology, tokens, layout="grouped")
    rank, row = routing.table(0)
    y = [torch.zeros(int(offsets[-1]), x.shape[1]).bfloat16() for offsets in routing.offsets]
    want = torch.zeros(x.shape)
    for k in range(8):
        rows = _row(x, idx[:, k])
        want += weights[:, k, None] * rows.float()
        for token, (r, at) in enumerate(zip(rank[:, k].tolist(), row[:, k].tolist(), strict=True)):
            y[r][at] = rows[token]
    how = {"combine_dtype": kind}
    out = reference.combine(routing, 0, y, out_dtype=torch.bfloat16, **how)  # type: ignore[arg-type]
    return float(((out.float() - want).abs() / want.abs().clamp_min(0.02)).max())


@pytest.mark.parametrize(("world", "seed"), [(2, 1), (2, 67), (8, 105), (16, 1)])
def test_sums_pass_the_gate_that_bfloat16_fails(world: int, seed: int) -> None:
    if (world, seed) != (2, 67):
        assert _worst(world, None, seed) > GATE
    assert _worst(world, "block16", seed) <= 0.006
