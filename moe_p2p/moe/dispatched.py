"""What dispatch returns and what its halves pass on, as named tuples for torch.compile.

Shapes: W ranks, T tokens, K top-k, H hidden size, E_local experts of this rank, R rows (padded:
E_local * capacity, else capacity); [rows] stands for [E_local, capacity] or [R].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from moe_p2p import errors
from moe_p2p.moe.layouts import LAYOUTS
from moe_p2p.moe.options import (
    COLUMN_SCALES,
    COPY_TOPK,
    LAYOUT_MASK,
    MERGE_DUPLICATES,
    QUANTIZE,
    WITH_RANGES,
    WITH_SOURCE,
    WITH_WAIT_TICKS,
    ZERO_PADDING,
    rows_of,
)
from moe_p2p.moe.ready import ReadyRows, arriving_rows
from moe_p2p.moe.shape import CommunicatorShape

if TYPE_CHECKING:
    from moe_p2p.moe.communicator import Communicator

new_tuple = tuple.__new__  # a named tuple of all its fields, in less time than its own way


class Call(NamedTuple):
    """What the calls that follow a dispatch need of it. Not for users."""

    handle: Tensor  # int32
    options: int  # DispatchOptions.number, with what autograd has added
    max_tokens: int
    capacity: int  # rows of each expert when padded, else of all


class Dispatched(NamedTuple):
    """Rows for this rank's experts, and what their combine needs.

    Rows of an expert are in the order of (source rank, token), and so are all rows by rank. Rows
    past the last hold whatever the memory held, or zeros with zero_padding.
    """

    x: Tensor  # [rows, H], type of the dispatched x, or float8_e4m3fn with quantize
    scales: Tensor | None  # [rows, P]; None unless fp8 came with scales
    extras: tuple[Tensor, ...]  # each [rows, n]
    row_weights: Tensor  # [R] fp32: weight of the (token, expert) of a row; by rank [R, K]
    row_topk: Tensor | None  # by rank: [R, K] local expert ids, -1: none of this rank
    counts: Tensor  # [E_local] int32: tokens of each expert
    offsets: Tensor  # [E_local + 1] int32: first row of each expert in [R]; by rank [W + 1]: source
    source: Tensor | None  # [R, 2] int32: source rank and its token; with_source only
    ranges: Tensor | None  # [E_local, W] int64; with_ranges only
    wait_ticks: Tensor | None  # [W] int64; with_wait_ticks only
    # [T, K] of this rank's tokens, as it was given; with copy_topk a copy; with merge_duplicates
    # without what repeats
    topk_idx: Tensor
    call: Call  # for combine and release; not for users
    ready: ReadyRows | None = None  # of make_outputs(num_sms=): which rows are here already


# Replaces x and its scales in a handle, which would keep them alive.
_NO_ROWS = (torch.empty(0, dtype=torch.float32, device="cpu"), None)
OBJECTS = Dispatched, Call, _NO_ROWS[0]  # what direct calls make results of
# What a direct dispatch returns: a Dispatched; rows, scales and a Dispatched without them; the
# first two.
WHOLE, APART, ROWS_ALONE = range(3)


def without_rows(received: Dispatched) -> Dispatched:
    """Returns it without x and scales (the first two fields), for a handle."""
    return new_tuple(Dispatched, _NO_ROWS + received[2:])


def tensors_of(received: Dispatched) -> list[Tensor]:
    return [received.call.handle, *(part for part in received if isinstance(part, Tensor))]


class PendingDispatch(NamedTuple):
    """A dispatch whose rows are on their way."""

    call: Call
    topk_idx: Tensor  # [T, K]
    x_dtype: torch.dtype  # as it was given
    width: int  # values of a row, or bytes
    scales: tuple[int, torch.dtype] | None  # number of scales of a row, and their type
    extras: tuple[tuple[int, torch.dtype], ...]  # width and type of each

    @property
    def dtype(self) -> torch.dtype:
        """Type of the rows."""
        return torch.float8_e4m3fn if self.call.options & QUANTIZE else self.x_dtype


class PendingCombine(NamedTuple):
    """A combine whose sums are on their way."""

    handle: Tensor
    num_rows: int  # T
    out_dtype: torch.dtype
    with_scalars: bool
    partials: int  # options.partials_of()


def new_outputs(like: Tensor, shape: CommunicatorShape, pending: PendingDispatch) -> Dispatched:
    """Makes what a dispatch fills, where `like` is: also for fake kernels, with symbolic sizes.

    The one list of these shapes in Python; Layout in csrc/ops/all_to_all_object.h is C++'s, and
    tests/moe/test_ops.py compares the two.
    """
    options, capacity, topk_idx = pending.call.options, pending.call.capacity, pending.topk_idx
    experts, ranks, topk = shape.num_local_experts, shape.world_size, shape.topk
    rows, new = rows_of(options), like.new_empty
    lead = (experts, capacity) if rows.apart else (capacity,)
    num_rows = experts * capacity if rows.apart else capacity
    fp32, int32, int64 = torch.float32, torch.int32, torch.int64
    return Dispatched(
        x=new((*lead, pending.width), dtype=pending.dtype),
        scales=pending.scales and _new_scales(like, lead, *pending.scales, options),
        extras=tuple(new((*lead, width), dtype=dtype) for width, dtype in pending.extras),
        row_weights=new((num_rows, topk) if rows.per_token else (num_rows,), dtype=fp32),
        row_topk=new((num_rows, topk), dtype=topk_idx.dtype) if rows.per_token else None,
        counts=new((experts,), dtype=int32),
        offsets=new(((ranks if rows.per_token else experts) + 1,), dtype=int32),
        source=new((num_rows, 2), dtype=int32) if options & WITH_SOURCE else None,
        ranges=new((experts, ranks), dtype=int64) if options & WITH_RANGES else None,
        wait_ticks=new((ranks,), dtype=int64) if options & WITH_WAIT_TICKS else None,
        topk_idx=topk_idx,
        call=pending.call,
    )


def outputs_for(
    pending: PendingDispatch, communicator: Communicator, num_sms: int | None = None
) -> Dispatched:
    """Makes what dispatch_recv fills.

    num_sms: with counters, zero in the order of the stream, and a kernel that raises them, which is
        compiled if it has to; most multiprocessors that it may hold.
    """
    made = new_outputs(pending.call.handle, communicator.shape, pending)
    if num_sms is None:
        return made
    options = pending.call.options
    rows = rows_of(options)
    errors.require(
        rows.apart and not options & ZERO_PADDING,
        f"num_sms: counters are of rows in layout 'padded' without zero_padding (no counter says "
        f"that padding is zero), and this dispatch has layout {rows.name!r}",
    )
    row_bytes = pending.width if pending.x_dtype == torch.uint8 else 0
    communicator.prepare_arriving(pending.x_dtype, options, row_bytes)
    ready = arriving_rows(made.counts, pending.call.capacity, communicator, num_sms)
    return made._replace(ready=ready)


def recv_arguments(into: Dispatched, pending: PendingDispatch) -> tuple[Any, ...]:
    """Returns what the op dispatch_recv takes behind the communicator."""
    handle, options, _, capacity = pending.call
    rows = (into.x, into.scales, list(into.extras), into.row_weights)
    beside = (into.source, into.ranges, into.wait_ticks, into.row_topk)
    outputs = (*rows, into.counts, into.offsets, *beside, capacity)
    given = options & ~MERGE_DUPLICATES, handle, *outputs
    if into.ready is None:
        return given
    errors.require(
        into.call is pending.call,
        "out.ready counts rows of another dispatch: receive into what make_outputs(pending, "
        "num_sms=...) has made for this one",
    )
    return *given, into.ready.counters, into.ready.num_sms


def _new_scales(
    like: Tensor, lead: tuple[int, ...], width: int, dtype: torch.dtype, options: int
) -> Tensor:
    """Makes scales [*lead, width]; column_scales: in columns of a multiple of 4 rows."""
    if not options & COLUMN_SCALES:
        return like.new_empty((*lead, width), dtype=dtype)
    ld = -(-lead[-1] // 4) * 4
    strides = (width * ld, 1, ld)[-1 - len(lead) :]
    return like.new_empty_strided((*lead, width), strides, dtype=dtype)


def dispatched_of(
    made: tuple[Any, ...],
    options: int,
    topk_idx: Tensor,
    has_scales: bool,
    max_tokens: int,
    capacity: int,
) -> Dispatched:
    """Returns what a dispatch op has made."""
    rows, row_scales, row_weights, counts, offsets, handle, more = made
    extras: tuple[Tensor, ...] = ()
    source = ranges = wait_ticks = row_topk = None
    if more:
        rest = iter(more)
        source = next(rest) if options & WITH_SOURCE else None
        ranges = next(rest) if options & WITH_RANGES else None
        wait_ticks = next(rest) if options & WITH_WAIT_TICKS else None
        topk_idx = next(rest) if options & COPY_TOPK else topk_idx
        row_topk = next(rest) if LAYOUTS[options & LAYOUT_MASK].per_token else None
        extras = tuple(rest)
    call = new_tuple(Call, (handle, options, max_tokens, capacity))
    first = (rows, row_scales if has_scales else None, extras, row_weights, row_topk)
    return new_tuple(
        Dispatched, (*first, counts, offsets, source, ranges, wait_ticks, topk_idx, call, None)
    )


def with_more(
    out: Tensor, scalars: Tensor | None, ticks: Tensor | None
) -> Tensor | tuple[Tensor, ...]:
    """Returns what a combine returns: its result and the other outputs that were asked for."""
    if scalars is None and ticks is None:
        return out
    return out, *(tensor for tensor in (scalars, ticks) if tensor is not None)


def beside_sums(
    like: Tensor, shape: CommunicatorShape, num_rows: int, with_scalars: bool, with_wait_ticks: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Makes tensors for the scalars and the wait_ticks of a combine."""
    scalars = ticks = None
    if with_scalars:
        scalars = like.new_empty((num_rows, shape.topk), dtype=torch.float32)
    if with_wait_ticks:
        ticks = like.new_empty((shape.world_size,), dtype=torch.int64)
    return scalars, ticks
