"""A rank's elements of a parameter as boxes with strides, and which indices of each dimension it
holds. Pure; used by flows.py and copies.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from moe_p2p.weights.layout import Blocks, Param, Placement, Shard


class Run(NamedTuple):
    """Indices first to first + size - 1 of a dimension, from index `local` of the rank's on."""

    first: int
    size: int
    local: int


Axis = tuple[Run, ...]
Box = tuple[tuple[int, int], ...]  # (first, size) in each dimension of a parameter


class PlacedBox(NamedTuple):
    """A box of elements; the first lies at `offset`, neighbours in dimension d at strides[d]."""

    box: Box
    offset: int
    strides: tuple[int, ...]


def overlap(one: Box, other: Box) -> Box | None:
    found = []
    for (a, size_a), (b, size_b) in zip(one, other, strict=True):
        low, high = max(a, b), min(a + size_a, b + size_b)
        if low >= high:
            return None
        found.append((low, high - low))
    return tuple(found)


def offset_in(placed: PlacedBox, box: Box) -> int:
    """Of the first element of `box`, which is inside the piece."""
    steps = zip(box, placed.box, placed.strides, strict=True)
    return placed.offset + sum((at - first) * stride for (at, _), (first, _), stride in steps)


def held(param: Param, position: int) -> list[PlacedBox]:
    """What a rank holds, where its own tensor has it; offsets count from param.offset."""
    whole = _whole(param, position)
    strides = param.strides or dense_strides([length(axis) for axis in whole], param.order)
    axes = _windowed(param, whole)
    skipped = len(axes) - len(param.elements)  # leading dimensions of size 1
    outer = axes[:skipped]
    if not all(outer):
        return []
    base = sum(axis[0].local * stride for axis, stride in zip(outer, strides, strict=False))
    return _product(axes[skipped:], strides[skipped:], base)


def local_shape(param: Param, position: int) -> tuple[int, ...]:
    """Of the rank's own tensor; of what it holds of the whole one where `param` is a window."""
    return tuple(length(axis) for axis in _whole(param, position))


def parameter_axes(param: Param, position: int) -> tuple[Axis, ...]:
    """What a rank holds of each dimension of the parameter, `local` as in a dense tensor of it."""
    axes = _windowed(param, _whole(param, position))
    skipped = len(axes) - len(param.elements)
    if not all(axes[:skipped]):
        return ((),) * len(param.elements)
    return tuple(_packed(axis) for axis in axes[skipped:])


def dense(axes: Sequence[Axis], order: Sequence[int] = ()) -> list[PlacedBox]:
    """The same elements in a dense tensor, its dimensions stored in `order`."""
    return _product(axes, dense_strides([length(axis) for axis in axes], order), 0)


def order_of(param: Param) -> tuple[int, ...]:
    """Dimensions of the parameter that have more than one element, outermost in memory first."""
    dims = len(param.shape)
    skipped = dims - len(param.elements)
    strides = param.strides or dense_strides(param.shape, param.order)
    found = [d for d in range(dims) if d >= skipped and param.elements[d - skipped] > 1]
    return tuple(d - skipped for d in sorted(found, key=lambda d: -strides[d]))


def block_axes(axes: Sequence[Axis], shape: Sequence[int]) -> tuple[Axis, ...]:
    """Blocks whose first element a shard holds, in each dimension; each block is one shard's."""
    return tuple(
        _owned(axis, size) for axis, size in zip(axes, block_sizes(axes, shape), strict=True)
    )


def target_blocks(axes: Sequence[Axis], blocks: Blocks) -> list[PlacedBox]:
    """Where a target keeps scales of the blocks that it holds; offsets count from blocks.offset.

    Its runs begin at blocks: `why_unaligned` is empty.
    """
    grid = [
        tuple(Run(run.first // size, -(-run.size // size), run.local // size) for run in axis)
        for axis, size in zip(axes, block_sizes(axes, blocks.shape), strict=True)
    ]
    counts = [axis[-1].local + axis[-1].size if axis else 0 for axis in grid]
    first = -len(counts)  # leading dimensions of one element do not count
    skipped = max(len(blocks.order) - len(counts), 0)
    order = [dim - skipped for dim in blocks.order if dim >= skipped]
    return _product(grid, blocks.strides[first:] or dense_strides(counts, order), 0)


def why_unaligned(axes: Sequence[Axis], shape: Sequence[int]) -> str:
    """Empty where blocks of the parameter are blocks of the rank's tensor; else why not."""
    for dim, (axis, size) in enumerate(zip(axes, block_sizes(axes, shape), strict=True)):
        for run in axis:
            if run.first % size or run.local % size:
                return (
                    f"indices {run.first} to {run.first + run.size - 1} of dimension {dim} begin "
                    f"inside a block of {size}"
                )
    return ""


def block_sizes(dims: Sequence[object], shape: Sequence[int]) -> tuple[int, ...]:
    """Of a block in each dimension of a parameter; [1, K] has one of them."""
    return ((1,) * (len(dims) - 2) + tuple(shape))[-len(dims) :]


def _owned(axis: Axis, size: int) -> Axis:
    found, local = [], 0
    for run in axis:
        first, end = -(-run.first // size), -(-(run.first + run.size) // size)
        if first < end:
            found.append(Run(first, end - first, local))
            local += end - first
    return tuple(found)


def _whole(param: Param, position: int) -> tuple[Axis, ...]:
    if param.part:
        return tuple((Run(first, size, 0),) for first, size in param.part)
    return axes_of(param.shape, param.mesh, param.placements, position)


def _windowed(param: Param, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    if not param.window:
        return axes
    return tuple(within(axis, *each) for axis, each in zip(axes, param.window, strict=True))


def _packed(axis: Axis) -> Axis:
    locals_ = itertools.accumulate((run.size for run in axis), initial=0)
    return tuple(run._replace(local=at) for run, at in zip(axis, locals_, strict=False))


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Of a tensor without gaps. order: dimensions, outermost first; (): as they are."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order or range(len(shape))):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def _product(axes: Sequence[Axis], strides: Sequence[int], base: int) -> list[PlacedBox]:
    return [
        PlacedBox(
            box=tuple((run.first, run.size) for run in runs),
            offset=base + sum(run.local * step for run, step in zip(runs, strides, strict=True)),
            strides=tuple(strides),
        )
        for runs in itertools.product(*axes)
    ]


# --- which indices of a dimension a rank holds, by placements as of torch's DTensor ---
#
# They are one for each dimension of a mesh of ranks, applied in order. A rank's part of a dimension
# is a list of runs; its part of the tensor is their product.
#
#   8 rows, mesh (2, 2), placements (Shard(0, 2), Shard(0)): FSDP of 2 over tensor parallelism of 2
#   ranks 0 to 3 hold rows 0-1, 4-5, 2-3, 6-7


def coordinates(mesh: Sequence[int], position: int) -> tuple[int, ...]:
    """Of a rank that is number `position` in a mesh, the last dimension fastest."""
    found = []
    for size in reversed(mesh):
        found.append(position % size)
        position //= size
    return tuple(reversed(found))


def axes_of(
    shape: Sequence[int], mesh: Sequence[int], placements: Sequence[Placement], position: int
) -> tuple[Axis, ...]:
    """What the rank at `position` of the mesh holds of each dimension."""
    spans = [[(0, size)] for size in shape]
    for placement, times, index in zip(placements, mesh, coordinates(mesh, position), strict=True):
        if isinstance(placement, Shard):
            spans[placement.dim] = _sharded(spans[placement.dim], placement, times, index)
    return tuple(_axis(each) for each in spans)


_Spans = list[tuple[int, int]]  # (first, size)


def _sharded(spans: _Spans, shard: Shard, times: int, index: int) -> _Spans:
    outer = _chunk_size(spans, shard.split_factor)
    found: _Spans = []
    for i in range(shard.split_factor):
        part = _cut(spans, outer * i, outer * (i + 1))
        size = _chunk_size(part, times)
        found += _cut(part, size * index, size * (index + 1))
    return found


def _chunk_size(spans: _Spans, times: int) -> int:
    return -(-sum(size for _, size in spans) // times)


def _cut(spans: _Spans, begin: int, end: int) -> _Spans:
    """Elements begin to end - 1 of the spans laid end to end."""
    found, at = [], 0
    for first, size in spans:
        low, high = max(begin - at, 0), min(end - at, size)
        if low < high:
            found.append((first + low, high - low))
        at += size
    return found


def _axis(spans: _Spans) -> Axis:
    runs: list[Run] = []
    local = 0
    for first, size in spans:
        if runs and runs[-1].first + runs[-1].size == first:
            runs[-1] = runs[-1]._replace(size=runs[-1].size + size)
        else:
            runs.append(Run(first, size, local))
        local += size
    return tuple(runs)


def length(axis: Axis) -> int:
    """Indices that the rank holds of a dimension."""
    return sum(run.size for run in axis)


def within(axis: Axis, first: int, size: int) -> Axis:
    """The part of an axis inside a window, with indices counted from the window's begin."""
    found = []
    for run in axis:
        low, high = max(run.first, first), min(run.first + run.size, first + size)
        if low < high:
            found.append(Run(low - first, high - low, run.local + low - run.first))
    return tuple(found)
