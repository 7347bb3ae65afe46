"""Dispatch and combine among the ranks of a group.

    config = AllToAllConfig(num_experts=64, hidden_dim=4096, topk=8, max_tokens=512)
    all_to_all = AllToAll(None, config)
    received = all_to_all.dispatch(x, topk_idx, topk_weights)
    y = experts(received.x, received.counts)
    out = all_to_all.combine(y, received)

All ranks make the same calls in the same order, with the same max_tokens, solo, types and options;
their numbers of tokens are their own. Calls of one object come from one thread at a time.

Shapes: W ranks, T rows of this rank's x, K top-k, E experts, E_local of this rank, H hidden size,
R rows received (padded: E_local * capacity, grouped: capacity); [rows] stands for
[E_local, capacity] or [R].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from moe_p2p import errors
from moe_p2p.communicator import Communicator
from moe_p2p.dispatched import Dispatched, Layout, PendingCombine, PendingDispatch
from moe_p2p.ops import SCALE_BLOCK, call

_ops = torch.ops.moe_p2p


_LAYOUTS = ("padded", "grouped")
_NO_FP8_GRADIENT = (
    "x requires grad, but what is dispatched as float8_e4m3fn has no gradient; dispatch x.detach() "
    "or do not quantize"
)
_PADDING_IS_NOT_ZERO = (
    "y requires grad, but rows without a token were not zeroed, and gradients of expert weights "
    "multiply them (0 * NaN is NaN); pass zero_padding=True to dispatch, "
    "or run under torch.no_grad() if nothing trains"
)
_NO_HALF_GRADIENT = (
    "{} requires grad, but halves are not differentiable; use the whole call, or torch.no_grad()"
)


def _split_count(num_tokens: int | Tensor | None) -> tuple[Tensor | None, int]:
    """The count as a tensor, and as a number that is used without the tensor (-1: all rows)."""
    if isinstance(num_tokens, Tensor):
        return num_tokens, -1
    if num_tokens is None:
        return None, -1
    errors.require(num_tokens >= 0, f"num_tokens is {num_tokens}, must be at least 0")
    return None, num_tokens


def _records(*tensors: Tensor | None) -> bool:
    """Whether autograd records what is done with one of these."""
    if not torch.is_grad_enabled():
        return False
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _refuse_gradient(**tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        errors.require(not _records(tensor), _NO_HALF_GRADIENT.format(name))


class AllToAll(Communicator):
    """Dispatch and combine of one rank. Making one is collective: every rank of the group does.

    group_or_store: a torch.distributed ProcessGroup, None for the default group, or a Store with
        rank and world_size. Used during construction only. Ranks that are threads of one process
        share a HashStore; other stores are one object per rank.
    config: equal on all ranks but for timeout_s, wait, num_threads and proxy_cpu.
    engine: NICs to use; None: an engine of its own, closed with this object.

    Raises on all ranks alike InvalidArgumentError when a field of the configurations differs
    (naming it, two ranks and both values), and TimeoutError naming the ranks that did not come.
    Also ResourceExhaustedError when /dev/shm is too small, saying what was asked for.
    """

    # --- whole calls ---

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor | None = None,
        *,
        scales: Tensor | None = None,
        extras: Sequence[Tensor] = (),
        num_tokens: int | Tensor | None = None,
        max_tokens: int | None = None,
        quantize: bool = False,
        layout: Literal["padded", "grouped"] = "padded",
        capacity: int | None = None,
        alignment: int = 1,
        with_source: bool = False,
        solo: bool = False,
        zero_padding: bool | None = None,
    ) -> Dispatched:
        """Sends each token to the ranks of its experts and returns the rows for this rank's.

        x: [T, H] bfloat16, float16, float32 or float8_e4m3fn, contiguous, T from 0 to max_tokens.
        topk_idx: [T, K] int32 or int64 expert ids, distinct in a row; -1: none.
        topk_weights: [T, K] float32. None: 1.
        scales: [T, ceil(H / 128)] float32, with x of float8_e4m3fn only.
        extras: up to 8 tensors [T, n] of any type that travel along as bytes.
        num_tokens: rows of x that count, or a tensor of one int32 or int64. None: all.
        max_tokens: bound on T of all ranks in this call. None: that of the configuration.
        quantize: send x as float8_e4m3fn with one scale per 128 values.
        layout: "padded" gives [E_local, capacity, H], "grouped" [capacity, H] with expert e from
            row offsets[e] on, a multiple of alignment.
        capacity: rows of each expert, or of all when grouped. None: enough for any routing.
        with_source: also return where each row comes from.
        solo: no combine follows while other calls are under way (training does this by itself).
        zero_padding: rows without a token become zero. None: when autograd records this call.
            Experts that train need it: the gradient of their weights multiplies all rows.

        Differentiable in x and topk_weights. Raises InvalidArgumentError before anything is sent;
        TimeoutError, PeerDeadError and ProtocolError break the object (`broken`).
        """
        tokens = self.config.max_tokens if max_tokens is None else max_tokens
        where = self._layout(layout, capacity, alignment, tokens)
        count, count_on_host = _split_count(num_tokens)
        records = _records(x, topk_weights, *extras)
        if self._device is not None and not torch.compiler.is_compiling():
            self._device.prepare_dispatch(x.dtype, quantize=quantize)
            if records and not quantize and x.dtype != torch.float8_e4m3fn:
                self._device.prepare_combine(x.dtype, x.dtype)  # its gradient
        if records and quantize and x.requires_grad:
            raise errors.make(errors.InvalidArgumentError, _NO_FP8_GRADIENT)
        zeroed = records if zero_padding is None else zero_padding
        rows, row_scales, row_weights, counts, offsets, source, handle, row_extras = call(
            _ops.dispatch.default if records else _ops.dispatch_inference.default,
            self._comm,
            x,
            scales,
            list(extras),
            topk_idx,
            topk_weights,
            count,
            count_on_host,
            tokens,
            quantize,
            *where,
            zeroed,
            with_source,
            solo or records,
        )
        return Dispatched(
            rows,
            row_scales if quantize or scales is not None else None,
            tuple(row_extras),
            row_weights,
            counts,
            offsets,
            source if with_source else None,
            handle,
            topk_idx,
            tokens,
            where,
            zeroed,
        )

    @overload
    def combine(
        self,
        y: Tensor,
        dispatched: Dispatched,
        *,
        weighted: bool = True,
        out_dtype: torch.dtype | None = None,
        row_scalars: None = None,
    ) -> Tensor: ...

    @overload
    def combine(
        self,
        y: Tensor,
        dispatched: Dispatched,
        *,
        weighted: bool = True,
        out_dtype: torch.dtype | None = None,
        row_scalars: Tensor,
    ) -> tuple[Tensor, Tensor]: ...

    def combine(
        self,
        y: Tensor,
        dispatched: Dispatched,
        *,
        weighted: bool = True,
        out_dtype: torch.dtype | None = None,
        row_scalars: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Adds up each token's rows at its own rank, in fp32 and in one order, and returns [T, H].

        y: [rows, H] bfloat16, float16 or float32, where dispatch put the rows, or flat [R, H].
        weighted: times row_weights.
        out_dtype: of the result and of the partial sums that travel. None: that of y.
        row_scalars: [R] float32, returned to the (token, k) of each row as a second result [T, K].

        Rows of x past num_tokens give zeros. Differentiable in y and in the dispatched row_weights.
        Raises as dispatch does.
        """
        row_weights = dispatched.row_weights if weighted else None
        sum_dtype = y.dtype if out_dtype is None else out_dtype
        records = _records(y, row_weights, row_scalars)
        if self._device is not None and not torch.compiler.is_compiling():
            self._device.prepare_combine(y.dtype, sum_dtype)
            if records:
                self._device.prepare_dispatch(sum_dtype, quantize=False)  # its gradient
        if records and not dispatched.zero_padding:
            raise errors.make(errors.InvalidArgumentError, _PADDING_IS_NOT_ZERO)
        out, scalars = call(
            _ops.combine.default if records else _ops.combine_inference.default,
            self._comm,
            y,
            row_weights,
            row_scalars,
            dispatched.handle,
            dispatched.topk_idx,
            dispatched.max_tokens,
            sum_dtype,
            *dispatched.layout,
        )
        return out if row_scalars is None else (out, scalars)

    # --- halves: between them other work may run while bytes travel ---

    def dispatch_send(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor | None = None,
        *,
        scales: Tensor | None = None,
        extras: Sequence[Tensor] = (),
        num_tokens: int | Tensor | None = None,
        max_tokens: int | None = None,
        quantize: bool = False,
        layout: Literal["padded", "grouped"] = "padded",
        capacity: int | None = None,
        alignment: int = 1,
        with_source: bool = False,
        solo: bool = False,
        zero_padding: bool = False,
    ) -> PendingDispatch:
        """The first half of dispatch: returns once the inputs may be overwritten.

        Takes what dispatch takes. max_tokens may span at most steps_in_flight chunks. Not
        differentiable.
        """
        _refuse_gradient(x=x, topk_weights=topk_weights)
        tokens = self.config.max_tokens if max_tokens is None else max_tokens
        where = self._layout(layout, capacity, alignment, tokens)
        count, count_on_host = _split_count(num_tokens)
        if self._device is not None:
            self._device.prepare_dispatch(x.dtype, quantize=quantize)
        words = self._shape.handle_words(x.shape[0], tokens)
        handle = torch.empty(words, dtype=torch.int32, device=x.device)
        call(
            _ops.dispatch_send.default,
            self._comm,
            x,
            scales,
            list(extras),
            topk_idx,
            topk_weights,
            count,
            count_on_host,
            tokens,
            quantize,
            solo,
            handle,
        )
        return PendingDispatch(
            handle,
            topk_idx,
            tokens,
            where,
            torch.float8_e4m3fn if quantize else x.dtype,
            quantize or scales is not None,
            tuple((extra.shape[1], extra.dtype) for extra in extras),
            with_source,
            zero_padding,
        )

    def dispatch_recv(self, pending: PendingDispatch, out: Dispatched | None = None) -> Dispatched:
        """The second half of dispatch: waits for the rows.

        out: an earlier result of the same layout and options, to receive into. None: new tensors.
        """
        into = self._make_outputs(pending) if out is None else out
        call(
            _ops.dispatch_recv.default,
            self._comm,
            pending.handle,
            into.x,
            into.scales,
            list(into.extras),
            into.row_weights,
            into.counts,
            into.offsets,
            into.source,
            *pending.layout,
            pending.zero_padding,
        )
        return into._replace(
            handle=pending.handle,
            topk_idx=pending.topk_idx,
            max_tokens=pending.max_tokens,
            layout=pending.layout,
            zero_padding=pending.zero_padding,
        )

    def combine_send(
        self,
        y: Tensor,
        dispatched: Dispatched,
        *,
        weighted: bool = True,
        out_dtype: torch.dtype | None = None,
    ) -> PendingCombine:
        """The first half of combine: returns once y may be overwritten. Not differentiable."""
        row_weights = dispatched.row_weights if weighted else None
        _refuse_gradient(y=y, row_weights=row_weights)
        dtype = y.dtype if out_dtype is None else out_dtype
        if self._device is not None:
            self._device.prepare_combine(y.dtype, dtype)
        send, handle = _ops.combine_send.default, dispatched.handle
        call(send, self._comm, handle, y, row_weights, None, dtype, dispatched.max_tokens)
        return PendingCombine(handle, dispatched.topk_idx.shape[0], dtype)

    def combine_recv(self, pending: PendingCombine, out: Tensor | None = None) -> Tensor:
        """The second half of combine: waits for the sums and returns [T, H].

        out: [T, H] of out_dtype, to receive into. None: a new tensor.
        """
        if out is None:
            shape = (pending.num_rows, self.config.hidden_dim)
            out = pending.handle.new_empty(shape, dtype=pending.out_dtype)
        call(_ops.combine_recv.default, self._comm, pending.handle, out, None)
        return out

    def release(self, given: Dispatched | PendingDispatch) -> None:
        """Ends a dispatch that gets no combine. All ranks release it, in one order of calls."""
        call(_ops.release.default, self._comm, given.handle)

    def _make_outputs(self, pending: PendingDispatch) -> Dispatched:
        experts, (grouped, capacity, _) = self.num_local_experts, pending.layout
        lead = (capacity,) if grouped else (experts, capacity)
        num_rows = capacity if grouped else experts * capacity
        hidden_dim = self.config.hidden_dim
        num_scales = -(-hidden_dim // SCALE_BLOCK)
        new, fp32, int32 = pending.handle.new_empty, torch.float32, torch.int32
        return Dispatched(
            x=new((*lead, hidden_dim), dtype=pending.dtype),
            scales=new((*lead, num_scales), dtype=fp32) if pending.with_scales else None,
            extras=tuple(new((*lead, width), dtype=dtype) for width, dtype in pending.extras),
            row_weights=new((num_rows,), dtype=fp32),
            counts=new((experts,), dtype=int32),
            offsets=new((experts + 1,), dtype=int32),
            source=new((num_rows, 2), dtype=int32) if pending.with_source else None,
            handle=pending.handle,
            topk_idx=pending.topk_idx,
            max_tokens=pending.max_tokens,
            layout=pending.layout,
            zero_padding=pending.zero_padding,
        )

    def _layout(self, layout: str, capacity: int | None, alignment: int, max_tokens: int) -> Layout:
        errors.require(layout in _LAYOUTS, f"layout is {layout!r}, must be one of {_LAYOUTS}")
        grouped = layout == "grouped"
        if capacity is None:
            capacity = self.world_size * max_tokens
            if grouped:
                experts = self.num_local_experts
                capacity = capacity * min(self.config.topk, experts) + (alignment - 1) * experts
        return Layout(grouped, capacity, alignment)
