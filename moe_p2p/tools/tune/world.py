"""What the measurements of `tune` share: ranks, communicators, timed calls and the clock.

Collective: all ranks make the same calls, and get the same medians, so they choose alike.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moe_p2p import AllToAll, AllToAllConfig
from moe_p2p.moe.layouts import RowLayout
from moe_p2p.moe.rendezvous.mirror import MirrorGroup
from moe_p2p.tools.gather import everyones
from moe_p2p.tools.gpu_timing import captured, chain_length, interleaved, timed_us
from moe_p2p.tools.meeting import Meeting, OnGpus

GAIN = 0.02  # a value has to be so much faster than the shipped one: less is noise
PADDED_UP_TO = 512  # most tokens of a call whose rows are padded, for decoding
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """processes: ranks that are started. world: of the communicators, more in a mirror world."""

    device: str
    processes: int
    world: int
    hosts: int
    tokens: tuple[int, ...]
    hidden: int
    topk: int
    experts: int
    num_sms: int  # "few multiprocessors"
    only: tuple[str, ...]
    seconds: float  # of each value
    timeout_s: float

    @property
    def mirrored(self) -> bool:
        return self.world > self.processes


class Timed(NamedTuple):
    """run is timed; setup comes before it, outside the clock."""

    run: Callable[[], object]
    setup: Callable[[], object] = lambda: None


class World:
    def __init__(self, options: TuneOptions, rank: int) -> None:
        self.options, self.rank = options, rank
        self._on_gpu = options.device == "cuda"
        self._clock: Meeting | None = None
        if self._on_gpu:
            ranks = OnGpus(
                ranks=options.processes,
                ranks_per_node=options.processes // options.hosts,
                hosts=options.hosts,
                timeout_s=options.timeout_s,
            )
            self._clock = Meeting(ranks)
        self._group: Any = None
        if options.mirrored:
            key = f"tune.{everyones(secrets.token_hex(8))[0]}"
            self._group = MirrorGroup(options.world, place=rank, count=options.processes, key=key)

    def close(self) -> None:
        if self._clock is not None:
            self._clock.close()

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def config(self, tokens: int, **more: Any) -> AllToAllConfig:
        options = self.options
        return AllToAllConfig(
            num_experts=options.experts,
            hidden_dim=options.hidden,
            topk=options.topk,
            max_tokens=tokens,
            chunk_tokens=tokens,
            device=options.device,
            timeout_s=options.timeout_s,
            **more,
        )

    def layout(self, tokens: int) -> RowLayout:
        return "padded" if tokens <= PADDED_UP_TO and self._on_gpu else "grouped"

    @contextmanager
    def communicator(self, tokens: int, **more: Any) -> Iterator[AllToAll]:
        with AllToAll(self._group, self.config(tokens, **more)) as comm:
            yield comm

    def pair(self, comm: AllToAll, tokens: int) -> Callable[[], Tensor]:
        """Returns a dispatch and combine of so many tokens a rank; its result is the sums."""
        options = self.options
        generator = torch.Generator().manual_seed(0 if options.mirrored else self.rank)
        x = torch.randn(tokens, options.hidden, generator=generator).bfloat16().to(options.device)
        chosen = torch.rand(tokens, options.experts, generator=generator).topk(options.topk)
        idx, weights = chosen.indices.to(options.device), chosen.values.to(options.device)
        given: dict[str, Any] = {"quantize": True} if options.hidden % 16 == 0 else {}
        given["layout"] = self.layout(tokens)
        first = comm.dispatch(x, idx, weights, **given)
        y = torch.randn(options.hidden, generator=generator).bfloat16().to(options.device)
        y = y.expand(first.x.shape).contiguous()

        def pair() -> Tensor:
            sums: Tensor = comm.combine(y, comm.dispatch(x, idx, weights, **given))
            return sums

        comm.combine(y, first)
        return pair

    def medians_us(self, runs: Mapping[K, Timed]) -> dict[K, float]:
        """Times all in turns; returns the median of each, of the slowest rank of each round."""
        if self._clock is None:
            spans = interleaved(
                {key: _wall_us(run) for key, run in runs.items()}, seconds=self.options.seconds
            )
        else:
            spans = self._on_gpu_us(runs, self._clock)
        return {key: float(values.median()) for key, values in spans.items()}

    def _on_gpu_us(self, runs: Mapping[K, Timed], clock: Meeting) -> dict[K, Tensor]:
        def graph(timed: Timed) -> Callable[[], tuple[float]]:
            timed.setup()
            chain = chain_length(timed.run, clock.align)
            replay = captured(timed.run, repeats=chain)
            return lambda: (timed_us(replay, clock.align) / chain,)

        timing = {key: graph(run) for key, run in runs.items()}
        return interleaved(timing, seconds=self.options.seconds)


def _wall_us(timed: Timed) -> Callable[[], tuple[float]]:
    def span() -> tuple[float]:
        timed.setup()
        dist.barrier()  # ranks leave the first barrier after other work milliseconds apart
        dist.barrier()
        began = time.perf_counter()
        timed.run()
        return ((time.perf_counter() - began) * 1e6,)

    return span


def best(medians: Mapping[K, float], shipped: K) -> K:
    """The fastest; what is shipped unless another one is faster by more than noise."""
    found = min(medians, key=lambda key: medians[key])
    return found if medians[found] < (1 - GAIN) * medians[shipped] else shipped
