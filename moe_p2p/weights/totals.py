"""What each rank sends, gets and converts in an update, summed over a plan."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from moe_p2p.weights.boxes import parameter_axes
from moe_p2p.weights.flows import MeshPlace
from moe_p2p.weights.layout import item_bytes
from moe_p2p.weights.placement import length
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
