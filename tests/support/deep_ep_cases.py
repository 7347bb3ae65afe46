"""DeepEP's normal calls as users make them, and their expected results in plain torch.

The checks run on threads of the CPU (test_deep_ep_normal.py) and on GPUs (test_deep_ep_gpu.py).
Every rank makes the tokens of all ranks, so it knows what must arrive.

Symbols: W ranks, T tokens of a rank, K top-k, E experts, H hidden size, R rows received.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe_p2p import deep_ep
from tests.support.ranks import Rank

H = 256


@dataclass(frozen=True)
class Setting:
    """Parameters of a test, equal on all ranks."""

    num_tokens: tuple[int, ...] = (5, 3, 7, 4)  # by rank; smaller worlds use the first ones
    num_experts: int = 12
    topk: int = 3
    hidden_dim: int = H
    fp8: bool = False
    packed_scales: bool = False  # four in an int32
    flat_scales: bool = False  # [T], for one scale
    topk_dtype: torch.dtype = torch.int64
    seed: int = 1


class Tokens(NamedTuple):
    x: Tensor  # [T, H]
    scales: Tensor | None  # [T, P]
    topk_idx: Tensor  # [T, K]
    topk_weights: Tensor  # [T, K]


class Expected(NamedTuple):
    """Rows of one rank, in order."""

    x: Tensor  # [R, H]
    scales: Tensor | None  # [R, P]
    topk_idx: Tensor  # [R, K], local
    topk_weights: Tensor  # [R, K]
    source: Tensor  # [R, 2]: rank, token


@dataclass(frozen=True)
class Place:
    """One rank with its buffer."""

    rank: int
    world_size: int
    device: str
    buffer: deep_ep.Buffer

    def put(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)


def open_buffer(rank: Rank, device: str, **options: Any) -> Place:
    group = dist.ProcessGroup(rank.store, rank.rank, rank.world_size)
    options = {"explicitly_destroy": True} | options
    buffer = deep_ep.Buffer(group, timeout_s=20.0 if device == "cpu" else 100.0, **options)
    return Place(rank.rank, rank.world_size, device, buffer)


# --- tokens, and expected rows ---


def make_tokens(setting: Setting, rank: int) -> Tokens:
    generator = torch.Generator().manual_seed(1000 * setting.seed + rank)
    count, experts = setting.num_tokens[rank], setting.num_experts
    scores = torch.rand(count, experts, generator=generator)
    topk_idx = scores.topk(setting.topk, dim=1).indices
    topk_idx[torch.rand(topk_idx.shape, generator=generator) < 0.2] = -1
    weights = torch.rand(topk_idx.shape, generator=generator)
    x = torch.randn(count, setting.hidden_dim, generator=generator)
    scales = None
    if setting.fp8:
        scales = torch.rand(count, setting.hidden_dim // 128, generator=generator) + 0.5
        if setting.packed_scales:
            width = -(-setting.hidden_dim // 512)
            scales = torch.randint(1 << 30, (count, width), generator=generator, dtype=torch.int32)
        # Column by column, as in engines.
        scales = scales.flatten() if setting.flat_scales else scales.t().contiguous().t()
    dtype = torch.float8_e4m3fn if setting.fp8 else torch.bfloat16
    return Tokens(x.to(dtype), scales, topk_idx.to(setting.topk_dtype), weights)


def expect_rows(setting: Setting, tokens: list[Tokens], rank: int) -> Expected:
    each = setting.num_experts // len(tokens)
    rows: list[tuple[int, int]] = []
    for source, mine in enumerate(tokens):
        here = (mine.topk_idx // each == rank) & (mine.topk_idx >= 0)
        rows += [(source, token) for token in here.any(1).nonzero().flatten().tolist()]

    def gather(name: str) -> Tensor:
        parts = [getattr(tokens[source], name)[token : token + 1] for source, token in rows]
        empty = getattr(tokens[0], name)[:0]
        return torch.cat([empty.contiguous(), *parts]) if parts else empty

    topk_idx = gather("topk_idx")
    local = (topk_idx // each == rank) & (topk_idx >= 0)
    return Expected(
        gather("x"),
        None if tokens[0].scales is None else gather("scales"),
        torch.where(local, topk_idx - rank * each, -1),
        torch.where(local, gather("topk_weights"), 0.0),
        torch.tensor(rows, dtype=torch.int32).view(-1, 2),
    )


def difference(x: Tensor, y: Tensor) -> float:
    """Relative difference in angle and length; 0 for equal tensors."""
    assert x.shape == y.shape
    if x.numel() == 0:
        return 0.0
    x, y = x.double() + 1, y.double() + 1
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


def bits(*tensors: Tensor | None) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def same(got: Tensor, expected: Tensor) -> bool:
    return (
        got.shape == expected.shape and got.dtype == expected.dtype and bits(got) == bits(expected)
    )


# --- calls ---


class Sent(NamedTuple):
    tokens: list[Tokens]
    expected: Expected
    layout: dict[str, Tensor | None]  # arguments of dispatch
    x: Tensor | tuple[Tensor, Tensor]
    rows: Any
    topk_idx: Tensor
    topk_weights: Tensor
    counts: list[int]
    handle: Any
    event: deep_ep.EventOverlap


def values_of(rows: Any) -> Tensor:
    return rows[0] if isinstance(rows, tuple) else rows


def layout_of(
    buffer: deep_ep.Buffer, topk_idx: Tensor, num_experts: int, **options: Any
) -> tuple[dict[str, Any], deep_ep.EventOverlap]:
    """Returns arguments of dispatch, and the event."""
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
        topk_idx, num_experts, **options
    )
    layout = {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_node,
        "num_tokens_per_expert": per_expert,
        "is_token_in_rank": in_rank,
    }
    return layout, event


def send(place: Place, setting: Setting, **options: Any) -> Sent:
    """Calls get_dispatch_layout and dispatch with this rank's tokens; waits for the event."""
    tokens = [make_tokens(setting, rank) for rank in range(place.world_size)]
    mine = tokens[place.rank]
    topk_idx, buffer = place.put(mine.topk_idx), place.buffer
    layout, _ = layout_of(buffer, topk_idx, setting.num_experts)
    x = place.put(mine.x)
    given = x if mine.scales is None else (x, place.put(mine.scales))
    weights = place.put(mine.topk_weights)
    rows, *rest, event = buffer.dispatch(
        given, topk_idx=topk_idx, topk_weights=weights, **layout, **options
    )
    event.current_stream_wait()
    expected = expect_rows(setting, tokens, place.rank)
    return Sent(tokens, expected, layout, given, rows, *rest, event)


def check_rows(sent: Sent, rows: Any) -> None:
    expected, num_rows = sent.expected, sent.expected.x.shape[0]
    assert same(values_of(rows)[:num_rows].cpu(), expected.x)
    assert isinstance(rows, tuple) == (expected.scales is not None)
    if isinstance(rows, tuple):
        assert same(rows[1][:num_rows].cpu(), expected.scales)


def expert_rows(place: Place, sent: Sent) -> Tensor:
    """Rows of combine [R, H]: different on every rank."""
    x = values_of(sent.rows)
    return (x.float() * (1 + place.rank)).to(torch.bfloat16)


def expect_sum(place: Place, setting: Setting, sent: Sent) -> Tensor:
    """Combine's result for the expert_rows of all ranks, [T, H] fp32."""
    mine = sent.tokens[place.rank]
    total = torch.zeros(mine.x.shape[0], setting.hidden_dim)
    for rank in range(place.world_size):
        in_rank = sent.layout["is_token_in_rank"]
        assert in_rank is not None
        there = in_rank[:, rank].cpu()
        total[there] += (mine.x[there].float() * (1 + rank)).to(torch.bfloat16).float()
    return total


# --- checks: called by all ranks, with one buffer or its own setting ---


def check_layout(place: Place, setting: Setting) -> None:
    """Tokens of each rank and expert, counted one by one."""
    mine = make_tokens(setting, place.rank)
    per_rank, per_node, per_expert, in_rank, event = place.buffer.get_dispatch_layout(
        place.put(mine.topk_idx), setting.num_experts
    )
    assert per_node is None
    assert event.event is None
    each = setting.num_experts // place.world_size
    named = [[e for e in row if e >= 0] for row in mine.topk_idx.tolist()]
    for expert in range(setting.num_experts):
        assert int(per_expert[expert]) == sum(row.count(expert) for row in named)
    ranks = [{expert // each for expert in row} for row in named]
    wanted = [[rank in row for rank in range(place.world_size)] for row in ranks]
    assert in_rank.tolist() == wanted
    assert in_rank.dtype == torch.bool
    assert per_rank.tolist() == [sum(column) for column in zip(*wanted, strict=True)] or not wanted
    assert per_rank.dtype == per_expert.dtype == torch.int32


def check_dispatch(place: Place, setting: Setting) -> None:
    """Rows, their experts, weights and counts, and the handle's tensors."""
    sent = send(place, setting, expert_alignment=4)
    expected = sent.expected
    check_rows(sent, sent.rows)
    assert values_of(sent.rows).shape[0] == expected.x.shape[0]
    assert same(sent.topk_idx.cpu(), expected.topk_idx)
    assert same(sent.topk_weights.cpu(), expected.topk_weights)
    each = setting.num_experts // place.world_size
    counts = [int((expected.topk_idx == expert).sum()) for expert in range(each)]
    assert sent.counts == [-(-count // 4) * 4 for count in counts]
    prefix, source = sent.handle[0].cpu(), expected.source
    for rank in range(place.world_size):
        rows = expect_rows(setting, sent.tokens, rank).source
        for i in range(place.world_size):
            assert prefix[i][rank] == (rows[:, 0] <= i).sum()
    assert sent.handle[3].cpu().tolist() == source[:, 1].tolist()
    assert sent.handle[4] is sent.layout["is_token_in_rank"]


def check_combine(place: Place, setting: Setting) -> None:
    """Sums of rows and of weights, with zero, one and two biases."""
    sent = send(place, setting)
    y, expected = expert_rows(place, sent), expect_sum(place, setting, sent)
    generator = torch.Generator().manual_seed(place.rank)
    biases = [torch.randn(expected.shape, generator=generator).bfloat16() for _ in range(2)]
    bias: Any
    for num_biases in range(3):
        given = [place.put(each) for each in biases[:num_biases]]
        bias = tuple(given) if num_biases == 2 else given[0] if given else None
        out, weights, event = place.buffer.combine(
            y, sent.handle, topk_weights=sent.topk_weights, bias=bias
        )
        event.current_stream_wait()
        total = expected + sum(each.float() for each in biases[:num_biases])
        assert out.dtype == torch.bfloat16
        assert difference(out.cpu(), total) < 5e-6
        mine = sent.tokens[place.rank]
        assert weights is not None
        named = torch.where(mine.topk_idx >= 0, mine.topk_weights, 0.0)
        assert difference(weights.cpu(), named) < 1e-9
    out, weights, _ = place.buffer.combine(y, sent.handle)
    assert weights is None
    assert difference(out.cpu(), expected) < 5e-6


def check_cached(place: Place, setting: Setting) -> None:
    """Repeated dispatches with a handle give the same rows, with the current values."""
    sent = send(place, setting)
    sent_again = replace(setting, seed=setting.seed + 50)
    new = make_tokens(sent_again, place.rank)
    for _ in range(3):
        rows, *nothing, event = place.buffer.dispatch(sent.x, handle=sent.handle)
        event.current_stream_wait()
        assert nothing == [None] * 4
        check_rows(sent, rows)
    given = place.put(new.x) if new.scales is None else (place.put(new.x), place.put(new.scales))
    rows, *_ = place.buffer.dispatch(given, handle=sent.handle)
    others = [make_tokens(sent_again, rank) for rank in range(place.world_size)]
    moved = [
        other._replace(topk_idx=first.topk_idx)
        for other, first in zip(others, sent.tokens, strict=True)
    ]
    check_rows(sent._replace(expected=expect_rows(setting, moved, place.rank)), rows)
    y = expert_rows(place, sent)
    outs = {bits(place.buffer.combine(y, sent.handle)[0]) for _ in range(3)}
    assert len(outs) == 1


def check_worst(place: Place, setting: Setting) -> None:
    """num_worst_tokens gives the same bits in more rows, without counts."""
    sent = send(place, setting)
    most = max(1, *setting.num_tokens[: place.world_size]) * place.world_size
    worst = send(place, setting, num_worst_tokens=most)
    num_rows = sent.expected.x.shape[0]
    check_rows(worst, worst.rows)
    assert worst.counts == []
    assert values_of(worst.rows).shape[0] == most
    assert worst.topk_idx.shape[0] == worst.topk_weights.shape[0] == most
    assert bits(worst.topk_idx[:num_rows], worst.topk_weights[:num_rows]) == bits(
        sent.topk_idx, sent.topk_weights
    )
    assert (worst.topk_idx[num_rows:] == -1).all()
    assert (worst.topk_weights[num_rows:] == 0).all()
    column = worst.handle[0].cpu()[:, place.rank]
    assert column.tolist() == sent.handle[0].cpu()[:, place.rank].tolist()
    out = place.buffer.combine(expert_rows(place, sent), sent.handle, sent.topk_weights)
    more = place.buffer.combine(expert_rows(place, worst), worst.handle, worst.topk_weights)
    assert bits(*out[:2]) == bits(*more[:2])
    again, *_ = place.buffer.dispatch(sent.x, handle=worst.handle)
    check_rows(worst, again)


def check_without_topk(place: Place, setting: Setting) -> None:
    """is_token_in_rank alone decides where rows go."""
    sent = send(place, setting)
    rows, topk_idx, weights, counts, handle, event = place.buffer.dispatch(sent.x, **sent.layout)
    event.current_stream_wait()
    assert topk_idx is None
    assert weights is None
    assert counts == sent.counts
    check_rows(sent, rows)
    mine, num_columns = sent.tokens[place.rank], min(setting.topk, place.world_size)
    out, summed, _ = place.buffer.combine(
        expert_rows(place, sent._replace(rows=rows)),
        handle,
        topk_weights=sent.topk_weights[:, :num_columns],
    )
    assert difference(out.cpu(), expect_sum(place, setting, sent)) < 5e-6
    named = torch.where(mine.topk_idx >= 0, mine.topk_weights, 0.0)[:, :num_columns]
    assert summed is not None
    assert difference(summed.cpu(), named) < 1e-9


def check_repeats(place: Place, setting: Setting) -> None:
    """The same bits every time."""
    seen = set()
    for _ in range(10):
        sent = send(place, setting)
        out, weights, _ = place.buffer.combine(
            expert_rows(place, sent), sent.handle, sent.topk_weights
        )
        rows = sent.rows if isinstance(sent.rows, tuple) else (sent.rows,)
        seen.add(bits(*rows, sent.topk_idx, sent.topk_weights, out, weights))
    assert len(seen) == 1


def check_events(place: Place, setting: Setting) -> None:
    """Asynchronous calls, one after the other, by events alone."""
    mine = make_tokens(setting, place.rank)
    topk_idx, weights = place.put(mine.topk_idx), place.put(mine.topk_weights)
    x = place.put(mine.x)
    given = x if mine.scales is None else (x, place.put(mine.scales))
    later: dict[str, Any] = {"async_finish": True, "allocate_on_comm_stream": True}
    start = place.buffer.capture()
    layout, event = layout_of(
        place.buffer, topk_idx, setting.num_experts, previous_event=start, **later
    )
    assert event.event is not None
    more: dict[str, Any] = {"topk_idx": topk_idx, "topk_weights": weights, "previous_event": event}
    rows, *_, handle, event = place.buffer.dispatch(given, **layout, **more, **later)
    with event:
        pass
    sent = send(place, setting)
    assert sent.event.event is None
    check_rows(sent, rows)
    again, *_, event = place.buffer.dispatch(
        given, handle=handle, previous_event=place.buffer.capture(), **later
    )
    assert event.event is not None
    event.current_stream_wait()
    check_rows(sent, again)
    y = expert_rows(place, sent._replace(rows=rows))
    out, _, event = place.buffer.combine(y, handle, previous_event=place.buffer.capture(), **later)
    event.current_stream_wait()
    assert difference(out.cpu(), expect_sum(place, setting, sent)) < 5e-6


CHECKS = (
    check_layout,
    check_dispatch,
    check_combine,
    check_cached,
    check_worst,
    check_without_topk,
    check_repeats,
    check_events,
)
# Includes a shape for which the real DeepEP has no kernels: 16 of 896 experts of width 3584.
SETTINGS = {
    "bf16": Setting(),
    "fp8": Setting(fp8=True, topk_dtype=torch.int32),
    "fp8-packed": Setting(fp8=True, packed_scales=True),
    "empty-rank": Setting(num_tokens=(5, 0, 4, 0)),
    "empty-rank-fp8": Setting(num_tokens=(0, 6, 0, 3), fp8=True),
    "one-scale": Setting(hidden_dim=128, fp8=True, flat_scales=True),
    "nobody-has-tokens": Setting(num_tokens=(0, 0, 0, 0)),
    "many-steps": Setting(num_tokens=(150, 20, 200, 64)),
    "wide": Setting(num_tokens=(3, 2, 4, 1), num_experts=896, topk=16, hidden_dim=3584),
}
