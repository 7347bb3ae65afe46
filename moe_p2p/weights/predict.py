"""What each rank sends, gets and converts in an update, and how long that takes by public rates;
nothing here is fitted.

A stage takes n * (time of one) + bytes / rate, on the rank that has most of it. Stages of an update
run side by side, layer by layer: the longest one counts, and of the others one layer's share.
Maxima are exchanged before.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from moe_p2p.weights.boxes import length, parameter_axes
from moe_p2p.weights.flows import MeshPlace
from moe_p2p.weights.layout import item_bytes
from moe_p2p.weights.models import Model, weights
from moe_p2p.weights.plan import PlanEntry, WeightPlan


@dataclass
class Totals:
    """Per rank: bytes and writes out, bytes in; bytes of copies, of their sources, of maxima that
    a rank sends to one other, and exchanges."""

    source_bytes: list[int]
    source_writes: list[int]
    target_bytes: list[int]
    copied_bytes: list[int]  # of copies, with scales
    read_bytes: list[int]  # of what they are made from
    maxima_bytes: list[int]
    peers: list[set[int]] = field(default_factory=list)  # with which maxima are exchanged


def totals(plan: WeightPlan) -> Totals:
    """Sums of all ranks. Parameters on the same ranks with the same template are added at once."""
    world = plan.source.world_size
    found = Totals(
        *([0] * world, [0] * world, [0] * plan.target.world_size, [0] * world, [0] * world,
          [0] * world),
        peers=[set() for _ in range(world)],
    )  # fmt: skip
    kinds: Counter[tuple[int, ...]] = Counter()
    examples: dict[tuple[int, ...], PlanEntry] = {}
    for entry, number in zip(plan.entries(), plan.numbers, strict=True):
        ranks = (id(each.ranks) for each in (*entry.sources, *entry.targets))
        key: tuple[int, ...] = (number, entry.turn % entry.template.cycle, *ranks)
        kinds[key] += 1
        examples.setdefault(key, entry)
    known: dict[object, _Sums] = {}
    for key, times in kinds.items():
        if key[:2] not in known:
            known[key[:2]] = _sums(examples[key])
        _add(found, examples[key], known[key[:2]], times)
    return found


class _Sums(NamedTuple):
    """Of a template, by place: what `Totals` has by rank."""

    out: dict[MeshPlace, list[int]]  # bytes, writes
    into: Counter[MeshPlace]
    copied: dict[MeshPlace, tuple[int, int]]  # bytes of copies, of their sources
    maxima: dict[MeshPlace, tuple[int, set[MeshPlace]]]  # bytes, with whom


def _sums(entry: PlanEntry) -> _Sums:
    found = _Sums({}, Counter(), {}, {})
    for flow in entry.template.flows:
        for number, place in enumerate(flow.targets):
            sent = found.out.setdefault(flow.sources[flow.source_of(number, entry.turn)], [0, 0])
            sent[0] += flow.nbytes
            sent[1] += 1
            found.into[place] += flow.nbytes
    stages = entry.template.stages
    each_copied = sum(item_bytes(stage.dtype) for stage in stages)
    passes = sum(2 if stage.blocks else 1 for stage in stages)  # fp8 is read for its maxima, too
    for i, param in enumerate(entry.sources if stages else ()):
        for at in range(len(param.ranks)):
            count = math.prod(length(axis) for axis in parameter_axes(param, at))
            read = count * item_bytes(param.dtype) * passes
            found.copied[i, at] = (count * each_copied, read)
    for each in entry.template.exchanges:
        nbytes = 4 * math.prod(size for _, size in each.blocks)
        for k in range(max(len(party) for party in each.parties)):
            group = {party[k % len(party)] for party in each.parties}
            for place in group:
                before, peers = found.maxima.get(place, (0, set()))
                found.maxima[place] = (before + nbytes, peers | group)
    return found


def _add(found: Totals, entry: PlanEntry, sums: _Sums, times: int) -> None:
    ours = [each.ranks for each in entry.sources]
    for (i, at), (nbytes, writes) in sums.out.items():
        found.source_bytes[ours[i][at]] += nbytes * times
        found.source_writes[ours[i][at]] += writes * times
    for (i, at), nbytes in sums.into.items():
        found.target_bytes[entry.targets[i].ranks[at]] += nbytes * times
    for (i, at), (copied, read) in sums.copied.items():
        found.copied_bytes[ours[i][at]] += copied * times
        found.read_bytes[ours[i][at]] += read * times
    for (i, at), (nbytes, peers) in sums.maxima.items():
        found.maxima_bytes[ours[i][at]] += nbytes * times
        found.peers[ours[i][at]].update(ours[j][to] for j, to in peers)


# Of device memory for an element: per_block_cast_to_fp8 of DeepGEMM in eager torch.
EAGER_BYTES = 31
EAGER_KERNELS = 9  # of it: zeros, copy, abs, float, amax, clamp, divide, multiply, cast


@dataclass(frozen=True)
class Rates:
    """Per GPU. nic: bytes/s of its NICs together.

    wire_part: what large writes reach of it: 370 of 400 Gbit/s (fabric-lib, pages of 64 KiB, CX7).
    write_s: posting one slice of a scatter: 8.5 us for 64 (fabric-lib, CX7).
    call_s: one call from Python: a budget of ours (5 us), not a measurement.
    memory: bytes/s of HBM (H100 SXM's data sheet). launch_s: launching a kernel or a copy of torch.
    host: pinned host to device over PCIe 5.0 x16, of 63 GB/s raw.
    """

    nic: float = 50e9
    wire_part: float = 370 / 400
    write_s: float = 8.5e-6 / 64
    call_s: float = 5e-6
    memory: float = 3.35e12
    launch_s: float = 5e-6
    host: float = 55e9


class StageTime(NamedTuple):
    name: str
    seconds: float
    how: str


class Prediction(NamedTuple):
    stages: tuple[StageTime, ...]
    seconds: float


def predict(totals: Totals, layers: int, rates: Rates) -> Prediction:
    """Our update: shards on the GPUs, no gather, written into another buffer of the targets."""
    moved = max(map(sum, zip(totals.copied_bytes, totals.read_bytes, strict=True)))
    launches = 2 * layers  # grouped: maxima, then values
    convert = launches * rates.launch_s + moved / rates.memory
    peers = max((len(each) - 1 for each in totals.peers), default=0)
    sent = 2 * max(totals.maxima_bytes, default=0)  # to the owner of a block, and back
    messages = 2 * max(peers, 0)
    wire_rate = rates.nic * rates.wire_part
    exchange = messages * rates.write_s + sent / wire_rate
    writes, calls = max(totals.source_writes), layers
    submit = calls * rates.call_s + writes * rates.write_s
    out, into = max(totals.source_bytes), max(totals.target_bytes)
    side = "in, at a generator" if into >= out else "out, at a trainer"
    stages = (
        StageTime("convert", convert, f"{launches} kernels, {moved / 1e9:.2f} GB of device memory"),
        StageTime("block maxima", exchange, f"{messages} messages, {sent / 1e6:.1f} MB"),
        StageTime("submit", submit, f"{calls} calls, {writes:,} writes"),
        StageTime("wire", max(out, into) / wire_rate, f"{max(out, into) / 1e9:.2f} GB {side}"),
    )
    together = [stage.seconds for stage in stages if stage.name != "block maxima"]
    longest = max(together)
    return Prediction(stages, exchange + longest + (sum(together) - longest) / layers)


class Published(NamedTuple):
    name: str
    predicted_ms: float
    published_ms: float
    how: str


def paper(model: Model, trainers: int, engine_ranks: int, rates: Rates) -> tuple[Published, ...]:
    """fabric-lib's own procedure for Kimi-K2: bf16 shards on hosts, experts dealt to the 8 GPUs of
    a node and sharded over nodes, other parameters sharded over all; parameters gathered, each
    converted by eager torch where it is sent from, and one write per parameter, scale and target.

    An expert goes to one target, other parameters to all, spread over the trainers.
    """
    elements = sends = quantized = kernels = local = 0.0
    for each in weights(model):
        size = 1
        for n in each.shape:
            size *= n
        elements += size
        local += 1 / 8 if each.expert is not None else 1
        times = 1 if each.expert is not None else engine_ranks
        sends += times * (2 if each.quantized else 1)
        if each.quantized:
            quantized += times * size
            kernels += times * EAGER_KERNELS
    copied = 1e3 * (elements * 2 / trainers / rates.host + local * rates.launch_s)
    moved = quantized * EAGER_BYTES / trainers
    cast = 1e3 * (moved / rates.memory + kernels / trainers * rates.launch_s)
    return (
        Published("host to device", copied, 184, f"{elements * 2 / trainers / 1e9:.2f} GB in "
                  f"{local:,.0f} copies"),
        Published("quantize", cast, 88, f"{moved / 1e9:.0f} GB of device memory, "
                  f"{kernels / trainers:,.0f} kernels"),
        Published("submit", sends / trainers * 26 / 1144, 26, f"{sends / trainers:,.0f} calls "
                  "(published: 1,144); the time of a call is theirs"),
    )  # fmt: skip
