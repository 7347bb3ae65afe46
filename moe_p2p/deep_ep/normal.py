"""What normal calls of `Buffer` need: one row for each (token, rank), by source rank and token.

All of them are solo calls of AllToAll: DeepEP's users dispatch and combine in any number and order
with one handle, forward and backward.

Symbols: T tokens, K top-k, E experts, H hidden size, W ranks, R rows received, P scales of a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moe_p2p import errors
from moe_p2p.deep_ep.handle import NormalHandle
from moe_p2p.moe import bare
from moe_p2p.moe.config import AllToAllConfig
from moe_p2p.moe.dispatched import ROWS_ALONE, Dispatched
from moe_p2p.moe.options import DispatchForm
from moe_p2p.moe.pool import ReleasingAllToAll

_MAX_TOKENS = 1 << 24  # of a communicator: sizes nothing, memory follows from each call's tokens
_Values = Tensor | tuple[Tensor, Tensor]


def normal_config(
    num_experts: int, topk: int, values: Tensor, num_sms: int, *, timeout_s: float
) -> AllToAllConfig:
    """Of the communicator of these shapes; types of 1 and 2 bytes share one."""
    return AllToAllConfig(
        num_experts=num_experts,
        hidden_dim=values.shape[1],
        topk=topk,
        max_tokens=_MAX_TOKENS,
        dtype=torch.bfloat16 if values.dtype.itemsize <= 2 else values.dtype,
        device=values.device.type,
        num_sms=num_sms if values.is_cuda else None,
        timeout_s=timeout_s,
    )


def send(
    all_to_all: ReleasingAllToAll,
    form: DispatchForm,
    values: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor | None = None,
) -> Dispatched:
    if scales is not None:
        scales = in_columns(scales)
    values, others = values.contiguous(), all_to_all.others
    return all_to_all.dispatch_with(form, values, topk_idx, topk_weights, scales, others=others)


def dispatch_again(handle: NormalHandle, values: Tensor, scales: Tensor | None) -> _Values | None:
    """Other values along the same routes, with nothing around it; None: it is more."""
    all_to_all, topk = handle.all_to_all, handle.dispatched.topk_idx
    columns = None if scales is None else in_columns(scales)
    comm, form, others = all_to_all._comm, handle.form_again, all_to_all.others
    made = bare.dispatch(comm, form, values, topk, None, columns, others, ROWS_ALONE)
    if made is None:
        return None
    return made[0] if scales is None else rows_of(made, scales)


def in_columns(scales: Tensor) -> Tensor:
    """[T] or [T, P] -> [T, P]"""
    return (scales.unsqueeze(1) if scales.dim() == 1 else scales).contiguous()


def rows_of(fields: tuple[Any, ...], scales: Tensor) -> _Values:
    """Returns rows in the form of the caller's x; its scales may be [T] instead of [T, P]."""
    return fields[0], fields[1].squeeze(1) if scales.dim() == 1 else fields[1]


def ranks_as_topk(is_token_in_rank: Tensor, num_experts: int) -> Tensor:
    """[T, W] int64: the first expert of each rank that a token goes to, else -1."""
    num_ranks = is_token_in_rank.shape[1]
    first = torch.arange(0, num_experts, num_experts // num_ranks, device=is_token_in_rank.device)
    return torch.where(is_token_in_rank, first, -1)


def widened(topk_weights: Tensor, topk: int) -> Tensor:
    """Adds columns up to the number that the dispatch used."""
    if topk_weights.shape[1] == topk:
        return topk_weights.contiguous()
    missing = topk - topk_weights.shape[1]
    errors.require(
        missing > 0,
        f"topk_weights has {topk_weights.shape[1]} columns, the dispatch of this handle had {topk}",
    )
    return functional.pad(topk_weights, (0, missing))
