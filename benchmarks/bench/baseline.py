"""The same job over torch.distributed.all_to_all_single: one row per (token, expert), no dedup.

Same inputs, same outputs in the same order, over gloo on CPUs and NCCL on GPUs. Written to be fast:
one exchange of counts, one of rows, one of the rest; permutations by index_select into buffers made
once; the weighted sum at the source is one fused gather (embedding_bag, 0.7 ms where index_add_
takes 3.4 ms for 128 x 8 rows of 7168 bf16 on one core of the machine this was written on).

The sizes of the exchange are host numbers, so dispatch waits for the GPU once, as every user of
all_to_all_single does; a CUDA graph cannot hold it.

Shapes: W ranks, T tokens, K top-k, P = T * K pairs, R rows at this rank's experts, E experts.
"""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from moe_p2p.bench.cases import Job
from moe_p2p.bench.options import Options
from moe_p2p.bench.systems import Rows
from moe_p2p.moe.reference import FP8, Tokens, quantize


class TorchAllToAll:
    name = "torch"
    num_steps = 1
    waited_s = 0.0

    def __init__(
        self, options: Options, job: Job, *, group: dist.ProcessGroup | None = None
    ) -> None:
        self.group = group
        self.quantize = quantizer(options.device) if options.quantize else None
        self.num_experts = job.topology.num_experts
        self.world_size = job.topology.world_size
        self.num_local = self.num_experts // self.world_size
        pairs = max(options.tokens) * job.topk
        rows = self.world_size * max(options.tokens) * min(job.topk, self.num_local)
        hidden, self.num_scales = job.hidden_dim, -(-job.hidden_dim // 128)
        self.wire_dtype = torch.uint8 if self.quantize else options.x_dtype  # gloo has no fp8
        extra = 1 + (self.num_scales if self.quantize else 0)
        empty = functools.partial(torch.empty, device=options.device)
        self.send_x = empty(pairs, hidden, dtype=self.wire_dtype)
        self.recv_x = empty(rows, hidden, dtype=self.wire_dtype)
        self.grouped_x = empty(rows, hidden, dtype=self.wire_dtype)
        self.send_extra = empty(pairs, extra)  # weight, scales
        self.recv_extra = empty(rows, extra)
        self.grouped_extra = empty(rows, extra)
        self.send_y = empty(rows, hidden, dtype=options.x_dtype)
        self.recv_y = empty(pairs, hidden, dtype=options.x_dtype)
        self.counts = empty(2, self.num_experts, dtype=torch.int64)  # sent, received

    def dispatch(self, tokens: Tokens) -> Rows:
        weights = tokens.topk_weights
        assert weights is not None
        num_tokens, topk = tokens.topk_idx.shape
        expert, order = tokens.topk_idx.flatten().sort(stable=True)
        token = order // topk
        send_counts, recv_counts = self.counts
        send_counts.zero_().index_add_(0, expert, torch.ones_like(expert))
        dist.all_to_all_single(recv_counts, send_counts, group=self.group)
        splits = self.counts.view(2, self.world_size, -1).sum(dim=2)
        began = time.perf_counter()
        send_splits, recv_splits = splits.tolist()  # on a GPU: the host waits for it
        self.waited_s += time.perf_counter() - began
        sent, received = len(order), sum(recv_splits)

        extra = self.send_extra[:sent]
        extra[:, 0] = weights.flatten()[order]
        x = tokens.x
        if self.quantize is not None:
            q, scales = self.quantize(x)
            x = q.view(torch.uint8)
            extra[:, 1:] = scales[token]
        torch.index_select(x, 0, token, out=self.send_x[:sent])
        rows = self._exchange(self.recv_x[:received], self.send_x[:sent], recv_splits, send_splits)
        rest = self._exchange(self.recv_extra[:received], extra, recv_splits, send_splits)

        # Rows arrive ordered by (source, expert), and go to (expert, source).
        by_source = recv_counts.view(self.world_size, self.num_local)
        place = _expert_major(by_source, received)
        torch.index_select(rows, 0, place, out=self.grouped_x[:received])
        torch.index_select(rest, 0, place, out=self.grouped_extra[:received])
        self.state = (order, num_tokens, topk, send_splits, recv_splits, by_source, weights)
        return Rows(
            x=self.grouped_x.view(FP8) if self.quantize else self.grouped_x,
            scales=self.grouped_extra[:, 1:] if self.quantize else None,
            row_weights=self.grouped_extra[:, 0],
            counts=by_source.sum(dim=0),
        )

    def combine(self, y: Tensor) -> Tensor:
        order, num_tokens, topk, send_splits, recv_splits, by_source, weights = self.state
        sent, received = len(order), sum(recv_splits)
        # From (expert, source) back to (source, expert): the same walk with the roles exchanged.
        back = _expert_major(by_source.t().contiguous(), received)
        rows = torch.index_select(y, 0, back, out=self.send_y[:received])
        rows = self._exchange(self.recv_y[:sent], rows, send_splits, recv_splits)
        if sent == 0:
            return y.new_zeros(num_tokens, y.shape[1])
        place = torch.empty_like(order)
        place[order] = torch.arange(sent, device=order.device)
        return functional.embedding_bag(
            place.view(num_tokens, topk),
            rows,
            mode="sum",
            per_sample_weights=weights.to(rows.dtype),
        )

    def close(self) -> None:
        pass

    def _exchange(
        self, out: Tensor, rows: Tensor, out_splits: list[int], row_splits: list[int]
    ) -> Tensor:
        dist.all_to_all_single(out, rows, out_splits, row_splits, group=self.group)
        return out


def quantizer(device: str) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Returns one kernel on GPUs with Triton; elsewhere plain torch with the same bits."""
    if device == "cuda" and importlib.util.find_spec("triton") is not None:
        from moe_p2p.kernels.triton.quantize import quantize as fused  # importing needs Triton

        return fused
    return quantize


def _expert_major(counts: Tensor, total: int) -> Tensor:
    """Returns where each row lies in blocks ordered (a, b), read in the order (b, a).

    counts [A, B] rows per block, `total` of all. Example: [[1, 2], [1, 0]], 4 -> [0, 3, 1, 2].
    """
    start = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts).t().flatten()
    length = counts.t().flatten()
    first = length.cumsum(0) - length
    shift = (start - first).repeat_interleave(length, output_size=total)
    return torch.arange(total, device=counts.device) + shift
