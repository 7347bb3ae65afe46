"""NICs, event by event: each sends one message at a time and receives one at a time."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Nic:
    """Rates of one NIC per GPU, with the source of each number in NICS."""

    gbps: float
    goodput: float  # of gbps, for payload
    latency_us: float  # one way, a small write of GPU memory
    post_us: float  # per posted write
    writes_per_us: float

    def microseconds(self, num_bytes: float) -> float:
        """For which a message occupies a NIC."""
        return max(num_bytes * 8e-3 / (self.gbps * self.goodput), 1 / self.writes_per_us)


NICS = {
    # 92 to 97% of the rate: published DeepEP slopes. 5.87 us: a completed RDMA write of 1 KiB of
    # GPU memory (ROCm/mori, MORI-IO-BENCHMARK.md), of which the way there is about half. 0.13 us
    # and 11.1 M writes/s: "RDMA Point-to-Point Communication for LLM Systems", arXiv 2510.27656.
    "cx7": Nic(gbps=400, goodput=0.93, latency_us=2.7, post_us=0.13, writes_per_us=11.1),
    # 15 to 25 us a round trip; 0.44 us and 2.1 M writes/s: the same paper. EFA reaches 88% of its
    # rate with writes of 1 MB, and less with smaller ones (Mooncake, p5en).
    "efa": Nic(gbps=400, goodput=0.88, latency_us=10.0, post_us=0.44, writes_per_us=2.1),
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A step of uniformly routed tokens; sizes in elements."""

    ranks: int
    tokens: int  # per rank
    ranks_per_node: int = 8
    hidden: int = 7168
    topk: int = 8
    experts: int = 256

    @property
    def nodes(self) -> int:
        return max(1, self.ranks // self.ranks_per_node)

    @property
    def num_experts(self) -> int:
        """At least one of each rank."""
        return max(self.experts, self.ranks)

    def routing(self, seed: int = 0) -> Iterator[tuple[int, list[int]]]:
        """(source rank, ranks of the experts) of each token of all ranks."""
        drawn = random.Random(seed)
        each = self.num_experts // self.ranks
        experts = range(self.num_experts)
        for source in range(self.ranks):
            for _ in range(self.tokens):
                yield source, [e // each for e in drawn.sample(experts, self.topk)]

    def distinct(self, groups: int) -> float:
        """Expected number of distinct groups of experts that one token has experts in."""
        outside = self.num_experts - self.num_experts // groups
        missed = math.comb(outside, self.topk) / math.comb(self.num_experts, self.topk)
        return groups * (1 - missed)


class Message(NamedTuple):
    """ready_us: when the sender's NIC may have it."""

    ready_us: float
    source: int
    target: int
    num_bytes: float


def arrivals(nic: Nic, messages: Sequence[Message]) -> list[float]:
    """When the last byte of each message is there, in the order given.

    A receiver that is busy delays a message; the sender is free again nevertheless: switches hold
    what waits. Messages of one sender that are ready at once leave in the order given.
    """
    waiting: dict[int, list[int]] = {}  # of each sender, the next one last
    for number in sorted(range(len(messages)), key=lambda n: (-messages[n].ready_us, -n)):
        waiting.setdefault(messages[number].source, []).append(number)
    turns = [(messages[numbers[-1]].ready_us, source) for source, numbers in waiting.items()]
    heapq.heapify(turns)
    there = [0.0] * len(messages)
    receiving: dict[int, float] = {}
    while turns:
        time, source = heapq.heappop(turns)
        message = messages[number := waiting[source].pop()]
        busy = nic.microseconds(message.num_bytes)
        begin = max(time + nic.latency_us, receiving.get(message.target, 0.0))
        there[number] = receiving[message.target] = begin + busy
        if waiting[source]:
            ready = messages[waiting[source][-1]].ready_us
            heapq.heappush(turns, (max(time + busy, ready), source))
    return there
