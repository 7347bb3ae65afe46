"""Checks of DeepEP's low-latency calls: functions of one rank, on the CPU or on a GPU.

Run by test_deep_ep_low_latency.py and test_deep_ep_gpu_calls.py; deep_ep_oracle.py has the results.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_p2p.deep_ep import Buffer
from tests.support import deep_ep_oracle
from tests.support.deep_ep_oracle import BF16_DIFFERENCE, Batch, Place, Shape
from tests.support.ranks import Rank, StoreGroup

SHAPE = Shape()
# Tokens of rank r in step s: COUNTS[s][r]. Steps with 0 tokens on some or all ranks, or the most.
SOME = [12, 8, 5, 3]
COUNTS = [[5, 3, 0, 12], [12] * 4, [0] * 4, [0, 0, 9, 0], [1, 2, 3, 4]]
FORMATS = {
    "bf16": {"use_fp8": False},
    "fp8": {},
    "round_scale": {"round_scale": True},
    "ue8m0": {"round_scale": True, "use_ue8m0": True},
}
SHAPES = {
    "many tokens": (Shape(max_tokens=768, hidden_dim=128), [768, 700], "fp8"),
    "many experts": (Shape(896, 3584, 16, 6), [6, 4], "ue8m0"),
    "short blocks": (Shape(hidden_dim=208), [12, 7], "ue8m0"),
    "K of 32": (Shape(num_experts=64, topk=32), [3, 12], "fp8"),
    "an empty rank": (SHAPE, [0, 12, 12], "round_scale"),
}
FP8_DIFFERENCE = 9e-4  # like BF16_DIFFERENCE, for rows that were rounded to e4m3


def make_buffer(rank: Rank, **options: Any) -> Buffer:
    group: Any = StoreGroup(rank)
    return Buffer(group, low_latency_mode=True, explicitly_destroy=True, timeout_s=20.0, **options)


# --- one call, checked ---


def dispatch(
    buffer: Buffer, mine: Batch, shape: Shape, mode: str = "sync", **options: Any
) -> tuple[Any, Tensor, Any]:
    """Rows, counts and handle, received."""
    rows, counts, handle, event, hook = buffer.low_latency_dispatch(
        mine.x,
        mine.topk_idx,
        shape.max_tokens,
        shape.num_experts,
        async_finish=mode == "async",
        return_recv_hook=mode == "hook",
        **options,
    )
    finish(mode, event, hook)
    return rows, counts, handle


def combine(
    buffer: Buffer, y: Tensor, mine: Batch, handle: Any, mode: str = "sync", **options: Any
) -> Tensor:
    out, event, hook = buffer.low_latency_combine(
        y,
        mine.topk_idx,
        mine.weights,
        handle,
        async_finish=mode == "async",
        return_recv_hook=mode == "hook",
        **options,
    )
    finish(mode, event, hook)
    return out


def finish(mode: str, event: Any, hook: Any) -> None:
    assert (hook is not None) == (mode == "hook")
    assert (event.event is not None) == (mode == "async")
    if hook is not None:
        hook()
    if mode == "async":
        event.current_stream_wait()


def unpacked(packs: Tensor, num_scales: int) -> Tensor:
    """Scales [n, P] of int32 packs; bytes past the last scale are zero."""
    data = (packs.unsqueeze(2) >> torch.tensor([0, 8, 16, 24]) & 255).flatten(1)
    assert not data[:, num_scales:].any()
    return torch.exp2(data[:, :num_scales].float() - 127)


def check_scales(x: Tensor, q: Tensor, scales: Tensor, options: dict[str, Any]) -> Tensor:
    """Asserts that q and scales match x, one expert's rows; returns the scales in float32."""
    smallest = deep_ep_oracle.largest_of_blocks(x) / 448
    if options.get("use_ue8m0"):
        assert scales.dtype == torch.int32
        assert scales.shape[1] == -(-x.shape[1] // 512)
        scales = unpacked(scales, smallest.shape[1])
    assert scales.dtype == torch.float32
    if options.get("round_scale"):
        assert torch.equal(scales, torch.exp2(torch.log2(smallest).ceil()))
    else:
        torch.testing.assert_close(scales, smallest, rtol=1e-6, atol=0.0)
    deep_ep_oracle.assert_quantized(x, q, scales)
    return scales


def check_rows(
    batches: list[Batch],
    rank: int,
    shape: Shape,
    got: Any,
    counts: Tensor,
    handle: Any,
    **options: Any,
) -> Tensor:
    """Checks everything that dispatch returned; returns [E_local, W * T, H] for combine."""
    num_ranks, num_local = len(batches), shape.num_experts // len(batches)
    capacity = num_ranks * shape.max_tokens
    values, scales = got if options.get("use_fp8", True) else (got, None)
    assert values.shape == (num_local, capacity, shape.hidden_dim)
    if scales is not None:
        assert scales.shape[:2] == (num_local, capacity)
        assert scales.stride(1) == 1
        assert scales.stride(2) == -(-capacity // 4) * 4
        assert scales.stride(0) == scales.stride(2) * scales.shape[2]
        scales = deep_ep_oracle.host(scales)
    values, counts = deep_ep_oracle.host(values), deep_ep_oracle.host(counts)
    src_info, ranges = deep_ep_oracle.host(handle[0]), deep_ep_oracle.host(handle[1])
    assert handle[2:] == (shape.max_tokens, shape.hidden_dim, shape.num_experts)
    y = torch.full((num_local, capacity, shape.hidden_dim), 1e4, dtype=torch.bfloat16)
    for i in range(num_local):
        number = rank * num_local + i
        rows = deep_ep_oracle.rows_of(batches, number)
        count = rows.shape[0]
        assert int(counts[i]) == count
        assert torch.equal(src_info[i, :count].long(), rows[:, 1])
        check_ranges(ranges[i], rows[:, 0], num_ranks)
        x = deep_ep_oracle.gather(batches, rows)
        received = values[i, :count]
        if scales is None:
            assert torch.equal(received, x)
        else:
            factors = check_scales(x, received, scales[i, :count], options)
            wide = factors.repeat_interleave(128, dim=1)[:, : shape.hidden_dim]
            received = (received.float() * wide).bfloat16()
        y[i, :count] = deep_ep_oracle.expert(number, received)
    return y


def check_ranges(ranges: Tensor, sources: Tensor, num_ranks: int) -> None:
    """(first << 32 | count) of each source, for one expert's rows in order."""
    first = 0
    for source, word in enumerate(ranges.tolist()):
        count = int((sources == source).sum())
        assert word & 0xFFFFFFFF == count
        assert count == 0 or word >> 32 == first
        first += count
    assert len(ranges) == num_ranks


def check_step(
    place: Place, batches: list[Batch], shape: Shape, mode: str, **options: Any
) -> tuple[Tensor, Tensor]:
    """Dispatches and combines; returns counts and sums."""
    rank, device, buffer = place
    mine = batches[rank.rank].on(device)
    rows, counts, handle = dispatch(buffer, mine, shape, mode, **options)
    y = check_rows(batches, rank.rank, shape, rows, counts, handle, **options)
    out = deep_ep_oracle.host(combine(buffer, y.to(device), mine, handle, mode))
    limit = FP8_DIFFERENCE if options.get("use_fp8", True) else BF16_DIFFERENCE
    wanted = deep_ep_oracle.combined(batches[rank.rank], batches[rank.rank].weights)
    assert deep_ep_oracle.difference(out, wanted) < limit
    return counts, out


# --- checks: each called on all ranks of a world


def steps(place: Place, form: str, mode: str = "sync") -> None:
    """Several steps with changing numbers of tokens, and their statistics."""
    rank, device, _ = place
    shape, options = SHAPE, FORMATS[form]
    num_local = shape.num_experts // rank.world_size
    stats = torch.zeros(num_local, dtype=torch.int32, device=device)
    wanted = torch.zeros(num_local, dtype=torch.int32)
    for seed, counts in enumerate(COUNTS):
        batches = deep_ep_oracle.make_batches(seed, counts[: rank.world_size], shape)
        more = {**options, "cumulative_local_expert_recv_stats": stats}
        got, _ = check_step(place, batches, shape, mode, **more)
        wanted += deep_ep_oracle.host(got)
    assert torch.equal(deep_ep_oracle.host(stats), wanted)


def one_step(place: Place, shape: Shape, counts: list[int], form: str) -> None:
    rank = place.rank
    batches = deep_ep_oracle.make_batches(1, counts[: rank.world_size], shape)
    check_step(place, batches, shape, "sync", **FORMATS[form])


def narrow_ids(place: Place) -> None:
    rank = place.rank
    batches = deep_ep_oracle.make_batches(3, SOME[: rank.world_size], SHAPE)
    narrow = [batch._replace(topk_idx=batch.topk_idx.int()) for batch in batches]
    check_step(place, narrow, SHAPE, "sync", use_fp8=False)


def repeats(place: Place) -> None:
    rank = place.rank
    batches = deep_ep_oracle.make_batches(7, [12] * rank.world_size, SHAPE)
    results = [
        check_step(place, batches, SHAPE, mode)[1] for mode in ("sync", "hook", "sync", "async")
    ]
    for again in results[1:]:
        assert torch.equal(results[0], again)


def dispatched(
    place: Place, seed: int, counts: list[int] = SOME, mode: str = "sync", **options: Any
) -> tuple[Batch, Any, Tensor]:
    """A checked dispatch; returns this rank's batch, the handle and the rows of combine."""
    rank, device, buffer = place
    batches = deep_ep_oracle.make_batches(seed, counts[: rank.world_size], SHAPE)
    mine = batches[rank.rank].on(device)
    rows, received, handle = dispatch(buffer, mine, SHAPE, mode, **options)
    y = check_rows(batches, rank.rank, SHAPE, rows, received, handle, **options)
    return mine, handle, y.to(device)


def never_or_again(place: Place) -> None:
    """A dispatch may have no combine, or several, late."""
    buffer = place.buffer
    mine, handle, y = dispatched(place, 5)
    first = deep_ep_oracle.host(combine(buffer, y, mine, handle))
    for _ in range(5):
        dispatch(buffer, mine, SHAPE)
    assert torch.equal(deep_ep_oracle.host(combine(buffer, y, mine, handle)), first)
    assert torch.equal(deep_ep_oracle.host(combine(buffer, y, mine, handle, "hook")), first)


def results_go(place: Place) -> None:
    """Results go to `out`, from rows in the zero-copy buffer; x is ignored."""
    buffer = place.buffer
    mine, handle, y = dispatched(place, 6)
    wanted = deep_ep_oracle.host(combine(buffer, y, mine, handle))
    zero_copy = buffer.get_next_low_latency_combine_buffer(handle)
    assert zero_copy.shape == y.shape
    zero_copy.copy_(y)
    for mode in ("sync", "hook"):
        out = torch.empty_like(mine.x)
        given = combine(buffer, torch.zeros_like(y), mine, handle, mode, zero_copy=True, out=out)
        assert given.data_ptr() == out.data_ptr()
        assert torch.equal(deep_ep_oracle.host(out), wanted)


def sums_round_once(place: Place) -> None:
    """Partial sums travel with 12 bits of a value, or as bfloat16 if the environment says so."""
    _, _, buffer = place
    mine, handle, y = dispatched(place, 1, [12] * 4, use_fp8=False)
    idx, weights = deep_ep_oracle.host(mine.topk_idx), deep_ep_oracle.host(mine.weights)
    factors = (0.5 + 0.25 * (idx % 7)).where(idx >= 0, 0.0)
    rows = (deep_ep_oracle.host(mine.x)[:, None].float() * factors[..., None]).bfloat16()
    want = (rows.double() * weights[..., None].double()).sum(1)
    away = []
    for partials in ("block16", None):
        found = [
            deep_ep_oracle.host(combine(buffer, y, mine, handle, mode))
            for mode in ("sync", "hook", "async")
        ]
        assert buffer._partials == partials
        assert all(torch.equal(found[0], other) for other in found[1:])
        away.append(float((found[0].double() - want).norm()))
        buffer._partials = None  # as of MOE_P2P_LOW_LATENCY_PARTIALS=bfloat16
    assert away[0] < 0.9 * away[1]


def ten_bits_travel(place: Place) -> None:
    """use_logfmt: sums of what each rank's partial sums become in 10 bits, in every mode."""
    rank, _, buffer = place
    for seed, counts in enumerate(COUNTS[:3]):
        mine, handle, y = dispatched(place, seed, counts)
        plain = deep_ep_oracle.host(combine(buffer, y, mine, handle)).float()
        found = [
            deep_ep_oracle.host(combine(buffer, y, mine, handle, mode, use_logfmt=True)).float()
            for mode in ("sync", "hook", "async")
        ]
        into = torch.empty_like(mine.x)
        combine(buffer, y, mine, handle, use_logfmt=True, out=into)
        found.append(deep_ep_oracle.host(into).float())
        assert all(torch.equal(found[0], other) for other in found[1:])
        if not plain.numel():
            continue
        assert not torch.equal(found[0], plain)
        blocks = plain.unflatten(1, (-1, 32))
        # Half a step of 1 / 511 of the block for each of the ranks, and bfloat16's rounding.
        far = (found[0] - plain).unflatten(1, (-1, 32)).abs().amax(2)
        assert bool((far <= blocks.abs().amax(2) * rank.world_size / 60).all())


def times_waited(place: Place) -> Tensor:
    """[2, W] of dispatches and combines. Rank 1 is late for the first, so that rank 0 waits."""
    rank, device, buffer = place
    late_s = 0.2 * (rank.rank == 1)
    waited = torch.zeros(2, rank.world_size, dtype=torch.int64, device=device)
    for seed, mode in enumerate(("sync", "hook", "sync", "hook")):
        before = deep_ep_oracle.host(waited).clone()
        time.sleep(late_s)
        stats = {"dispatch_wait_recv_cost_stats": waited[0]}
        mine, handle, y = dispatched(place, seed, SOME, mode, **stats)
        time.sleep(late_s)
        combine(buffer, y, mine, handle, mode, combine_wait_recv_cost_stats=waited[1])
        assert (deep_ep_oracle.host(waited) >= before).all()
        late_s = 0.0
    return deep_ep_oracle.host(waited)


def two_in_flight(place: Place) -> None:
    rank, device, buffer = place
    pair = [deep_ep_oracle.make_batches(seed, SOME[: rank.world_size], SHAPE) for seed in (1, 2)]
    mine = [batches[rank.rank].on(device) for batches in pair]
    sent = [
        buffer.low_latency_dispatch(
            m.x, m.topk_idx, SHAPE.max_tokens, SHAPE.num_experts, return_recv_hook=True
        )
        for m in mine
    ]
    between = mine[0].x @ mine[0].x.T  # other work while rows travel
    ys = []
    for (rows, counts, handle, _, hook), batches in zip(sent, pair, strict=True):
        assert hook is not None
        hook()
        ys.append(check_rows(batches, rank.rank, SHAPE, rows, counts, handle).to(device))
    back = [
        buffer.low_latency_combine(y, m.topk_idx, m.weights, s[2], return_recv_hook=True)
        for y, m, s in zip(ys, mine, sent, strict=True)
    ]
    for (out, _, hook), batches in zip(back, pair, strict=True):
        assert hook is not None
        hook()
        batch = batches[rank.rank]
        assert (
            deep_ep_oracle.difference(
                deep_ep_oracle.host(out), deep_ep_oracle.combined(batch, batch.weights)
            )
            < FP8_DIFFERENCE
        )
    assert deep_ep_oracle.host(between).shape[0] == mine[0].x.shape[0]


def graphs(place: Place, mode: str) -> None:
    def pair(mine: Batch) -> Tensor:
        rows, _, handle = dispatch(place.buffer, mine, SHAPE, mode, use_fp8=False)
        return combine(place.buffer, rows * 2, mine, handle, mode)

    deep_ep_oracle.replay(place.rank, f"low latency, {mode}", SHAPE, pair)


def without(batches: list[Batch], gone: list[int]) -> list[Batch]:
    """Returns a call's batches without these ranks' tokens and experts."""
    each = SHAPE.num_experts // len(batches)
    left = []
    for rank, batch in enumerate(batches):
        lost = torch.isin(batch.topk_idx // each, torch.tensor(gone))
        kept = batch._replace(topk_idx=batch.topk_idx.masked_fill(lost, -1))
        left.append(Batch(*(value[:0] for value in batch)) if rank in gone else kept)
    return left


def step_without(place: Place, seed: int, gone: list[int], mode: str = "sync") -> None:
    """Every rank passes all its tokens; only the remaining ranks' tokens arrive."""
    rank, device, buffer = place
    batches = deep_ep_oracle.make_batches(seed, SOME[: rank.world_size], SHAPE)
    seen = without(batches, gone)
    mine = batches[rank.rank].on(device)
    rows, counts, handle = dispatch(buffer, mine, SHAPE, mode, use_fp8=False)
    y = check_rows(seen, rank.rank, SHAPE, rows, counts, handle, use_fp8=False)
    out = deep_ep_oracle.host(combine(buffer, y.to(device), mine, handle, mode))
    wanted = deep_ep_oracle.combined(seen[rank.rank], batches[rank.rank].weights)
    assert deep_ep_oracle.difference(out, wanted) < BF16_DIFFERENCE


def check_masks(place: Place, masked: list[int]) -> None:
    ranks = range(place.rank.world_size)
    status = torch.full((len(ranks),), -1, dtype=torch.int32, device=place.device)
    place.buffer.low_latency_query_mask_buffer(status)
    assert deep_ep_oracle.host(status).tolist() == [int(rank in masked) for rank in ranks]


def masked(place: Place) -> None:
    """The last rank and the others mask each other, until all clean their masks."""
    rank = place.rank
    place = place._replace(buffer=make_buffer(rank, enable_shrink=True))
    last = rank.world_size - 1
    gone = list(range(last)) if rank.rank == last else [last]
    check_masks(place, [])
    place.buffer.low_latency_update_mask_buffer(gone[0], True)
    place.buffer.low_latency_update_mask_buffer(gone[0], False)  # no call has missed it
    for other in gone:
        place.buffer.low_latency_update_mask_buffer(other, True)
    check_masks(place, gone)
    for seed, mode in enumerate(("sync", "hook", "sync", "async")):
        step_without(place, seed, gone, mode)
    with pytest.raises(AssertionError, match="has missed calls; low_latency_clean_mask_buffer"):
        place.buffer.low_latency_update_mask_buffer(gone[0], False)
    place.buffer.low_latency_clean_mask_buffer()
    check_masks(place, [])
    for seed in range(3):
        step_without(place, seed, [])
    place.buffer.destroy()
