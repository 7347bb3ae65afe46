"""Ops of calls whose host waits for counts, and what torch is asked for beside them."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from moe_p2p import DispatchOptions, ExpertMap, deep_ep
from tests.support.cases import make, make_tokens
from tests.support.ranks import Rank

ops = torch.ops.moe_p2p


def test_counts_are_exact_and_so_are_the_rows() -> None:
    """dispatch_counted allocates as many rows as the counts tell, which no fake kernel can know."""
    tokens = make_tokens(0, 0, 5)
    words = torch.zeros(1 + 8 + 2, dtype=torch.int32)
    count = (0, tokens.topk_idx, 8, 1, 0, words.data_ptr(), 3)
    opcheck(ops.count_routing.default, count)
    per_rank, _, per_expert, _ = ops.count_routing(*count)
    words.zero_()
    share = (0, per_rank, per_expert, 5, words.data_ptr(), 3)
    opcheck(ops.share_counts.default, share)
    assert words.tolist() == [*per_rank.tolist(), *per_expert.tolist(), 5, 3]
    given = (None, tokens.topk_idx, tokens.topk_weights, -1, 4)
    aligned = [-(-count // 4) * 4 for count in per_expert.tolist()]
    with make(Rank(0, 1, dist.HashStore()), steps_in_flight=16) as comm:
        for layout, kernel in itertools.product(("by_rank", "grouped"), (-1, 0)):
            if kernel == 0:  # the op counts by itself
                words.zero_()
            options = DispatchOptions(layout=layout, alignment=4, zero_padding=True, solo=True)
            arguments = (comm._comm, options.number, tokens.x, *given, kernel, words.data_ptr(), 3)
            *made, gathered, sizes, num_tokens, most, grouped = ops.dispatch_counted(*arguments)
            assert (num_tokens, most, grouped) == (*per_rank.tolist(), 5, sum(aligned))
            assert sizes.tolist() == aligned
            assert made[0].shape[0] == (num_tokens if layout == "by_rank" else grouped)
            assert gathered.tolist() == [words[:-1].tolist()]
        words.zero_()
        agree = (comm._comm, tokens.topk_idx, 0, 1 + 8 + 1, words.data_ptr(), 4, 4)
        gathered, sizes, *numbers = ops.all_to_all_agree(*agree)
        assert (sizes.tolist(), numbers) == (aligned, [*per_rank.tolist(), 5, sum(aligned)])
        assert gathered.tolist() == [words[:-1].tolist()]


def test_slots_of_experts_compile() -> None:
    table = ExpertMap([0, 1, 1, 2], num_experts=3)
    idx = torch.tensor([[0, 1], [1, -1]])
    opcheck(ops.map_experts.default, (0, idx, table.slots, table.counts, 4, 0))
    compiled = torch.compile(table.to_slots, fullgraph=True, backend="eager")
    assert compiled(idx).tolist() == [[0, 1], [2, -1]]
    table.set([1, 0, 2, -1])
    assert compiled(idx).tolist() == [[1, 0], [0, -1]]


@pytest.mark.parametrize("bound", [-1, 5, 9])
def test_rows_made_before_the_counts_are_known_are_cut(bound: int) -> None:
    """Few rows by rank are made for the worst case; what is returned is exact. bound: on T."""
    tokens = make_tokens(0, 0, 5)
    idx = tokens.topk_idx.clone()
    idx[3] = -1  # a token that goes nowhere
    words = torch.zeros(1 + 8 + 2, dtype=torch.int32)
    ops.count_routing(0, idx, 8, 1, 0, words.data_ptr(), 3)
    options = DispatchOptions(layout="by_rank", with_source=True, copy_topk=True, solo=True)
    with make(Rank(0, 1, dist.HashStore()), steps_in_flight=16) as comm:
        given = (None, idx, tokens.topk_weights, bound, 1, -1, words.data_ptr(), 3)
        *made, _, _, num_tokens, most, _ = ops.dispatch_counted(
            comm._comm, options.number, tokens.x, *given
        )
        assert (num_tokens, most) == (4, 5 if bound < 0 else bound)
        x, _, weights, counts, offsets, _, more = made
        assert x.shape[0] == num_tokens
        assert x.untyped_storage().nbytes() == x[:1].numel() * x.element_size() * most
        exact = comm.dispatch(
            tokens.x, idx, tokens.topk_weights, options=options, max_tokens=most, capacity=4
        )
        expected = (exact.source, exact.topk_idx, exact.row_topk)
        for got, want in zip(
            (x, weights, counts, offsets, *more),
            (exact.x, exact.row_weights, exact.counts, exact.offsets, *expected),
            strict=True,
        ):
            assert got.is_contiguous()
            assert torch.equal(got, want)


def test_what_lies_beside_the_rows_is_one_allocation() -> None:
    """Each allocation is a call of torch's, and rows may be freed before the rest."""
    tokens = make_tokens(0, 0, 5)
    words = torch.zeros(1 + 8 + 2, dtype=torch.int32)
    options = DispatchOptions(layout="by_rank", with_source=True, copy_topk=True, solo=True)
    with make(Rank(0, 1, dist.HashStore())) as comm:
        given = (None, tokens.topk_idx, tokens.topk_weights, -1, 1, 0, words.data_ptr(), 3)
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as profile:
            made = ops.dispatch_counted(comm._comm, options.number, tokens.x, *given)
    rows, _, *beside, more, gathered, sizes, _, _, _ = made
    places = {tensor.untyped_storage().data_ptr() for tensor in (*beside, *more)}
    assert len(places) == 1
    assert places.isdisjoint({rows.untyped_storage().data_ptr()})
    assert gathered.untyped_storage().data_ptr() == sizes.untyped_storage().data_ptr()
    # Allocations and cuts pass torch's dispatcher by.
    assert [e.key for e in profile.key_averages() if "::" in e.key] == ["moe_p2p::dispatch_counted"]


class Recorded(TorchDispatchMode):
    """Names of all ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def functions_of(call: Any) -> int:
    entered = 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal entered
        entered += event == "call"

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


def test_a_call_that_waits_for_counts_is_one_op() -> None:
    """Copies and small tensors beside it would each cost a launch while the GPU idles, and so does
    the Python around it: functions that it may enter are counted, its own included."""
    rank = Rank(0, 1, dist.HashStore())
    group = dist.ProcessGroup(rank.store, 0, 1)
    buffer = deep_ep.Buffer(group, explicitly_destroy=True)
    elastic = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=8, explicitly_destroy=True)
    x = torch.randn(5, 128).bfloat16()
    idx = torch.rand(5, 8).topk(3).indices
    weights = torch.rand(5, 3)

    def layout() -> Any:
        return buffer.get_dispatch_layout(idx, 8)

    def normal(layout: Any) -> Any:
        per_rank, _, per_expert, in_rank, _ = layout
        return buffer.dispatch(
            x,
            topk_idx=idx,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )

    def v2() -> Any:
        return elastic.dispatch(x, idx, weights, num_experts=8, do_cpu_sync=True)

    normal(layout()), v2()  # make communicators
    for call, wanted, most_functions in (
        (layout, ["count_routing"], 17),
        (lambda: normal(layout()), ["count_routing", "dispatch_counted"], 32),
        (v2, ["dispatch_counted"], 19),
    ):
        with Recorded() as recorded:
            call()
        assert recorded.names == [f"moe_p2p.{name}.default" for name in wanted]
        assert functions_of(call) <= most_functions
    buffer.destroy()
    elastic.destroy()
