"""Routing that names an expert more than once in a row: merged where asked, else refused by name.

Oracles: the reference, bit for bit, and a dense sum over all (token, k) that knows no merging.
Tolerance of the latter: sums of a few products of size 1 in fp32, in another order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_p2p
from moe_p2p import AllToAll, DispatchOptions, deep_ep
from moe_p2p.moe import reference
from moe_p2p.moe.arguments import merged
from moe_p2p.moe.reference import Tokens
from tests.support import cases
from tests.support.cases import HIDDEN_DIM, TOPK, make
from tests.support.ranks import Rank, on_ranks, run_threads

E = 8
LAYOUTS = ["padded", "grouped", "by_rank"]


def hashed(seed: int, rank: int, count: int) -> Tokens:
    """Few experts, so that most rows name one twice, some all three times; some name none."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    idx = torch.randint(0, E, (count, TOPK), generator=generator) // 3 * 3 % E
    idx[torch.rand(idx.shape, generator=generator) < 0.2] = -1
    return Tokens(
        x=torch.randn(count, HIDDEN_DIM, generator=generator),
        topk_idx=idx,
        topk_weights=torch.rand(count, TOPK, generator=generator),
    )


def dense(tokens: Tokens, weights: Tensor) -> Tensor:
    total = torch.zeros_like(tokens.x)
    for k in range(TOPK):
        for expert in range(E):
            here = tokens.topk_idx[:, k] == expert
            y = cases.expert(expert, tokens.x)
            total = total + (weights[:, k] * here)[:, None] * y
    return total


def answers(comm: AllToAll, got: Any) -> Tensor:
    """Of this rank's experts, by plain differentiable steps; other rows are zero."""
    local, first = E // comm.world_size, comm.rank * (E // comm.world_size)
    flat = got.x.reshape(-1, HIDDEN_DIM)
    if got.row_topk is not None:
        return sum(
            (got.row_weights * (got.row_topk == i)).sum(1)[:, None] * cases.expert(first + i, flat)
            for i in range(local)
        ).where((got.row_topk >= 0).any(1)[:, None], 0.0)  # type: ignore[union-attr]
    y = torch.zeros_like(flat)
    for i in range(local):
        start = int(got.offsets[i])
        here = torch.zeros(len(flat), 1, dtype=torch.bool)
        here[start : start + int(got.counts[i])] = True
        y = y + cases.expert(first + i, flat).where(here, 0.0)
    return y


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("num_ranks", "per_node"), [(1, 1), (2, 2), (4, 2)])
def test_every_weight_counts(num_ranks: int, per_node: int, layout: str, weighted: bool) -> None:
    options = DispatchOptions(layout=layout, merge_duplicates=True)  # type: ignore[arg-type]

    def body(rank: Rank) -> None:
        with make(rank, ranks_per_node=per_node, max_tokens=12) as comm:
            for seed in range(6):
                tokens = [hashed(seed, r, (7, 0, 12, 3)[(r + seed) % 4]) for r in range(num_ranks)]
                if not weighted:
                    tokens = [Tokens(x=t.x, topk_idx=t.topk_idx) for t in tokens]
                mine = tokens[rank.rank]
                wanted = cases.expect(
                    cases.topology_of(comm),
                    [reference.merge_duplicates(t) for t in tokens],
                    max_tokens=12,
                    layout=layout,
                )
                given = (mine.x, mine.topk_idx, mine.topk_weights)
                for whole in (True, False):
                    if whole:
                        got = comm.dispatch(*given, options=options)
                    else:
                        got = comm.dispatch_recv(comm.dispatch_send(*given, options=options))
                    cases.assert_received(got, wanted.received[rank.rank])
                    y = wanted.y[rank.rank].reshape(-1, HIDDEN_DIM)
                    if whole:
                        out = comm.combine(y, got)
                    else:
                        out = comm.combine_recv(comm.combine_send(y, got))
                    cases.assert_combined(out, wanted.out[rank.rank])
                weights = torch.ones(mine.topk_idx.shape)
                weights = weights if mine.topk_weights is None else mine.topk_weights
                torch.testing.assert_close(out, dense(mine, weights), rtol=1e-5, atol=1e-5)

    run_threads(num_ranks, body)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_repeat_has_the_gradient_of_its_weight(layout: str) -> None:
    options = DispatchOptions(layout=layout, merge_duplicates=True)  # type: ignore[arg-type]

    def body(rank: Rank) -> None:
        with make(rank, max_tokens=12) as comm:
            for seed in range(4):
                mine = hashed(seed, rank.rank, 9 - rank.rank)
                assert mine.topk_weights is not None
                grad = torch.randn(mine.x.shape, generator=torch.Generator().manual_seed(seed))
                found = []
                for through in (True, False):
                    x = mine.x.clone().requires_grad_()
                    weights = mine.topk_weights.clone().requires_grad_()
                    if through:
                        got = comm.dispatch(x, mine.topk_idx, weights, options=options)
                        out = comm.combine(answers(comm, got), got)
                    else:
                        out = dense(Tokens(x=x, topk_idx=mine.topk_idx), weights)
                    out.backward(grad)
                    assert isinstance(out, Tensor)
                    found.append((out.detach(), x.grad, weights.grad))
                for ours, theirs in zip(*found, strict=True):
                    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)

    run_threads(2, body)


@on_ranks(1)
def test_under_torch_compile(rank: Rank) -> None:
    options = DispatchOptions(layout="grouped", merge_duplicates=True)
    with make(rank, max_tokens=12) as comm:

        def layer(x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
            got = comm.dispatch(x, idx, weights, options=options)
            out = comm.combine(got.x * 2.0, got)
            assert isinstance(out, Tensor)
            return out

        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for seed in range(3):
            t = hashed(seed, 0, 8)
            given = (t.x, t.topk_idx, t.topk_weights)
            assert torch.equal(compiled(*given), layer(*given))


def test_what_is_merged() -> None:
    idx, weights = merged(torch.tensor([[3, 1, 3], [-1, -1, 2]]), None)
    assert idx.tolist() == [[3, 1, -1], [-1, -1, 2]]
    assert weights is not None
    assert weights.tolist() == [[2.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    idx, weights = merged(torch.tensor([[3, 1, 3]]), torch.tensor([[0.5, torch.inf, 0.25]]))
    assert weights is not None
    assert weights.tolist() == [[0.75, torch.inf, 0.0]]


@on_ranks(1)
def test_what_does_not_go_with_it(rank: Rank) -> None:
    options = DispatchOptions(merge_duplicates=True)
    t = hashed(0, 0, 4)
    with make(rank, max_tokens=12) as comm:
        got = comm.dispatch(t.x, t.topk_idx, options=options)
        for combine in (comm.combine, comm.combine_send):
            with pytest.raises(moe_p2p.InvalidArgumentError, match="do not go with merge_dupl"):
                combine(got.x, got, topk_weights=t.topk_weights)
        comm.release(got)
        for wrong in (t.topk_idx.float(), t.topk_idx[:, 0], t.topk_idx[:, :2]):
            with pytest.raises(moe_p2p.InvalidArgumentError, match="topk_idx"):
                comm.dispatch(t.x, wrong, options=options)  # type: ignore[arg-type]
        with pytest.raises(moe_p2p.InvalidArgumentError, match="topk_weights"):
            comm.dispatch(t.x, t.topk_idx, torch.ones(3, TOPK), options=options)
    with pytest.raises(moe_p2p.InvalidArgumentError, match="merge_duplicates is 2"):
        DispatchOptions(merge_duplicates=2)  # type: ignore[arg-type]


@on_ranks(1)
def test_every_door_refuses_it_unless_asked(rank: Rank) -> None:
    x, idx, weights = torch.ones(1, HIDDEN_DIM), torch.tensor([[5, -1, 5]]), torch.ones(1, TOPK)
    rest = (None, [], None, None, -1)
    with make(rank, max_tokens=12) as comm:
        number, merging = (DispatchOptions(merge_duplicates=each).number for each in (False, True))
        op, ours = torch.ops.moe_p2p.dispatch, comm._comm
        doors = {
            "whole": lambda: comm.dispatch(x, idx),
            "halves": lambda: comm.dispatch_send(x, idx),
            "training": lambda: comm.dispatch(x.clone().requires_grad_(), idx, weights),
            "op": lambda: op(ours, number, 12, 64, x, idx, None, None, [], None, None, -1),
        }
        for door in doors.values():
            with pytest.raises(RuntimeError, match="names expert 5 twice"):
                door()
        with pytest.raises(RuntimeError, match="must be the number of a moe_p2p"):
            op(ours, merging, 12, 64, x, idx, None, *rest)
    group = dist.ProcessGroup(rank.store, rank.rank, rank.world_size)
    rows = torch.ones(1, 128, dtype=torch.bfloat16)
    hybrid = deep_ep.HybridEPBuffer(group, 128, 8, E)
    sizes = {"num_max_tokens_per_rank": 8, "hidden": 128, "num_topk": TOPK}
    v2 = deep_ep.ElasticBuffer(group, **sizes, explicitly_destroy=True)
    normal, low = deep_ep.Buffer(group), deep_ep.Buffer(group, low_latency_mode=True)
    given = {"topk_idx": idx, "topk_weights": weights}
    per_rank, _, per_expert, within, _ = normal.get_dispatch_layout(idx, E)
    counts = {
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": within,
        "num_tokens_per_expert": per_expert,
    }
    doors = {
        "hybrid": lambda: hybrid.dispatch_with_permute(hidden=rows, **given, num_of_experts=E),
        "v2": lambda: v2.dispatch(rows, **given, num_experts=E),
        "v2 without sync": lambda: v2.dispatch(rows, **given, num_experts=E, do_cpu_sync=False),
        "normal": lambda: normal.dispatch(rows, **counts, **given),
        "low latency": lambda: low.low_latency_dispatch(rows, idx, 8, E, use_fp8=False),
    }
    for door in doors.values():
        with pytest.raises(RuntimeError, match="names expert 5 twice"):
            door()
    v2.destroy()


@on_ranks(1)
@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_tensors_that_are_no_routing_are_refused_as_without_it(rank: Rank) -> None:
    t = hashed(1, 0, 4)
    idx, weights = t.topk_idx.masked_fill(t.topk_idx >= 0, 1), t.topk_weights
    nested = torch.nested.nested_tensor(list(idx))
    others = [(idx.to("meta"), weights), (idx, weights.to("meta")), (idx.to_sparse(), weights)]
    others += [(idx, weights.to_sparse()), (nested, weights), (idx.to(torch.complex64), weights)]
    with make(rank) as comm:
        for given in others:
            for options in (DispatchOptions(), DispatchOptions(merge_duplicates=True)):
                with pytest.raises(moe_p2p.InvalidArgumentError, match="topk_"):
                    comm.dispatch(t.x, *given, options=options)
        with pytest.raises(moe_p2p.InvalidArgumentError, match="max_tokens is '8', must be an int"):
            comm.dispatch(t.x, idx, weights, max_tokens="8")  # type: ignore[arg-type]
        comm.close()
        with pytest.raises(moe_p2p.ClosedError):
            _ = comm.arrival_flags
