"""Dispatch and combine in halves: between them other work may run while bytes travel.

A mixin of AllToAll, which has the whole calls. Shapes: as in all_to_all.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from moe_p2p import errors
from moe_p2p.library import call, refusal, unaffected, without_default_device
from moe_p2p.moe import arguments
from moe_p2p.moe.communicator import Communicator
from moe_p2p.moe.dispatched import Call, Dispatched, PendingCombine, PendingDispatch, new_outputs
from moe_p2p.moe.layouts import RowLayout
from moe_p2p.moe.options import (
    COPY_TOPK,
    MERGE_DUPLICATES,
    CombineOptions,
    DispatchForm,
    DispatchOptions,
    combine_options,
    partials_from,
    sum_order_of,
)

_ops = torch.ops.moe_p2p


def with_more(
    out: Tensor, scalars: Tensor | None, ticks: Tensor | None
) -> Tensor | tuple[Tensor, ...]:
    """Returns what a combine returns: its result and the other outputs that were asked for."""
    if scalars is None and ticks is None:
        return out
    return out, *(tensor for tensor in (scalars, ticks) if tensor is not None)


class Halves(Communicator):
    """See AllToAll."""

    def dispatch_send(
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
    ) -> PendingDispatch:
        """The first half of dispatch: returns once the inputs may be overwritten.

        Takes what dispatch takes. max_tokens may span at most steps_in_flight chunks. Not
        differentiable.
        """
        if torch.is_grad_enabled():
            refuse = without_default_device(arguments.refuse_gradient)
            refuse(arguments.NO_HALF_GRADIENT, x=x, topk_weights=topk_weights)
        arguments.refuse_tensor(extras)
        form = arguments.dispatch_form(
            self._shape,
            self.config.max_tokens if max_tokens is None else max_tokens,
            options,
            layout,
            quantize,
            capacity,
            moved,
        )
        count, count_on_host = None, arguments.ALL_ROWS
        if num_tokens is not None:
            count, count_on_host = arguments.split_count(num_tokens)
        return without_default_device(self.dispatch_send_with)(
            form, x, topk_idx, topk_weights, scales, extras, count, count_on_host
        )

    def dispatch_send_with(
        self,
        form: DispatchForm | tuple[DispatchOptions, int, int],
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor | None = None,
        scales: Tensor | None = None,
        extras: Sequence[Tensor] = (),
        count: Tensor | None = None,
        count_on_host: int = arguments.ALL_ROWS,
    ) -> PendingDispatch:
        """Like AllToAll.dispatch_with."""
        if not isinstance(x, Tensor):
            raise errors.wrong_type("x", x)
        if x.is_nested and (refused := refusal({"x": x})):  # no shape is looked at then
            raise refused
        given, max_tokens, capacity = form
        options = given.number
        if merges := options & MERGE_DUPLICATES:
            options ^= merges
            topk_idx, topk_weights = arguments.merged(topk_idx, topk_weights)
        self._prepare_dispatch(x.dtype, options, False, arguments.bytes_of_rows(x))
        words = self._shape.handle_words(x.shape[0], max_tokens)
        handle = torch.empty(words, dtype=torch.int32, device=x.device)
        call(
            _ops.dispatch_send.default,
            self._comm,
            options,
            x,
            scales,
            list(extras),
            topk_idx,
            topk_weights,
            count,
            count_on_host,
            max_tokens,
            handle,
        )
        has_scales = given.quantize or scales is not None
        return PendingDispatch(
            Call(handle, options | merges, max_tokens, capacity),
            topk_idx.clone() if options & COPY_TOPK else topk_idx,
            torch.float8_e4m3fn if given.quantize else x.dtype,
            arguments.bytes_of_rows(x) or self.config.hidden_dim,
            self._shape.scales_of(scales, options) if has_scales else None,
            tuple((extra.shape[1], extra.dtype) for extra in extras),
        )

    def make_outputs(self, pending: PendingDispatch) -> Dispatched:
        """Returns what dispatch_recv fills, before it is filled."""
        return new_outputs(pending.call.handle, self._shape, pending)

    @unaffected
    def dispatch_recv(self, pending: PendingDispatch, out: Dispatched | None = None) -> Dispatched:
        """The second half of dispatch: waits for the rows.

        out: an earlier result of the same options, to receive into. None: new tensors.
        """
        errors.require_type("pending", pending, PendingDispatch, "the result of a dispatch_send")
        into = self.make_outputs(pending) if out is None else out
        handle, options, _, capacity = pending.call
        options &= ~MERGE_DUPLICATES
        call(
            _ops.dispatch_recv.default,
            self._comm,
            options,
            handle,
            into.x,
            into.scales,
            list(into.extras),
            into.row_weights,
            into.counts,
            into.offsets,
            into.source,
            into.ranges,
            into.wait_ticks,
            into.row_topk,
            capacity,
        )
        if out is None or out.call is pending.call:
            return into  # made for this dispatch
        return into._replace(topk_idx=pending.topk_idx, call=pending.call)

    @unaffected
    def combine_send(
        self,
        y: Tensor,
        dispatched: Dispatched,
        *,
        options: CombineOptions | None = None,
        weighted: bool | None = None,
        out_dtype: torch.dtype | None = None,
        row_scalars: Tensor | None = None,
        topk_weights: Tensor | None = None,
        **moved: Any,
    ) -> PendingCombine:
        """The first half of combine: returns once y may be overwritten. Not differentiable.

        Takes what combine takes, sums in order "ranks"; combine_recv is asked for wait_ticks.
        """
        given = combine_options(options, weighted, out_dtype, moved)
        errors.require(not sum_order_of(given.number), "halves take sums in order='ranks' only")
        errors.require(
            not given.with_wait_ticks,
            "with_wait_ticks is an option of the whole combine; give it to combine_recv",
        )
        weighted, out_dtype, partials = given.weighted, given.out_dtype, partials_from(given.number)
        row_weights = arguments.row_weights_of(dispatched, weighted, topk_weights)
        if torch.is_grad_enabled():
            arguments.refuse_gradient(
                arguments.NO_HALF_GRADIENT, y=y, row_weights=row_weights, topk_weights=topk_weights
            )
        if not isinstance(y, Tensor):
            raise errors.wrong_type("y", y)
        dtype = y.dtype if out_dtype is None else out_dtype
        handle, call_options, max_tokens, _ = dispatched.call
        arguments.refuse_late_weights(call_options, topk_weights)
        call_options &= ~MERGE_DUPLICATES
        self._prepare_combine(y.dtype, dtype, call_options | given.number, False)
        call(
            _ops.combine_send.default,
            self._comm,
            handle,
            y,
            row_weights,
            row_scalars,
            topk_weights,
            dtype,
            max_tokens,
            partials,
        )
        num_rows = dispatched.topk_idx.shape[0]
        return PendingCombine(handle, num_rows, dtype, row_scalars is not None, partials)

    @unaffected
    def combine_recv(
        self,
        pending: PendingCombine,
        out: Tensor | None = None,
        *,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        with_wait_ticks: bool = False,
    ) -> Any:
        """The second half of combine: waits for the sums and returns what combine does.

        out: [T, H] of out_dtype, to receive into. None: a new tensor.
        """
        errors.require_type("pending", pending, PendingCombine, "the result of a combine_send")
        num_rows = pending.num_rows
        if out is None:
            out = pending.handle.new_empty(
                (num_rows, self.config.hidden_dim), dtype=pending.out_dtype
            )
        scalars, ticks = self._beside_sums(
            pending.handle, num_rows, pending.with_scalars, with_wait_ticks
        )
        terms = [] if bias is None else arguments.bias_list(bias)
        given = (pending.handle, out, scalars, terms, ticks, pending.partials)
        call(_ops.combine_recv.default, self._comm, *given)
        return with_more(out, scalars, ticks)

    def release(self, given: Dispatched | PendingDispatch) -> None:
        """Ends a dispatch that gets no combine. All ranks release it, in one order of calls."""
        kinds = (Dispatched, PendingDispatch)
        errors.require_type("given", given, kinds, "the result of a dispatch or dispatch_send")
        call(_ops.release.default, self._comm, given.call.handle)

    def _beside_sums(
        self, like: Tensor, num_rows: int, with_scalars: bool, with_wait_ticks: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Makes tensors for the scalars and the wait_ticks of a combine."""
        scalars = ticks = None
        if with_scalars:
            scalars = like.new_empty((num_rows, self.config.topk), dtype=torch.float32)
        if with_wait_ticks:
            ticks = like.new_empty((self.world_size,), dtype=torch.int64)
        return scalars, ticks
