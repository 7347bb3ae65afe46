"""Dispatch and combine among the ranks of a group.

    config = AllToAllConfig(num_experts=64, hidden_dim=4096, topk=8, max_tokens=512)
    all_to_all = AllToAll(None, config)
    received = all_to_all.dispatch(x, topk_idx, topk_weights)
    y = experts(received.x, received.counts)
    out = all_to_all.combine(y, received)

All ranks make the same calls in the same order, with the same max_tokens, solo, types and options;
their numbers of tokens may differ. Calls of one object come from one thread at a time.

Shapes: W ranks, T rows of this rank's x, K top-k, E experts, E_local of this rank, H hidden size,
P scales of a token, R rows received (padded: E_local * capacity, else capacity); [rows] stands for
[E_local, capacity] or [R].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_p2p import errors
from moe_p2p.library import num_modes, raise_typed, watched, without_default_device
from moe_p2p.moe import arguments, direct
from moe_p2p.moe.dispatched import Call, Dispatched, new_tuple
from moe_p2p.moe.halves import Halves, with_more
from moe_p2p.moe.layouts import LAYOUTS, RowLayout
from moe_p2p.moe.ops import NO_EXTRA_GRADIENT, NO_FP8_GRADIENT
from moe_p2p.moe.options import (
    COPY_TOPK,
    DEFAULT_COMBINE,
    LAYOUT_MASK,
    SOLO,
    WITH_RANGES,
    WITH_SOURCE,
    WITH_WAIT_TICKS,
    ZERO_PADDING,
    CombineOptions,
    DispatchForm,
    DispatchOptions,
    combine_options,
    partials_from,
    sum_order_of,
)

_ops = torch.ops.moe_p2p
is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_DISPATCH, _DISPATCH_INFERENCE = _ops.dispatch.default, _ops.dispatch_inference.default
_DISPATCH_EAGER = direct.call_of("dispatch_inference", _DISPATCH_INFERENCE)
_COMBINE, _COMBINE_INFERENCE = _ops.combine.default, _ops.combine_inference.default
_COMBINE_EAGER = direct.call_of("combine_inference", _COMBINE_INFERENCE)
_COMBINE_OUT = _ops.combine_out.default


class AllToAll(Halves):
    """Dispatch and combine of one rank. Making one is collective: every rank of the group does.

    group_or_store: a torch.distributed ProcessGroup, None for the default group, or a Store with
        rank and world_size. Used during construction only. Ranks that are threads of one process
        share a HashStore; other stores are one object per rank.
    config: equal on all ranks but for timeout_s, wait, num_threads, num_sms, transport,
        nics_per_rank and nics (config.LOCAL_FIELDS); all ranks must arrive at the same transport.
    engine: NICs to use, in place of the fields of config that choose them. None: makes an engine,
        closed with this object.
    masked: with mask_lost_ranks, the tensor [W] of `masked`; objects that share one mask together.
        None: makes one.

    On a GPU, calls run one after the other in the order in which they are made, also on different
    streams: a call on another stream than the one before waits for it. Any part may be captured
    into CUDA graphs. Replays on several streams, or beside calls, must be ordered by the caller:
    two that run at once raise InvalidArgumentError, at the next call or check(). Calls of other
    communicators of the process on this GPU are ordered likewise, unless both have num_sms.

    Raises on all ranks alike InvalidArgumentError when a field of the configurations differs
    (naming it, two ranks and both values), and TimeoutError naming the ranks that are missing.
    Also ResourceExhaustedError when /dev/shm is too small, with the bytes that were asked for.
    """

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor | None = None,
        *,
        options: DispatchOptions | None = None,
        layout: RowLayout | None = None,
        quantize: bool | None = None,
        scales: Tensor | None = None,
        extras: Sequence[Tensor] = (),
        num_tokens: int | Tensor | None = None,
        max_tokens: int | None = None,
        capacity: int | None = None,
        **moved: NoReturn,
    ) -> Dispatched:
        """Sends each token to the ranks of its experts; returns the rows for this rank's experts.

        x: [T, H] bfloat16, float16, float32 or float8_e4m3fn, contiguous, T from 0 to max_tokens.
            Or uint8 [T, B], bytes of any meaning (packed fp4), B a multiple of 16 that a row has
            room for: they arrive unchanged.
        topk_idx: [T, K] int32 or int64 expert ids, distinct in a row; -1: none.
        topk_weights: [T, K] float32. None: 1.
        options: how rows travel and lie, and what else is returned. None: DispatchOptions().
        layout, quantize: replace options that differ from DispatchOptions() in these alone.
        scales: [T, P] float32 or int32, with x of float8_e4m3fn or uint8. They travel as bytes;
            more than ceil(H / 128) need room from extra_bytes of the configuration.
        extras: up to 8 tensors [T, n] of any type that travel along as bytes.
        num_tokens: rows of x that count, or a tensor of one int32 or int64. None: all.
        max_tokens: bound on T of all ranks in this call. None: the configuration's.
        capacity: rows of each expert when padded, else of all. None: enough for any routing.

        Differentiable in x and topk_weights. Raises InvalidArgumentError before anything is sent;
        TimeoutError, PeerDeadError and ProtocolError break the object (`broken`).
        """
        form = arguments.dispatch_form(
            self._shape,
            self.config.max_tokens if max_tokens is None else max_tokens,
            options,
            layout,
            quantize,
            capacity,
            moved,
        )
        if type(extras) is not tuple:  # a look at a type of torch's would take longer
            arguments.refuse_tensor(extras)
        count, count_on_host = None, arguments.ALL_ROWS
        if num_tokens is not None:
            count, count_on_host = arguments.split_count(num_tokens)
        run = without_default_device(self.dispatch_with) if num_modes() else self.dispatch_with
        return new_tuple(
            Dispatched, run(form, x, topk_idx, topk_weights, scales, extras, count, count_on_host)
        )

    def dispatch_with(
        self,
        form: DispatchForm | tuple[DispatchOptions, int, int],
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor | None = None,
        scales: Tensor | None = None,
        extras: Sequence[Tensor] = (),
        count: Tensor | None = None,
        count_on_host: int = arguments.ALL_ROWS,
        others: Sequence[int] = (),
    ) -> tuple[Any, ...]:
        """Returns the fields of Dispatched, for callers that make many calls of one form.

        others: numbers of communicators to check first, without gradients and where nobody watches.
        """
        if not isinstance(x, Tensor):
            raise errors.wrong_type("x", x)
        if forward_ad._current_level >= 0:
            arguments.refuse_tangents(x=x, topk_weights=topk_weights, scales=scales, extras=extras)
        given, max_tokens, capacity = form
        options, quantize = given.number, given.quantize
        grad = torch.is_grad_enabled() and arguments.require_grad(x, topk_weights, *extras)
        dtype = x.dtype
        if self._device is not None:
            row_bytes = arguments.bytes_of_rows(x) if dtype == torch.uint8 else 0
            self._prepare_dispatch(dtype, options, grad, row_bytes)
        if grad:
            if quantize or dtype == torch.float8_e4m3fn:
                arguments.refuse_gradient(NO_FP8_GRADIENT, x=x)
            named = {f"extras[{i}]": extra for i, extra in enumerate(extras)}
            arguments.refuse_gradient(NO_EXTRA_GRADIENT, **named)
            options |= SOLO | (ZERO_PADDING if given.zero_padding is None else 0)
        counted = count is not None or count_on_host != arguments.ALL_ROWS
        try:
            if grad or extras or counted or watched():
                made = (_DISPATCH if grad else _DISPATCH_INFERENCE)(
                    self._comm,
                    options,
                    max_tokens,
                    capacity,
                    x,
                    topk_idx,
                    topk_weights,
                    scales,
                    [] if watched() else others,
                    [*extras],
                    count,
                    count_on_host,
                )
            else:
                last = (scales, others) if others else () if scales is None else (scales,)
                made = _DISPATCH_EAGER(
                    self._comm, options, max_tokens, capacity, x, topk_idx, topk_weights, *last
                )
        except RuntimeError as error:
            more = {"scales": scales, "extras": extras, "num_tokens": count}
            raise_typed(error, x=x, topk_idx=topk_idx, topk_weights=topk_weights, **more)
        has_scales = quantize or scales is not None
        return fields_of(made, options, topk_idx, has_scales, max_tokens, capacity)

    def combine(
        self,
        y: Tensor,
        dispatched: Dispatched,
        *,
        options: CombineOptions | None = None,
        weighted: bool | None = None,
        out_dtype: torch.dtype | None = None,
        row_scalars: Tensor | None = None,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        out: Tensor | None = None,
        **moved: Any,
    ) -> Any:
        """Adds up each token's rows at its own rank, in fp32 and in one order, and returns [T, H].

        y: [rows, H] bfloat16, float16 or float32, where dispatch put the rows, or flat [R, H].
        options: which sums, how they travel, and what else is returned. None: CombineOptions().
        weighted, out_dtype: replace options that differ from CombineOptions() in these alone.
        row_scalars: [R] float32, returned to the (token, k) of each row as a second result [T, K].
            By rank [R, K]: each k summed over the ranks that the token went to.
        topk_weights: [T, K] float32 of this rank's own tokens, where dispatch did not have them:
            times these, `weighted` is ignored. On all ranks or none. Not differentiable.
        bias: [T, H] of out_dtype, or two of them: the first addends of the result.
        out: [T, H] to write the result to, of out_dtype if that is given. Not differentiable.

        Returns a Tensor; with row_scalars or options.with_wait_ticks a tuple of it and those.
        Rows of x past num_tokens give zeros, plus bias. Differentiable in y, bias and the
        dispatched row_weights. Raises as dispatch does.
        """
        if options is not None or weighted is not None or out_dtype is not None or moved:
            options = combine_options(options, weighted, out_dtype, moved)
        else:
            options = DEFAULT_COMBINE
        row_weights = arguments.row_weights_of(dispatched, options.weighted, topk_weights)
        terms = [] if bias is None else arguments.bias_list(bias)
        grad = torch.is_grad_enabled() and without_default_device(arguments.grad_of_combine)(
            y, row_weights, row_scalars, topk_weights, terms
        )
        run = without_default_device(self.combine_with) if num_modes() else self.combine_with
        return run(y, dispatched, options, row_weights, row_scalars, topk_weights, terms, out, grad)

    def combine_with(
        self,
        y: Tensor,
        dispatched: Dispatched,
        given: CombineOptions = DEFAULT_COMBINE,
        row_weights: Tensor | None = None,
        row_scalars: Tensor | None = None,
        topk_weights: Tensor | None = None,
        terms: Sequence[Tensor] = (),
        out: Tensor | None = None,
        grad: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """Runs a combine that `combine` has checked: times row_weights, whatever given.weighted is.

        grad: autograd records it.
        """
        if not isinstance(y, Tensor):
            raise errors.wrong_type("y", y)
        if forward_ad._current_level >= 0:
            arguments.refuse_tangents(
                y=y,
                row_weights=row_weights,
                topk_weights=topk_weights,
                row_scalars=row_scalars,
                bias=terms,
                out=out,
            )
        out_dtype, with_wait_ticks, number = given.out_dtype, given.with_wait_ticks, given.number
        if out is not None:
            arguments.check_out(out, out_dtype, dispatched.topk_idx.shape[0], grad)
            in_order = not sum_order_of(number)
            errors.require(in_order, "out is given, which takes sums in order='ranks' only")
            out_dtype = out.dtype
        dtype = y.dtype
        sum_dtype = dtype if out_dtype is None else out_dtype
        handle, options, max_tokens, capacity = dispatched.call
        options |= number
        if grad and partials_from(number):
            raise errors.make(errors.InvalidArgumentError, arguments.NO_INT10_GRADIENT)
        if self._device is not None:
            self._prepare_combine(dtype, sum_dtype, options, grad)
        if grad and not options & ZERO_PADDING:
            raise errors.make(errors.InvalidArgumentError, arguments.PADDING_IS_NOT_ZERO)
        if out is not None:
            scalars, ticks = self._beside_sums(
                y, out.shape[0], row_scalars is not None, with_wait_ticks
            )
        topk_idx = dispatched.topk_idx
        is_plain = out_dtype is None and row_scalars is None and not (terms or with_wait_ticks)
        try:
            first = (self._comm, options, max_tokens, handle)
            if is_plain and not grad:
                run = _COMBINE_INFERENCE if is_dynamo_compiling() else _COMBINE_EAGER
                late = () if topk_weights is None else (topk_weights,)
                out, _ = run(*first, y, topk_idx, row_weights, *late)
                return out
            if out is not None:
                inputs = (y, row_weights, row_scalars, topk_weights, terms, handle)
                _COMBINE_OUT(
                    self._comm, *inputs, max_tokens, out, scalars, ticks, partials_from(number)
                )
                arguments.count_versions(out)
                return with_more(out, scalars, ticks)
            last = (row_weights, topk_weights, row_scalars, terms, sum_dtype, capacity)
            run = _COMBINE if grad else _COMBINE_INFERENCE
            out, more = run(*first, y, topk_idx, *last, with_wait_ticks)
        except RuntimeError as error:
            more = {"row_weights": row_weights, "row_scalars": row_scalars, "bias": terms}
            raise_typed(error, y=y, topk_weights=topk_weights, out=out, **more)
        return (out, *more) if more else out


def fields_of(
    made: tuple[Any, ...],
    options: int,
    topk_idx: Tensor,
    has_scales: bool,
    max_tokens: int,
    capacity: int,
) -> tuple[Any, ...]:
    """Returns the fields of Dispatched from what a dispatch op has made."""
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
    return (
        rows,
        row_scales if has_scales else None,
        extras,
        row_weights,
        row_topk,
        counts,
        offsets,
        source,
        ranges,
        wait_ticks,
        topk_idx,
        new_tuple(Call, (handle, options, max_tokens, capacity)),
    )
