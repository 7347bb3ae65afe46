"""The plan of a weight update: which strided bytes each trainer writes into which engine rank.

`weight_plan` is pure and made once, from both layouts; every rank may make it by itself, read it
from disk, or get it as bytes. Parameters that are described alike share a template (flows.py), so a
plan of 70,000 parameters has some dozens of them. docs/weights.md explains it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from moe_p2p import log
from moe_p2p.engine.strides import Rows
from moe_p2p.errors import InvalidArgumentError, make, require, require_type
from moe_p2p.weights.flows import Exchange, Flow, MeshPlace, Stage, Template, template
from moe_p2p.weights.layout import Param, WeightLayout, item_bytes, tuples

# Changes with what flows.py makes of layouts: files of another one are not read.
FORMAT = "weights 1"


class Write(NamedTuple):
    """Row r of unit u: offsets[u][0] + r * source_stride bytes of the source's tensor, to
    offsets[u][1] + r * target_stride bytes of the target's."""

    name: str
    scales: bool
    source_rank: int
    source_tensor: str
    target_rank: int
    target_tensor: str
    rows: Rows

    @property
    def nbytes(self) -> int:
        return self.rows.row_bytes * self.rows.num_rows * len(self.rows.offsets)


class Copy(NamedTuple):
    """A dense copy that a source rank makes of its elements of a parameter before it writes."""

    name: str
    tensor: str
    param: Param
    position: int  # of the rank in the Param's mesh
    stage: Stage


class Maxima(NamedTuple):
    """Blocks of a parameter, (first, size) of its grid, whose maxima these ranks exchange.

    tensor: the copy that is quantized by them.
    """

    name: str
    tensor: str
    blocks: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]


class Counts(NamedTuple):
    """What one rank writes to another in an update."""

    nbytes: int
    writes: int  # of `of_source`
    rows: int


class Gathered(NamedTuple):
    """A parameter that targets get unconverted, in their tensor `Param.received`."""

    name: str
    nbytes: int
    why: str


class PlanEntry(NamedTuple):
    """A parameter of a plan. turn: its number."""

    name: str
    turn: int
    template: Template
    sources: tuple[Param, ...]
    targets: tuple[Param, ...]


@dataclass(frozen=True)
class WeightPlan:
    source: WeightLayout
    target: WeightLayout
    templates: tuple[Template, ...]
    numbers: tuple[int, ...]  # of the template of each of `names`
    lost: frozenset[int] = frozenset()  # source ranks that others stand in for

    def without(self, lost: Iterable[int]) -> WeightPlan:
        """The plan where other holders of the same shards send for `lost` source ranks.

        Raises InvalidArgumentError with a parameter of which nobody else holds a part.
        """
        lost = frozenset(lost)
        if lost == self.lost:
            return self
        found = dataclasses.replace(self, lost=lost)
        known: set[object] = set()
        for entry, number in zip(self.entries(), self.numbers, strict=True):
            key = (number, *(id(each.ranks) for each in entry.sources))
            if key not in known:
                known.add(key)
                _check_held(found, entry)
        return found

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Parameters that travel, in the source's order."""
        return tuple(name for name in self.source.by_name if name in self.target.by_name)

    @functools.cached_property
    def unused(self) -> tuple[str, ...]:
        """Parameters of the source that no target has."""
        return tuple(name for name in self.source.by_name if name not in self.target.by_name)

    def of_source(self, rank: int, names: Sequence[str] | None = None) -> Iterator[Write]:
        """What a source rank writes, of all parameters or of `names`. Sources begin with different
        targets, so that they do not all write to the same one."""
        self._check("source", rank, self.source)
        wanted = None if names is None else set(names)
        for entry, (by_source, _) in self._indexed():
            if wanted is not None and entry.name not in wanted:
                continue
            found = [
                _write(entry, flow, place, target)
                for place in _places(entry.sources, rank)
                for flow, number in by_source.get(place, ())
                for i, target in enumerate(flow.targets)
                if self._number(entry, flow, i) == number
            ]
            found.sort(key=lambda write: (write.target_rank - rank - 1) % self.target.world_size)
            yield from found

    def of_target(self, rank: int) -> dict[int, Counts]:
        """What a target rank gets, from which source ranks."""
        self._check("target", rank, self.target)
        found: dict[int, list[int]] = {}
        for entry, (_, by_target) in self._indexed():
            for place in _places(entry.targets, rank):
                for flow, number in by_target.get(place, ()):
                    i, at = flow.sources[self._number(entry, flow, number)]
                    counts = found.setdefault(entry.sources[i].ranks[at], [0, 0, 0])
                    counts[0] += flow.nbytes
                    counts[1] += 1
                    counts[2] += flow.rows.num_rows * len(flow.rows.offsets)
        return {source: Counts(*counts) for source, counts in sorted(found.items())}

    def writes_to(self, rank: int) -> Iterator[Write]:
        """What a target rank gets: `of_source` of all sources, where it is the target."""
        self._check("target", rank, self.target)
        for entry, (_, by_target) in self._indexed():
            for place in _places(entry.targets, rank):
                for flow, number in by_target.get(place, ()):
                    source = flow.sources[self._number(entry, flow, number)]
                    yield _write(entry, flow, source, place)

    def copies(self, rank: int) -> Iterator[Copy]:
        """What a source rank converts before it writes: other types, other orders, fp8."""
        self._check("source", rank, self.source)
        for entry in self.entries():
            for i, at in _places(entry.sources, rank) if entry.template.stages else ():
                for stage in entry.template.stages:
                    yield Copy(entry.name, stage.tensor(entry.name), entry.sources[i], at, stage)

    def maxima(self, rank: int) -> Iterator[Maxima]:
        """Exchanges of block maxima that a source rank takes part in."""
        self._check("source", rank, self.source)
        for entry in self.entries():
            if entry.template.exchanges:
                yield from _maxima(entry, set(_places(entry.sources, rank)), self.lost)

    def received(self, rank: int) -> dict[str, tuple[Param, int]]:
        """Tensors that a target rank gets in checkpoint layout, and of which parameter: a Param,
        and the rank's position in it."""
        return {
            entry.targets[i].received: (entry.targets[i], at)
            for entry in self.entries()
            if entry.template.received
            for i, at in _places(entry.targets, rank)
            if i in dict(entry.template.received)
        }

    def writers_to(self, rank: int) -> list[int]:
        """Source ranks that may write to a target rank, also in place of lost ones."""
        found: set[int] = set()
        for entry, (_, by_target) in self._indexed():
            for place in _places(entry.targets, rank):
                for flow, _ in by_target.get(place, ()):
                    found.update(entry.sources[i].ranks[at] for i, at in flow.sources)
        return sorted(found)

    def _number(self, entry: PlanEntry, flow: Flow, target: int) -> int:
        """Which of flow.sources serves flow.targets[target]."""
        number = flow.source_of(target, entry.turn)
        if self.lost and _rank(entry, flow.sources[number]) in self.lost:
            held = _held_by(entry, flow.sources, self.lost)
            return flow.sources.index(held[(number + target) % len(held)])
        return number

    @functools.cached_property
    def gathered(self) -> tuple[Gathered, ...]:
        """What is not written in its final form, and why; bytes of all targets together."""
        return tuple(
            Gathered(
                name=entry.name,
                nbytes=sum(
                    flow.nbytes * sum(i == number for i, _ in flow.targets)
                    for flow in entry.template.flows
                ),
                why=f"{entry.targets[number].tensor}: {why}",
            )
            for entry in self.entries()
            for number, why in entry.template.received
        )

    def entries(self) -> Iterator[PlanEntry]:
        ours, theirs = self.source.by_name, self.target.by_name
        for turn, (name, number) in enumerate(zip(self.names, self.numbers, strict=True)):
            yield PlanEntry(name, turn, self.templates[number], ours[name], theirs[name])

    def _indexed(self) -> Iterator[tuple[PlanEntry, tuple[_ByPlace, _ByPlace]]]:
        for entry, number in zip(self.entries(), self.numbers, strict=True):
            yield entry, self._indices[number]

    @functools.cached_property
    def _indices(self) -> list[tuple[_ByPlace, _ByPlace]]:
        return [_by_place(each) for each in self.templates]

    def _check(self, side: str, rank: int, layout: WeightLayout) -> None:
        require(
            type(rank) is int and 0 <= rank < layout.world_size,
            f"{side} rank {rank!r} must be 0 to {layout.world_size - 1}",
        )

    def to_bytes(self) -> bytes:
        """The plan with both layouts, to send to other ranks."""
        source, target = self.source.to_bytes(), self.target.to_bytes()
        head = len(source).to_bytes(8, "little") + len(target).to_bytes(8, "little")
        return head + source + target + _pack(self.templates, self.numbers)

    @classmethod
    def from_bytes(cls, data: bytes) -> WeightPlan:
        first, second = (int.from_bytes(data[at : at + 8], "little") for at in (0, 8))
        ends = (16, 16 + first, 16 + first + second)
        source, target = (data[a:b] for a, b in itertools.pairwise(ends))
        layouts = (WeightLayout.from_bytes(source), WeightLayout.from_bytes(target))
        return cls(*layouts, *_unpack(data[ends[2] :]))


def weight_plan(
    source: WeightLayout, target: WeightLayout, *, cache: str | Path | None = None
) -> WeightPlan:
    """Returns the plan from `source` to `target`.

    cache: folder of plans by a hash of both layouts; a plan that is there, whole, is read; a folder
    that cannot be used is logged. Raises InvalidArgumentError with the parameter that one side
    lacks or that cannot be converted.
    """
    require_type("weight_plan: source", source, WeightLayout, "a WeightLayout")
    require_type("weight_plan: target", target, WeightLayout, "a WeightLayout")
    if cache is None:
        return _plan(source, target)
    key = hashlib.sha256(f"{FORMAT} {source.digest} {target.digest}".encode()).hexdigest()
    file = Path(cache) / f"{key[:32]}.weights"
    with contextlib.suppress(OSError, InvalidArgumentError):  # missing, or not ours: made anew
        return WeightPlan(source, target, *_unpack(_read_file(file, key)))
    plan = _plan(source, target)
    try:
        _write_file(file, key, _pack(plan.templates, plan.numbers))
    except OSError as error:
        log.warning(f"weight_plan: cache={str(cache)!r} does not keep the plan: {error}")
    return plan


def _plan(source: WeightLayout, target: WeightLayout) -> WeightPlan:
    missing = [name for name in target.by_name if name not in source.by_name]
    require(
        not missing,
        f"weight_plan: no source rank has {', '.join(missing[:3])}"
        + (f" and {len(missing) - 3} more" if len(missing) > 3 else ""),
    )
    known: dict[tuple[object, ...], int] = {}
    made: list[Template] = []
    numbers = []
    for name, ours in source.by_name.items():
        theirs = target.by_name.get(name)
        if theirs is None:
            continue
        key = (tuple(each.how for each in ours), tuple(each.how for each in theirs))
        if key not in known:
            known[key] = len(made)
            made.append(template(name, ours, theirs))
        numbers.append(known[key])
    return WeightPlan(source, target, tuple(made), tuple(numbers))


def _places(params: Sequence[Param], rank: int) -> list[MeshPlace]:
    return [(i, at) for i, each in enumerate(params) for at in each.positions(rank)]


_ByPlace = dict[MeshPlace, list[tuple[Flow, int]]]


def _by_place(each: Template) -> tuple[_ByPlace, _ByPlace]:
    """Flows by source and by target place, with the number of the place in the flow."""
    sides: tuple[_ByPlace, _ByPlace] = ({}, {})
    for flow in each.flows:
        for side, places in zip(sides, (flow.sources, flow.targets), strict=True):
            for i, place in enumerate(places):
                side.setdefault(place, []).append((flow, i))
    return sides


def _write(entry: PlanEntry, flow: Flow, source: MeshPlace, target: MeshPlace) -> Write:
    ours, theirs = entry.sources[source[0]], entry.targets[target[0]]
    stage = entry.template.stages[flow.stage] if flow.stage >= 0 else None
    if stage is None:
        tensor, offset = ours.tensor, ours.offset * item_bytes(ours.dtype)
    else:
        tensor, offset = stage.tensor(entry.name) + (":scales" if flow.scales else ""), 0
    if target[0] in dict(entry.template.received):
        to_tensor, to_offset = theirs.received, 0
    elif flow.scales:
        assert theirs.blocks is not None
        to_tensor, to_offset = theirs.blocks.tensor, theirs.blocks.offset * 4
    else:
        to_tensor, to_offset = theirs.tensor, theirs.offset * item_bytes(theirs.dtype)
    offsets = tuple((offset + a, to_offset + b) for a, b in flow.rows.offsets)
    return Write(
        name=entry.name,
        scales=flow.scales,
        source_rank=ours.ranks[source[1]],
        source_tensor=tensor,
        target_rank=theirs.ranks[target[1]],
        target_tensor=to_tensor,
        rows=flow.rows._replace(offsets=offsets),
    )


def _rank(entry: PlanEntry, place: MeshPlace) -> int:
    return entry.sources[place[0]].ranks[place[1]]


def _held_by(
    entry: PlanEntry, places: Sequence[MeshPlace], lost: frozenset[int]
) -> list[MeshPlace]:
    """Places of ranks that are there. Raises where there are none."""
    found = [place for place in places if _rank(entry, place) not in lost]
    holders = ", ".join(str(_rank(entry, place)) for place in places)
    require(
        bool(found),
        f"{entry.name}: of source ranks {holders}, which hold a part of it, none is left",
    )
    return found


def _check_held(plan: WeightPlan, entry: PlanEntry) -> None:
    for flow in entry.template.flows:
        _held_by(entry, flow.sources, plan.lost)
    for each in entry.template.exchanges:
        for party in each.parties:
            _held_by(entry, party, plan.lost)


def _maxima(entry: PlanEntry, places: set[MeshPlace], lost: frozenset[int]) -> Iterator[Maxima]:
    """Places of the same number exchange; a shard with fewer of them takes part several times."""
    for each in entry.template.exchanges:
        parties = each.parties
        if lost:
            parties = tuple(tuple(_held_by(entry, party, lost)) for party in parties)
        for k in range(max(len(party) for party in parties)):
            group = [party[k % len(party)] for party in parties]
            if places.intersection(group):
                ranks = tuple(entry.sources[i].ranks[at] for i, at in group)
                stage = entry.template.stages[each.stage]
                yield Maxima(entry.name, stage.tensor(entry.name), each.blocks, ranks)


# --- as bytes, and on disk ---

_SUM_BYTES = 32
_Stored = tuple[tuple[Template, ...], tuple[int, ...]]


def _pack(templates: tuple[Template, ...], numbers: tuple[int, ...]) -> bytes:
    text = json.dumps([templates, numbers], separators=(",", ":"))
    return zlib.compress(text.encode(), 1)


def _unpack(data: bytes) -> _Stored:
    try:
        templates, numbers = json.loads(zlib.decompress(data))
        return tuple(_template(*each) for each in templates), tuple(numbers)
    except (ValueError, TypeError, zlib.error) as error:
        raise make(InvalidArgumentError, f"these bytes are no weight plan: {error}") from error


def _template(flows: Any, stages: Any, exchanges: Any, received: Any) -> Template:
    return Template(
        tuple(_flow(*each) for each in flows),
        tuple(Stage(*tuples(each)) for each in stages),
        tuple(Exchange(*tuples(each)) for each in exchanges),
        tuples(received),
    )


def _flow(sources: Any, targets: Any, part: Any, stage: int, scales: bool, rows: Any) -> Flow:
    return Flow(tuples(sources), tuples(targets), tuples(part), stage, scales, Rows(*tuples(rows)))


def _read_file(file: Path, key: str) -> bytes:
    """Returns what was written for that key. Raises OSError, or InvalidArgumentError where the file
    holds anything else."""
    whole = file.read_bytes()
    data = whole[_SUM_BYTES:]
    require(whole[:_SUM_BYTES] == _sum(key, data), f"{file} is not the plan of {key}")
    return data


def _write_file(file: Path, key: str, data: bytes) -> None:
    """Others see the old file or the whole new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=file.parent)
    with os.fdopen(number, "wb") as out:
        out.write(_sum(key, data) + data)
    os.replace(name, file)


def _sum(key: str, data: bytes) -> bytes:
    return hashlib.sha256(key.encode() + data).digest()
