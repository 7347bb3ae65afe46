"""Low-latency calls of one rank: of V1's `Buffer`, and of `moe_p2p.nixl_ep`'s.

Symbols: W ranks, T the bound on a rank's tokens, t tokens of this rank, K top-k, E experts, E_local
of this rank, H hidden size, P scales of a token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from moe_p2p.deep_ep import nvfp4, streams
from moe_p2p.deep_ep.event import EventOverlap
from moe_p2p.deep_ep.low_latency import (
    TWO_WAYS,
    Hook,
    LowLatencyHandle,
    LowLatencyKey,
    add_counts,
    as_nvfp4,
    combine_form,
    dispatch_bare,
    low_latency_partials,
    receive_rows,
    receive_sums,
    room_for_sums,
    sums_of,
    topk_of,
)
from moe_p2p.deep_ep.overlap import ready_rows
from moe_p2p.deep_ep.streams import Streams, new_event
from moe_p2p.moe import bare
from moe_p2p.moe.dispatched import tensors_of, without_rows
from moe_p2p.moe.options import DispatchForm, partials_from
from moe_p2p.moe.pool import ReleasingAllToAll


class LowLatencyCalls:
    """check_others: raises what has broken other communicators of the caller, as that of a pool."""

    def __init__(self, check_others: Callable[..., None]) -> None:
        self._check_others = check_others
        self._streams = Streams()
        self._low_latency_made: dict[LowLatencyKey, tuple[ReleasingAllToAll, DispatchForm]] = {}
        self._partials = low_latency_partials()

    def _make_low_latency(
        self, x: Tensor, key: LowLatencyKey
    ) -> tuple[ReleasingAllToAll, DispatchForm]:
        """Makes what serves calls of this key, and notes it in `_low_latency_made`. Collective."""
        raise NotImplementedError

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        x_global_scale: Tensor | None = None,
        use_nvfp4: bool = False,
    ) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor, LowLatencyHandle, EventOverlap, Hook | None]:
        """Sends tokens to the ranks of their experts.

        x: [t, H] bfloat16. topk_idx: [t, K] int64 or int32; -1: none.
        num_max_dispatch_tokens_per_rank: T, equal on all ranks.
        cumulative_local_expert_recv_stats: [E_local] int32; each expert's tokens are added to it.
        dispatch_wait_recv_cost_stats: [W] int64; time waited for each source is added.
        use_fp8: x becomes float8_e4m3fn with a scale per 128 values. round_scale: scales are powers
            of two; use_ue8m0: packed as bytes, four in an int32.
        async_finish: runs on the communication stream; wait for the event.
        return_recv_hook: only sends; the returned hook receives, into the tensors returned here.
        use_nvfp4: instead of use_fp8, for which it stands; x becomes nvfp4, made for x_global_scale
            [1] or [t]. Rows are a pair of uint8 [W * T, H / 2, E_local] and scales float8_e4m3fn
            [32, 4, ceil(W * T / 128), 4, ceil(H / 64), E_local], as in the branch hybrid-ep.

        Returns (rows, counts [E_local] int32, handle, event, hook): rows [E_local, W * T, H], with
        use_fp8 a pair with scales of logical shape [E_local, W * T, P], stored column by column.
        Rows of an expert are in the order of (source rank, token); rows past its count are not set.
        """
        assert not (async_finish and return_recv_hook), TWO_WAYS
        stats = (cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats)
        fp8, timed = use_fp8 and not use_nvfp4, stats[1] is not None
        how = num_max_dispatch_tokens_per_rank, num_experts, fp8, round_scale, use_ue8m0, timed
        plain = not (async_finish or return_recv_hook or use_nvfp4) and stats[0] is stats[1] is None
        if plain and (device := self._streams.bare_on(x)) is not None:
            key = x.dtype, device, x.shape[1], topk_of(topk_idx), how
            if (done := dispatch_bare(self._low_latency_made, key, x, topk_idx)) is not None:
                return done
        self._check_others(dispatches=not return_recv_hook)
        hook: Hook | None = None
        with self._streams.turn(x, None, async_finish) as turn:
            key = x.dtype, x.get_device(), x.shape[1], topk_of(topk_idx), how
            all_to_all, form = self._low_latency_made.get(key) or self._make_low_latency(x, key)
            given, extras = (x, ()) if not use_nvfp4 else as_nvfp4(x, x_global_scale)
            tiles: Tensor | None = None
            if return_recv_hook:
                pending = all_to_all.dispatch_send_with(form, given, topk_idx, extras=extras)
                fields = outputs = all_to_all.make_outputs(pending)
                tiles = nvfp4.tiles_for(fields[2][0]) if use_nvfp4 else None
                hook = self._hook(
                    x,
                    functools.partial(receive_rows, all_to_all, pending, outputs, stats, tiles),
                    (given, topk_idx, *stats, *tensors_of(fields), *fields[2], tiles),
                )
            else:
                fields = all_to_all.dispatch_with(
                    form, given, topk_idx, extras=extras, others=all_to_all.others
                )
                if use_nvfp4:
                    tiles = nvfp4.tiles_for(fields[2][0])
                    nvfp4.fill(tiles, fields[2][0])
            received = without_rows(fields)
            if hook is None:
                add_counts(received, stats)
            if async_finish:
                made = [*tensors_of(fields), *fields[2], *([] if tiles is None else [tiles])]
                turn.uses((x, topk_idx, x_global_scale, *stats), made)
        rows, scales = fields[:2]
        if tiles is not None:
            rows, scales = rows.permute(1, 2, 0), tiles
        got = rows if scales is None else (rows, scales)
        handle = LowLatencyHandle(all_to_all, received, key[2], num_experts)
        return got, received.counts, handle, turn.event, hook

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
        *,
        overlap: bool = False,
        packed_recv_count: Tensor | None = None,
        comp_signal: Tensor | None = None,
        block_m: int = 64,
        threshold: int = 0,
        num_sms: int = 0,
        src_signals: Tensor | None = None,
        src_signal_expect_value: int = 0,
    ) -> tuple[Tensor, EventOverlap, Hook | None]:
        """Returns rows to their tokens, each multiplied by its weight, and sums them in fp32.

        x: [E_local, W * T, H] bfloat16, rows in dispatch's order.
        topk_idx: [t, K] as at dispatch; ignored, the ids given there are used.
        topk_weights: [t, K] float32.
        use_logfmt: rows travel in 10 bits a value: not DeepEP's logarithms but integers with a
            scale for each 32 values (partials="int10"), whose error is about bfloat16's. H
            must be a multiple of 32, and use_logfmt alike on all ranks. False: in bfloat16's bytes
            as partials="block16": errors of up to 2^-14.4 of the largest of 8 neighbours, where
            bfloat16's are up to 2^-9 of each value. MOE_P2P_LOW_LATENCY_PARTIALS=bfloat16, on all
            ranks, sends bfloat16.
        zero_copy: reads rows from the buffer of get_next_low_latency_combine_buffer, if that was
            called, instead of x. Rows are never copied.
        out: [t, H] bfloat16 to write to. None: a new tensor.
        combine_wait_recv_cost_stats: [W] int64; time waited for each rank is added.
        overlap: x is still being written, on another stream, and each row is sent once it is
            complete. Without it what follows is not read. Not with lost ranks masked.
        comp_signal: int32, counter e * ceil(W * T / block_m) + r // block_m for row r of expert e;
            at `threshold` (or more) its rows are written. The caller clears it before each product.
        src_signals: [E_local] uint32 instead, a counter for each expert, and its value.
        num_sms: most multiprocessors that wait for rows. With src_signals 0 means all but
            src_signal_expect_value, which is how many the product has.
        packed_recv_count: [E_local]; the handle has it, too.

        Returns (sums [t, H], event, hook).
        """
        assert not (async_finish and return_recv_hook), TWO_WAYS
        assert isinstance(handle, LowLatencyHandle), (
            "the handle is not one that low_latency_dispatch of this package returned; "
            "pass the object itself, not a tuple of its elements"
        )
        stats = combine_wait_recv_cost_stats
        y = handle.combine_buffer if zero_copy and handle.combine_buffer is not None else x
        timed = stats is not None and not (return_recv_hook or overlap)
        options = combine_form(self._partials, y.dtype, use_logfmt, timed)
        plain = stats is None and not (async_finish or return_recv_hook or overlap)
        all_to_all, received = handle.all_to_all, handle.received
        if plain and self._streams.bare_on(x) is not None:
            sums = bare.combine(all_to_all._comm, y, received, options, False, topk_weights, out)
            if sums is not None:
                return sums, new_event(EventOverlap), None
        hook: Hook | None = None
        with self._streams.turn(x, None, async_finish) as turn:
            if return_recv_hook or overlap:
                out = into = room_for_sums(out, topk_idx.shape[0], y)
                ready = None
                if overlap:
                    ready = ready_rows(
                        y,
                        packed_recv_count=packed_recv_count,
                        comp_signal=comp_signal,
                        block_m=block_m,
                        threshold=threshold,
                        num_sms=num_sms,
                        src_signals=src_signals,
                        src_signal_expect_value=src_signal_expect_value,
                    )
                pending = all_to_all.combine_send(
                    y, received, options=options, topk_weights=topk_weights, ready=ready
                )
                receive = functools.partial(receive_sums, all_to_all, pending, into, stats)
                if return_recv_hook:
                    uses = (y, topk_weights, received.call.handle, stats, out)
                    hook = self._hook(x, receive, uses)
                else:
                    receive()
            else:
                result = all_to_all.combine_with(
                    y, received, options, topk_weights=topk_weights, out=out
                )
                out = sums_of(result, stats)
            if async_finish:
                turn.uses((y, topk_weights, received.call.handle, stats, out), (out,))
        return out, turn.event, hook

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> Tensor:
        """Returns a tensor [E_local, W * T, H] bfloat16 for the rows of a combine with zero_copy.

        Each handle has its own: there is no ring of buffers that a later call would overwrite.
        """
        return handle.make_combine_buffer()

    def prepare_low_latency(
        self,
        num_max_dispatch_tokens_per_rank: int,
        hidden: int,
        num_experts: int,
        num_topk: int,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        use_logfmt: bool = False,
        overlap: bool = False,
    ) -> None:
        """Makes all that low-latency calls of this shape need, which their first call does
        otherwise and no call can while a CUDA graph is captured. Collective. Not in DeepEP.

        Tensors of the calls are on this rank's GPU; on a machine without one on the CPU.
        """
        device = "cuda" if torch.cuda.is_available() else "cpu"
        x = torch.empty(0, hidden, dtype=torch.bfloat16, device=device)
        how = num_max_dispatch_tokens_per_rank, num_experts, use_fp8, round_scale, use_ue8m0, False
        key = x.dtype, x.get_device(), hidden, num_topk, how
        made, form = self._low_latency_made.get(key) or self._make_low_latency(x, key)
        combine = combine_form(self._partials, x.dtype, use_logfmt, False)
        made.prepare(form.options, combine=combine)
        if overlap:
            made._communicator.prepare_ready(x.dtype, x.dtype, partials_from(combine.number))

    def _hook(self, x: Tensor, receive: Callable[[], None], uses: Iterable[Tensor | None]) -> Hook:
        """Wraps receive() for a call on any stream; `uses` belong to the sending stream."""
        return functools.partial(self._run_hook, x, receive, uses, streams.current(x))

    def _run_hook(
        self, x: Tensor, receive: Callable[[], None], uses: Iterable[Tensor | None], sent_on: Any
    ) -> None:
        with self._streams.turn(x):
            streams.use_here(x, uses, sent_on)
            receive()
