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

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.autograd import forward_ad

from moe_p2p import errors
from moe_p2p.engine.engine import Engine
from moe_p2p.engine.lifetime import Owner
from moe_p2p.engine.transfers import NicCounters
from moe_p2p.library import (
    call,
    num_modes,
    raise_typed,
    refusal,
    unaffected,
    watched,
    without_default_device,
)
from moe_p2p.moe import arguments, bare
from moe_p2p.moe.communicator import Communicator
from moe_p2p.moe.config import AllToAllConfig
from moe_p2p.moe.dispatched import (
    Call,
    Dispatched,
    PendingCombine,
    PendingDispatch,
    beside_sums,
    dispatched_of,
    outputs_for,
    recv_arguments,
    with_more,
)
from moe_p2p.moe.elastic import Joining
from moe_p2p.moe.gpu.prepared import combines_of, dispatches_of
from moe_p2p.moe.layouts import RowLayout
from moe_p2p.moe.ops import NO_EXTRA_GRADIENT, NO_FP8_GRADIENT
from moe_p2p.moe.options import (
    COPY_TOPK,
    DEFAULT_COMBINE,
    MERGE_DUPLICATES,
    SOLO,
    ZERO_PADDING,
    CombineOptions,
    DispatchForm,
    DispatchOptions,
    combine_options,
    partials_from,
    prepared_options,
    sum_order_of,
)
from moe_p2p.moe.ready import ReadyRows, arguments_of

if TYPE_CHECKING:
    from typing_extensions import Self

_ops = torch.ops.moe_p2p
_DISPATCH, _DISPATCH_INFERENCE = _ops.dispatch.default, _ops.dispatch_inference.default
_COMBINE, _COMBINE_INFERENCE = _ops.combine.default, _ops.combine_inference.default
_COMBINE_OUT = _ops.combine_out.default


class AllToAll(Owner):
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
    gone: with mask_lost_ranks, whether a rank is known to have left, so that nobody waits for it.
    members: the ranks of world_size that begin, in a world that changes (docs/calls.md);
        with mask_lost_ranks those of them that come. update_members() adds and removes ranks.
    join: this process comes later, or takes the place of one that is gone. Returns once members
        have added it; its calls are theirs from there on.

    On a GPU, calls run one after the other in the order in which they are made, also on different
    streams: a call on another stream than the one before waits for it. Any part may be captured
    into CUDA graphs. Replays on several streams, or beside calls, must be ordered by the caller:
    two that run at once raise InvalidArgumentError, at the next call or check(). Calls of other
    communicators of the process on this GPU are ordered likewise, unless both have num_sms.

    Raises on all ranks alike InvalidArgumentError when a field of the configurations differs
    (naming it, two ranks and both values), and TimeoutError naming the ranks that are missing.
    Also ResourceExhaustedError when /dev/shm is too small, with the bytes that were asked for.
    """

    def __init__(
        self,
        group_or_store: dist.ProcessGroup | Store | None,
        config: AllToAllConfig,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        engine: Engine | None = None,
        masked: Tensor | None = None,
        gone: Callable[[int], bool] = lambda _: False,
        members: Iterable[int] | None = None,
        join: bool = False,
    ) -> None:
        self._communicator = made = Communicator(
            group_or_store,
            config,
            rank,
            world_size,
            engine=engine,
            masked=masked,
            gone=gone,
            joining=Joining.of(members, join),
        )
        # What calls look at, which stays as it is:
        self.config, self.engine, self.rank = made.config, made.engine, made.rank
        self.world_size, self.ranks_per_node = made.world_size, made.ranks_per_node
        self.num_local_experts, self.metrics = made.num_local_experts, made.metrics
        self._comm, self._device, self._shape = made.number, made.device, made.shape

    # --- whole calls ---

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
        topk_idx: [T, K] int32 or int64 expert ids, distinct in a row unless merge_duplicates of the
            options; -1: none.
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
        given = arguments.dispatch_options(options, layout, quantize, moved)
        if type(extras) is not tuple:  # a look at a type of torch's would take longer
            arguments.refuse_tensor(extras)
        if num_tokens is None and not extras:
            open_form = given, max_tokens, capacity
            made = bare.dispatch(self._comm, open_form, x, topk_idx, topk_weights, scales)
            if made is not None:
                return made  # type: ignore[no-any-return]
        form = arguments.dispatch_form(self.config, self._shape, given, max_tokens, capacity)
        count, count_on_host = arguments.split_count(num_tokens)
        run = without_default_device(self.dispatch_with) if num_modes() else self.dispatch_with
        return run(form, x, topk_idx, topk_weights, scales, extras, count, count_on_host)

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
        others: list[int] | None = None,
    ) -> Dispatched:
        """For callers that make many calls of one form.

        others: numbers of communicators to check first, without gradients and where nobody watches.
        """
        counted = count is not None or count_on_host != arguments.ALL_ROWS
        if not (extras or counted):
            done = bare.dispatch(self._comm, form, x, topk_idx, topk_weights, scales, others)
            if done is not None:
                return done  # type: ignore[no-any-return]
        if not isinstance(x, Tensor):
            raise errors.wrong_type("x", x)
        if forward_ad._current_level >= 0:
            arguments.refuse_tangents(x=x, topk_weights=topk_weights, scales=scales, extras=extras)
        given, max_tokens, capacity = form
        options, quantize = given.number, given.quantize
        if merges := options & MERGE_DUPLICATES:
            options ^= merges
            topk_idx, topk_weights = arguments.merged(topk_idx, topk_weights)
        grad = torch.is_grad_enabled() and arguments.require_grad(x, topk_weights, *extras)
        dtype = x.dtype
        if self._device is not None:
            row_bytes = arguments.bytes_of_rows(x) if dtype == torch.uint8 else 0
            self._communicator.prepare_dispatch(dtype, options, grad, row_bytes)
        if grad:
            if quantize or dtype == torch.float8_e4m3fn:
                arguments.refuse_gradient(NO_FP8_GRADIENT, x=x)
            named = {f"extras[{i}]": extra for i, extra in enumerate(extras)}
            arguments.refuse_gradient(NO_EXTRA_GRADIENT, **named)
            options |= SOLO | (ZERO_PADDING if given.zero_padding is None else 0)
        first = (self._comm, options, max_tokens, capacity, x, topk_idx, topk_weights)
        checked = arguments.checked_first(others)
        last: tuple[Any, ...] = (scales, checked, [*extras], count, count_on_host)
        if not (grad or extras or counted or watched()):  # what is not given takes as long
            last = last[: 2 if others else scales is not None]
        try:
            made = (_DISPATCH if grad else _DISPATCH_INFERENCE)(*first, *last)
        except RuntimeError as error:
            more = {"scales": scales, "extras": extras, "num_tokens": count}
            raise_typed(error, x=x, topk_idx=topk_idx, topk_weights=topk_weights, **more)
        has_scales = quantize or scales is not None
        return dispatched_of(made, options | merges, topk_idx, has_scales, max_tokens, capacity)

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
        if row_scalars is None and bias is None:
            weighted, comm = options.weighted, self._comm
            made = bare.combine(comm, y, dispatched, options, weighted, topk_weights, out)
            if made is not None:
                return made
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

        row_weights: of the dispatch, or None. grad: autograd records it.
        """
        if row_scalars is None and not terms:
            weighted = row_weights is not None
            made = bare.combine(self._comm, y, dispatched, given, weighted, topk_weights, out)
            if made is not None:
                return made
        if not isinstance(y, Tensor):
            raise errors.wrong_type("y", y)
        if forward_ad._current_level >= 0:
            beside = {"topk_weights": topk_weights, "row_scalars": row_scalars, "bias": terms}
            arguments.refuse_tangents(y=y, row_weights=row_weights, out=out, **beside)
        out_dtype, with_wait_ticks, number = given.out_dtype, given.with_wait_ticks, given.number
        if out is not None:
            arguments.check_out(out, out_dtype, dispatched.topk_idx.shape[0], grad, number)
            out_dtype = out.dtype
        dtype = y.dtype
        sum_dtype = dtype if out_dtype is None else out_dtype
        handle, options, max_tokens, capacity = dispatched.call
        if options & MERGE_DUPLICATES:
            arguments.refuse_late_weights(options, topk_weights)
            options ^= MERGE_DUPLICATES
        options |= number
        if grad and partials_from(number):
            raise errors.make(errors.InvalidArgumentError, arguments.NO_PARTIALS_GRADIENT)
        if self._device is not None:
            self._communicator.prepare_combine(dtype, sum_dtype, options, grad)
        if grad and not options & ZERO_PADDING:
            raise errors.make(errors.InvalidArgumentError, arguments.PADDING_IS_NOT_ZERO)
        topk_idx = dispatched.topk_idx
        try:
            first = (self._comm, options, max_tokens, handle)
            if out is not None:
                with_scalars = row_scalars is not None
                also = beside_sums(y, self._shape, out.shape[0], with_scalars, with_wait_ticks)
                inputs = (y, row_weights, row_scalars, topk_weights, terms, handle)
                _COMBINE_OUT(self._comm, *inputs, max_tokens, out, *also, partials_from(number))
                arguments.count_versions(out)
                return with_more(out, *also)
            usual = (*first, y, topk_idx, row_weights)
            if out_dtype is None and row_scalars is None and not (terms or with_wait_ticks or grad):
                late = () if topk_weights is None else (topk_weights,)
                return _COMBINE_INFERENCE(*usual, *late)[0]  # type: ignore[no-any-return]
            last = (topk_weights, row_scalars, terms, sum_dtype, capacity, with_wait_ticks)
            out, more = (_COMBINE if grad else _COMBINE_INFERENCE)(*usual, *last)
        except RuntimeError as error:
            more = {"row_weights": row_weights, "row_scalars": row_scalars, "bias": terms}
            raise_typed(error, y=y, topk_weights=topk_weights, out=out, **more)
        return (out, *more) if more else out

    # --- calls in halves: between them other work may run while bytes travel ---

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

        Takes what dispatch takes, max_tokens of at most steps_in_flight chunks. Not differentiable.
        """
        if torch.is_grad_enabled():
            refuse = without_default_device(arguments.refuse_gradient)
            refuse(arguments.NO_HALF_GRADIENT, x=x, topk_weights=topk_weights)
        arguments.refuse_tensor(extras)
        given = arguments.dispatch_options(options, layout, quantize, moved)
        form = arguments.dispatch_form(self.config, self._shape, given, max_tokens, capacity)
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
        """Like dispatch_with."""
        if not isinstance(x, Tensor):
            raise errors.wrong_type("x", x)
        if topk_idx is None:
            raise errors.wrong_type("topk_idx", topk_idx)
        if x.is_nested and (refused := refusal({"x": x})):  # no shape is looked at then
            raise refused
        if forward_ad._current_level >= 0:
            arguments.refuse_tangents(x=x, topk_weights=topk_weights, scales=scales, extras=extras)
        given, max_tokens, capacity = form
        options = given.number
        if merges := options & MERGE_DUPLICATES:
            options ^= merges
            topk_idx, topk_weights = arguments.merged(topk_idx, topk_weights)
        self._communicator.prepare_dispatch(x.dtype, options, False, arguments.bytes_of_rows(x))
        words = self._shape.handle_words(x.shape[0], max_tokens)
        handle = torch.empty(words, dtype=torch.int32, device=x.device)
        tensors = (x, scales, list(extras), topk_idx, topk_weights, count)
        more = (count_on_host, max_tokens, handle)
        call(_ops.dispatch_send.default, self._comm, options, *tensors, *more)
        has_scales = given.quantize or scales is not None
        return PendingDispatch(
            Call(handle, options | merges, max_tokens, capacity),
            topk_idx.clone() if options & COPY_TOPK else topk_idx,
            x.dtype,
            arguments.bytes_of_rows(x) or self.config.hidden_dim,
            self._shape.scales_of(scales, options) if has_scales else None,
            tuple((extra.shape[1], extra.dtype) for extra in extras),
        )

    def make_outputs(self, pending: PendingDispatch, *, num_sms: int | None = None) -> Dispatched:
        """Returns what dispatch_recv fills, before it is filled.

        num_sms: also counters that it raises as rows arrive (`ready`, a ReadyRows); it then holds
            at most so many multiprocessors, at least 1 on a GPU.
        """
        self._communicator.require_open()
        return outputs_for(pending, self._communicator, num_sms)

    @unaffected
    def dispatch_recv(self, pending: PendingDispatch, out: Dispatched | None = None) -> Dispatched:
        """The second half of dispatch: waits for the rows.

        out: an earlier result of the same options, to receive into. None: new tensors.
        """
        errors.require_type("pending", pending, PendingDispatch, "the result of a dispatch_send")
        into = outputs_for(pending, self._communicator) if out is None else out
        if out is not None:
            arguments.refuse_lazy_rows(out)
        call(_ops.dispatch_recv.default, self._comm, *recv_arguments(into, pending))
        if out is None or out.call is pending.call:
            return into  # made for this dispatch
        arguments.count_versions(into.x, into.scales, into.row_weights, *into.extras)
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
        ready: ReadyRows | None = None,
        **moved: Any,
    ) -> PendingCombine:
        """The first half of combine: returns once y may be overwritten. Not differentiable.

        Takes what combine takes, sums in order "ranks"; combine_recv is asked for wait_ticks.
        ready: y, padded, is still being written; each row is sent once its counter says so.
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
        if forward_ad._current_level >= 0:
            late = {"topk_weights": topk_weights, "row_scalars": row_scalars}
            arguments.refuse_tangents(y=y, row_weights=row_weights, **late)
        dtype = y.dtype if out_dtype is None else out_dtype
        handle, call_options, max_tokens, _ = dispatched.call
        arguments.refuse_late_weights(call_options, topk_weights)
        call_options &= ~MERGE_DUPLICATES
        self._communicator.prepare_combine(y.dtype, dtype, call_options | given.number, False)
        tensors = (handle, y, row_weights, row_scalars, topk_weights)
        more = () if ready is None else arguments_of(ready, self._communicator, y, dtype, partials)
        call(_ops.combine_send.default, self._comm, *tensors, dtype, max_tokens, partials, *more)
        rows = dispatched.topk_idx.shape[0]
        return PendingCombine(handle, rows, dtype, row_scalars is not None, partials)

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
            shape = num_rows, self.config.hidden_dim
            out = pending.handle.new_empty(shape, dtype=pending.out_dtype)
        else:
            arguments.check_received_sums(out)
        scalars, ticks = beside_sums(
            pending.handle, self._shape, num_rows, pending.with_scalars, with_wait_ticks
        )
        terms = [] if bias is None else arguments.bias_list(bias)
        given = (pending.handle, out, scalars, terms, ticks, pending.partials)
        call(_ops.combine_recv.default, self._comm, *given)
        arguments.count_versions(out)
        return with_more(out, scalars, ticks)

    def release(self, given: Dispatched | PendingDispatch) -> None:
        """Ends a dispatch that gets no combine. All ranks release it, in one order of calls."""
        kinds = (Dispatched, PendingDispatch)
        errors.require_type("given", given, kinds, "the result of a dispatch or dispatch_send")
        call(_ops.release.default, self._comm, given.call.handle)

    # --- its state, its masks, and its end ---

    def prepare(
        self,
        *options: DispatchOptions,
        x_dtype: torch.dtype | None = None,
        y_dtype: torch.dtype | None = None,
        combine: CombineOptions | None = None,
        row_bytes: int = 0,
        **moved: Any,
    ) -> None:
        """Compiles and loads, side by side, the kernels of dispatches with each of these options
        and of one combine, so that no call waits for a compiler. Not collective.

        A new AllToAll has the kernels of calls without options: of its dtype, quantized too, and of
        combine_dtype. Others are compiled at their first call, for seconds, which raises
        UnavailableError while a CUDA graph is captured. On a CPU it does nothing.

        x_dtype: of x; None: the configuration's. row_bytes: of a row of x that is uint8.
        y_dtype: of combine; None: the widest combined. combine: its options.

        Raises InvalidArgumentError as such a call does, UnavailableError without NVRTC.
        """
        dispatches = dispatches_of(self.config, options, x_dtype, row_bytes)
        combines = combines_of(self.config, y_dtype, prepared_options(combine, moved))
        self._communicator.prepare(dispatches, combines)

    @property
    def closed(self) -> bool:
        """True also in a child forked from the process that made it."""
        return bool(self._communicator.why_closed)

    @property
    def arrival_flags(self) -> str:
        """How arrivals from other nodes are seen: "write", "gdrcopy", "relay"; else "none"."""
        return str(call(_ops.all_to_all_arrival_flags.default, self._comm))

    @property
    def broken(self) -> str:
        """The error text of what broke the object; empty while it is usable."""
        return self._communicator.why_closed or str(_ops.all_to_all_broken.default(self._comm))

    def check(self) -> None:
        """Raises what has broken this object, with its whole text; nothing while it is usable.

        Every call does so by itself, but the replay of a CUDA graph makes none: call it once per
        step of an engine that replays graphs. It reads one word of pinned memory, waits for nothing
        and launches nothing, so it finds what kernels have reported so far; what a kernel leaves
        out meanwhile is NaN in its outputs, or -1 in counts. Other ranks of the node then stop
        waiting for this one. Raises as calls do, ClosedError once it is closed, PeerDeadError once
        naming step and rank where sums are NaN because a rank was lost (`lost` of the
        configuration), and AbortedError where the world goes on without this rank.
        """
        call(_ops.all_to_all_check.default, [self._comm])
        self._communicator.check_member()

    def counters(self) -> list[NicCounters]:
        """What each NIC of this rank's engine wrote and received since the engine was made."""
        return self.engine.counters()

    @property
    def refused_connections(self) -> int:
        """Connections of strangers that this rank has refused: to its NICs, which `counters` lists
        one by one, and to its node's ranks while they passed on memory of GPUs."""
        of_nics = sum(nic["connections_refused"] for nic in self.counters())
        return self._communicator.num_refused + of_nics

    @property
    def masked(self) -> Tensor:
        """[W] int32 on the device of the calls: 1 for each rank that is masked here, else 0.

        The memory itself, which calls and the polling thread set: copy it (on a GPU in stream
        order). Each rank masks others by itself, so masks may differ for as long as a deadline.
        clean_masks() takes ranks back. Raises InvalidArgumentError without mask_lost_ranks.
        """
        return self._communicator.masked

    def mask_ranks(self, ranks: Iterable[int]) -> None:
        """Masks these ranks at once; on a GPU in stream order. Call it on all ranks: a rank that
        does not waits for the masked ranks, and masked ranks wait for the callers. Data under way
        to them need not arrive. Raises InvalidArgumentError for this rank and for unknown ones.
        """
        self._communicator.mask_ranks(ranks)

    def clean_masks(self) -> None:
        """Takes masked ranks back, where all ranks are of one node; on a GPU in stream order.

        Every rank calls it, equally often, also one that has masked none: others may have masked
        it. It waits for nobody. Who makes its next call before another one has cleaned waits for it
        there, and masks it at the deadline. Captured CUDA graphs stay valid. Open calls end.

        On this rank no call may run meanwhile: replays of graphs on other streams have ended.
        Objects that share one mask all clean it. Raises UnavailableError between nodes,
        InvalidArgumentError without mask_lost_ranks or in a capture, and what broke the object.
        """
        call(_ops.all_to_all_clean_masks.default, self._comm)

    @property
    def lost_tokens(self) -> int:
        """How many tokens of this rank lacked rows of a rank that was lost after their dispatch
        in the epoch that is. UnavailableError on GPUs in a fixed world with `lost=None`."""
        return self._communicator.lost_tokens

    def stage_members(self, *, add: Iterable[int] = (), remove: Iterable[int] = ()) -> None:
        """Begins to make the next epoch of the world, beside steps: of this one's ranks but for
        `remove` and those that are gone, and of new processes of `add`, also in place of lost ones.

        Returns at once. Ranks that stay or are removed call it alike; new ones pass join=True.
        Raises InvalidArgumentError for seats that are not there, and where members are staged.
        """
        self._communicator.stage_members(add, remove)

    def members_staged(self) -> bool:
        """Whether commit_members() waits for nobody. Asks no store, and never waits."""
        return self._communicator.staged()

    def commit_members(self) -> None:
        """Enters the epoch that was staged, once all its ranks have staged it. All ranks call it
        between the same two steps. Open calls, and handles, masks and errors of the epoch before,
        end; the object stays, unless this rank was removed: then it is closed.

        Raises AbortedError, naming whom, where a rank was lost or late (timeout_s) or raised: this
        epoch goes on. Also where others go on without this rank, which was not removed: the object
        waits for an epoch with its whole node of several ranks, else it is closed. Raises
        StoreError where the store is gone, and closes the object if others may have gone on.
        """
        self._communicator.commit_members()

    def update_members(self, *, add: Iterable[int] = (), remove: Iterable[int] = ()) -> None:
        """stage_members() and commit_members(), for ranks that may wait between two steps."""
        self.stage_members(add=add, remove=remove)
        self.commit_members()

    def gather_counts(self, values: Tensor) -> Tensor:
        """Gathers the same number of int32 [n] from every rank, [W, n] on each, in host memory.

        For numbers that the host must know ahead. All ranks call it, in the one order of their
        calls; it waits for them, but neither uses a GPU nor waits for one. n: at most
        num_experts + W + 16. Raises InvalidArgumentError before anything is sent; TimeoutError and
        PeerDeadError, naming the missing ranks, and ProtocolError for another n break the object.
        Not with mask_lost_ranks.
        """
        return call(_ops.all_to_all_gather_counts.default, self._comm, values)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Idempotent. Each rank closes by itself; what it has sent still arrives."""
        self._communicator.close()

    def __enter__(self) -> Self:
        if self.closed:
            text = f"rank {self.rank}: the communicator is closed, and cannot be entered again"
            raise errors.make(errors.ClosedError, text)
        return self

    def __repr__(self) -> str:
        broken = self.broken
        return (
            f"{type(self).__name__}(rank {self.rank} of {self.world_size}, "
            f"{self.ranks_per_node} per node, {self.num_local_experts} of "
            f"{self.config.num_experts} experts here, {broken if broken else 'usable'})"
        )
