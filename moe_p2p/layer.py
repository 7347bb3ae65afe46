"""A plain mixture-of-experts layer over dispatch and combine: read it, copy it, change it.

With an AllToAll the experts are spread over its ranks, and every rank passes its own tokens; with
None all experts live in this process and the same mathematics runs without communication. Both
train. Gradients of an expert sum over the tokens of all ranks, as they do in one process; gradients
of the router, like those of any replicated weight, are this rank's and the caller's to reduce.

Shapes: T tokens, H hidden size, F width of an expert, E experts, E_local of this rank, K top-k,
R rows at this rank's experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_p2p.all_to_all import AllToAll


def local_experts(all_to_all: AllToAll) -> list[int]:
    """Global ids of this rank's experts, in the order of the rows that dispatch gives."""
    owners = all_to_all.config.expert_rank
    if owners is None:
        count = all_to_all.num_local_experts
        return list(range(all_to_all.rank * count, (all_to_all.rank + 1) * count))
    return [expert for expert, owner in enumerate(owners) if owner == all_to_all.rank]


class Router(nn.Module):
    """Softmax over all experts, the K largest, rescaled to sum to one."""

    def __init__(self, hidden_dim: int, num_experts: int, *, topk: int) -> None:
        super().__init__()
        self.topk = topk
        self.score = nn.Linear(hidden_dim, num_experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> expert ids int64 [T, K] and their weights fp32 [T, K]."""
        probabilities = self.score(x).float().softmax(dim=-1)  # [T, E]
        weights, topk_idx = probabilities.topk(self.topk, dim=-1)
        return topk_idx, weights / weights.sum(dim=-1, keepdim=True)


class Experts(nn.Module):
    """SwiGLU experts, w_down(silu(w_gate x) * w_up x), on rows that are grouped by expert.

    Expert e starts from the same weights whichever rank holds it: they are drawn from (seed, e).
    """

    def __init__(self, expert_ids: list[int], hidden_dim: int, *, ffn_dim: int, seed: int) -> None:
        super().__init__()
        count = len(expert_ids)
        self.w_gate = nn.Parameter(torch.empty(count, hidden_dim, ffn_dim))
        self.w_up = nn.Parameter(torch.empty(count, hidden_dim, ffn_dim))
        self.w_down = nn.Parameter(torch.empty(count, ffn_dim, hidden_dim))
        for i, expert in enumerate(expert_ids):
            generator = torch.Generator().manual_seed(1_000_003 * seed + expert)
            for weight in (self.w_gate, self.w_up, self.w_down):
                std = weight.shape[1] ** -0.5
                nn.init.normal_(weight.data[i], std=std, generator=generator)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows [R, H], counts [E_local] rows of each expert, one after the other -> [R, H]."""
        sizes = counts.tolist()
        *mine, unused = torch.split(rows, [*sizes, rows.shape[0] - sum(sizes)])
        out = []
        for i, x in enumerate(mine):
            gate = functional.silu(x @ self.w_gate[i].to(x.dtype))
            out.append((gate * (x @ self.w_up[i].to(x.dtype))) @ self.w_down[i].to(x.dtype))
        return torch.cat([*out, torch.zeros_like(unused)])


class MoELayer(nn.Module):
    """Router, dispatch, experts, combine."""

    def __init__(
        self,
        hidden_dim: int,
        num_experts: int,
        *,
        topk: int,
        ffn_dim: int,
        all_to_all: AllToAll | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.all_to_all = all_to_all
        self.router = Router(hidden_dim, num_experts, topk=topk)
        mine = list(range(num_experts)) if all_to_all is None else local_experts(all_to_all)
        self.experts = Experts(mine, hidden_dim, ffn_dim=ffn_dim, seed=seed)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, H] of this rank -> [T, H]."""
        topk_idx, topk_weights = self.router(x)
        if self.all_to_all is None:
            return self._one_process(x, topk_idx, topk_weights)
        received = self.all_to_all.dispatch(x, topk_idx, topk_weights, layout="grouped")
        y = self.experts(received.x, received.counts)
        return self.all_to_all.combine(y, received)

    def _one_process(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        expert, order = topk_idx.flatten().sort(stable=True)  # (token, k) pairs, expert by expert
        token = order // topk_idx.shape[1]
        counts = torch.bincount(expert, minlength=self.num_experts)
        y = self.experts(x[token], counts) * topk_weights.flatten()[order, None]
        out: Tensor = y.new_zeros(x.shape).index_add(0, token, y).to(x.dtype)
        return out
