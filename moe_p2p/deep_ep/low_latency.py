"""What low-latency calls of `Buffer` need: handles, masks, configurations, statistics.

Rows are grouped by expert and padded, for decoding. A dispatch is one kernel that writes the
caller's layout directly; with a hook it is two, and other work can run between them. Weights arrive
at combine: each rank sends its tokens' weights to the ranks of their experts, which sum up before
anything travels back.

Symbols: W ranks, T the bound on a rank's tokens, t tokens of this rank, K top-k, E experts, E_local
of this rank, H hidden size, P scales of a token.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_p2p import env, errors
from moe_p2p.deep_ep import nvfp4
from moe_p2p.deep_ep.config import named
from moe_p2p.deep_ep.event import EventOverlap
from moe_p2p.deep_ep.handle import Elements
from moe_p2p.deep_ep.runtime import NODE_RANKS
from moe_p2p.deep_ep.streams import new_event
from moe_p2p.library import refuse_freed
from moe_p2p.moe import bare
from moe_p2p.moe.arguments import check_out
from moe_p2p.moe.config import AllToAllConfig
from moe_p2p.moe.dispatched import APART, Dispatched, PendingCombine, PendingDispatch
from moe_p2p.moe.options import CombineOptions, DispatchForm, DispatchOptions, Partials
from moe_p2p.moe.pool import AllToAllPool, ReleasingAllToAll

Hook = Callable[[], None]

# Key of a low-latency dispatch: type, device, H, K, and as one: T, E, use_fp8, round_scale,
# use_ue8m0, whether it records the time waited.
LowLatencyKey = tuple[torch.dtype, int, int, int, tuple[int, int, bool, bool, bool, bool]]

TWO_WAYS = (
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
        self._hidden = hidden
        self._num_experts = num_experts

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
        max_tokens = self.received.call.max_tokens
        return (src_info, ranges, max_tokens, self._hidden, self._num_experts)


def dispatch_bare(
    made: dict[LowLatencyKey, tuple[ReleasingAllToAll, DispatchForm]],
    key: LowLatencyKey,
    x: Tensor,
    topk_idx: Tensor,
) -> tuple[Any, Tensor, LowLatencyHandle, EventOverlap, None] | None:
    """A dispatch with nothing around it; None: it is more, or nothing is made for its key."""
    found = made.get(key)
    if found is None:
        return None
    all_to_all, form = found
    comm, others = all_to_all._comm, all_to_all.others
    results = bare.dispatch(comm, form, x, topk_idx, None, None, others, APART)
    if results is None:
        return None
    rows, scales, received = results
    handle = LowLatencyHandle(all_to_all, received, key[2], key[4][1])
    got = rows if scales is None else (rows, scales)
    return got, received.counts, handle, new_event(EventOverlap), None


def topk_of(topk_idx: Tensor) -> int:
    try:
        return topk_idx.shape[1]
    except (AttributeError, IndexError):
        raise errors.wrong_type("topk_idx", topk_idx, "a tensor [t, K]") from None


def low_latency_partials() -> Partials | None:
    """How bfloat16 sums travel."""
    name = env.low_latency_partials()
    if name not in _PARTIALS:
        text = f"MOE_P2P_LOW_LATENCY_PARTIALS is {name!r}, must be one of {tuple(_PARTIALS)}"
        raise errors.make(errors.InvalidArgumentError, text)
    return _PARTIALS[name]


def combine_form(
    partials: Partials | None, dtype: torch.dtype, logfmt: bool, timed: bool
) -> CombineOptions:
    """partials: of bfloat16 sums. dtype: of the sums."""
    if logfmt:
        return _COMBINES["int10", timed]
    return _COMBINES[partials if dtype == torch.bfloat16 else None, timed]


class Masks:
    """Which ranks low-latency calls leave out: one tensor for all communicators of a buffer."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._status: Tensor | None = None  # [W] int32; 1: masked

    def on(self, device: torch.device | None) -> Tensor:
        """Returns the masks, moved to the device. None: where they are."""
        if self._status is None:
            at_first = "cuda" if torch.cuda.is_available() else "cpu"
            with torch.inference_mode(False):  # written later in any mode
                self._status = torch.zeros(self._world_size, dtype=torch.int32, device=at_first)
            if self._status.is_cuda:  # calls and users have it on any stream
                torch.cuda.current_stream().synchronize()
        if device is not None:
            with torch.inference_mode(False):
                self._status = self._status.to(device)
        return self._status


def make_low_latency(
    pool: AllToAllPool, x: Tensor, key: LowLatencyKey, *, timeout_s: float, masked: Tensor | None
) -> tuple[ReleasingAllToAll, DispatchForm]:
    """Returns what serves calls of this key: a communicator, with masks if given some, and a form
    of dispatch. Collective."""
    _, _, hidden, topk, (num_tokens, num_experts, *_) = key
    form = form_of(key, pool.world_size)
    config = AllToAllConfig(
        num_experts=num_experts,
        hidden_dim=hidden,
        topk=topk,
        max_tokens=num_tokens,
        chunk_tokens=num_tokens,
        dtype=x.dtype,
        device=x.device.type,
        timeout_s=timeout_s,
        mask_lost_ranks=masked is not None,
    )
    tokens = "num_max_dispatch_tokens_per_rank"
    with named(max_tokens=tokens, chunk_tokens=tokens, mask_lost_ranks="enable_shrink"):
        return pool.get(config, masked=masked), form


def form_of(key: LowLatencyKey, num_ranks: int) -> DispatchForm:
    """num_ranks: whose tokens rows have room for."""
    num_tokens, _, use_fp8, round_scale, use_ue8m0, timed = key[4]
    assert use_fp8 or not round_scale, "round_scale needs use_fp8"
    assert round_scale or not use_ue8m0, "use_ue8m0 needs round_scale"
    options = DispatchOptions(
        quantize=use_fp8,
        scale_format="ue8m0" if use_ue8m0 else "power_of_two" if round_scale else "float32",
        column_scales=use_fp8,
        with_source=True,
        with_ranges=True,
        with_wait_ticks=timed,
        zero_padding=False,
    )
    return DispatchForm(options, num_tokens, num_ranks * num_tokens)


def size_hint(num_tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """Bytes that calls of this shape take on one rank of nodes of 8, for any top-k."""
    config = AllToAllConfig(
        num_experts=num_experts,
        hidden_dim=hidden,
        topk=min(_NUM_TOPK_OF_HINT, num_experts),
        max_tokens=num_tokens,
        chunk_tokens=num_tokens,
    )
    regions = config.plan(world_size=num_ranks, ranks_per_node=math.gcd(num_ranks, NODE_RANKS))
    return -(-sum(regions.values()) // _SIZE_ALIGNMENT) * _SIZE_ALIGNMENT


def await_all(
    made: dict[LowLatencyKey, tuple[ReleasingAllToAll, DispatchForm]], shape: tuple[int, int, int]
) -> None:
    """Waits for all ranks by an empty dispatch of calls of this H, T and E, if there were any."""
    for key, (all_to_all, form) in made.items():
        _, device, hidden, topk, (num_tokens, num_experts, *_) = key
        if (hidden, num_tokens, num_experts) == shape:
            where = torch.device("cpu") if device < 0 else torch.device("cuda", device)
            x = torch.empty((0, hidden), dtype=key[0], device=where)
            topk_idx = torch.empty((0, topk), dtype=torch.int64, device=where)
            all_to_all.dispatch_with(form, x, topk_idx, others=all_to_all.others)
            return


def add_counts(received: Dispatched, stats: tuple[Tensor | None, Tensor | None]) -> None:
    """Adds a dispatch's counts and wait times to the user's statistics."""
    tokens, waited = stats
    if tokens is not None:
        tokens.add_(received.counts)
    if waited is not None and received.wait_ticks is not None:
        waited.add_(received.wait_ticks)


def sums_of(result: Any, waited: Tensor | None) -> Tensor:
    """Returns the tensor in a combine's result, and adds the time it waited to `waited`."""
    if waited is None:
        return result  # type: ignore[no-any-return]
    sums, ticks = result
    waited.add_(ticks)
    return sums  # type: ignore[no-any-return]


def as_nvfp4(x: Tensor, global_scale: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    if global_scale is not None:
        errors.require_type("x_global_scale", global_scale, Tensor)
    values, scales = nvfp4.quantize(x, global_scale)
    return values, (scales,)


def receive_rows(
    all_to_all: ReleasingAllToAll,
    pending: PendingDispatch,
    outputs: Dispatched,
    stats: tuple[Tensor | None, Tensor | None],
    tiles: Tensor | None,
) -> None:
    add_counts(all_to_all.dispatch_recv(pending, outputs), stats)
    if tiles is not None:
        nvfp4.fill(tiles, outputs.extras[0])


def room_for_sums(out: Tensor | None, num_rows: int, y: Tensor) -> Tensor:
    """Returns a caller's `out`, or makes one. What does not fit is refused before rows of y travel:
    a hook would refuse it when they have, and nothing could receive their sums."""
    if out is None:
        return y.new_empty((num_rows, y.shape[-1]))
    check_out(out, y.dtype, num_rows, grad=False, options=0)
    refuse_freed(out=out)
    return out


def receive_sums(
    all_to_all: ReleasingAllToAll, pending: PendingCombine, out: Tensor, waited: Tensor | None
) -> None:
    sums_of(all_to_all.combine_recv(pending, out, with_wait_ticks=waited is not None), waited)
