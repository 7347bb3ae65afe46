"""Combines whose partial sums travel as 10-bit integers, or in blocks of 16-bit values: bit for bit
as the reference has them. The blocks' arithmetic: test_block16.py."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from moe_p2p import AllToAll, CombineOptions, InvalidArgumentError
from moe_p2p.moe import reference
from moe_p2p.moe.layouts import RowLayout
from moe_p2p.moe.options import Partials
from moe_p2p.moe.reference import Topology, int10
from tests.support import cases
from tests.support.cases import Wanted
from tests.support.ranks import Rank, on_ranks, run_threads

HIDDEN_DIM = 544  # two units of 256, and a unit of one block
COUNTS = [[5, 3, 0, 12], [0] * 4, [12] * 4, [7, 0, 12, 1]]
LAYOUTS = get_args(RowLayout)
INT10 = CombineOptions(partials="int10")
KINDS: tuple[Partials, ...] = get_args(Partials)


def with_specials(tokens: reference.Tokens, rank: int) -> reference.Tokens:
    """Rows with NaN, infinities, zeros, the smallest and very large numbers, block by block."""
    x = tokens.x.clone()
    for i, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        x[i::3, (rank + 32 * i) % x.shape[1]] = value
    x[:, 96:128] = 0
    x[:, 128:160] *= torch.finfo(x.dtype).tiny
    x[:, 160:192] = torch.finfo(x.dtype).max / 64 * x[:, 160:192].sign()
    return replace(tokens, x=x)


def same(got: Tensor, want: Tensor) -> bool:
    """Bit for bit, but for the bits of NaN."""
    return bool(((got.cpu() == want) | (got.cpu().isnan() & want.isnan())).all())


def run_int10(
    comm: AllToAll, wanted: Wanted, want: list[Tensor], kind: Partials, num_biases: int
) -> None:
    """The whole call with and without scalars, then halves."""
    got = comm.dispatch(**cases.dispatch_arguments(comm, wanted))
    more = cases.given_biases(comm, wanted, num_biases)
    cases.finish(comm)
    back = cases.combine_arguments(comm, wanted, partials=kind) | {"dispatched": got}
    out = comm.combine(**back, **more)
    cases.finish(comm)
    assert same(out, want[comm.rank])
    scalars, found_want = cases.scalars_of(comm, wanted, got)
    out, found = comm.combine(**back, **more, row_scalars=scalars)
    cases.finish(comm)
    assert same(out, want[comm.rank])
    assert torch.equal(found.cpu(), found_want)
    into = torch.empty_like(out)
    back |= {"options": CombineOptions(partials=kind)}
    assert comm.combine(**back, **more, out=into) is into
    cases.finish(comm)
    assert same(into, want[comm.rank])
    if wanted.options["max_tokens"] > comm.config.step_tokens * comm.config.steps_in_flight:
        return  # halves take no more steps
    sent = comm.combine_send(**back)
    out = comm.combine_recv(sent, **more)
    cases.finish(comm)
    assert same(out, want[comm.rank])


def steps_of(topology: Topology, dtype: torch.dtype, max_tokens: int = 12) -> list[Wanted]:
    made = []
    for seed, counts in enumerate(COUNTS):
        tokens = [
            cases.make_tokens(seed, rank, counts[rank], dtype=dtype, hidden_dim=HIDDEN_DIM)
            for rank in range(topology.world_size)
        ]
        if seed == 3:
            tokens = [with_specials(each, rank) for rank, each in enumerate(tokens)]
        layout = LAYOUTS[seed % len(LAYOUTS)]
        made.append(cases.expect(topology, tokens, max_tokens=max_tokens, layout=layout))
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks_per_node", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_those_of_the_reference(
    kind: Partials, ranks_per_node: int, dtype: torch.dtype
) -> None:
    topology = Topology(world_size=4, ranks_per_node=ranks_per_node, num_experts=8)
    wanted = steps_of(topology, dtype)
    wants = [cases.sums_of(topology, w, i % 3, combine_dtype=kind) for i, w in enumerate(wanted)]
    plain = [cases.sums_of(topology, w, i % 3) for i, w in enumerate(wanted)]
    if kind != "block16" or dtype == torch.float32:  # else sums may round to the same
        changes = kind != "int10_nodes" or ranks_per_node < 4
        assert all(torch.equal(a, b) for a, b in zip(wants[2], plain[2], strict=True)) != changes
    config = {"dtype": dtype, "ranks_per_node": ranks_per_node, "hidden_dim": HIDDEN_DIM}
    take = functools.partial(run_int10, kind=kind)
    for more in ({"part_bytes": 2048}, {"chunk_tokens": 6}):
        run_threads(4, cases.summed_steps, wanted, wants, take, config | more)


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
    tokens = cases.make_tokens(0, 0, 3, hidden_dim=HIDDEN_DIM)

    def refused(rank: Rank) -> None:
        with cases.make(rank, hidden_dim=HIDDEN_DIM) as comm:
            got = comm.dispatch(tokens.x, tokens.topk_idx, layout="grouped")
            with pytest.raises(InvalidArgumentError, match="partials is 'int9', must be one"):
                CombineOptions(partials="int9")
            for kind in KINDS:  # int10_nodes too, although nothing goes from node to node here
                ordered = CombineOptions(partials=kind, order="topk")
                with pytest.raises(InvalidArgumentError, match="order='ranks' only"):
                    comm.combine(got.x, got, options=ordered)
            y = got.x.clone().requires_grad_()
            with pytest.raises(InvalidArgumentError, match="leave out partials"):
                comm.combine(y, got, options=INT10)
            sent = comm.combine_send(got.x, got, options=INT10)
            comm.combine_recv(sent)
        for size, text in (
            (272, "272, must be a multiple of 32"),
            (32, "hidden_dim 32 is 384 bytes, 336 for each 256 .* leave partials out"),
        ):
            with cases.make(rank, hidden_dim=size) as comm:
                got = comm.dispatch(tokens.x[:, :size].contiguous(), tokens.topk_idx)
                with pytest.raises(InvalidArgumentError, match=text):
                    comm.combine(got.x, got, options=INT10)
                comm.combine(got.x, got)

    run_threads(1, refused)


def test_widths_that_docs_refuse_are_those_whose_rows_do_not_fit() -> None:
    tokens = cases.make_tokens(0, 0, 3, hidden_dim=544)

    def refused(rank: Rank) -> None:
        for dtype, too_short in (
            (torch.bfloat16, {32, 64, 96, 288}),
            (torch.float32, {32}),
        ):
            found = set()
            for size in range(32, 545, 32):
                with cases.make(rank, hidden_dim=size, dtype=dtype) as comm:
                    x = tokens.x[:, :size].to(dtype).contiguous()
                    got = comm.dispatch(x, tokens.topk_idx, layout="grouped")
                    try:
                        comm.combine(got.x, got, options=INT10)
                    except InvalidArgumentError:
                        found.add(size)
                        comm.combine(got.x, got)
            assert found == too_short

    run_threads(1, refused)


@on_ranks(2)
def test_ranks_that_differ_are_named(rank: Rank) -> None:
    tokens = cases.make_tokens(0, rank.rank, 3, hidden_dim=HIDDEN_DIM)
    with cases.make(rank, hidden_dim=HIDDEN_DIM) as comm:
        got = comm.dispatch(tokens.x, tokens.topk_idx)
        kind: Partials = "int10" if rank.rank else "block16"
        with pytest.raises(Exception, match=r"10-bit integer rows|16-bit block rows"):
            comm.combine(got.x, got, options=CombineOptions(partials=kind))
