"""Which elements of a sharded tensor a rank holds, and where. Pure; used by moe_p2p/weights.

Placements are those of torch's DTensor, one for each dimension of a mesh of ranks, applied in
order. A rank's part of a dimension is a list of runs; its part of the tensor is their product.

    8 rows, mesh (2, 2), placements (Shard(0, 2), Shard(0)): FSDP of 2 over tensor parallelism of 2
    ranks 0 to 3 hold rows 0-1, 4-5, 2-3, 6-7
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from moe_p2p.errors import InvalidArgumentError, make


class Shard(NamedTuple):
    """Dimension `dim` is cut as torch.chunk does. split_factor: of DTensor's _StridedShard: the
    dimension is cut into so many parts first, and a rank gets its chunk of each of them."""

    dim: int
    split_factor: int = 1


class Replicate(NamedTuple):
    """All ranks of this dimension of the mesh hold the same."""


Placement = Shard | Replicate


class Run(NamedTuple):
    """Indices first to first + size - 1 of a dimension, from index `local` of the rank's on."""

    first: int
    size: int
    local: int


Axis = tuple[Run, ...]


def from_torch(placements: Iterable[object]) -> tuple[Placement, ...]:
    """The same placements; of torch.distributed.tensor, whichever torch names them."""
    found: list[Placement] = []
    for each in placements:
        kind = type(each).__name__
        if kind == "Replicate":
            found.append(Replicate())
        elif kind in ("Shard", "_StridedShard"):
            found.append(Shard(int(getattr(each, "dim")), int(getattr(each, "split_factor", 1))))  # noqa: B009
        else:
            raise make(
                InvalidArgumentError,
                f"placement {each!r} holds no elements of its own; redistribute to Shard or "
                "Replicate first",
            )
    return tuple(found)


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
