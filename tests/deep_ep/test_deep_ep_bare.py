"""Calls with nothing around them: the same results as the others, by a shorter way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_p2p import errors
from moe_p2p.deep_ep import Buffer, ElasticBuffer
from moe_p2p.deep_ep.streams import Streams
from tests.support.cases import bits
from tests.support.ranks import Rank, StoreGroup, run_threads

T, H, K, E = 5, 256, 2, 4
Pair = Callable[[], list[Any]]


def inputs(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(T, H, generator=generator).bfloat16()
    return x, torch.rand(T, E, generator=generator).topk(K).indices, torch.full((T, K), 0.5)


def low_latency(rank: Rank, **how: Any) -> Pair:
    buffer, (x, idx, weights) = Buffer(StoreGroup(rank)), inputs(rank.rank)  # type: ignore[arg-type]
    y = torch.ones(E // rank.world_size, rank.world_size * T, H).bfloat16()

    def pair() -> list[Any]:
        got, counts, handle, event, hook = buffer.low_latency_dispatch(x, idx, T, E, **how)
        assert (event.event, hook) == (None, None)
        rows = got[0] if how.get("use_fp8", True) else got
        assert isinstance(rows, Tensor)
        filled = [rows[e, : int(counts[e])].clone() for e in range(len(counts))]
        out = torch.empty(T, H).bfloat16()
        into, event, hook = buffer.low_latency_combine(y, idx, weights, handle, out=out)
        assert into is out
        assert (event.event, hook) == (None, None)
        again, _, _ = buffer.low_latency_combine(y, idx, weights, handle)
        src_info, ranges, *sizes = handle
        assert sizes == [T, H, E]
        valid = [src_info[e, : int(counts[e])].clone() for e in range(len(counts))]
        return [*filled, *valid, counts, ranges, out, again]

    return pair


def normal_cached(rank: Rank) -> Pair:
    buffer, (x, idx, weights) = Buffer(StoreGroup(rank)), inputs(rank.rank)  # type: ignore[arg-type]
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, E)
    handle = buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=idx,
        topk_weights=weights,
    )[4]

    def pair() -> list[Any]:
        rows, *others, event = buffer.dispatch(x, handle=handle)
        assert (others, event.event) == ([None] * 4, None)
        fp8 = (x.to(torch.float8_e4m3fn), torch.arange(T * H / 128.0).view(T, -1))
        values, scales = buffer.dispatch(fp8, handle=handle)[0]
        assert isinstance(rows, Tensor)
        assert handle is not None
        out, none, event = buffer.combine(rows, handle)
        assert (none, event.event) == (None, None)
        return [rows, values, scales, out]

    return pair


def elastic(rank: Rank) -> Pair:
    buffer = ElasticBuffer(StoreGroup(rank), num_max_tokens_per_rank=T)  # type: ignore[arg-type]
    x, idx, weights = inputs(rank.rank)

    def pair() -> list[Any]:
        rows, ids, row_weights, handle, event = buffer.dispatch(
            x, idx, weights, num_experts=E, do_cpu_sync=False
        )
        assert event.event is None
        assert isinstance(rows, Tensor)
        assert ids is not None
        assert row_weights is not None
        num = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        out, none, event = buffer.combine(rows, handle)
        assert (none, event.event) == (None, None)
        return [rows[:num], ids[:num], row_weights[:num], handle.received.counts, out]

    return pair


PAIRS = [
    low_latency,
    lambda rank: low_latency(rank, use_fp8=False),
    lambda rank: low_latency(rank, round_scale=True, use_ue8m0=True),
    normal_cached,
    elastic,
]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("make", PAIRS, ids=["fp8", "bf16", "ue8m0", "cached", "v2"])
def test_results_are_those_of_other_calls(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[Rank], Pair], grad: bool
) -> None:
    calls: list[str] = []
    turn = Streams.turn

    def other(*given: Any, **more: Any) -> Any:
        calls.append("turn")
        return turn(*given, **more)

    monkeypatch.setattr(Streams, "turn", other)

    def second(rank: Rank) -> list[Any]:
        with torch.set_grad_enabled(grad):
            pair = make(rank)
            pair()  # makes what the next one uses
            calls.clear()
            return pair()

    got = run_threads(2, second)
    assert calls == []
    monkeypatch.setattr(Streams, "bare_on", lambda *_: None)
    for bare, other in zip(got, run_threads(2, second), strict=True):
        for one, two in zip(bare, other, strict=True):
            assert one.dtype == two.dtype
            assert not one.requires_grad
            assert torch.equal(bits(one), bits(two))
    assert len(calls) >= 2  # a dispatch and a combine


def test_which_calls_are_bare() -> None:
    streams, x = Streams(), torch.zeros(2, 2)
    assert streams.bare_on(x) == -1
    assert streams.bare_on("x") is None
    assert streams.bare_on(torch.nn.Parameter(x, requires_grad=False)) is None


def test_what_is_more_is_made_the_longer_way() -> None:
    """With the same results, as long as they are no gradients: calls have none."""
    buffer = Buffer(StoreGroup(Rank(0, 1, torch.distributed.HashStore())))  # type: ignore[arg-type]
    x, idx, weights = inputs(0)
    y = torch.ones(E, T, H).bfloat16()

    def pair(x: Tensor, weights: Tensor) -> Tensor:
        handle = buffer.low_latency_dispatch(x, idx, T, E)[2]
        return buffer.low_latency_combine(y, idx, weights, handle)[0]

    want = pair(x, weights)
    grads = x.clone().requires_grad_(), weights.clone().requires_grad_()
    for given in (grads, (x, grads[1]), (grads[0], weights)):
        got = pair(*given)
        assert not got.requires_grad
        assert torch.equal(got, want)
    with torch.device("cpu"), torch.autograd.profiler.profile():
        assert torch.equal(pair(x, weights), want)
    with torch.autograd.forward_ad.dual_level():
        assert torch.equal(pair(x, weights), want)


def test_inputs_with_gaps_are_copied() -> None:
    buffer = ElasticBuffer(
        StoreGroup(Rank(0, 1, torch.distributed.HashStore())), num_max_tokens_per_rank=T
    )  # type: ignore[arg-type]
    x, idx, weights = inputs(0)

    def pair(x: Tensor, idx: Tensor) -> Tensor:
        rows, *_, handle, _ = buffer.dispatch(x, idx, weights, num_experts=E, do_cpu_sync=False)
        assert isinstance(rows, Tensor)
        y = torch.cat((rows, rows), 1)[:, :H] if x.stride(0) > H else rows
        return buffer.combine(y, handle)[0]

    wide = torch.cat((x, x), 1)[:, :H], torch.cat((idx, idx), 1)[:, :K]
    for _ in range(2):
        assert torch.equal(pair(*wide), pair(x, idx))


def test_errors_of_bare_calls_have_names() -> None:
    buffer = Buffer(StoreGroup(Rank(0, 1, torch.distributed.HashStore())))  # type: ignore[arg-type]
    x, idx, weights = inputs(0)
    for _ in range(2):
        handle = buffer.low_latency_dispatch(x, idx, T, E)[2]
    with pytest.raises(errors.InvalidArgumentError, match=r"topk_idx is .idx., must be a tensor"):
        buffer.low_latency_dispatch(x, "idx", T, E)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidArgumentError, match=r"y is .*, must hold"):
        buffer.low_latency_combine(x[:, :7].contiguous(), idx, weights, handle)
    with pytest.raises(errors.InvalidArgumentError, match="out has 3 rows, must have 5"):
        buffer.low_latency_combine(x, idx, weights, handle, out=x[:3])
