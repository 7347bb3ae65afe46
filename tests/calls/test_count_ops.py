"""Ops of calls whose host waits for counts, and what torch is asked for beside them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from moe_p2p import DispatchOptions, deep_ep
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
    given = (None, tokens.topk_idx, tokens.topk_weights, -1, 4, words.data_ptr(), 3)
    with make(Rank(0, 1, dist.HashStore()), steps_in_flight=16) as comm:
        for layout in ("by_rank", "grouped"):
            options = DispatchOptions(layout=layout, alignment=4, zero_padding=True, solo=True)
            arguments = (comm._comm, options.number, tokens.x, *given)
            opcheck(ops.dispatch_counted.default, arguments, test_utils=("test_schema",))
            *made, gathered, sizes = ops.dispatch_counted(*arguments)
            aligned = [-(-count // 4) * 4 for count in per_expert.tolist()]
            assert sizes == [*per_rank.tolist(), 5, *aligned]
            assert made[0].shape[0] == (sizes[0] if layout == "by_rank" else sum(aligned))
            assert gathered.tolist() == [words[:-1].tolist()]


class Recorded(TorchDispatchMode):
    """Names of all ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_call_that_waits_for_counts_is_one_op() -> None:
    """Copies and small tensors beside it would each cost a launch while the GPU idles."""
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
    for call, wanted in (
        (layout, ["count_routing"]),
        (lambda: normal(layout()), ["count_routing", "dispatch_counted"]),
        (v2, ["count_routing", "dispatch_counted"]),
    ):
        with Recorded() as recorded:
            call()
        assert recorded.names == [f"moe_p2p.{name}.default" for name in wanted]
    buffer.destroy()
    elastic.destroy()
