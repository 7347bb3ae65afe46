"""What dispatch returns and what its halves pass on, as named tuples for torch.compile.

Shapes: T tokens, K top-k, H hidden size, E_local experts of this rank, R rows (padded: E_local *
capacity, grouped: capacity); [rows] stands for [E_local, capacity] or [R].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """How received rows lie."""

    grouped: bool  # all experts one after the other; else [E_local, capacity]
    capacity: int  # rows of each expert, or of all when grouped
    alignment: int  # grouped: an expert starts at a multiple of it


class Dispatched(NamedTuple):
    """Rows for this rank's experts, and what their combine needs.

    Rows of an expert are in the order of (source rank, token). Rows past an expert's count hold
    whatever the memory held, or zeros with zero_padding.
    """

    x: Tensor  # [rows, H], type of the dispatched x, or float8_e4m3fn with quantize
    scales: Tensor | None  # [rows, ceil(H / 128)] fp32; None unless fp8 came with scales
    extras: tuple[Tensor, ...]  # each [rows, n]
    row_weights: Tensor  # [R] fp32: weight of the (token, expert) that a row stands for
    counts: Tensor  # [E_local] int32: rows of each expert
    offsets: Tensor  # [E_local + 1] int32: first row of each expert, in [R]
    source: Tensor | None  # [R, 2] int32: source rank and its token; with_source only
    handle: Tensor  # int32, opaque
    topk_idx: Tensor  # [T, K], as it was given
    max_tokens: int  # of this call
    layout: Layout
    zero_padding: bool  # rows without a token are zero


class PendingDispatch(NamedTuple):
    """A dispatch whose rows are on their way."""

    handle: Tensor
    topk_idx: Tensor  # [T, K]
    max_tokens: int
    layout: Layout
    dtype: torch.dtype  # of the rows
    with_scales: bool
    extras: tuple[tuple[int, torch.dtype], ...]  # width and type of each
    with_source: bool
    zero_padding: bool


class PendingCombine(NamedTuple):
    """A combine whose rows are on their way."""

    handle: Tensor
    num_rows: int  # T
    out_dtype: torch.dtype
