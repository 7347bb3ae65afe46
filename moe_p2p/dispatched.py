"""What dispatch returns and what its halves pass on, as named tuples for torch.compile.

Shapes: W ranks, T tokens, K top-k, H hidden size, E_local experts of this rank, R rows (padded:
E_local * capacity, else capacity); [rows] stands for [E_local, capacity] or [R].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LAYOUTS = ("padded", "grouped", "by_rank")  # kernels/abi/shape.h, RowLayout
SCALE_FORMATS = ("float32", "power_of_two", "ue8m0")  # ScaleFormat
PADDED, GROUPED, BY_RANK = range(3)


class Layout(NamedTuple):
    """How received rows lie."""

    rows: int  # PADDED, GROUPED or BY_RANK
    capacity: int  # rows of each expert when padded, else of all
    alignment: int  # grouped: an expert starts at a multiple of it


# What a dispatch is asked for beside its tensors, as its op takes it: max_tokens, quantize, scale
# format as its position in SCALE_FORMATS, layout, column_scales, zero_padding (None: when autograd
# records the call), sum of WITH_SOURCE and the like (ops.py), solo. Without names, for every
# dispatch of AllToAll makes one: with them a pair takes 0.25 us more of 3.5 (two shared cores,
# benchmarks/bench_host_time.py).
DispatchOptions = tuple[int, bool, int, Layout, bool, bool | None, int, bool]


class Dispatched(NamedTuple):
    """Rows for this rank's experts, and what their combine needs.

    Rows of an expert are in the order of (source rank, token), and so are all rows by rank. Rows
    past the last hold whatever the memory held, or zeros with zero_padding.
    """

    x: Tensor  # [rows, H], type of the dispatched x, or float8_e4m3fn with quantize
    scales: Tensor | None  # [rows, P]; None unless fp8 came with scales
    extras: tuple[Tensor, ...]  # each [rows, n]
    row_weights: Tensor  # [R] fp32: weight of the (token, expert) of a row; by rank [R, K]
    counts: Tensor  # [E_local] int32: tokens of each expert
    offsets: Tensor  # [E_local + 1] int32: first row of each expert in [R]; by rank [W + 1]: source
    source: Tensor | None  # [R, 2] int32: source rank and its token; with_source only
    handle: Tensor  # int32, opaque
    topk_idx: Tensor  # [T, K], as it was given, or with copy_topk a copy
    max_tokens: int  # of this call
    layout: Layout
    zero_padding: bool  # rows without a token are zero
    ranges: Tensor | None = None  # [E_local, W] int64; with_ranges only
    wait_ticks: Tensor | None = None  # [W] int64; with_wait_ticks only
    row_topk: Tensor | None = None  # by rank: [R, K] local expert ids, -1: none of this rank


class PendingDispatch(NamedTuple):
    """A dispatch whose rows are on their way."""

    handle: Tensor
    topk_idx: Tensor  # [T, K]
    options: DispatchOptions
    dtype: torch.dtype  # of the rows
    scales: tuple[int, torch.dtype] | None  # how many of a row, and their type
    extras: tuple[tuple[int, torch.dtype], ...]  # width and type of each


class PendingCombine(NamedTuple):
    """A combine whose rows are on their way."""

    handle: Tensor
    num_rows: int  # T
    out_dtype: torch.dtype
    with_scalars: bool
