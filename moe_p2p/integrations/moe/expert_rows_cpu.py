"""What kernels/triton/expert_rows.py has, function by function, in torch: for CPU tensors.

Rows are in the same order, and sums are taken in the same order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_p2p import errors


def list_places(routing_map: Tensor) -> Tensor:
    num_tokens, num_experts = routing_map.shape
    ends = routing_map.t().reshape(-1).cumsum(0, dtype=torch.int32)
    places = ends.new_zeros((num_tokens, 2 + 2 * num_experts))
    if num_tokens:
        token, expert = routing_map.nonzero(as_tuple=True)
        nth = routing_map.cumsum(1)[token, expert] + 1
        places[:, 0], places[:, 1] = routing_map.sum(1), ends[-1]
        places[token, nth] = ends.view(num_experts, num_tokens)[expert, token] - 1
        places[token, nth + num_experts] = expert.int()
    return places


def to_rows(
    x: Tensor,
    places: Tensor,
    num_rows: int,
    *,
    weights: Tensor | None = None,
    probs: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    token, expert = _pairs(places, num_rows)
    rows = x.index_select(0, token)
    if weights is not None:
        wide = _wider(x, weights)
        rows = (rows.to(wide) * weights[token, expert].to(wide)[:, None]).to(x.dtype)
    more = num_rows - len(token)
    rows = torch.cat((rows, rows.new_zeros((more, x.shape[1])))) if more else rows
    if probs is None:
        return rows, None
    return rows, torch.cat((probs[token, expert], probs.new_zeros(more)))


def sum_rows(
    rows: Tensor,
    places: Tensor,
    *,
    weights: Tensor | None = None,
    row_probs: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    token, expert = _pairs(places, len(rows))
    terms = rows[: len(token)].to(_wider(rows, weights))
    if weights is not None:
        terms = terms * weights[token, expert].to(terms.dtype)[:, None]
    # Threads of scatter_add_ divide the tokens: a token's rows are added in their order.
    out = terms.new_zeros((len(places), rows.shape[1]))
    out.scatter_add_(0, token[:, None].expand(terms.shape), terms)
    if row_probs is None:
        return out.to(rows.dtype), None
    probs = row_probs.new_zeros((len(places), (places.shape[1] - 2) // 2))
    probs[token, expert] = row_probs[: len(token)]
    return out.to(rows.dtype), probs


def dots(x: Tensor, rows: Tensor, places: Tensor, dtype: torch.dtype) -> Tensor:
    token, expert = _pairs(places, len(rows))
    wide = torch.promote_types(_wider(x, rows), dtype)
    out = x.new_zeros((len(x), (places.shape[1] - 2) // 2), dtype=dtype)
    out[token, expert] = (x[token].to(wide) * rows[: len(token)]).sum(-1).to(dtype)
    return out


def chunk_index(sizes: Tensor, order: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    total = int(sizes.sum())
    errors.require(total == num_rows, f"split_sizes sum up to {total}, there are {num_rows} rows")
    rows = torch.split(torch.arange(num_rows, device=sizes.device), sizes.tolist())
    index = torch.cat([rows[chunk] for chunk in order.tolist()]) if rows else sizes.new_empty(0)
    return index, index.argsort()


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    return x.index_select(0, index)


def _pairs(places: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Token and expert of each row, but of those from num_rows on."""
    num_experts = (places.shape[1] - 2) // 2
    listed = torch.arange(num_experts, device=places.device) < places[:, :1]
    order = places[:, 2 : 2 + num_experts][listed].argsort()[:num_rows]
    expert = places[:, 2 + num_experts :][listed]
    return listed.nonzero()[order, 0], expert[order].long()


def _wider(*tensors: Tensor | None) -> torch.dtype:
    wide = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if wide else torch.float32
