"""EPBuffer: DeepEP 2.5's dispatch and combine, over the same calls as V2's ElasticBuffer.

What is new in it: the receiving half of a call may wait for the call's event (defer_epilogue),
handles hold topk_idx by reference, and experts may have copies on other ranks of the node, in a
region of the buffer (balance.py).

Symbols: W ranks, T the bound on a rank's tokens, t tokens of this rank, K top-k, E experts, E_local
of this rank, H hidden size, P scale packs of a token, R rows received. Balanced experts: n ranks
of the node, S redundant slots of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe_p2p import errors
from moe_p2p.deep_ep.elastic import EXACT, Asked, ElasticBuffer, Route
from moe_p2p.deep_ep.elastic_handle import EPHandle
from moe_p2p.deep_ep.event import EventHandle, EventOverlap
from moe_p2p.deep_ep.handle import no_handle
from moe_p2p.deep_ep.streams import current, use_here
from moe_p2p.deep_ep_v25 import comm
from moe_p2p.deep_ep_v25.allocator import ALLOCATION_ALIGNMENT, BufferAllocator
from moe_p2p.deep_ep_v25.balance import Balancer, Slots
from moe_p2p.deep_ep_v25.base import BufferBase
from moe_p2p.moe.arguments import bias_list
from moe_p2p.moe.dispatched import PendingCombine, PendingDispatch, without_rows
from moe_p2p.moe.options import sum_order_of
from moe_p2p.moe.pool import ReleasingAllToAll

_Values = Tensor | tuple[Tensor, Tensor]
_Event = EventOverlap | EventHandle
_Dispatch = tuple[_Values, Tensor | None, Tensor | None, EPHandle, EventOverlap]
_Combine = tuple[Tensor, Tensor | None, EventOverlap]


class _Runtime(NamedTuple):
    """What programs read of DeepEP's object of C++."""

    lb_storage: Tensor


class _Sent(NamedTuple):
    """A dispatch whose rows are on their way."""

    route: Route
    pending: PendingDispatch
    stream: int  # on which it was sent
    values: Tensor
    with_weights: bool
    stats: Tensor | None
    handle: EPHandle | None
    num_sms: int
    sync: bool


class EPBuffer(BufferBase):
    """Dispatch and combine of one rank, under DeepEP 2.5's names.

    The constructor is collective. Arguments as of `moe_p2p.deep_ep.ElasticBuffer`, but for these:

    num_bytes: a multiple of get_num_allocation_alignment().
    lb_allocation_plan_or_num_bytes: the region for copies of experts: its bytes, a multiple of
        that too, or a plan, whose tensors get their memory in it. Alike on all ranks of a node.
        `runtime.lb_storage` is the region, uint8.
    sl_idx: NICs' service level; between nodes None or 0, another one is a setting of the transport.

    Have no effect: deterministic (results always are), allow_hybrid_mode (each rank and each node
    adds up before it sends), num_allocated_qps but as a bound of num_qps, num_cpu_timeout_secs (the
    host's waits end by num_gpu_timeout_secs too).
    """

    barrier = comm.barrier
    get_comm_stream = comm.get_comm_stream
    get_physical_domain_size = comm.get_physical_domain_size
    get_logical_domain_size = comm.get_logical_domain_size

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        lb_allocation_plan_or_num_bytes: BufferAllocator | int = 0,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int | None = None,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: float = 300,
        num_gpu_timeout_secs: float = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        super().__init__(explicitly_destroy)
        _check_bytes("num_bytes", num_bytes or 0)
        given, name = lb_allocation_plan_or_num_bytes, "lb_allocation_plan_or_num_bytes"
        plan = given if isinstance(given, BufferAllocator) else None
        errors.require(
            plan is None or not plan.materialized,
            f"{name} is a plan that has its memory already, of another buffer: make a new plan",
        )
        self.num_lb_bytes = _check_bytes(name, plan.num_bytes if plan else given)  # type: ignore[arg-type]
        _check_count("num_allocated_qps", num_allocated_qps)
        elastic = self.elastic = ElasticBuffer(
            group,
            num_bytes,
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            hidden=hidden,
            num_topk=num_topk,
            use_fp8_dispatch=use_fp8_dispatch,
            allow_multiple_reduction=allow_multiple_reduction,
            prefer_overlap_with_compute=prefer_overlap_with_compute,
            num_gpu_timeout_secs=num_gpu_timeout_secs,
            explicitly_destroy=True,
        )
        errors.require(
            sl_idx in (None, 0) or elastic.num_rdma_ranks == 1,
            f"sl_idx is {sl_idx}: the service level of NICs is a setting of the transport, on all "
            f"ranks MOE_P2P_TRANSPORT_SETTINGS=service_level={sl_idx}; pass None",
        )
        self.group, self.num_bytes = group, elastic.num_bytes
        self.rank_idx, self.num_ranks = elastic.rank_idx, elastic.num_ranks
        self.deterministic, self.allow_hybrid_mode = deterministic, allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_allocated_qps = num_allocated_qps
        self.context = self.nccl_comm_handle = None  # there is no communicator of NCCL
        self.num_scaleout_ranks, self.num_scaleup_ranks = elastic.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx
        self.num_rdma_ranks, self.num_nvlink_ranks = elastic.get_physical_domain_size()
        self._balancer = Balancer(elastic._pool, self.num_lb_bytes)
        self.runtime = _Runtime(self._balancer.storage)
        if plan is not None:
            plan.materialize(self._balancer.storage)

    def destroy(self) -> None:
        """Waits for all ranks, then frees everything. Collective."""
        errors.require(
            self.explicitly_destroy, "destroy() needs explicitly_destroy=True at construction"
        )
        if self.runtime is None:
            return
        self._balancer.finish()
        self.elastic.destroy()
        self._balancer.close()
        self.runtime = None

    def print_memory_usage(self) -> None:
        """Prints how many bytes this rank's calls and its region for copies of experts take."""
        self.elastic._pool.require_open()
        print(
            f"[DeepEP memory usage] rank_idx={self.rank_idx}, num_ranks={self.num_ranks}, "
            f"communicators {self.elastic._pool.num_bytes} bytes, balanced experts "
            f"{self.num_lb_bytes} bytes",
            flush=True,
        )

    def check(self) -> None:
        """Raises what broke this buffer (ElasticBuffer.check). Not part of DeepEP's API."""
        self.elastic.check()

    def prepare(self, hidden: int, num_experts: int, num_topk: int, **options: Any) -> None:
        """Makes all that calls of a shape need (ElasticBuffer.prepare). Not part of DeepEP's API.

        What a deferred call needs beside it is made by the first one, outside of a graph.
        """
        self.elastic.prepare(hidden, num_experts, num_topk, **options)

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Returns the bytes that such calls take on one rank, a multiple of 2 MiB. Collective."""
        return ElasticBuffer.get_buffer_size_hint(
            group,
            num_max_tokens_per_rank,
            hidden,
            num_topk,
            use_fp8_dispatch,
            allow_hybrid_mode,
            allow_multiple_reduction,
        )

    @staticmethod
    def capture() -> EventHandle:
        """Returns an event of the current stream."""
        return EventHandle()

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 0,
        sm_write_gbs: float = 0,
    ) -> int:
        """Returns the thread blocks of a call without num_sms, independent of the routing and of
        rates. num_scaleout_topk: 0, as in DeepEP."""
        errors.require(
            num_scaleout_topk == 0, f"num_scaleout_topk is {num_scaleout_topk}, must be 0"
        )
        return self.elastic.get_theoretical_num_sms(num_experts, num_topk)

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Returns 0: one thread per GPU owns its NICs, for any number of thread blocks."""
        return 0

    # --- dispatch ---

    def dispatch(
        self,
        x: _Values,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: _Event | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = False,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        defer_epilogue: bool = False,
    ) -> _Dispatch | EventOverlap:
        """Sends tokens to the ranks of their experts. ElasticBuffer.dispatch has the arguments that
        both have, and the results.

        topk_idx: the handle holds it by reference: it must stay as it is while the handle is used.
        previous_event: with allocate_on_comm_stream=True only, as in DeepEP.
        do_handle_copy: False.
        defer_epilogue: returns the event alone, whose current_stream_wait() receives, on the
            stream that is current then, and returns (rows, ids, weights, handle). With do_cpu_sync
            the host waits for the counts there. Needs async_with_compute_stream. All ranks wait
            for their deferred calls, in one order. A dispatch of more steps than may be under way
            is sent there as a whole: x must stay as it is until then, as always.
        """
        errors.require(
            not do_handle_copy,
            "do_handle_copy is True: handles hold topk_idx by reference; pass a copy as topk_idx "
            "if it will be overwritten",
        )
        self._check_call(num_sms, num_qps, previous_event, allocate_on_comm_stream)
        if defer_epilogue:
            _check_deferred(async_with_compute_stream)
            sync = handle is None if do_cpu_sync is None else do_cpu_sync
            rows = (do_expand, do_zero_padding, use_tma_aligned_col_major_sf, False)
            how = num_experts, num_max_tokens_per_rank, num_sms, expert_alignment, rows
            given = topk_idx, topk_weights, cumulative_local_expert_recv_stats
            return self._dispatch_later(x, *given, how, previous_event, handle, sync)
        made = self.elastic.dispatch(
            x,
            topk_idx,
            topk_weights,
            cumulative_local_expert_recv_stats,
            num_experts,
            num_max_tokens_per_rank,
            expert_alignment,
            num_sms,
            0,
            previous_event,
            None,
            async_with_compute_stream,
            False,
            handle,
            False,
            do_cpu_sync,
            do_expand,
            do_zero_padding,
            use_tma_aligned_col_major_sf,
        )
        if handle is None:
            made[3].hold_topk()
        return made

    def _dispatch_later(
        self,
        x: _Values,
        topk_idx: Tensor | None,
        weights: Tensor | None,
        stats: Tensor | None,
        how: Asked,
        previous_event: _Event | None,
        handle: EPHandle | None,
        sync: bool,
    ) -> EventOverlap:
        values, packs = x if isinstance(x, tuple) else (x, None)
        elastic = self.elastic
        elastic._pool.check_others()
        with elastic._streams.turn(values, previous_event, True) as turn:
            route = elastic.route(values, packs, topk_idx, handle, how, sync)
            unchanged = _watch(route.topk)
            if not _fits(route.all_to_all, route.form.max_tokens):
                num_experts, num_tokens, num_sms, alignment, rows = how

                def whole() -> tuple[Any, ...]:
                    unchanged()
                    found = self.dispatch(
                        x,
                        topk_idx,
                        weights,
                        stats,
                        num_experts,
                        num_tokens,
                        alignment,
                        num_sms,
                        handle=handle,
                        do_cpu_sync=sync,
                        do_expand=rows[0],
                        do_zero_padding=rows[1],
                        use_tma_aligned_col_major_sf=rows[2],
                    )
                    assert isinstance(found, tuple)
                    return found[:4]

                return _at_wait(whole, previous_event)
            given = values.contiguous(), route.topk, weights
            scales = None if packs is None else packs.contiguous()
            pending = route.all_to_all.dispatch_send_with(route.form, *given, scales)
            turn.uses((values, packs, topk_idx, *given, scales, stats), (pending.call.handle,))
            stream = current(values)
        sent = _Sent(
            route, pending, stream, values, weights is not None, stats, handle, how[2], sync
        )

        def receive() -> tuple[Any, ...]:
            unchanged()
            return self._receive_rows(sent)

        event = turn.event
        event.register_hook_after_wait(receive)
        return event

    def _receive_rows(self, sent: _Sent) -> tuple[Any, ...]:
        route, pending, counts = sent.route, sent.pending, sent.route.counts
        with self.elastic._streams.turn(sent.values):
            use_here(sent.values, (pending.call.handle, route.topk), sent.stream)
            if sent.sync:
                counts = self.elastic.count(route)
                capacity = counts.form(0, 1, (_is_grouped(route), False, False, False)).capacity
                pending = pending._replace(call=pending.call._replace(capacity=capacity))
            fields = route.all_to_all.dispatch_recv(pending)
            if sent.stats is not None:
                sent.stats.add_(fields.counts)
            received = without_rows(fields)
        handle = sent.handle
        if handle is not None:
            handle.take(received)
        else:
            handle = EPHandle(
                route.all_to_all,
                received,
                counts,
                do_expand=_is_grouped(route),
                num_experts=route.num_experts,
                expert_alignment=route.alignment,
                num_sms=sent.num_sms or self.elastic.get_theoretical_num_sms(0, 0),
            )
        if sent.handle is None:
            handle.hold_topk()
        got, scales = fields[:2]
        return (
            got if scales is None else (got, scales),
            received.row_topk,
            received.row_weights if sent.with_weights else None,
            handle,
        )

    # --- combine ---

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: _Event | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        defer_epilogue: bool = False,
    ) -> _Combine | EventOverlap:
        """Sums the rows of each token, without weights. ElasticBuffer.combine has the arguments
        that both have, and the results.

        defer_epilogue: returns the event alone, whose current_stream_wait() receives, adds bias,
            and returns (sums, weights). Sums in the order of top-k (a bias, or
            allow_multiple_reduction=False, among ranks of one node) and combines of more steps than
            may be under way are sent there as a whole.
        """
        self._check_call(num_sms, num_qps, previous_event, allocate_on_comm_stream)
        if not isinstance(handle, EPHandle):
            raise no_handle(handle)
        assert handle.topk_idx is not None  # it is looked at: it may have been changed
        terms = [] if bias is None else bias_list(bias)
        elastic, received = self.elastic, handle.received
        if not defer_epilogue:
            return elastic.combine(
                x,
                handle,
                topk_weights,
                bias,
                previous_event=previous_event,
                async_with_compute_stream=async_with_compute_stream,
            )
        _check_deferred(async_with_compute_stream)
        options = elastic.sums_of(bool(terms))
        if sum_order_of(options.number) or not _fits(handle.all_to_all, received.call.max_tokens):

            def whole() -> tuple[Any, ...]:
                assert handle.topk_idx is not None
                return elastic.combine(x, handle, topk_weights, bias)[:2]

            return _at_wait(whole, previous_event)
        with elastic._streams.turn(x, previous_event, True) as turn:
            exact = torch.float32 if options is EXACT else None
            given = x.contiguous()
            pending = handle.all_to_all.combine_send(
                given, received, weighted=False, out_dtype=exact, row_scalars=topk_weights
            )
            turn.uses((x, given, topk_weights, received.call.handle), ())
            stream = current(x)
        event = turn.event
        event.register_hook_after_wait(
            lambda: self._receive_sums(handle.all_to_all, pending, x, terms, stream)
        )
        return event

    def _receive_sums(
        self,
        all_to_all: ReleasingAllToAll,
        pending: PendingCombine,
        like: Tensor,
        terms: list[Tensor],
        stream: int,
    ) -> tuple[Tensor, Tensor | None]:
        with self.elastic._streams.turn(like):
            use_here(like, (pending.handle,), stream)
            exact = pending.out_dtype != like.dtype
            bias: Any = tuple(term.float() if exact else term for term in terms)
            found = all_to_all.combine_recv(pending, bias=bias or None)
            sums, weights = found if pending.with_scalars else (found, None)
            return sums.to(like.dtype) if exact else sums, weights

    def _check_call(
        self, num_sms: int, num_qps: int, previous_event: object, allocate_on_comm_stream: bool
    ) -> None:
        if num_sms or num_qps:
            _check_count("num_sms", num_sms)
            _check_count("num_qps", num_qps)
            errors.require(
                not num_qps or num_qps <= (self.num_allocated_qps or num_qps),
                f"num_qps is {num_qps}, and num_allocated_qps {self.num_allocated_qps}",
            )
        errors.require(
            previous_event is None or allocate_on_comm_stream,
            "previous_event needs allocate_on_comm_stream=True, as in DeepEP 2.5",
        )

    # --- balanced experts ---

    def lb_get_theoretical_num_sms(self) -> int:
        """Returns 0: the engine moves copies of experts, beside the calls."""
        return 0

    def lb_prefetch_weights(
        self,
        redundant_expert_weights: Sequence[Tensor] | Tensor,
        expert_weights: Sequence[Tensor] | Tensor,
        redundancy_mapping: Tensor,
        num_sms: int = 0,
        previous_event: _Event | None = None,
    ) -> EventOverlap:
        """Copies experts of the node's ranks to the slots that name them. Collective, in a node.

        redundant_expert_weights: one or more tensors [S, ..] in the buffer's region, contiguous,
            at the same place of it on all ranks. Slots that the mapping leaves out stay as they
            are.
        expert_weights: as many tensors [E_local, ..], contiguous, of as many bytes an expert.
        redundancy_mapping: [n, S] int32, the same on all ranks of the node: the expert of each
            slot, numbered within the node, or -1.
        num_sms: has no effect. previous_event: the copies begin after it; None: after the work so
            far of the current stream.

        Returns an event, whose wait blocks the host until this rank's slots hold their experts and
        this rank's experts were read. It raises there, on all ranks of the node, what has failed:
        InvalidArgumentError for an expert outside, ProtocolError where ranks make unlike calls,
        PeerDeadError and TimeoutError. Not in CUDA graphs: UnavailableError.
        """
        names = "redundant_expert_weights", "expert_weights"
        redundant = _tensors(names[0], redundant_expert_weights)
        experts = _tensors(names[1], expert_weights)
        errors.require(
            len(redundant) == len(experts),
            f"{names[0]} are {len(redundant)} tensors and {names[1]} {len(experts)}, must be as "
            "many",
        )
        self._check_mapping("lb_prefetch_weights", redundancy_mapping, num_sms)
        slots = [
            self._slots(names, one, other, redundancy_mapping.shape[1:], experts[0].shape[:1])
            for one, other in zip(redundant, experts, strict=True)
        ]
        after = _after(previous_event)
        return EventOverlap(self._balancer.prefetch(slots, redundancy_mapping, after))

    def lb_reduce_grads(
        self,
        redundant_expert_grads: Tensor,
        expert_grads: Tensor,
        redundancy_mapping: Tensor,
        num_sms: int = 0,
        previous_event: _Event | None = None,
    ) -> EventOverlap:
        """Adds the gradients of experts' copies to those of the experts. Collective, in a node.

        redundant_expert_grads: [S, H] float32 in the buffer's region.
        expert_grads: [E_local, H] float32; copies are added to them in the order of the mapping.
        Else as lb_prefetch_weights. After an error some copies may have been added.
        """
        names = "redundant_expert_grads", "expert_grads"
        for name, tensor in zip(names, (redundant_expert_grads, expert_grads), strict=True):
            errors.require_type(name, tensor, Tensor)
            errors.require(
                tensor.dtype == torch.float32 and tensor.dim() == 2,
                f"{name} is {list(tensor.shape)} {tensor.dtype}, must be float32 of two dimensions",
            )
        self._check_mapping("lb_reduce_grads", redundancy_mapping, num_sms)
        slots = self._slots(
            names,
            redundant_expert_grads,
            expert_grads,
            redundancy_mapping.shape[1:],
            expert_grads.shape[:1],
        )
        after = _after(previous_event)
        return EventOverlap(self._balancer.reduce(slots, redundancy_mapping, after))

    def _check_mapping(self, call: str, mapping: Tensor, num_sms: int) -> None:
        errors.require(
            self.num_lb_bytes > 0,
            f"{call}: the buffer has no region for copies of experts; give its constructor "
            "lb_allocation_plan_or_num_bytes",
        )
        _check_count("num_sms", num_sms)
        errors.require_type("redundancy_mapping", mapping, Tensor)
        errors.require(
            mapping.dim() == 2
            and mapping.dtype == torch.int32
            and mapping.shape[0] == self.num_nvlink_ranks,
            f"redundancy_mapping is {list(mapping.shape)} {mapping.dtype}, must be int32 "
            f"[{self.num_nvlink_ranks}, slots]: a row for each rank of the node",
        )
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            text = f"{call}: the host moves the bytes, so it cannot be captured in a CUDA graph"
            raise errors.make(errors.UnavailableError, text)

    def _slots(
        self,
        names: tuple[str, str],
        redundant: Tensor,
        experts: Tensor,
        num_slots: torch.Size,
        num_local: torch.Size,
    ) -> Slots:
        """num_slots, num_local: of one number each."""
        region = self._balancer.storage
        for name, tensor, length in zip(
            names, (redundant, experts), (num_slots, num_local), strict=True
        ):
            errors.require(
                tensor.dim() > 0 and tensor.is_contiguous() and tensor.device == region.device,
                f"{name} is {list(tensor.shape)} with strides {list(tensor.stride())} on "
                f"{tensor.device}, must be contiguous, on {region.device}",
            )
            errors.require(
                tensor.shape[:1] == length and tensor.numel() > 0,
                f"{name} is {list(tensor.shape)}, dim 0 must be {length[0]} and no other 0",
            )
        nbytes = [tensor[0].nbytes for tensor in (redundant, experts)]
        errors.require(
            nbytes[0] == nbytes[1],
            f"{names[0]} has {nbytes[0]} bytes an expert, and {names[1]} {nbytes[1]}",
        )
        offset = redundant.data_ptr() - region.data_ptr()
        errors.require(
            0 <= offset <= region.nbytes - redundant.nbytes,
            f"{names[0]} is not in the buffer's region: take it from the plan that the buffer was "
            "made with, or from buffer.runtime.lb_storage",
        )
        return Slots(offset, nbytes[0], experts)


def _is_grouped(route: Route) -> bool:
    return route.form.options.layout == "grouped"


def _fits(all_to_all: ReleasingAllToAll, max_tokens: int) -> bool:
    """Whether a call of so many tokens may be cut in halves."""
    config = all_to_all.config
    return max_tokens <= config.step_tokens * config.steps_in_flight


def _at_wait(run: Callable[[], tuple[Any, ...]], previous_event: _Event | None) -> EventOverlap:
    """The event of a call that is made as a whole when it is waited for, behind previous_event."""
    event = EventOverlap(_after(previous_event))
    event.register_hook_after_wait(run)
    return event


def _watch(topk_idx: Tensor) -> Callable[[], None]:
    """Returns what asserts that it is as it was. Tensors of inference mode have no version."""
    version = None if topk_idx.is_inference() else topk_idx._version

    def unchanged() -> None:
        assert version is None or topk_idx._version == version, (
            "topk_idx was changed in place between a deferred dispatch and the wait for it"
        )

    return unchanged


def _after(event: _Event | None) -> EventHandle:
    handle = event.event if isinstance(event, EventOverlap) else event
    return EventHandle() if handle is None else handle


def _check_deferred(is_async: bool) -> None:
    errors.require(
        is_async,
        "defer_epilogue=True needs async_with_compute_stream=True: its event is waited for",
    )


def _check_count(name: str, value: int) -> None:
    errors.require_type(name, value, int, "an int")
    errors.require(value >= 0, f"{name} is {value}, must be at least 0")


def _check_bytes(name: str, value: int) -> int:
    _check_count(name, value)
    errors.require(
        value % ALLOCATION_ALIGNMENT == 0,
        f"{name} is {value}, must be a multiple of {ALLOCATION_ALIGNMENT} bytes "
        "(get_num_allocation_alignment)",
    )
    return value


def _tensors(name: str, given: Sequence[Tensor] | Tensor) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    errors.require_type(name, given, Sequence, "a torch.Tensor, or several")
    errors.require(len(given) > 0, f"{name} is empty, must have at least one tensor")
    for number, each in enumerate(given):
        errors.require_type(f"{name}[{number}]", each, Tensor)
    return list(given)
