"""V2's ElasticBuffer: DeepEP's newer dispatch and combine over AllToAll.

Symbols: W ranks, T the bound on a rank's tokens, t tokens of this rank, K top-k, E experts, E_local
of this rank, H hidden size, P scale packs of a token, R rows received.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from moe_p2p.deep_ep.config import check_alignment, named
from moe_p2p.deep_ep.elastic_handle import EPHandle, RowCounts, RowForm
from moe_p2p.deep_ep.event import EventHandle, EventOverlap
from moe_p2p.deep_ep.handle import no_handle
from moe_p2p.deep_ep.streams import Streams, new_event, wait_for
from moe_p2p.moe import bare
from moe_p2p.moe.arguments import bias_list
from moe_p2p.moe.config import DEFAULT_CHUNK_TOKENS, AllToAllConfig
from moe_p2p.moe.dispatched import APART, Dispatched, new_tuple, tensors_of, without_rows
from moe_p2p.moe.options import DEFAULT_COMBINE, CombineOptions, DispatchForm
from moe_p2p.moe.pool import MOST_STEP_TOKENS, AllToAllPool, ReleasingAllToAll, config_of
from moe_p2p.moe.row_counts import HostCounts
from moe_p2p.moe.shape import SCALE_BLOCK, num_scales

_MAX_TOKENS = 1 << 24  # of a communicator: sizes nothing, memory follows from each call's tokens
_OVERLAP_SMS = 24  # enough for both calls to come near the links' rate; docs/tuning.md
_MAX_LOCAL_EXPERTS = 256  # DeepEP's limit, for sizes without experts
_MAX_EXPERTS = 32768
_SIZE_ALIGNMENT = 2 << 20
_PADDING_NEEDS = "do_zero_padding needs do_expand"
_USUAL_BYTES = 2 << 30  # of a shape without num_bytes: 4096 tokens of 7168 values on 8 ranks fit
# Of a dispatch: E, T, thread blocks, expert alignment, rows.
_How = tuple[int, int, int, int, RowForm]
Asked = tuple[int | None, int | None, int, int | None, RowForm]  # the same, as the call has it
# Its key: type, device, (H, P, K), and that.
_Key = tuple[torch.dtype, int, tuple[int, int, int], _How]
# Made for a key: the communicator, the most rows that can arrive, a dispatch form with these.
_Made = tuple[ReleasingAllToAll, RowCounts, DispatchForm]
_Values = Tensor | tuple[Tensor, Tensor]
_Event = EventOverlap | EventHandle
_Dispatch = tuple[_Values, Tensor | None, Tensor | None, EPHandle, EventOverlap]

_BY_ROWS, _BY_TOPK = (CombineOptions(order=order) for order in ("rows", "topk"))
EXACT = CombineOptions(out_dtype=torch.float32)


class Route(NamedTuple):
    """topk: [t, K]. counts: of the handle, else the most rows that can arrive."""

    all_to_all: ReleasingAllToAll
    counts: RowCounts
    form: DispatchForm
    topk: Tensor
    num_experts: int
    alignment: int


class ElasticBuffer:
    """Dispatch and combine of one rank, under DeepEP's newer names.

    The constructor is collective.

    group: of any backend.
    num_bytes: bytes that calls may take. Steps of the first shape have as many tokens as fit into
        31/32 of it, of the next one into 31/32 of what is left. None: on GPUs a call is one step,
        as in DeepEP, as far as 2 GiB for its shape allow; else steps of 512 tokens.
    num_max_tokens_per_rank: T for calls that pass none. hidden, num_topk: only used to compute the
        attribute num_bytes.
    use_fp8_dispatch: x of float8_e4m3fn get a communicator of half the size.
    allow_multiple_reduction: partial sums are rounded to x's type before they travel. False: sums
        are rounded once, at the end. On one node rows travel one by one and are added in the order
        of top-k; between nodes partial sums travel as float32, twice the bytes.
    prefer_overlap_with_compute: calls without num_sms use 24 thread blocks, not all that help.
    num_gpu_timeout_secs: deadline of every wait, of the host too. A wait that passes it raises.
    explicitly_destroy: destroy() will be called. Otherwise memory is freed with the object.

    Accepted and ignored: num_cpu_bytes, deterministic (results always are), allow_hybrid_mode (each
    rank and each node adds up before it sends), sl_idx, num_allocated_qps, num_cpu_timeout_secs.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: float = 300,
        num_gpu_timeout_secs: float = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        self._pool = AllToAllPool(group, timeout_s=num_gpu_timeout_secs)
        self._streams = Streams()
        self._host_counts = HostCounts()
        self._made: dict[_Key, _Made] = {}
        self.group = group
        self.rank_idx = self._pool.rank
        self.num_ranks = self._pool.world_size
        self._limit_bytes = num_bytes or 0
        if num_bytes is None and hidden > 0 and num_max_tokens_per_rank > 0:
            num_bytes = _size(
                self._pool,
                num_max_tokens_per_rank,
                hidden,
                num_topk,
                use_fp8_dispatch,
                allow_multiple_reduction,
            )
        self.num_bytes = num_bytes or 0
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.use_fp8_dispatch = use_fp8_dispatch
        self.deterministic = deterministic
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.num_allocated_qps = num_allocated_qps
        self.explicitly_destroy = explicitly_destroy
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self.runtime: AllToAllPool | None = self._pool

    def destroy(self) -> None:
        """Waits for all ranks, then frees everything. Collective."""
        assert self.explicitly_destroy, "destroy() needs explicitly_destroy=True at construction"
        if self.runtime is None:
            return
        self._pool.meet("all ranks to destroy their buffers")
        self._made.clear()
        self._pool.close()
        self.runtime = None

    def check(self) -> None:
        """Raises the error that broke this buffer, with its whole text. Not part of DeepEP's API.

        Every call checks by itself. Replays of CUDA graphs do not: call this once per step of them.
        It neither waits nor launches.
        """
        self._pool.check()

    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        """Orders later work of the current stream after the work so far of all ranks' streams.

        Later calls of this buffer run after it too, on any stream. Collective.
        """
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if with_cpu_sync and device.type == "cuda":
            torch.cuda.synchronize()
        config = config_of(
            num_experts=self.num_ranks,
            hidden_dim=SCALE_BLOCK,
            topk=1,
            max_tokens=1,
            device=device.type,
            timeout_s=self._pool.timeout_s,
        )
        smallest = self._pool.get(config)
        nothing = torch.empty((0, SCALE_BLOCK), dtype=torch.bfloat16, device=device)
        with self._streams.turn(nothing):
            topk = torch.empty((0, 1), dtype=torch.int64, device=device)
            received = smallest.dispatch(nothing, topk)
            smallest.combine(received.x, received)
        if with_cpu_sync and device.type == "cuda":
            torch.cuda.synchronize()

    @staticmethod
    def capture() -> EventHandle:
        """Returns an event of the current stream."""
        return EventHandle()

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream of asynchronous calls."""
        return self._streams.comm

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Returns (number of nodes, ranks per node); the ranks of a node share memory."""
        per_node = self._pool.ranks_per_node
        return self.num_ranks // per_node, per_node

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Returns (1, W): counts are by rank on any topology."""
        return 1, self.num_ranks

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """Returns the thread blocks of a call without num_sms, independent of the routing."""
        return self._usual_num_sms

    @cached_property
    def _usual_num_sms(self) -> int:
        if self.prefer_overlap_with_compute or not torch.cuda.is_available():
            return _OVERLAP_SMS
        return torch.cuda.get_device_properties().multi_processor_count

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Returns 0: one thread per GPU owns its NICs, for any number of thread blocks."""
        return 0

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
        return _size(
            AllToAllPool(group),
            num_max_tokens_per_rank,
            hidden,
            num_topk,
            use_fp8_dispatch,
            allow_multiple_reduction,
        )

    def prepare(
        self,
        hidden: int,
        num_experts: int,
        num_topk: int,
        num_max_tokens_per_rank: int = 0,
        num_sms: int = 0,
        *,
        do_expand: bool = False,
    ) -> None:
        """Makes all that calls of this shape need, which their first call does otherwise and no
        call can while a CUDA graph is captured. Collective. Not in DeepEP.

        Rows are bfloat16, with use_fp8_dispatch float8_e4m3fn. Arguments as of dispatch. Tensors
        of the calls are on this rank's GPU; on a machine without one on the CPU.
        """
        dtype = torch.float8_e4m3fn if self.use_fp8_dispatch else torch.bfloat16
        device = "cuda" if torch.cuda.is_available() else "cpu"
        values = torch.empty(0, hidden, dtype=dtype, device=device)
        num_tokens = num_max_tokens_per_rank or self.num_max_tokens_per_rank
        assert num_tokens > 0, "num_max_tokens_per_rank was given neither here nor before"
        packs = num_scales(hidden) if self.use_fp8_dispatch else 0
        rows = (do_expand, False, False, True)
        how = num_experts, num_tokens, num_sms, 1, rows
        key = dtype, values.get_device(), (hidden, packs, num_topk), how
        all_to_all, _, form = self._made.get(key) or self._make(values, key)
        combine = CombineOptions(order="ranks" if self.allow_multiple_reduction else "rows")
        all_to_all.prepare(form.options, x_dtype=dtype, y_dtype=torch.bfloat16, combine=combine)

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
        previous_event_before_epilogue: _Event | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> _Dispatch:
        """Sends tokens to the ranks of their experts.

        x: [t, H], or a pair of float8_e4m3fn [t, H] and scale packs [t, P] of 4 bytes, which travel
            as they are.
        topk_idx, topk_weights: [t, K]; -1: none. num_experts: E.
        cumulative_local_expert_recv_stats: [E_local] int32; each expert's tokens are added to it.
        num_max_tokens_per_rank: T, equal on all ranks.
        num_sms: thread blocks of this call and its combine. 0: get_theoretical_num_sms().
        previous_event, previous_event_before_epilogue: the call runs after both.
        async_with_compute_stream: runs on the communication stream; wait for the event.
        handle: of an earlier dispatch: sends other values along the same routes. do_expand and any
            numbers that are given must equal the earlier ones.
        do_handle_copy: the handle copies topk_idx, so that the caller may overwrite theirs.
        do_cpu_sync: the host waits for all ranks' counts, and R is exact; else R is the most rows
            that could arrive. None: True without a handle, False with one.
        do_expand: one row per (token, expert), in groups by expert that begin at multiples of
            expert_alignment; else one row per token, in the order of (source rank, token).
        do_zero_padding: with do_expand, rows without a token are zero. Otherwise they are not set.
        use_tma_aligned_col_major_sf: received packs are stored column by column.

        Returns rows (a pair if a pair was given), their local expert ids [R, K] with -1 elsewhere
        (None with do_expand), their weights ([R, K], with do_expand [R], None without
        topk_weights), the handle and the event.
        """
        values, packs = x if isinstance(x, tuple) else (x, None)
        sync = handle is None if do_cpu_sync is None else do_cpu_sync
        rows = (do_expand, do_zero_padding, use_tma_aligned_col_major_sf, do_handle_copy)
        how = num_experts, num_max_tokens_per_rank, num_sms, expert_alignment, rows
        later = (
            sync or async_with_compute_stream or previous_event or previous_event_before_epilogue
        )
        plain = not later and handle is None and cumulative_local_expert_recv_stats is None
        if plain and self._streams.bare_on(values) is not None:
            made = self._dispatch_bare(values, packs, topk_idx, topk_weights, how)
            if made is not None:
                return made
        self._pool.check_others(dispatches=not sync)
        with self._streams.turn(values, previous_event, async_with_compute_stream) as turn:
            if previous_event_before_epilogue is not None:
                wait_for(previous_event_before_epilogue, values)
            route = self.route(values, packs, topk_idx, handle, how, sync)
            all_to_all, counts, form, topk = route[:4]
            given = (
                values.contiguous(),
                topk,
                topk_weights,
                None if packs is None else packs.contiguous(),
            )
            if sync:
                fields, counts = self._dispatch_counted(all_to_all, form, given, route.alignment)
            else:
                fields = all_to_all.dispatch_with(form, *given, others=all_to_all.others)
            received = without_rows(fields)
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats.add_(received.counts)
            if async_with_compute_stream:
                stats = cumulative_local_expert_recv_stats
                turn.uses((values, packs, topk_idx, topk, topk_weights, stats), tensors_of(fields))
        if handle is None:
            handle = EPHandle(
                all_to_all,
                received,
                counts,
                do_expand=do_expand,
                num_experts=route.num_experts,
                expert_alignment=route.alignment,
                num_sms=num_sms or self._usual_num_sms,
            )
        else:
            handle.take(received)
        got, scales = fields[:2]
        return (
            got if scales is None else (got, scales),
            received.row_topk,
            None if topk_weights is None else received.row_weights,
            handle,
            turn.event,
        )

    def route(
        self,
        values: Tensor,
        packs: Tensor | None,
        topk_idx: Tensor | None,
        handle: EPHandle | None,
        how: Asked,
        sync: bool,
    ) -> Route:
        """What a dispatch with these arguments runs on: a new routing, or the handle's."""
        if handle is None:
            key = self._key(values, packs, topk_idx, how)
            assert topk_idx is not None
            made = self._made.get(key) or self._make(values, key)
            fields = (*made, topk_idx.contiguous(), key[3][0], key[3][3])
            return new_tuple(Route, fields)
        num_experts, num_tokens, _, alignment, rows = how
        assert not rows[1] or rows[0], _PADDING_NEEDS
        assert topk_idx is None, "a handle was given with topk_idx; give one of them"
        assert not sync, "a handle brings its counts: there is no CPU sync with it"
        handle.check_same(
            do_expand=rows[0],
            num_experts=num_experts,
            expert_alignment=alignment,
            num_max_tokens_per_rank=num_tokens,
        )
        alignment, counts = handle.expert_alignment, handle.row_counts
        form = counts.form(handle.num_max_tokens_per_rank, alignment, (*rows[:3], False))
        first = handle.all_to_all, counts, form
        return Route(*first, handle.topk_idx, handle.num_experts, alignment)

    def _key(
        self, values: Tensor, packs: Tensor | None, topk_idx: Tensor | None, how: Asked
    ) -> _Key:
        num_experts, num_tokens, num_sms, alignment, rows = how
        assert not rows[1] or rows[0], _PADDING_NEEDS
        assert topk_idx is not None, "topk_idx is missing, and there is no handle"
        assert num_experts is not None, "num_experts is missing, and there is no handle"
        alignment = alignment or 1
        if alignment != 1:
            check_alignment(alignment)
        num_tokens = num_tokens or self.num_max_tokens_per_rank
        assert num_tokens > 0, "num_max_tokens_per_rank was given neither here nor before"
        num_packs = 0 if packs is None else packs.shape[1]
        shape = values.shape[1], num_packs, topk_idx.shape[1]
        how = num_experts, num_tokens, num_sms, alignment, rows
        return values.dtype, values.get_device(), shape, how

    def _dispatch_bare(
        self,
        values: Tensor,
        packs: Tensor | None,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        how: Asked,
    ) -> _Dispatch | None:
        """A dispatch with nothing around it; None: it is more, or its key is a new one."""
        key = self._key(values, packs, topk_idx, how)
        made = self._made.get(key)
        if made is None or topk_idx is None:
            return None
        all_to_all, counts, form = made
        comm, others = all_to_all._comm, all_to_all.others
        scales = None if packs is None else packs.contiguous()
        found = bare.dispatch(comm, form, values, topk_idx, topk_weights, scales, others, APART)
        if found is None:
            return None
        got, scales, received = found
        num_experts, _, num_sms, alignment, rows = key[3]
        handle = EPHandle(
            all_to_all,
            received,
            counts,
            rows[0],
            num_experts,
            alignment,
            num_sms or self._usual_num_sms,
        )
        return (
            got if scales is None else (got, scales),
            received.row_topk,
            None if topk_weights is None else received.row_weights,
            handle,
            new_event(EventOverlap),
        )

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: _Event | None = None,
        previous_event_before_epilogue: _Event | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sums the rows of each token, without weights.

        x: [R, H], rows in dispatch's order.
        topk_weights: [R, K], with do_expand [R]; returned to the tokens together with the sums.
        bias: one or two [t, H]; each sum starts with them, and goes on in the order of top-k where
            all ranks are one node.
        num_sms: ignored; the dispatch's number is used.

        Returns [t, H] of x's type, [t, K] or None, and the event.
        """
        if not isinstance(handle, EPHandle):
            raise no_handle(handle)
        later = async_with_compute_stream or previous_event or previous_event_before_epilogue
        plain = bias is None and topk_weights is None and self.allow_multiple_reduction
        if plain and not later and self._streams.bare_on(x) is not None:
            alone = bare.combine(handle.all_to_all._comm, x, handle.received)
            if alone is not None:
                return alone, None, new_event(EventOverlap)
        received, terms = handle.received, [] if bias is None else bias_list(bias)
        with self._streams.turn(x, previous_event, async_with_compute_stream) as turn:
            if previous_event_before_epilogue is not None:
                wait_for(previous_event_before_epilogue, x)
            options = self.sums_of(bool(terms))
            exact = options is EXACT
            result: Any = handle.all_to_all.combine_with(
                x.contiguous(),
                received,
                options,
                row_scalars=topk_weights,
                terms=[term.float() for term in terms] if exact else terms,
            )
            sums, weights = (result, None) if topk_weights is None else result
            if exact:
                sums = sums.to(x.dtype)
            if async_with_compute_stream:
                turn.uses((x, topk_weights, *terms, received.call.handle), (sums, weights))
        return sums, weights, turn.event

    def sums_of(self, has_bias: bool) -> CombineOptions:
        """How a combine adds: in DeepEP's order, where it documents what is added when."""
        if self.num_rdma_ranks == 1:
            if not self.allow_multiple_reduction:
                return _BY_ROWS
            return _BY_TOPK if has_bias else DEFAULT_COMBINE
        # Between nodes, sums on the way travel as float32 where they may not be rounded.
        return DEFAULT_COMBINE if self.allow_multiple_reduction else EXACT

    def _dispatch_counted(
        self,
        all_to_all: ReleasingAllToAll,
        form: DispatchForm,
        given: tuple[Any, ...],
        alignment: int,
    ) -> tuple[Dispatched, RowCounts]:
        """Dispatches into exactly as many rows as arrive: waits for the counts of all ranks."""
        values, topk, weights, packs = given
        fields, sizes = all_to_all.dispatch_counted(
            form.options,
            values,
            topk,
            weights,
            packs,
            self._host_counts.of(topk, all_to_all.config.num_experts, self.num_ranks),
            alignment=alignment,
            max_tokens=form.max_tokens,
        )
        num_tokens, _, num_grouped, per_expert, gathered = sizes
        return fields, new_tuple(RowCounts, (num_tokens, num_grouped, per_expert, gathered))

    def count(self, route: Route) -> RowCounts:
        """Waits for the counts of all ranks of a dispatch that was sent. Collective."""
        config = route.all_to_all.config
        given = self._host_counts.of(route.topk, config.num_experts, self.num_ranks)
        num_counts = self.num_ranks + config.num_experts + 1
        sizes = given.sizes(route.all_to_all, num_counts, route.alignment)
        num_tokens, _, num_grouped, per_expert, gathered = sizes
        return RowCounts(num_tokens, num_grouped, per_expert, gathered)

    def _make(self, values: Tensor, key: _Key) -> _Made:
        dtype, _, (hidden, num_packs, topk), how = key
        num_experts, num_tokens, num_sms, alignment, rows = how
        step_tokens = self.num_max_tokens_per_rank or num_tokens
        if dtype == torch.float8_e4m3fn and not self.use_fp8_dispatch:
            dtype = torch.bfloat16
        more_packs = num_packs - num_scales(hidden)
        limited = self._limit_bytes > 0
        on_gpu = values.is_cuda and (num_sms > 0 or self.prefer_overlap_with_compute)
        config = AllToAllConfig(
            num_experts=num_experts,
            hidden_dim=hidden,
            topk=topk,
            max_tokens=_MAX_TOKENS,
            dtype=dtype,
            **_sums(self._pool, self.allow_multiple_reduction, topk, num_experts),
            extra_bytes=max(0, -(-4 * more_packs // 16) * 16),
            device=values.device.type,
            chunk_tokens=step_tokens if limited else min(step_tokens, DEFAULT_CHUNK_TOKENS),
            num_sms=(num_sms or _OVERLAP_SMS) if on_gpu else None,
            timeout_s=self._pool.timeout_s,
        )
        if values.is_cuda and not limited:
            config = usual_steps(self._pool, config, step_tokens)
        with named(chunk_tokens="num_max_tokens_per_rank"):
            all_to_all = self._pool.get(config, limit_bytes=self._limit_bytes)
        most = RowCounts.most(all_to_all, num_tokens, alignment)
        made = all_to_all, most, most.form(num_tokens, alignment, rows)
        self._made[key] = made
        return made


def usual_steps(pool: AllToAllPool, config: AllToAllConfig, step_tokens: int) -> AllToAllConfig:
    """Returns `config` with a step for all tokens of a call, as far as memory allows."""
    whole = dataclasses.replace(config, chunk_tokens=min(step_tokens, MOST_STEP_TOKENS))
    fitting = pool.tokens_within(_USUAL_BYTES, whole)
    return dataclasses.replace(config, chunk_tokens=max(fitting, config.step_tokens))


def _sums(
    pool: AllToAllPool, allow_multiple_reduction: bool, topk: int, num_experts: int
) -> dict[str, Any]:
    """Fields of a configuration whose sums are rounded once, if that is asked."""
    if allow_multiple_reduction:
        return {}
    if pool.ranks_per_node < pool.world_size:
        return {"combine_dtype": torch.float32}
    return {"combine_rows": min(topk, num_experts // pool.world_size)}


def _size(
    pool: AllToAllPool,
    num_tokens: int,
    hidden: int,
    topk: int,
    use_fp8: bool,
    allow_multiple_reduction: bool,
) -> int:
    """Bytes of a communicator that is given no limit."""
    world_size = pool.world_size
    config = AllToAllConfig(
        num_experts=min(_MAX_LOCAL_EXPERTS, _MAX_EXPERTS // world_size) * world_size,
        hidden_dim=hidden,
        topk=topk or 1,
        max_tokens=num_tokens,
        dtype=torch.float8_e4m3fn if use_fp8 else torch.bfloat16,
        **_sums(pool, allow_multiple_reduction, topk or 1, _MAX_EXPERTS),
        chunk_tokens=min(num_tokens, DEFAULT_CHUNK_TOKENS),
    )
    if torch.cuda.is_available():
        config = usual_steps(pool, config, num_tokens)
    regions = config.plan(world_size=world_size, ranks_per_node=pool.ranks_per_node)
    return -(-sum(regions.values()) // _SIZE_ALIGNMENT) * _SIZE_ALIGNMENT


def _not_served(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"ElasticBuffer.{name} is an experiment of DeepEP that has no part in dispatch and "
            "combine; moe_p2p does not have it"
        )

    return refuse


for _name in (
    "engram_write",
    "engram_fetch",
    "pp_set_config",
    "pp_send",
    "pp_recv",
    "create_agrs_session",
    "destroy_agrs_session",
    "agrs_new_session",
    "agrs_set_config",
    "agrs_get_inplace_tensor",
    "all_gather",
    "get_engram_storage_size_hint",
    "get_pp_buffer_size_hint",
    "get_agrs_num_max_session_bytes",
    "get_agrs_buffer_size_hint",
):
    setattr(ElasticBuffer, _name, _not_served(_name))


def get_physical_domain_size(group: dist.ProcessGroup) -> tuple[int, int]:
    """Returns (nodes of the group, ranks per node); a node's ranks share memory. Collective."""
    pool = AllToAllPool(group)
    per_node = pool.ranks_per_node
    return pool.world_size // per_node, per_node


def get_logical_domain_size(
    group: dist.ProcessGroup, allow_hybrid_mode: bool = True
) -> tuple[int, int]:
    """Returns (1, W): counts are by rank on any topology."""
    return 1, group.size()
