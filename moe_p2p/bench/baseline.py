"""The same job over torch.distributed.all_to_all_single: one row per (token, expert), no dedup.

Same inputs, same outputs in the same order. Written to be fast: one exchange of counts, one of
rows, one of the rest; permutations by index_select into buffers made once; the weighted sum at the
source is one fused gather (embedding_bag, 0.7 ms where index_add_ takes 3.4 ms for 128 x 8 rows of
7168 bf16 on one core of the machine this was written on).

Shapes: W ranks, T tokens, K top-k, P = T * K pairs, R rows at this rank's experts, E experts.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from moe_p2p.bench.cases import Job
from moe_p2p.bench.options import Options
from moe_p2p.bench.systems import Rows
from moe_p2p.reference import FP8, Tokens, quantize


class TorchAllToAll:
    name = "torch"
    num_steps = 1

    def __init__(self, options: Options, job: Job) -> None:
        self.quantize = options.quantize
        self.num_experts = job.topology.num_experts
        self.world_size = job.topology.world_size
        self.num_local = self.num_experts // self.world_size
        pairs = max(options.tokens) * job.topk
        rows = self.world_size * max(options.tokens) * min(job.topk, self.num_local)
        hidden, self.num_scales = job.hidden_dim, -(-job.hidden_dim // 128)
        self.wire_dtype = torch.uint8 if self.quantize else options.x_dtype  # gloo knows no fp8
        extra = 1 + (self.num_scales if self.quantize else 0)
        self.send_x = torch.empty(pairs, hidden, dtype=self.wire_dtype)
        self.recv_x = torch.empty(rows, hidden, dtype=self.wire_dtype)
        self.grouped_x = torch.empty(rows, hidden, dtype=self.wire_dtype)
        self.send_extra = torch.empty(pairs, extra)  # weight, scales
        self.recv_extra = torch.empty(rows, extra)
        self.grouped_extra = torch.empty(rows, extra)
        self.send_y = torch.empty(rows, hidden, dtype=options.x_dtype)
        self.recv_y = torch.empty(pairs, hidden, dtype=options.x_dtype)
        self.send_counts = torch.empty(self.num_experts, dtype=torch.int64)
        self.recv_counts = torch.empty(self.num_experts, dtype=torch.int64)

    def begin(self, max_tokens: int) -> None:
        pass

    def dispatch(self, tokens: Tokens) -> Rows:
        weights = tokens.topk_weights
        assert weights is not None
        num_tokens, topk = tokens.topk_idx.shape
        expert, order = tokens.topk_idx.flatten().sort(stable=True)
        token = order // topk
        self.send_counts.copy_(torch.bincount(expert, minlength=self.num_experts))
        dist.all_to_all_single(self.recv_counts, self.send_counts)
        send_splits = self.send_counts.view(self.world_size, -1).sum(dim=1).tolist()
        recv_splits = self.recv_counts.view(self.world_size, -1).sum(dim=1).tolist()
        sent, received = len(order), sum(recv_splits)

        extra = self.send_extra[:sent]
        extra[:, 0] = weights.flatten()[order]
        x = tokens.x
        if self.quantize:
            q, scales = quantize(x)
            x = q.view(torch.uint8)
            extra[:, 1:] = scales[token]
        torch.index_select(x, 0, token, out=self.send_x[:sent])
        rows = _exchange(self.recv_x[:received], self.send_x[:sent], recv_splits, send_splits)
        rest = _exchange(self.recv_extra[:received], extra, recv_splits, send_splits)

        # They come ordered by (source, expert), and go to (expert, source).
        by_source = self.recv_counts.view(self.world_size, self.num_local)
        place = _expert_major(by_source)
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
        back = _expert_major(by_source.t().contiguous())
        rows = torch.index_select(y, 0, back, out=self.send_y[:received])
        rows = _exchange(self.recv_y[:sent], rows, send_splits, recv_splits)
        if sent == 0:
            return y.new_zeros(num_tokens, y.shape[1])
        place = torch.empty_like(order)
        place[order] = torch.arange(sent)
        return functional.embedding_bag(
            place.view(num_tokens, topk),
            rows,
            mode="sum",
            per_sample_weights=weights.to(rows.dtype),
        )

    def wire_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass


def _exchange(out: Tensor, rows: Tensor, out_splits: list[int], row_splits: list[int]) -> Tensor:
    dist.all_to_all_single(out, rows, out_splits, row_splits)
    return out


def _expert_major(counts: Tensor) -> Tensor:
    """Where to find each row in an array of blocks ordered (a, b), read in the order (b, a).

    counts [A, B] rows per block. Example: [[1, 2], [1, 0]] -> [0, 3, 1, 2].
    """
    start = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts).t().flatten()
    length = counts.t().flatten()
    first = length.cumsum(0) - length
    return torch.arange(int(length.sum())) + (start - first).repeat_interleave(length)
