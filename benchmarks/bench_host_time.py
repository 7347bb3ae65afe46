"""Python time of a dispatch and its combine, for AllToAll and for the DeepEP API on top of it.

One rank on the CPU. Ops and direct calls are replaced by functions that return what an earlier call
did at once, so only Python is measured: no allocations, no launches, and not the time that torch
takes to call an op with so many arguments (about 5 us each). Rows "as ..." are the AllToAll calls
that the DeepEP call of that name makes: the difference is the cost of the DeepEP layer.

hot: pairs in a loop. cold: other data fills the core's caches between two pairs, as models and
waiting for a GPU do; then the amount of code and data that a pair touches decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from pytest_benchmark.fixture import BenchmarkFixture

from moe_p2p import AllToAll, AllToAllConfig, DispatchOptions
from moe_p2p.deep_ep import Buffer, ElasticBuffer
from moe_p2p.moe import bare, pool

TOKENS, HIDDEN, TOPK, EXPERTS = 16, 512, 8, 64
OPS = ("dispatch_inference", "combine_inference", "combine_out", "release")
DIRECT = [(bare, "_DISPATCH"), (bare, "_COMBINE"), (pool, "_COUNTED")]
COUNTED = ("count_routing", "dispatch_counted")
HALVES = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")


class Place(NamedTuple):
    """A single rank with all objects to call."""

    all_to_all: AllToAll
    buffer: Buffer
    elastic: ElasticBuffer
    x: torch.Tensor
    idx: torch.Tensor
    weights: torch.Tensor
    out: torch.Tensor
    padded: torch.Tensor  # [E, T, H], experts' outputs, padded
    by_rank: torch.Tensor  # [T, H]


AS_LOW_LATENCY = DispatchOptions(
    quantize=True, column_scales=True, with_source=True, with_ranges=True
)
AS_BY_RANK = DispatchOptions(layout="by_rank", with_source=True, solo=True)

Pair = Callable[[], object]


@pytest.fixture(name="place", scope="module")
def _place() -> Iterator[Place]:
    store = dist.HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    config = AllToAllConfig(num_experts=EXPERTS, hidden_dim=HIDDEN, topk=TOPK, max_tokens=TOKENS)
    x = torch.randn(TOKENS, HIDDEN).bfloat16()
    with AllToAll(store, config, rank=0, world_size=1) as all_to_all:
        buffer = Buffer(group, explicitly_destroy=True)
        elastic = ElasticBuffer(group, num_max_tokens_per_rank=TOKENS, explicitly_destroy=True)
        yield Place(
            all_to_all,
            buffer,
            elastic,
            x,
            torch.rand(TOKENS, EXPERTS).topk(TOPK).indices,
            torch.rand(TOKENS, TOPK),
            torch.empty_like(x),
            torch.randn(EXPERTS, TOKENS, HIDDEN).bfloat16(),
            torch.randn(TOKENS, HIDDEN).bfloat16(),
        )
        buffer.destroy()
        elastic.destroy()


# --- pairs ---


def padded(at: Place) -> Pair:
    all_to_all = at.all_to_all
    return lambda: all_to_all.combine(at.padded, all_to_all.dispatch(at.x, at.idx, at.weights))


def as_low_latency(at: Place) -> Pair:
    def pair() -> object:
        received = at.all_to_all.dispatch(at.x, at.idx, options=AS_LOW_LATENCY)
        return at.all_to_all.combine(at.padded, received, topk_weights=at.weights, out=at.out)

    return pair


def low_latency(at: Place) -> Pair:
    def pair() -> object:
        handle = at.buffer.low_latency_dispatch(at.x, at.idx, TOKENS, EXPERTS)[2]
        return at.buffer.low_latency_combine(at.padded, at.idx, at.weights, handle, out=at.out)

    return pair


def low_latency_hooks(at: Place) -> Pair:
    def pair() -> None:
        _, _, handle, _, receive = at.buffer.low_latency_dispatch(
            at.x, at.idx, TOKENS, EXPERTS, return_recv_hook=True
        )
        receive()
        _, _, receive = at.buffer.low_latency_combine(
            at.padded, at.idx, at.weights, handle, out=at.out, return_recv_hook=True
        )
        receive()

    return pair


def as_by_rank(at: Place) -> Pair:
    def pair() -> object:
        received = at.all_to_all.dispatch(at.x, at.idx, options=AS_BY_RANK, capacity=TOKENS)
        return at.all_to_all.combine(at.by_rank, received, weighted=False)

    return pair


def _normal(at: Place) -> Callable[[], Any]:
    """A dispatch with counts, available at once; returns its handle."""
    per_rank, _, per_expert, in_rank, _ = at.buffer.get_dispatch_layout(at.idx, EXPERTS)
    return lambda: at.buffer.dispatch(
        at.x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=at.idx,
        topk_weights=at.weights,
    )[4]


def normal(at: Place) -> Pair:
    dispatch = _normal(at)
    return lambda: at.buffer.combine(at.by_rank, dispatch())


def normal_cached(at: Place) -> Pair:
    handle = _normal(at)()

    def pair() -> object:
        at.buffer.dispatch(at.x, handle=handle)
        return at.buffer.combine(at.by_rank, handle)

    return pair


def _dispatch_elastic(at: Place, do_handle_copy: bool = True) -> Any:
    return at.elastic.dispatch(
        at.x,
        topk_idx=at.idx,
        topk_weights=at.weights,
        num_experts=EXPERTS,
        num_max_tokens_per_rank=TOKENS,
        do_cpu_sync=False,
        do_handle_copy=do_handle_copy,
    )[3]


def elastic(at: Place) -> Pair:
    return lambda: at.elastic.combine(at.by_rank, _dispatch_elastic(at))


def elastic_no_copy(at: Place) -> Pair:
    return lambda: at.elastic.combine(at.by_rank, _dispatch_elastic(at, False))


def elastic_cached(at: Place) -> Pair:
    handle = _dispatch_elastic(at)

    def pair() -> object:
        at.elastic.dispatch(at.x, topk_weights=at.weights, handle=handle)
        return at.elastic.combine(at.by_rank, handle)

    return pair


PAIRS = (
    *(padded, as_low_latency, low_latency, low_latency_hooks),
    *(as_by_rank, normal, normal_cached, elastic, elastic_no_copy, elastic_cached),
)


def touch(others: torch.Tensor) -> None:
    others.add_(1)


@pytest.mark.parametrize("caches", ["hot", "cold"])
@pytest.mark.parametrize("make", PAIRS, ids=lambda make: make.__name__)
def test_python_of_a_pair(
    benchmark: BenchmarkFixture,
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    make: Any,
    caches: str,
) -> None:
    def remember(holder: Any, name: str) -> None:
        real, latest = getattr(holder, name), []

        def call(*arguments: Any) -> Any:
            if len(latest) < 2:  # the first call prepares memory and kernels
                latest.append(real(*arguments))
            return latest[-1]

        monkeypatch.setattr(holder, name, call)

    with torch.no_grad():
        pair = make(place)
        for module, name in DIRECT:
            remember(module, name)
        for name in (*OPS, *HALVES, *COUNTED):
            remember(getattr(torch.ops.moe_p2p, name).default, "_op")
        if caches == "hot":
            benchmark.pedantic(pair, rounds=100, iterations=200, warmup_rounds=2)
        else:
            others = torch.zeros(24 << 20, dtype=torch.uint8)
            benchmark.pedantic(pair, setup=lambda: touch(others), rounds=300, warmup_rounds=2)
