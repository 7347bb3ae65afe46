"""The phases of a pair: DeepEP V1's low-latency calls, and ours.

DeepEP: a copy of a token per expert on another node, straight from GPU to NIC. Everything that is
not the wire is one constant per phase, fitted with the goodput on the points of 16 ranks.

Ours: a copy per node (or, flat, per rank), from the GPU's outbox by way of the proxy; each rank
sends to the rank of the same place on other nodes, whose node reads it over NVLink. Nothing is
fitted: each term was measured alone, or is published.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from moe_p2p.machine.transport import VERBS
from moe_p2p.moe.config import MOST_PARTS, default_part_bytes
from moe_p2p.moe.reference.wire import LINE, align, slot_head_bytes
from moe_p2p.tools.model.wire import Job, Message, Nic, arrivals


class Pair(NamedTuple):
    """Microseconds."""

    dispatch: float
    combine: float

    @property
    def total(self) -> float:
        return self.dispatch + self.combine


# --- DeepEP V1, low latency ---


def deepep_bytes(job: Job) -> Pair:
    """Of one message: fp8 values, a scale of 128 each and an index; a row of bf16."""
    return Pair(job.hidden + 4 * (job.hidden // 128) + 16, 2 * job.hidden)


def deepep_wire(job: Job, nic: Nic, phase: int) -> float:
    """Until the last message of the slowest rank is there.

    Dispatch sends a count to each remote rank once all tokens are sent. In combine a flag follows
    the rows of each expert, so posting hides behind rows that are under way.
    """
    num_bytes = deepep_bytes(job)[phase]
    sent = [
        Message(0.0, source, target, num_bytes)
        for source, targets in job.routing()
        for target in targets
        if target // job.ranks_per_node != source // job.ranks_per_node
    ]
    counts = nic.post_us * (job.ranks - job.ranks_per_node) if phase == 0 else 0.0
    return max(arrivals(nic, sent), default=nic.latency_us) + counts


@dataclass(frozen=True)
class Fit:
    """What was fitted of a phase: constant microseconds, and the goodput of the NIC."""

    fixed_us: float
    goodput: float


def fit(nic: Nic, jobs: Sequence[Job], phase: int, measured: Sequence[float]) -> Fit:
    """Least squares of `measured` against what the wire takes at its full rate."""
    full = replace(nic, goodput=1.0)
    x = [deepep_wire(job, full, phase) for job in jobs]
    mean_x, mean_y = sum(x) / len(x), sum(measured) / len(x)
    spread = sum((a - mean_x) ** 2 for a in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, measured, strict=True)) / spread
    return Fit(fixed_us=mean_y - slope * mean_x, goodput=1 / slope)


def deepep(job: Job, nic: Nic, fits: Sequence[Fit]) -> Pair:
    times = (
        fitted.fixed_us + deepep_wire(job, replace(nic, goodput=fitted.goodput), phase)
        for phase, fitted in enumerate(fits)
    )
    return Pair(*times)


# --- ours ---


@dataclass(frozen=True, kw_only=True)
class Ours:
    """Terms in microseconds, each measured apart (docs/tuning.md has how)."""

    # Pair on 8 H200 of one host: 16.8, 25.7 and 60.1 at T 8, 32 and 128.
    kernels: float = 13.9  # two launches, routing, flags: at no tokens
    per_row: float = 0.361 / 5.25  # a row of each phase at one (token, rank); a third is dispatch's
    # Per direction between nodes, 2 x 1.
    ring: float = 2.4  # the last worker counts, fences and stores the bell
    bell: float = 0.6  # over PCIe to a core that spins
    proxy: float = 0.4  # sees it and makes the writes, without posting them
    publish: float = 0.6  # completion, immediate, word for the GPU
    flush: float = 1.4  # cuFlushGPUDirectRDMAWrites; twice with a node to share it
    relay: float = 2.1  # a block sees the host's word and repeats it to the node


def slot_bytes(job: Job) -> Pair:
    """Of one token between nodes: fp8 with scales behind its head; a row of bf16."""
    values = align(job.hidden, 16) + align(4 * (job.hidden // 128), 16)
    slot = align(slot_head_bytes(job.topk) + values, LINE)
    return Pair(slot, align(2 * job.hidden, LINE))


def ours(job: Job, nic: Nic, *, flat: bool = False, terms: Ours | None = None) -> Pair:
    """flat: a copy per rank instead of one per node. With the expected number of tokens each."""
    terms = terms or Ours()
    peers = job.ranks - job.ranks_per_node if flat else job.nodes - 1
    groups = job.ranks if flat else job.nodes
    each = job.tokens * job.distinct(groups) / groups  # copies for one peer
    times = []
    for share, slot, header in zip(Pair(1 / 3, 2 / 3), slot_bytes(job), _headers(job), strict=True):
        near = share * terms.per_row * job.tokens * job.distinct(job.ranks)
        if not peers:
            times.append(terms.kernels / 2 + near)
            continue
        begin = terms.kernels / 2 + terms.ring + terms.bell + terms.proxy
        behind = terms.publish + terms.flush * (2 if job.ranks_per_node > 1 else 1) + terms.relay
        there = _there(nic, peers, header + slot * each, begin, num_parts(job, slot, each))
        # NVLink's work on arrivals hides behind the wire, except the work on the last part.
        last = near / MOST_PARTS
        times.append(max(there + last, begin + near) + behind)
    return Pair(*times)


def _headers(job: Job) -> Pair:
    """Bytes of a message beside its slots: a header, and counts in dispatch."""
    each = job.num_experts // job.ranks
    return Pair(LINE + align(4 * job.ranks_per_node * each, LINE), LINE)


def num_parts(job: Job, slot: float, num_slots: float) -> int:
    """Of a message of so many slots, in a step of all the job's tokens: RegionPart of
    kernels/abi/region.h, with the communicator's default."""
    least = -(-job.tokens // MOST_PARTS)
    part_bytes = default_part_bytes(VERBS, 2 * job.hidden * job.tokens)
    return max(1, math.ceil(num_slots / max(least, math.ceil(part_bytes / slot))))


def _there(nic: Nic, peers: int, num_bytes: float, begin: float, parts: int) -> float:
    """When the last part is there. The proxy posts one write after another; ranks begin with the
    peer behind them, so that no receiver is busy with two."""
    sent = [
        Message(begin + nic.post_us * (number + 1), 0, 1 + number // parts, num_bytes / parts)
        for number in range(peers * parts)
    ]
    return max(arrivals(nic, sent))
