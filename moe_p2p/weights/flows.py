"""One parameter's part of a plan, without names, ranks and offsets. Pure; used by plan.py.

Parameters that are described alike have one `Template`: experts of all layers, say. A place in it
is (number among the side's Params of that name, position in its mesh).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from moe_p2p.engine.strides import Level, Rows, rows_of
from moe_p2p.errors import InvalidArgumentError, make
from moe_p2p.weights import boxes
from moe_p2p.weights.boxes import Box, PlacedBox
from moe_p2p.weights.layout import FP8, Param, item_bytes

LEAST_CUT_BYTES = 64 << 10  # what replicas share is not cut into writes below it: 370 Gbit/s there

MeshPlace = tuple[int, int]
_Boxes = dict[Box, tuple[PlacedBox, list[MeshPlace]]]


class Stage(NamedTuple):
    """A dense copy that a source rank makes of what it holds, in another type or order.

    blocks: () or the shape of fp8 blocks, which have their scales beside it.
    """

    dtype: str
    order: tuple[int, ...]
    blocks: tuple[int, ...]

    def tensor(self, name: str) -> str:
        """What the copy of parameter `name` is called."""
        kind = [self.dtype, *self.blocks, "".join(map(str, self.order))]
        return ":".join([name, *map(str, kind)])


class Flow(NamedTuple):
    """Rows that each of `targets` gets from one of `sources`, which hold the same.

    part: (k, n): the k-th of n parts of a box that several sources share. Offsets of rows count
    from those of the Params, of a staged copy from its begin. stage: its number, -1: no copy.
    """

    sources: tuple[MeshPlace, ...]
    targets: tuple[MeshPlace, ...]
    part: tuple[int, int]
    stage: int
    scales: bool
    rows: Rows

    def source_of(self, target: int, turn: int) -> int:
        """Which source serves targets[target]. Needs laid end to end are cut evenly; `turn`, the
        parameter's number, moves what cannot be cut from source to source."""
        k, n = self.part
        count = len(self.sources)
        return ((target * n + k) * count // (len(self.targets) * n) + turn) % count

    @property
    def nbytes(self) -> int:
        return self.rows.row_bytes * self.rows.num_rows * len(self.rows.offsets)


class Exchange(NamedTuple):
    """Blocks, as (first, size) of the grid, of which several shards hold a part.

    parties: for each of these shards the places that hold it. Places of the same number exchange.
    """

    stage: int
    blocks: Box
    parties: tuple[tuple[MeshPlace, ...], ...]


class Template(NamedTuple):
    flows: tuple[Flow, ...]
    stages: tuple[Stage, ...]
    exchanges: tuple[Exchange, ...]
    received: tuple[tuple[int, str], ...]  # target Params that convert by themselves, and why

    @property
    def cycle(self) -> int:
        """Turns after which sources serve the same targets again."""
        return math.lcm(*(len(flow.sources) for flow in self.flows))


class _Wish(NamedTuple):
    """What a target Param wants to get: `dtype`, in `order`, with blocks of fp8 or not."""

    stage: Stage
    why_received: str


def template(name: str, sources: Sequence[Param], targets: Sequence[Param]) -> Template:
    """Raises InvalidArgumentError, with the name, where one cannot become the other."""
    first = sources[0]
    alike = [i for i, each in enumerate(sources) if each.how == first.how]
    wishes = [_wish(name, first, target) for target in targets]
    stages = tuple(dict.fromkeys(wish.stage for wish in wishes if not _is_live(first, wish.stage)))
    flows: list[Flow] = []
    for stage in dict.fromkeys(wish.stage for wish in wishes):
        number = stages.index(stage) if stage in stages else -1
        wanting = [(i, targets[i], wish) for i, wish in enumerate(wishes) if wish.stage == stage]
        ours = _sources(sources, alike, None if number < 0 else stage)
        flows += _flows(number, False, item_bytes(stage.dtype), ours, _targets(wanting))
        if stage.blocks:
            scales = _scales_of(sources, alike, stage.blocks), _target_scales(wanting)
            flows += _flows(number, True, 4, *scales)
    held = _sources(sources, alike, None)
    exchanges = [
        each for i, stage in enumerate(stages) if stage.blocks
        for each in _exchanges(i, stage.blocks, first.elements, held)
    ]  # fmt: skip
    received = tuple((i, wish.why_received) for i, wish in enumerate(wishes) if wish.why_received)
    return Template(tuple(flows), stages, tuple(exchanges), received)


def _is_live(source: Param, stage: Stage) -> bool:
    return not stage.blocks and (stage.dtype, stage.order) == (
        source.dtype,
        boxes.order_of(source),
    )


def _wish(name: str, source: Param, target: Param) -> _Wish:
    if source.elements != target.elements:
        raise _wrong(
            f"{name}: the source has shape {source.elements}, the target {target.elements}; "
            "describe both as the same tensor (Param.window)"
        )
    if source.blocks or source.finalize or source.part:
        raise _wrong(
            f"{name}: the source has blocks, finalize or part, which only targets have; scales of "
            "an fp8 trainer are parameters of their own"
        )
    why = target.finalize
    if not why:
        _check_types(name, source.dtype, target.dtype, target.blocks is not None)
    if not why and target.blocks:
        if len(target.shape) < 2:
            raise _wrong(f"{name}: blocks of {target.blocks.shape} need two dimensions")
        axes = [boxes.parameter_axes(target, at) for at in range(len(target.ranks))]
        found = (boxes.why_unaligned(each, target.blocks.shape) for each in axes)
        why = next((each for each in found if each), "")
    if why:  # in the source's type and the checkpoint's order
        order = tuple(d for d, size in enumerate(target.elements) if size > 1)
        return _Wish(Stage(source.dtype, order, ()), why)
    blocks = target.blocks.shape if target.blocks else ()
    return _Wish(Stage(target.dtype, boxes.order_of(target), blocks), "")


def _check_types(name: str, source: str, target: str, has_blocks: bool) -> None:
    if source == target and not has_blocks:
        return
    kinds = ("float64", "float32", "bfloat16", "float16")
    if source not in kinds or target not in (*kinds, FP8) or (target == FP8) != has_blocks:
        raise _wrong(
            f"{name}: {source} does not become {target} {'with' if has_blocks else 'without'} "
            "blocks; sources of fp8 and integers are copied as they are, fp8 is made with blocks"
        )


def _wrong(message: str) -> Exception:
    return make(InvalidArgumentError, message)


def _sources(params: Sequence[Param], alike: Iterable[int], stage: Stage | None) -> _Boxes:
    """Boxes of the source, and who holds each; where the rank's tensor has them, or its copy."""
    found: _Boxes = {}
    for i in alike:
        for at in range(len(params[i].ranks)):
            if stage is None:
                ours = boxes.held(params[i], at)
            else:
                order = _full(stage.order, len(params[i].elements))
                ours = boxes.dense(boxes.parameter_axes(params[i], at), order)
            for placed in ours:
                found.setdefault(placed.box, (placed, []))[1].append((i, at))
    return found


def _full(order: Sequence[int], dims: int) -> tuple[int, ...]:
    """Dimensions of one element stand first."""
    return (*(d for d in range(dims) if d not in order), *order)


def _scales_of(params: Sequence[Param], alike: Iterable[int], blocks: tuple[int, ...]) -> _Boxes:
    found: _Boxes = {}
    for i in alike:
        for at in range(len(params[i].ranks)):
            axes = boxes.block_axes(boxes.parameter_axes(params[i], at), blocks)
            for placed in boxes.dense(axes):
                found.setdefault(placed.box, (placed, []))[1].append((i, at))
    return found


_Wanting = Sequence[tuple[int, Param, _Wish]]
_Targets = dict[PlacedBox, list[MeshPlace]]


def _targets(wanting: _Wanting) -> _Targets:
    found: _Targets = {}
    for i, param, wish in wanting:
        for at in range(len(param.ranks)):
            if wish.why_received:
                theirs = boxes.dense(boxes.parameter_axes(param, at))
            else:
                theirs = boxes.held(param, at)
            for placed in theirs:
                found.setdefault(placed, []).append((i, at))
    return found


def _target_scales(wanting: _Wanting) -> _Targets:
    found: _Targets = {}
    for i, param, _ in wanting:
        assert param.blocks is not None
        for at in range(len(param.ranks)):
            for placed in boxes.target_blocks(boxes.parameter_axes(param, at), param.blocks):
                found.setdefault(placed, []).append((i, at))
    return found


def _flows(
    stage: int, scales: bool, item: int, sources: _Boxes, targets: _Targets
) -> Iterable[Flow]:
    for theirs, to in targets.items():
        for ours, places in sources.values():
            box = boxes.overlap(ours.box, theirs.box)
            if box is None:
                continue
            parts = _parts(box, len(places), len(to), item)
            for k, part in enumerate(parts):
                rows = _rows(ours, theirs, part, item)
                yield Flow(tuple(places), tuple(to), (k, len(parts)), stage, scales, rows)


def _parts(box: Box, num_sources: int, num_targets: int, item: int) -> list[Box]:
    """The box cut so that all sources send the same, unless its parts would be small."""
    times = num_sources // math.gcd(num_sources, num_targets)
    sizes = [size for _, size in box]
    if times == 1 or math.prod(sizes) * item < times * LEAST_CUT_BYTES or max(sizes) < times:
        return [box]
    dim = sizes.index(max(sizes))
    first, size = box[dim]
    ends = [first + size * i // times for i in range(times + 1)]
    return [
        (*box[:dim], (low, high - low), *box[dim + 1 :]) for low, high in itertools.pairwise(ends)
    ]


def _rows(ours: PlacedBox, theirs: PlacedBox, box: Box, item: int) -> Rows:
    levels = [
        Level(size, a * item, b * item)
        for (_, size), a, b in zip(box, ours.strides, theirs.strides, strict=True)
    ]
    begin = (boxes.offset_in(ours, box) * item, boxes.offset_in(theirs, box) * item)
    return rows_of(item, levels, [begin])


def _exchanges(
    stage: int, blocks: Sequence[int], elements: Sequence[int], held: _Boxes
) -> Iterable[Exchange]:
    """Cells of the grid between all cuts; each is one exchange where several boxes touch it."""
    sizes = boxes.block_sizes(elements, blocks)
    touched = [
        (tuple((at // b, -(-(at + n) // b)) for (at, n), b in zip(box, sizes, strict=True)),
         tuple(places))
        for box, (_, places) in held.items()
    ]  # fmt: skip
    cuts = [sorted({at for grid, _ in touched for at in grid[d]}) for d in range(len(elements))]
    for cell in itertools.product(*(itertools.pairwise(each) for each in cuts)):
        parties = tuple(dict.fromkeys(  # a strided shard has several boxes
            places for grid, places in touched
            if all(a <= low and high <= b for (a, b), (low, high) in zip(grid, cell, strict=True))
        ))  # fmt: skip
        if len(parties) > 1:
            yield Exchange(stage, tuple((low, high - low) for low, high in cell), parties)
