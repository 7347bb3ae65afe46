"""V2's ElasticBuffer: DeepEP's newer dispatch and combine over AllToAll.

Symbols: W ranks, T the bound on a rank's tokens, t tokens of this rank, K top-k, E experts, E_local
of this rank, H hidden size, P scale packs of a token, R rows received.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_p2p.deep_ep.config import check_alignment
from moe_p2p.deep_ep.elastic_base import ElasticBase
from moe_p2p.deep_ep.elastic_handle import EPHandle, RowCounts
from moe_p2p.deep_ep.event import EventHandle, EventOverlap
from moe_p2p.deep_ep.handle import no_handle
from moe_p2p.deep_ep.streams import wait_for
from moe_p2p.moe.arguments import bias_list
from moe_p2p.moe.dispatched import new_tuple, tensors_of, without_rows
from moe_p2p.moe.options import DEFAULT_COMBINE, CombineOptions, DispatchForm
from moe_p2p.moe.pool import ReleasingAllToAll

_Values = Tensor | tuple[Tensor, Tensor]
_Event = EventOverlap | EventHandle
_BY_ROWS, _BY_TOPK = (CombineOptions(order=order) for order in ("rows", "topk"))
_EXACT = CombineOptions(out_dtype=torch.float32)


class ElasticBuffer(ElasticBase):
    """Dispatch and combine of one rank; elastic_base.py documents the constructor."""

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
    ) -> tuple[_Values, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
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
        self._pool.check_others(dispatches=not sync)
        assert not do_zero_padding or do_expand, "do_zero_padding needs do_expand"
        with self._streams.turn(values, previous_event, async_with_compute_stream) as turn:
            if previous_event_before_epilogue is not None:
                wait_for(previous_event_before_epilogue, values)
            copies = do_handle_copy and handle is None
            rows = (do_expand, do_zero_padding, use_tma_aligned_col_major_sf, copies)
            if handle is None:
                assert topk_idx is not None, "topk_idx is missing, and there is no handle"
                assert num_experts is not None, "num_experts is missing, and there is no handle"
                alignment = expert_alignment or 1
                check_alignment(alignment)
                num_tokens = num_max_tokens_per_rank or self.num_max_tokens_per_rank
                assert num_tokens > 0, "num_max_tokens_per_rank was given neither here nor before"
                key = (
                    values.dtype,
                    values.get_device(),
                    values.shape[1],
                    0 if packs is None else packs.shape[1],
                    topk_idx.shape[1],
                    num_experts,
                    num_tokens,
                    num_sms,
                    alignment,
                    rows,
                )
                all_to_all, counts, form = self._made.get(key) or self._make(values, key)
                topk = topk_idx.contiguous()
            else:
                assert topk_idx is None, "a handle was given with topk_idx; give one of them"
                assert not sync, "a handle brings its counts: there is no CPU sync with it"
                handle.check_same(
                    do_expand=do_expand,
                    num_experts=num_experts,
                    expert_alignment=expert_alignment,
                    num_max_tokens_per_rank=num_max_tokens_per_rank,
                )
                all_to_all, alignment = handle.all_to_all, handle.expert_alignment
                topk, num_tokens = handle.topk_idx, handle.num_max_tokens_per_rank
                counts = handle.row_counts
                form = counts.form(num_tokens, alignment, rows)
            given = (
                values.contiguous(),
                topk,
                topk_weights,
                None if packs is None else packs.contiguous(),
            )
            if sync:
                fields, counts = self._dispatch_counted(all_to_all, form, given, alignment)
            else:
                fields = all_to_all.dispatch_with(form, *given, others=all_to_all.others)
            received = without_rows(fields)
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats.add_(received.counts)
            if async_with_compute_stream:
                stats = cumulative_local_expert_recv_stats
                turn.uses((values, packs, topk_idx, topk, topk_weights, stats), tensors_of(fields))
        if handle is None:
            assert num_experts is not None
            handle = EPHandle(
                all_to_all,
                received,
                counts,
                do_expand=do_expand,
                num_experts=num_experts,
                expert_alignment=alignment,
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
        received, terms = handle.received, [] if bias is None else bias_list(bias)
        with self._streams.turn(x, previous_event, async_with_compute_stream) as turn:
            if previous_event_before_epilogue is not None:
                wait_for(previous_event_before_epilogue, x)
            # Between nodes, sums on the way travel as float32 where they may not be rounded.
            exact = not self.allow_multiple_reduction and self.num_rdma_ranks > 1
            options = DEFAULT_COMBINE  # in DeepEP's order, where it documents what is added when
            if exact:
                options = _EXACT
            elif self.num_rdma_ranks == 1 and not self.allow_multiple_reduction:
                options = _BY_ROWS
            elif self.num_rdma_ranks == 1 and terms:
                options = _BY_TOPK
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

    def _dispatch_counted(
        self,
        all_to_all: ReleasingAllToAll,
        form: DispatchForm,
        given: tuple[Any, ...],
        alignment: int,
    ) -> tuple[tuple[Any, ...], RowCounts]:
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
