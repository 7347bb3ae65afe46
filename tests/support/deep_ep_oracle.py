"""Expected results of DeepEP's calls, computed in plain torch from the tokens of all ranks.

Symbols: W ranks, T tokens of a rank, K top-k, E experts, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.support import gpu_ranks
from tests.support.ranks import Rank

# Largest 1 - 2<x,y> / (<x,x> + <y,y>) for sums of bf16 rows; from DeepEP's own tests.
BF16_DIFFERENCE = 1e-5


def captured(
    rank: Rank, name: str, body: Callable[[], Tensor]
) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Runs body() once as a warm-up, then captures it; returns the graph and its result."""
    body()
    graph = torch.cuda.CUDAGraph()

    def record() -> Tensor:
        stream = torch.cuda.current_stream()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            return body()

    return graph, gpu_ranks.in_turn(rank, f"capture of {name}", record)


def replay(rank: Rank, name: str, shape: Shape, body: Callable[[Batch], Tensor]) -> None:
    """Asserts that replays of body(batch), which doubles each row for its k, use current values."""
    counts = [shape.max_tokens] * rank.world_size
    place = make_batches(0, counts, shape)[rank.rank].on("cuda")
    graph, out = captured(rank, name, lambda: body(place))
    for seed in range(1, 6):
        batch = make_batches(seed, counts, shape)[rank.rank]
        for tensor, value in zip(place, batch, strict=True):
            tensor.copy_(value)
        graph.replay()
        weights = 2 * batch.weights.where(batch.topk_idx >= 0, 0.0)
        wanted = batch.x.double() * weights.double().sum(1, keepdim=True)
        assert difference(host(out), wanted) < BF16_DIFFERENCE


class Place(NamedTuple):
    """One rank with its buffer, of any of DeepEP's kinds."""

    rank: Rank
    device: str
    buffer: Any


class Shape(NamedTuple):
    """Shape of a test's calls."""

    num_experts: int = 12
    hidden_dim: int = 384
    topk: int = 3
    max_tokens: int = 12


class Batch(NamedTuple):
    """Tokens of one rank."""

    x: Tensor  # [T, H] bfloat16
    topk_idx: Tensor  # [T, K] int64, -1: none
    weights: Tensor  # [T, K] float32

    def on(self, device: str) -> Batch:
        return Batch(*(tensor.to(device) for tensor in self))


def make_batches(seed: int, counts: list[int], shape: Shape, drop: float = 0.2) -> list[Batch]:
    """Batches of all ranks; counts: tokens of each rank."""
    return [
        _make_batch(1000 * seed + rank, count, shape, drop) for rank, count in enumerate(counts)
    ]


def _make_batch(seed: int, count: int, shape: Shape, drop: float) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, shape.hidden_dim, generator=generator).bfloat16()
    scores = torch.rand(count, shape.num_experts, generator=generator)
    weights, idx = scores.topk(shape.topk, dim=1)
    idx[torch.rand(idx.shape, generator=generator) < drop] = -1
    return Batch(x, idx, weights)


def rows_of(batches: list[Batch], expert: int) -> Tensor:
    """[n, 2]: (source rank, token) of the rows of an expert, in order."""
    rows = [
        (rank, token)
        for rank, batch in enumerate(batches)
        for token in (batch.topk_idx == expert).any(1).nonzero().flatten().tolist()
    ]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 2)


def rows_by_rank(batches: list[Batch], rank: int, num_experts: int) -> Tensor:
    """[R, 2]: (source rank, token) of the tokens with an expert at `rank`, in order."""
    local = num_experts // len(batches)
    rows = [
        (source, token)
        for source, batch in enumerate(batches)
        for token in owned(batch.topk_idx, rank, local).any(1).nonzero().flatten().tolist()
    ]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 2)


def owned(topk_idx: Tensor, rank: int, num_local_experts: int) -> Tensor:
    return (topk_idx >= rank * num_local_experts) & (topk_idx < (rank + 1) * num_local_experts)


def gather(batches: list[Batch], rows: Tensor, field: str = "x") -> Tensor:
    """Returns `field` of the tokens that `rows` names, in order."""
    values = [getattr(batches[rank], field)[token] for rank, token in rows.tolist()]
    like = getattr(batches[0], field)
    return torch.stack(values) if values else like.new_empty((0, *like.shape[1:]))


def expert(number: int, x: Tensor) -> Tensor:
    """A function of its own for each expert, in bfloat16."""
    return (x.float() * (0.5 + 0.25 * (number % 7))).bfloat16()


def combined(batch: Batch, weights: Tensor | None = None) -> Tensor:
    """[T, H] in double: the sum of the experts' results, times `weights` [T, K] if given."""
    factors = 0.5 + 0.25 * (batch.topk_idx % 7).double()
    factors = factors.where(batch.topk_idx >= 0, 0.0)
    if weights is not None:
        factors = factors * weights.double()
    return batch.x.double() * factors.sum(1, keepdim=True)


def difference(x: Tensor, y: Tensor) -> float:
    """The difference used by DeepEP's tests; 0 for equal tensors."""
    x, y = x.double().flatten(), y.double().flatten()
    squares = (x @ x + y @ y).item()
    return 0.0 if squares == 0 else 1 - 2 * (x @ y).item() / squares


def host(tensor: Tensor) -> Tensor:
    """Copies to the CPU, after the current stream's work."""
    if tensor.is_cuda:
        torch.cuda.current_stream().synchronize()
    return tensor.cpu()


def dequantize(x: Tensor, scales: Tensor) -> Tensor:
    """x [n, H] float8_e4m3fn, scales [n, ceil(H / 128)] -> float32 [n, H]."""
    wide = scales.repeat_interleave(128, dim=1)[:, : x.shape[1]]
    return x.float() * wide


def assert_quantized(x: Tensor, q: Tensor, scales: Tensor) -> None:
    """Asserts that q * scales is x within e4m3's precision: 3 bits of mantissa, 2^-9 of a scale."""
    error = (dequantize(q, scales) - x.float()).abs()
    steps = scales.repeat_interleave(128, dim=1)[:, : x.shape[1]] * 2.0**-10
    assert (error <= torch.maximum(x.float().abs() * 2.0**-4, steps) * 1.001).all()


def largest_of_blocks(x: Tensor) -> Tensor:
    """Largest magnitudes of blocks of 128 values, [n, ceil(H / 128)] of [n, H]."""
    pad = -x.shape[1] % 128
    padded = torch.cat((x.float().abs(), x.new_zeros((x.shape[0], pad)).float()), 1)
    return padded.reshape(x.shape[0], padded.shape[1] // 128, 128).amax(2)
