"""What prepare of DeepEP's buffers has made, calls use: they make no communicator of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_p2p.deep_ep import Buffer, ElasticBuffer
from moe_p2p.moe.all_to_all import AllToAll
from moe_p2p.moe.options import DispatchOptions
from tests.support.deep_ep_cases import layout_of
from tests.support.ranks import Rank, StoreGroup, run_threads

TOKENS, HIDDEN, EXPERTS, TOPK = 4, 256, 8, 2


def _low_latency(rank: Rank) -> tuple[Any, Callable[[], object]]:
    buffer = Buffer(StoreGroup(rank), low_latency_mode=True)
    buffer.prepare_low_latency(TOKENS, HIDDEN, EXPERTS, TOPK, round_scale=True, use_ue8m0=True)
    x, topk_idx, _ = _inputs()
    return buffer, lambda: buffer.low_latency_dispatch(
        x, topk_idx, TOKENS, EXPERTS, round_scale=True, use_ue8m0=True
    )


def _normal(rank: Rank) -> tuple[Any, Callable[[], object]]:
    buffer = Buffer(StoreGroup(rank), 1 << 28)
    buffer.prepare(HIDDEN, EXPERTS, TOPK)
    x, topk_idx, weights = _inputs()

    def call() -> object:
        layout, _ = layout_of(buffer, topk_idx, EXPERTS)
        return buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, **layout)

    return buffer, call


def _elastic(rank: Rank) -> tuple[Any, Callable[[], object]]:
    buffer = ElasticBuffer(StoreGroup(rank), num_max_tokens_per_rank=TOKENS)
    buffer.prepare(HIDDEN, EXPERTS, TOPK)
    x, topk_idx, weights = _inputs()
    return buffer, lambda: buffer.dispatch(
        x, topk_idx=topk_idx, topk_weights=weights, num_experts=EXPERTS
    )


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    topk_idx = torch.tensor([[0, 5]]).repeat(TOKENS, 1)
    return torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16), topk_idx, torch.ones(TOKENS, TOPK)


@pytest.mark.parametrize("make", [_low_latency, _normal, _elastic])
def test_a_call_after_prepare_makes_no_communicator(
    make: Callable[[Rank], tuple[Any, Callable[[], object]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[DispatchOptions, ...]] = []
    prepare = AllToAll.prepare

    def note(self: AllToAll, *options: DispatchOptions, **types: Any) -> None:
        asked.append(options)
        prepare(self, *options, **types)

    monkeypatch.setattr(AllToAll, "prepare", note)

    def body(rank: Rank) -> None:
        buffer, call = make(rank)
        before = dict(buffer._pool._made)
        assert len(before) == 1
        call()
        assert buffer._pool._made == before
        buffer._pool.close()

    run_threads(2, body)
    expected = {_low_latency: ("padded", True), _normal: ("by_rank", False)}
    layout, quantize = expected.get(make, ("by_rank", False))
    assert [(one.layout, one.quantize) for (one,) in asked] == [(layout, quantize)] * 2
