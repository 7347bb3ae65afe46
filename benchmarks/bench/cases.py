"""Inputs of the benchmark: deterministic, so that every rank can make every rank's input.

Shapes: W ranks, T tokens of one rank, K top-k, E experts, H hidden size, S recorded steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_p2p.bench.options import Options
from moe_p2p.moe.reference import Tokens, Topology
from moe_p2p.tools.routing import RecordedRouting


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that is fixed for a run."""

    topology: Topology
    hidden_dim: int
    topk: int
    x_dtype: torch.dtype
    routing: Callable[[int, int, int], tuple[Tensor, Tensor]]  # (step, rank, T) -> [T, K] twice
    mirrored: bool = False  # all ranks do what rank 0 does, turned

    def tokens(self, step: int, counts: list[int]) -> list[Tokens]:
        """Returns every rank's input in one step; `counts` tokens of each."""
        return [self.tokens_of(step, rank, count) for rank, count in enumerate(counts)]

    def tokens_of(self, step: int, rank: int, count: int) -> Tokens:
        """Returns one rank's input."""
        topk_idx, topk_weights = self.routing(step, rank, count)
        seed = 0 if self.mirrored else rank
        x = torch.randn(count, self.hidden_dim, generator=_generator(step, seed))
        return Tokens(x=x.to(self.x_dtype), topk_idx=topk_idx, topk_weights=topk_weights)

    def number_of(self, expert: Tensor) -> Tensor:
        """Returns the number by which an expert answers; in a mirror world its local one."""
        return expert % self.topology.max_local_experts() if self.mirrored else expert


def make_job(options: Options) -> Job:
    num_experts, topk = options.experts, options.topk
    routing = _drawn(popularity(options), options)
    if options.trace:
        recorded = RecordedRouting.load(Path(options.trace))
        num_experts, topk = recorded.num_experts, recorded.topk_idx.shape[-1]
        routing = _replayed(recorded, options)
    return Job(
        topology=Topology(
            world_size=options.ranks, ranks_per_node=options.ranks_per_node, num_experts=num_experts
        ),
        hidden_dim=options.hidden,
        topk=topk,
        x_dtype=options.x_dtype,
        routing=_turned(routing, num_experts, options.ranks) if options.mirror else routing,
        mirrored=options.mirror > 0,
    )


Routed = Callable[[int, int, int], tuple[Tensor, Tensor]]


def _turned(routing: Routed, num_experts: int, num_ranks: int) -> Routed:
    """Gives every rank the routing of rank 0, with experts turned by a rank from each to the next.

    [0, 9] of 16 experts and 4 ranks: [4, 13] on rank 1, [8, 1] on rank 2.
    """

    def turned(step: int, rank: int, count: int) -> tuple[Tensor, Tensor]:
        idx, weights = routing(step, 0, count)
        turned_idx = (idx + rank * (num_experts // num_ranks)) % num_experts
        return torch.where(idx < 0, idx, turned_idx), weights

    return turned


def changing_counts(
    step: int, world_size: int, tokens: int, *, mirrored: bool = False
) -> list[int]:
    """Token counts of the checked steps: full, then each rank in turn without any, others odd.

    mirrored: rank 0's, for all.
    """
    if mirrored:
        return changing_counts(step, 2, tokens)[1:] * world_size
    if step == 0:
        return [tokens] * world_size
    generator = _generator(step, world_size)
    counts = torch.randint(1, tokens + 1, (world_size,), generator=generator).tolist()
    counts[step % world_size] = 0
    return [int(count) for count in counts]


def _generator(step: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(7_919 * step + rank)


def _choose(popularity: Tensor, topk: int, count: int, generator: torch.Generator) -> Tensor:
    """[count, topk] distinct experts, drawn one after the other by popularity [E]."""
    noise = torch.rand(count, len(popularity), generator=generator).clamp_min(1e-12)
    return (popularity.log() - (-noise.log()).log()).topk(topk, dim=1).indices


def _drawn(
    popularity: Tensor, options: Options
) -> Callable[[int, int, int], tuple[Tensor, Tensor]]:
    def routing(step: int, rank: int, count: int) -> tuple[Tensor, Tensor]:
        generator = _generator(step, rank + 1_000_000)
        topk_idx = _choose(popularity, options.topk, count, generator)
        weights = torch.rand(count, options.topk, generator=generator) + 0.1
        return topk_idx, weights / weights.sum(dim=1, keepdim=True)

    return routing


def popularity(options: Options) -> Tensor:
    """[E] how often experts are drawn, but for a factor: powers of their places, mixed."""
    name, _, number = options.routing.partition(":")
    if name == "uniform":
        return torch.ones(options.experts)
    place = 1.0 + torch.randperm(options.experts, generator=_generator(0, 0)).double()
    exponent = float(number or 1.0)
    if name == "maxvio":
        exponent = _exponent_of(exponent, options.topk, options.experts)
    return (place**-exponent).float()


def _exponent_of(max_vio: float, topk: int, num_experts: int) -> float:
    """Returns the power by which the busiest expert is expected to have 1 + max_vio times the mean.

    MaxVio is (largest load - mean) / mean (Wang et al. 2024, arXiv 2408.15664).
    """
    place = torch.arange(1, num_experts + 1, dtype=torch.float64)
    low, high = 0.0, 16.0
    for _ in range(50):
        exponent = (low + high) / 2
        share = _chosen(place**-exponent, topk)
        low, high = (
            (exponent, high) if share[0] * num_experts < topk * (1 + max_vio) else (low, exponent)
        )
    return low


def _chosen(popularity: Tensor, topk: int) -> Tensor:
    """[E] how probably a token names each: of a race of Poisson processes the first topk."""
    low, high = 0.0, float(topk / popularity.min())
    for _ in range(200):
        time = (low + high) / 2
        low, high = (time, high) if (-torch.expm1(-popularity * time)).sum() < topk else (low, time)
    return -torch.expm1(-popularity * low)


def _replayed(recorded: RecordedRouting, options: Options) -> Routed:
    num_steps, world_size, tokens, _ = recorded.topk_idx.shape
    if world_size != options.ranks:
        raise ValueError(f"{options.trace} has {world_size} ranks, --ranks is {options.ranks}")
    if tokens < max(options.tokens):
        raise ValueError(
            f"{options.trace} has {tokens} tokens per rank, --tokens asks for {max(options.tokens)}"
        )

    def routing(step: int, rank: int, count: int) -> tuple[Tensor, Tensor]:
        at = step % num_steps
        weights = recorded.topk_weights[at, rank, :count]
        return recorded.topk_idx[at, rank, :count], weights.contiguous()

    return routing
