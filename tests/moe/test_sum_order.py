"""Sums in the order of top-k, on CPU ranks: bit for bit as the reference, which has that order.

Every case runs several steps with changing counts, with and without bias and scalars.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import chain

import pytest
import torch
from torch import Tensor

from moe_p2p import AllToAll, CombineOptions, InvalidArgumentError
from moe_p2p.moe.options import SumOrder
from moe_p2p.moe.reference import Topology
from tests.support import cases
from tests.support.cases import TOPK, Wanted
from tests.support.ranks import Rank, on_ranks, run_threads

# Four ranks with two experts each: tokens of three experts have one, two or three ranks.
COUNTS = [[5, 3, 0, 12], [0] * 4, [12] * 4, [0, 0, 9, 0], [7, 0, 12, 1]]
ROWS = 2  # most rows of a token at one rank


def wanted_steps(dtype: torch.dtype, layout: str, world_size: int = 4) -> list[Wanted]:
    topology = Topology(world_size=world_size, ranks_per_node=world_size, num_experts=8)
    return [
        cases.expect(
            topology,
            [
                cases.make_tokens(seed, rank, counts[rank], dtype=dtype)
                for rank in range(world_size)
            ],
            max_tokens=12,
            layout=layout,
        )
        for seed, counts in enumerate(COUNTS)
    ]


def ordered(topology: Topology, wanted: Wanted, order: SumOrder, num_biases: int) -> list[Tensor]:
    """What the reference makes of `wanted` in this order, by rank."""
    weighted = False if order == "rows" or wanted.options["layout"] == "by_rank" else None
    return cases.sums_of(topology, wanted, num_biases, order=order, weighted=weighted)


def run_ordered(
    comm: AllToAll, wanted: Wanted, want: list[Tensor], order: SumOrder, num_biases: int
) -> None:
    got = comm.dispatch(**cases.dispatch_arguments(comm, wanted))
    more = cases.given_biases(comm, wanted, num_biases)
    weighted = False if order == "rows" else None
    cases.finish(comm)
    back = cases.combine_arguments(comm, wanted, order=order, weighted=weighted)
    back |= {"dispatched": got} | more
    out = comm.combine(**back)
    cases.finish(comm)
    assert torch.equal(out.cpu(), want[comm.rank])
    scalars, found_want = cases.scalars_of(comm, wanted, got)
    out, found = comm.combine(**back, row_scalars=scalars)
    cases.finish(comm)
    assert torch.equal(out.cpu(), want[comm.rank])
    assert torch.equal(found.cpu(), found_want)


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
    config = {"dtype": dtype, "chunk_tokens": chunk_tokens, "combine_rows": ROWS}
    take = functools.partial(run_ordered, order=order)
    run_threads(4, cases.summed_steps, wanted, wants, take, config)


def test_the_reference_adds_row_after_row() -> None:
    """Against a loop over the tokens of a rank, which knows nothing of stages."""
    wanted = wanted_steps(torch.float32, "grouped")[0]
    topology = Topology(world_size=4, ranks_per_node=4, num_experts=8)
    want = ordered(topology, wanted, "rows", 1)[0]
    tokens, owner = wanted.tokens[0], topology.owner()
    (bias,) = cases.biases_of(0, wanted.out[0], 1)
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
    tokens = [cases.make_tokens(1, rank, 6) for rank in range(2)]

    def body(rank: Rank) -> None:
        config = {"mask_lost_ranks": True, "chunk_tokens": 12, "timeout_s": 20.0}
        with cases.make(rank, combine_rows=TOPK, **config) as comm:
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
    tokens = replace(cases.make_tokens(0, 0, 3), topk_idx=torch.tensor([[0, 1, 2]] * 3))
    topk = CombineOptions(order="topk")

    def refused(rank: Rank) -> None:
        with cases.make(rank, ranks_per_node=1) as comm:
            got = comm.dispatch(tokens.x, tokens.topk_idx)
            with pytest.raises(InvalidArgumentError, match="among ranks of one node, these are 2"):
                comm.combine(got.x, got, options=CombineOptions(weighted=False, order="topk"))
            comm.combine(got.x, got)
        with cases.make(rank) as comm:
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


@on_ranks(2)
def test_gradients_do_not_depend_on_the_order(rank: Rank) -> None:
    with cases.make(rank, combine_rows=TOPK) as comm:
        mine = cases.make_tokens(3, rank.rank, 6)
        grads: list[Tensor] = []
        for order in ("ranks", "topk", "rows"):
            how = CombineOptions(order=order, weighted=False)
            x = mine.x.clone().requires_grad_()
            got = comm.dispatch(x, mine.topk_idx, layout="grouped")
            out = comm.combine(got.x * 2, got, options=how)
            grads.append(*torch.autograd.grad(out.square().sum(), x))
        assert all(torch.allclose(grads[0], grad, rtol=1e-5) for grad in grads[1:])
