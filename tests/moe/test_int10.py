"""Combines whose partial sums travel as 10-bit integers: bit for bit as the reference has them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from moe_p2p import AllToAll, CombineOptions, InvalidArgumentError
from moe_p2p.moe import reference
from moe_p2p.moe.layouts import RowLayout
from moe_p2p.moe.options import Partials
from moe_p2p.moe.reference import Topology, int10
from tests.moe.test_late_weights import biases_of
from tests.support.cases import (
    Wanted,
    combine_arguments,
    dispatch_arguments,
    expect,
    finish,
    make,
    make_tokens,
    on_device,
)
from tests.support.ranks import Rank, run_threads

HIDDEN_DIM = 544  # two units of 256, and a unit of one block
COUNTS = [[5, 3, 0, 12], [0] * 4, [12] * 4, [7, 0, 12, 1]]
LAYOUTS = get_args(RowLayout)
INT10 = CombineOptions(partials="int10")
KINDS: tuple[Partials, ...] = ("int10", "int10_nodes")


def with_specials(tokens: reference.Tokens, rank: int) -> reference.Tokens:
    """Rows with NaN, infinities, zeros, the smallest and very large numbers, block by block."""
    x = tokens.x.clone()
    for i, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        x[i::3, (rank + 32 * i) % x.shape[1]] = value
    x[:, 96:128] = 0
    x[:, 128:160] *= torch.finfo(x.dtype).tiny
    x[:, 160:192] = torch.finfo(x.dtype).max / 64 * x[:, 160:192].sign()
    return replace(tokens, x=x)


def sums(
    topology: Topology, wanted: Wanted, kind: Partials | None, num_biases: int
) -> list[Tensor]:
    """What the reference makes of `wanted` with this type, by rank."""
    layout, most = wanted.options["layout"], wanted.options["max_tokens"]
    routing = reference.route(topology, wanted.tokens, layout=layout, max_tokens=most)
    return [
        reference.combine(
            routing,
            rank,
            wanted.y,
            out_dtype=wanted.out_dtype,
            bias=biases_of(rank, wanted.out[rank], num_biases) if num_biases else (),
            combine_dtype=kind,
        )
        for rank in range(topology.world_size)
    ]


def same(got: Tensor, want: Tensor) -> bool:
    """Bit for bit, but for the bits of NaN."""
    return bool(((got.cpu() == want) | (got.cpu().isnan() & want.isnan())).all())


def run_int10(
    comm: AllToAll, wanted: Wanted, want: list[Tensor], kind: Partials, num_biases: int
) -> None:
    """The whole call with and without scalars, then halves."""
    got = comm.dispatch(**dispatch_arguments(comm, wanted))
    more: dict[str, Any] = {}
    if num_biases:
        bias = [on_device(comm, b) for b in biases_of(comm.rank, want[comm.rank], num_biases)]
        more["bias"] = bias[0] if num_biases == 1 else tuple(bias)
    finish(comm)
    back = combine_arguments(comm, wanted, partials=kind) | {"dispatched": got}
    out = comm.combine(**back, **more)
    finish(comm)
    assert same(out, want[comm.rank])
    mine = wanted.tokens[comm.rank]
    assert mine.topk_weights is not None
    scalars = got.row_weights
    if got.row_topk is not None:
        scalars = scalars.where(got.row_topk >= 0, 0.0)
    out, found = comm.combine(**back, **more, row_scalars=scalars)
    finish(comm)
    assert same(out, want[comm.rank])
    assert torch.equal(found.cpu(), mine.topk_weights.where(mine.topk_idx >= 0, 0.0))
    into = torch.empty_like(out)
    back |= {"options": CombineOptions(partials=kind)}
    assert comm.combine(**back, **more, out=into) is into
    finish(comm)
    assert same(into, want[comm.rank])
    if wanted.options["max_tokens"] > comm.config.step_tokens * comm.config.steps_in_flight:
        return  # halves take no more steps
    sent = comm.combine_send(**back)
    out = comm.combine_recv(sent, **more)
    finish(comm)
    assert same(out, want[comm.rank])


def steps_of(topology: Topology, dtype: torch.dtype, max_tokens: int = 12) -> list[Wanted]:
    made = []
    for seed, counts in enumerate(COUNTS):
        tokens = [
            make_tokens(seed, rank, counts[rank], dtype=dtype, hidden_dim=HIDDEN_DIM)
            for rank in range(topology.world_size)
        ]
        if seed == 3:
            tokens = [with_specials(each, rank) for rank, each in enumerate(tokens)]
        layout = LAYOUTS[seed % len(LAYOUTS)]
        made.append(expect(topology, tokens, max_tokens=max_tokens, layout=layout))
    return made


def int10_steps(
    rank: Rank, wanted: list[Wanted], wants: list[list[Tensor]], kind: Partials, config: Any
) -> None:
    with make(rank, hidden_dim=HIDDEN_DIM, **config) as comm:
        for i, (step, want) in enumerate(zip(wanted, wants, strict=True)):
            run_int10(comm, step, want, kind, i % 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks_per_node", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_those_of_the_reference(
    kind: Partials, ranks_per_node: int, dtype: torch.dtype
) -> None:
    topology = Topology(world_size=4, ranks_per_node=ranks_per_node, num_experts=8)
    wanted = steps_of(topology, dtype)
    wants = [sums(topology, step, kind, i % 3) for i, step in enumerate(wanted)]
    plain = [sums(topology, step, None, i % 3) for i, step in enumerate(wanted)]
    changes = kind == "int10" or ranks_per_node < 4
    assert all(torch.equal(a, b) for a, b in zip(wants[2], plain[2], strict=True)) != changes
    config = {"dtype": dtype, "ranks_per_node": ranks_per_node}
    run_threads(4, int10_steps, wanted, wants, kind, config | {"part_bytes": 2048})
    run_threads(4, int10_steps, wanted, wants, kind, config | {"chunk_tokens": 6})


def test_a_block_rounds_to_its_largest_value() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 320) * torch.rand(64, 320).exp()
    q, scale = int10.quantize(x)
    assert int(q.abs().max()) <= int10.MOST
    most = x.unflatten(1, (-1, int10.BLOCK)).abs().amax(-1)
    assert bool((q.abs().amax(-1) >= 507).all())  # a bf16 scale is at most 2^-7 too large
    error = (int10.dequantize(q, scale) - x).unflatten(1, (-1, int10.BLOCK)).abs().amax(-1)
    assert bool((error <= most / 1000).all())
    assert torch.equal(int10.round_trip(torch.zeros(2, 64)), torch.zeros(2, 64))
    tiny = torch.full((1, 32), 2.0**-140)
    assert torch.equal(int10.round_trip(tiny), torch.zeros(1, 32))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_no_number_comes_of_what_is_none(value: float) -> None:
    x = torch.ones(1, 96)
    x[0, 40] = value
    got = int10.round_trip(x)
    assert bool(got[0, 32:64].isnan().all())
    assert bool((got[0, :32] - 1).abs().max() < 1 / 500)
    assert bool(got[0, 64:].isfinite().all())


def test_what_cannot_be_sent_so_is_refused_by_name() -> None:
    tokens = make_tokens(0, 0, 3, hidden_dim=HIDDEN_DIM)

    def refused(rank: Rank) -> None:
        with make(rank, hidden_dim=HIDDEN_DIM) as comm:
            got = comm.dispatch(tokens.x, tokens.topk_idx, layout="grouped")
            with pytest.raises(InvalidArgumentError, match="partials is 'int9', must be one"):
                CombineOptions(partials="int9")
            with pytest.raises(InvalidArgumentError, match="order='ranks' only"):
                comm.combine(got.x, got, options=CombineOptions(partials="int10", order="topk"))
            y = got.x.clone().requires_grad_()
            with pytest.raises(InvalidArgumentError, match="leave out partials"):
                comm.combine(y, got, options=INT10)
            sent = comm.combine_send(got.x, got, options=INT10)
            comm.combine_recv(sent)
        with make(rank, hidden_dim=272) as comm:
            x = tokens.x[:, :272].contiguous()
            got = comm.dispatch(x, tokens.topk_idx)
            with pytest.raises(InvalidArgumentError, match="272, must be a multiple of 32"):
                comm.combine(got.x, got, options=INT10)
            comm.combine(got.x, got)
        with make(rank, hidden_dim=32) as comm:
            x = tokens.x[:, :32].contiguous()
            got = comm.dispatch(x, tokens.topk_idx)
            with pytest.raises(InvalidArgumentError, match="a combined row is 384 bytes"):
                comm.combine(got.x, got, options=INT10)
            comm.combine(got.x, got)

    run_threads(1, refused)


def test_ranks_that_differ_are_named() -> None:
    def body(rank: Rank) -> None:
        tokens = make_tokens(0, rank.rank, 3, hidden_dim=HIDDEN_DIM)
        with make(rank, hidden_dim=HIDDEN_DIM) as comm:
            got = comm.dispatch(tokens.x, tokens.topk_idx)
            kind: Partials | None = "int10" if rank.rank else None
            with pytest.raises(Exception, match=r"10-bit integer rows"):
                comm.combine(got.x, got, options=CombineOptions(partials=kind))

    run_threads(2, body)
