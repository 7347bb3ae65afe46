"""The low-latency calls of `Buffer`: rows grouped by expert, padded, for decoding.

A dispatch is one kernel that writes the caller's layout directly; with a hook it is two, and other
work can run between them. Weights arrive at combine: each rank sends its tokens' weights to the
ranks of their experts, which sum up before anything travels back.

Symbols: W ranks, T the bound on a rank's tokens, t tokens of this rank, K top-k, E experts, E_local
of this rank, H hidden size, P scales of a token.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_p2p import env, errors
from moe_p2p.deep_ep import nvfp4, streams
from moe_p2p.deep_ep.base import NODE_RANKS, BufferBase, LowLatencyKey
from moe_p2p.deep_ep.event import EventOverlap
from moe_p2p.deep_ep.handle import Elements
from moe_p2p.moe.config import AllToAllConfig
from moe_p2p.moe.dispatched import (
    Dispatched,
    PendingCombine,
    PendingDispatch,
    tensors_of,
    without_rows,
)
from moe_p2p.moe.options import CombineOptions, DispatchForm, DispatchOptions, Partials
from moe_p2p.moe.pool import ReleasingAllToAll

Hook = Callable[[], None]

_TWO_WAYS = (
    "async_finish and return_recv_hook exclude each other: a hook is called where the result is "
    "needed, an event is waited for"
)

# By how partial sums travel, and whether the wait for each rank is asked for.
_COMBINES = {
    (partials, timed): CombineOptions(partials=partials, with_wait_ticks=timed)
    for partials in (None, "int10", "block16")
    for timed in (False, True)
}
_PARTIALS: dict[str, Partials | None] = {"bfloat16": None, "block16": "block16"}
_NUM_TOPK_OF_HINT = 32  # the largest top-k; slots for top-8 and top-12 have the same size
_SIZE_ALIGNMENT = 128  # required by DeepEP's Buffer


class LowLatencyHandle(Elements):
    """(src_info [E_local, W * T] int32, layout_range [E_local, W] int64, T, H, E) of a dispatch.

    src_info: index of each row's token at its source. layout_range: for each source, its first row
    << 32 | number of rows. The object itself carries what combine needs: pass it on, not a copy.
    """

    combine_buffer: Tensor | None = None

    def __init__(
        self, all_to_all: ReleasingAllToAll, received: Dispatched, hidden: int, num_experts: int
    ) -> None:
        self.all_to_all = all_to_all
        self.received = received  # without its rows, which may be freed before this handle
        self._sizes = (received.call.max_tokens, hidden, num_experts)

    def make_combine_buffer(self) -> Tensor:
        if self.combine_buffer is None:
            src_info, _, _, hidden, _ = self
            shape = (*src_info.shape, hidden)
            self.combine_buffer = src_info.new_empty(shape, dtype=torch.bfloat16)
        return self.combine_buffer

    @functools.cached_property
    def _elements(self) -> Sequence[Any]:
        source, ranges = self.received.source, self.received.ranges
        assert source is not None
        assert ranges is not None
        src_info = source[:, 1].view(ranges.shape[0], -1)
        return (src_info, ranges, *self._sizes)


class LowLatencyCalls(BufferBase):
    """Mixin of `Buffer`."""

    _mask_status: Tensor | None = None  # [W] int32; 1: masked. Shared by all its communicators

    @functools.cached_property
    def _low_latency_partials(self) -> Partials | None:
        """How bfloat16 sums travel."""
        name = env.low_latency_partials()
        if name not in _PARTIALS:
            text = f"MOE_P2P_LOW_LATENCY_PARTIALS is {name!r}, must be one of {tuple(_PARTIALS)}"
            raise errors.make(errors.InvalidArgumentError, text)
        return _PARTIALS[name]

    def _combine_options(self, dtype: torch.dtype, logfmt: bool, timed: bool) -> CombineOptions:
        """dtype: of the sums."""
        if logfmt:
            return _COMBINES["int10", timed]
        return _COMBINES[self._low_latency_partials if dtype == torch.bfloat16 else None, timed]

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
        assert not (async_finish and return_recv_hook), _TWO_WAYS
        self._pool.check_others(dispatches=not return_recv_hook)
        stats = (cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats)
        hook: Hook | None = None
        fields: tuple[Any, ...]  # fields of a Dispatched
        with self._streams.turn(x, None, async_finish) as turn:
            hidden = x.shape[1]
            try:
                topk = topk_idx.shape[1]
            except (AttributeError, IndexError):
                raise errors.wrong_type("topk_idx", topk_idx, "a tensor [t, K]") from None
            key = (
                x.dtype,
                x.get_device(),
                hidden,
                topk,
                num_max_dispatch_tokens_per_rank,
                num_experts,
                use_fp8 and not use_nvfp4,
                round_scale,
                use_ue8m0,
                dispatch_wait_recv_cost_stats is not None,
            )
            all_to_all, form = self._low_latency_made.get(key) or self._make_low_latency(x, key)
            given, extras = (x, ()) if not use_nvfp4 else _as_nvfp4(x, x_global_scale)
            tiles: Tensor | None = None
            if return_recv_hook:
                pending = all_to_all.dispatch_send_with(form, given, topk_idx, extras=extras)
                fields = outputs = all_to_all.make_outputs(pending)
                tiles = nvfp4.tiles_for(fields[2][0]) if use_nvfp4 else None
                hook = self._hook(
                    x,
                    functools.partial(_receive_rows, all_to_all, pending, outputs, stats, tiles),
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
                _count(received, stats)
            if async_finish:
                made = [*tensors_of(fields), *fields[2], *([] if tiles is None else [tiles])]
                turn.uses((x, topk_idx, x_global_scale, *stats), made)
        rows, scales = fields[:2]
        if tiles is not None:
            rows, scales = rows.permute(1, 2, 0), tiles
        got = rows if scales is None else (rows, scales)
        handle = LowLatencyHandle(all_to_all, received, hidden, num_experts)
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
    ) -> tuple[Tensor, EventOverlap, Hook | None]:
        """Returns rows to their tokens, each multiplied by its weight, and sums them in fp32.

        x: [E_local, W * T, H] bfloat16, rows in dispatch's order.
        topk_idx: [t, K] as at dispatch; ignored, the ids given there are used.
        topk_weights: [t, K] float32.
        use_logfmt: rows travel in 10 bits a value: not DeepEP's logarithms but integers with a
            scale for each 32 values (partials="int10"), whose error is about bfloat16's. H
            must be a multiple of 32, and use_logfmt alike on all ranks. False: in bfloat16's bytes
            as partials="block16": 12 bits of a value where bfloat16 has 8, unless it is smaller
            than 1/64 of the largest of its 8 neighbours, whose share of error is up to 2^-18 of
            that largest. MOE_P2P_LOW_LATENCY_PARTIALS=bfloat16, on all ranks, sends bfloat16.
        zero_copy: reads rows from the buffer of get_next_low_latency_combine_buffer, if that was
            called, instead of x. Rows are never copied.
        out: [t, H] bfloat16 to write to. None: a new tensor.
        combine_wait_recv_cost_stats: [W] int64; time waited for each rank is added.

        Returns (sums [t, H], event, hook).
        """
        assert not (async_finish and return_recv_hook), _TWO_WAYS
        assert isinstance(handle, LowLatencyHandle), (
            "the handle is not one that low_latency_dispatch of this package returned; "
            "pass the object itself, not a tuple of its elements"
        )
        all_to_all, received = handle.all_to_all, handle.received
        stats = combine_wait_recv_cost_stats
        y = handle.combine_buffer if zero_copy and handle.combine_buffer is not None else x
        hook: Hook | None = None
        with self._streams.turn(x, None, async_finish) as turn:
            if return_recv_hook:
                pending = all_to_all.combine_send(
                    y,
                    received,
                    options=self._combine_options(y.dtype, use_logfmt, False),
                    topk_weights=topk_weights,
                )
                out = y.new_empty((topk_idx.shape[0], y.shape[-1])) if out is None else out
                hook = self._hook(
                    x,
                    functools.partial(_receive_sums, all_to_all, pending, out, stats),
                    (y, topk_weights, received.call.handle, stats, out),
                )
            else:
                result = all_to_all.combine_with(
                    y,
                    received,
                    self._combine_options(y.dtype, use_logfmt, stats is not None),
                    topk_weights=topk_weights,
                    out=out,
                )
                out = _sums(result, stats)
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
    ) -> None:
        """Makes all that low-latency calls of this shape need, which their first call does
        otherwise and no call can while a CUDA graph is captured. Collective. Not in DeepEP.

        Tensors of the calls are on this rank's GPU; on a machine without one on the CPU.
        """
        device = "cuda" if torch.cuda.is_available() else "cpu"
        x = torch.empty(0, hidden, dtype=torch.bfloat16, device=device)
        key = (
            x.dtype,
            x.get_device(),
            hidden,
            num_topk,
            num_max_dispatch_tokens_per_rank,
            num_experts,
            use_fp8,
            round_scale,
            use_ue8m0,
            False,
        )
        all_to_all, form = self._low_latency_made.get(key) or self._make_low_latency(x, key)
        combine = self._combine_options(x.dtype, use_logfmt, False)
        all_to_all.prepare(form.options, combine=combine)

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Does nothing: calls do not depend on data that earlier calls left."""

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Returns the bytes that calls of this shape take on one rank, a multiple of 128.

        For nodes of 8 ranks and any top-k. Memory is allocated at the first call, independent of
        num_rdma_bytes.
        """
        config = AllToAllConfig(
            num_experts=num_experts,
            hidden_dim=hidden,
            topk=min(_NUM_TOPK_OF_HINT, num_experts),
            max_tokens=num_max_dispatch_tokens_per_rank,
            chunk_tokens=num_max_dispatch_tokens_per_rank,
        )
        regions = config.plan(world_size=num_ranks, ranks_per_node=math.gcd(num_ranks, NODE_RANKS))
        return -(-sum(regions.values()) // _SIZE_ALIGNMENT) * _SIZE_ALIGNMENT

    # --- masks: ranks that the calls above leave out, if enable_shrink is set ---

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Masks a rank: low-latency calls no longer wait for it or send it tokens.

        Calls mask a rank by themselves when it misses the deadline (`timeout_s`) or is gone. Mask
        it on all ranks: otherwise ranks without the mask wait for it, and it waits for ranks with
        the mask. mask=False undoes a mask only if no call was made since; otherwise the rank has
        missed calls (AssertionError), and low_latency_clean_mask_buffer takes it back.
        """
        masks = self._masks()
        assert mask or not self._low_latency_made or int(masks[rank_to_mask]) == 0, (
            f"rank {rank_to_mask} is masked and has missed calls; low_latency_clean_mask_buffer, "
            "called by all ranks, takes it back"
        )
        masks[rank_to_mask].fill_(int(mask))

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Writes 1 for each masked rank, else 0, to mask_status [W] int32, without waiting."""
        mask_status.copy_(self._masks())

    def low_latency_clean_mask_buffer(self) -> None:
        """Removes all masks. All ranks of the group call it, equally often, masked ranks too.

        On one host it waits for nobody and captured CUDA graphs stay valid. The next call waits
        for ranks that have not called this yet, and masks them at its deadline, as ranks that are
        gone. On several hosts the next low-latency call of each shape makes a new communicator of
        all ranks: if one is gone, that call raises a TimeoutError that names it. Handles of earlier
        dispatches become invalid.
        """
        masks = self._masks()
        self._pool.clean_masks()
        self._low_latency_made.clear()
        masks.zero_()

    def _masks_some(self) -> bool:
        return self._mask_status is not None and bool(self._mask_status.any())

    def _masks(self, device: torch.device | None = None) -> Tensor:
        """Returns the masks, on the device of the first call."""
        assert self.enable_shrink, "masks need a Buffer made with enable_shrink=True"
        if self._mask_status is None:
            at_first = "cuda" if torch.cuda.is_available() else "cpu"
            with torch.inference_mode(False):  # written later in any mode
                self._mask_status = torch.zeros(self.group_size, dtype=torch.int32, device=at_first)
            if self._mask_status.is_cuda:  # calls and users have it on any stream
                torch.cuda.current_stream().synchronize()
        if device is not None and not self._low_latency_made:
            with torch.inference_mode(False):
                self._mask_status = self._mask_status.to(device)
        return self._mask_status

    def _make_low_latency(
        self, x: Tensor, key: LowLatencyKey
    ) -> tuple[ReleasingAllToAll, DispatchForm]:
        _, _, hidden, topk, num_tokens, num_experts, use_fp8, round_scale, use_ue8m0, timed = key
        assert use_fp8 or not round_scale, "round_scale needs use_fp8"
        assert round_scale or not use_ue8m0, "use_ue8m0 needs round_scale"
        config = AllToAllConfig(
            num_experts=num_experts,
            hidden_dim=hidden,
            topk=topk,
            max_tokens=num_tokens,
            chunk_tokens=num_tokens,
            dtype=x.dtype,
            device=x.device.type,
            timeout_s=self._timeout_s,
            mask_lost_ranks=self.enable_shrink,
        )
        masked = self._masks(x.device) if self.enable_shrink else None
        all_to_all = self._pool.get(config, masked=masked)
        options = DispatchOptions(
            quantize=use_fp8,
            scale_format="ue8m0" if use_ue8m0 else "power_of_two" if round_scale else "float32",
            column_scales=use_fp8,
            with_source=True,
            with_ranges=True,
            with_wait_ticks=timed,
            zero_padding=False,
        )
        form = DispatchForm(options, num_tokens, self.group_size * num_tokens)
        self._low_latency_made[key] = all_to_all, form
        return all_to_all, form

    def _hook(self, x: Tensor, receive: Callable[[], None], uses: Iterable[Tensor | None]) -> Hook:
        """Wraps receive() for a call on any stream; `uses` belong to the sending stream."""
        return functools.partial(self._run_hook, x, receive, uses, streams.current(x))

    def _run_hook(
        self, x: Tensor, receive: Callable[[], None], uses: Iterable[Tensor | None], sent_on: Any
    ) -> None:
        with self._streams.turn(x):
            streams.use_here(x, uses, sent_on)
            receive()


def _count(received: Dispatched, stats: tuple[Tensor | None, Tensor | None]) -> None:
    """Adds a dispatch's counts and wait times to the user's statistics."""
    tokens, waited = stats
    if tokens is not None:
        tokens.add_(received.counts)
    if waited is not None and received.wait_ticks is not None:
        waited.add_(received.wait_ticks)


def _sums(result: Any, waited: Tensor | None) -> Tensor:
    """Returns the tensor in a combine's result, and adds the time it waited to `waited`."""
    if waited is None:
        return result  # type: ignore[no-any-return]
    sums, ticks = result
    waited.add_(ticks)
    return sums  # type: ignore[no-any-return]


def _as_nvfp4(x: Tensor, global_scale: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    if global_scale is not None:
        errors.require_type("x_global_scale", global_scale, Tensor)
    values, scales = nvfp4.quantize(x, global_scale)
    return values, (scales,)


def _receive_rows(
    all_to_all: ReleasingAllToAll,
    pending: PendingDispatch,
    outputs: Dispatched,
    stats: tuple[Tensor | None, Tensor | None],
    tiles: Tensor | None,
) -> None:
    _count(all_to_all.dispatch_recv(pending, outputs), stats)
    if tiles is not None:
        nvfp4.fill(tiles, outputs.extras[0])


def _receive_sums(
    all_to_all: ReleasingAllToAll, pending: PendingCombine, out: Tensor, waited: Tensor | None
) -> None:
    _sums(all_to_all.combine_recv(pending, out, with_wait_ticks=waited is not None), waited)
