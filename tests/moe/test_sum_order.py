"""Sums in the order of top-k, on CPU ranks: bit for bit as the reference, which has that order.

Every case runs several steps with changing counts, with and without bias and scalars.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_p2p import AllToAll, CombineOptions, Dispatched, InvalidArgumentError
from moe_p2p.moe import reference
from moe_p2p.moe.options import SumOrder
from moe_p2p.moe.reference import Topology
from tests.moe.test_late_weights import biases_of
from tests.support.cases import (
    TOPK,
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

# Four ranks with two experts each: tokens of three experts have one, two or three ranks.
COUNTS = [[5, 3, 0, 12], [0] * 4, [12] * 4, [0, 0, 9, 0], [7, 0, 12, 1]]
ROWS = 2  # most rows of a token at one rank


def wanted_steps(dtype: torch.dtype, layout: str, world_size: int = 4) -> list[Wanted]:
    topology = Topology(world_size=world_size, ranks_per_node=world_size, num_experts=8)
    return [
        expect(
            topology,
            [make_tokens(seed, rank, counts[rank], dtype=dtype) for rank in range(world_size)],
            max_tokens=12,
            layout=layout,
        )
        for seed, counts in enumerate(COUNTS)
    ]


def ordered(topology: Topology, wanted: Wanted, order: SumOrder, num_biases: int) -> list[Tensor]:
    """What the reference makes of `wanted` in this order, by rank."""
    layout = wanted.options["layout"]
    routing = reference.route(
        topology, wanted.tokens, layout=layout, max_tokens=wanted.options["max_tokens"]
    )
    return [
        reference.combine(
            routing,
            rank,
            wanted.y,
            out_dtype=wanted.out_dtype,
            weighted=False if order == "rows" or layout == "by_rank" else None,
            bias=biases_of(rank, wanted.out[rank], num_biases) if num_biases else (),
            order=order,
        )
        for rank in range(topology.world_size)
    ]


def run_ordered(
    comm: AllToAll, wanted: Wanted, want: list[Tensor], order: SumOrder, num_biases: int
) -> None:
    got = comm.dispatch(**dispatch_arguments(comm, wanted))
    weighted, more = False if order == "rows" else None, dict[str, Any]()
    if num_biases:
        made = biases_of(comm.rank, wanted.out[comm.rank], num_biases)
        bias = [on_device(comm, b) for b in made]
        more["bias"] = bias[0] if num_biases == 1 else tuple(bias)
    finish(comm)
    back = combine_arguments(comm, wanted, order=order, weighted=weighted)
    back |= {"dispatched": got} | more
    out = comm.combine(**back)
    finish(comm)
    assert torch.equal(out.cpu(), want[comm.rank])
    scalars, found_want = scalars_of(comm, wanted, got)
    out, found = comm.combine(**back, row_scalars=scalars)
    finish(comm)
    assert torch.equal(out.cpu(), want[comm.rank])
    assert torch.equal(found.cpu(), found_want)


def scalars_of(comm: AllToAll, wanted: Wanted, got: Dispatched) -> tuple[Tensor, Tensor]:
    """Row scalars that are the weights, and what comes back: each (token, k) has its own."""
    mine = wanted.tokens[comm.rank]
    assert mine.topk_weights is not None
    rows = got.row_weights
    if got.row_topk is not None:
        rows = rows.where(got.row_topk >= 0, 0.0)
    return rows, mine.topk_weights.where(mine.topk_idx >= 0, 0.0)


def ordered_steps(
    rank: Rank, wanted: list[Wanted], wants: list[list[Tensor]], order: SumOrder, config: Any
) -> None:
    with make(rank, combine_rows=ROWS, **config) as comm:
        for i, (step, want) in enumerate(zip(wanted, wants, strict=True)):
            run_ordered(comm, step, want, order, i % 3)


@pytest.mark.parametrize("order", ["topk", "rows"])
@pytest.mark.parametrize("layout", ["padded", "grouped", "by_rank"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_tokens", [None, 5])
def test_sums_are_in_the_order_of_topk(
    order: SumOrder, layout: str, dtype: torch.dtype, chunk_tokens: int | None
) -> None:
    wanted = wanted_steps(dtype, layout)
    topology = Topology(world_size=4, ranks_per_node=4, num_experts=8)
    wants = [ordered(topology, step, order, i % 3) for i, step in enumerate(wanted)]
    others = [ordered(topology, step, "ranks", i % 3) for i, step in enumerate(wanted)]
    if dtype == torch.float32:  # another order gives other bits
        pairs = zip(chain(*wants), chain(*others), strict=True)
        assert not all(torch.equal(a, b) for a, b in pairs)
    config = {"dtype": dtype, "chunk_tokens": chunk_tokens}
    run_threads(4, ordered_steps, wanted, wants, order, config)


def test_the_reference_adds_row_after_row() -> None:
    """Against a loop over the tokens of a rank, which knows nothing of stages."""
    wanted = wanted_steps(torch.float32, "grouped")[0]
    topology = Topology(world_size=4, ranks_per_node=4, num_experts=8)
    want = ordered(topology, wanted, "rows", 1)[0]
    tokens, owner = wanted.tokens[0], topology.owner()
    (bias,) = biases_of(0, wanted.out[0], 1)
    for token in range(5):
        total = bias[token].clone()
        for expert in tokens.topk_idx[token].tolist():
            if expert < 0:
                continue
            rank = int(owner[expert])
            received = wanted.received[rank]
            of_token = (received.source == torch.tensor([0, token])).all(1)
            begin = int(received.offsets[expert % 2])
            end = begin + int(received.counts[expert % 2])
            (row,) = [r for r in of_token.nonzero().flatten().tolist() if begin <= r < end]
            total += wanted.y[rank][row]
        assert torch.equal(total, want[token])


def test_a_lost_rank_is_left_out_of_sums_by_topk() -> None:
    tokens = [make_tokens(1, rank, 6) for rank in range(2)]

    def body(rank: Rank) -> None:
        config = {"mask_lost_ranks": True, "chunk_tokens": 12, "timeout_s": 20.0}
        with make(rank, combine_rows=TOPK, **config) as comm:
            mine = tokens[rank.rank]
            comm.mask_ranks([1 - rank.rank])
            got = comm.dispatch(mine.x, mine.topk_idx, mine.topk_weights, layout="grouped")
            out = comm.combine(got.x, got, options=CombineOptions(weighted=False, order="rows"))
            here = mine.topk_idx.div(4, rounding_mode="floor") == rank.rank
            # Experts that are the identity: a token is added once for each that is left.
            want = torch.zeros_like(mine.x)
            for k in range(TOPK):
                want += mine.x.where(here[:, k, None], 0.0)
            assert torch.equal(out, want)

    run_threads(2, body)


def test_what_an_order_needs_is_named() -> None:
    tokens = replace(make_tokens(0, 0, 3), topk_idx=torch.tensor([[0, 1, 2]] * 3))
    topk = CombineOptions(order="topk")

    def refused(rank: Rank) -> None:
        with make(rank, ranks_per_node=1) as comm:
            got = comm.dispatch(tokens.x, tokens.topk_idx)
            with pytest.raises(InvalidArgumentError, match="among ranks of one node, these are 2"):
                comm.combine(got.x, got, options=CombineOptions(weighted=False, order="topk"))
            comm.combine(got.x, got)
        with make(rank) as comm:
            got = comm.dispatch(tokens.x, tokens.topk_idx, layout="grouped")
            with pytest.raises(InvalidArgumentError, match=r"set combine_rows .* to 3"):
                comm.combine(got.x, got, options=CombineOptions(weighted=False, order="rows"))
            with pytest.raises(InvalidArgumentError, match="weighted=False"):
                comm.combine(got.x, got, options=CombineOptions(order="rows"))
            with pytest.raises(InvalidArgumentError, match="order is 'k', must be one of"):
                CombineOptions(order="k")
            with pytest.raises(InvalidArgumentError, match="order='ranks' only"):
                comm.combine(got.x, got, options=topk, out=torch.empty_like(tokens.x))
            with pytest.raises(InvalidArgumentError, match="halves take sums in order='ranks'"):
                comm.combine_send(got.x, got, options=topk)
            comm.combine(got.x, got, options=topk)

    run_threads(2, refused)


def test_gradients_do_not_depend_on_the_order() -> None:
    def body(rank: Rank) -> None:
        with make(rank, combine_rows=TOPK) as comm:
            mine = make_tokens(3, rank.rank, 6)
            grads: list[Tensor] = []
            for order in ("ranks", "topk", "rows"):
                how = CombineOptions(order=order, weighted=False)
                x = mine.x.clone().requires_grad_()
                got = comm.dispatch(x, mine.topk_idx, layout="grouped")
                out = comm.combine(got.x * 2, got, options=how)
                grads.append(*torch.autograd.grad(out.square().sum(), x))
            assert all(torch.allclose(grads[0], grad, rtol=1e-5) for grad in grads[1:])

    run_threads(2, body)
