"""Bytes that are strided on both sides, as rows and units. Pure; used by moe_p2p/kv/plan.py.

The engine's requests have two levels: units, anywhere, each given by an index, and in each of them
rows of `row_bytes` bytes at one distance. Tokens, heads, K and V are up to four levels; levels
that follow each other without a gap on both sides become one, the longest that is left becomes the
rows, and the others are spelled out as offsets of units.

    2 tokens of 3 heads of 8 bytes, source [token][head], target [head][token]:
    row_bytes 8, 3 rows at 8 and at 16 bytes, units at (0, 0) and (24, 8)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple


class Level(NamedTuple):
    """`times` things, the next one `source` bytes further at the source, `target` at the target."""

    times: int
    source: int
    target: int


class Rows(NamedTuple):
    row_bytes: int
    num_rows: int
    source_stride: int
    target_stride: int
    offsets: tuple[tuple[int, int], ...]  # of units: (source, target)


def progression(points: Sequence[tuple[int, int]]) -> Level | None:
    """`points` as a level, if their distances are all equal and none goes back."""
    if len(points) == 1:
        return Level(1, 0, 0)
    source, target = points[1][0] - points[0][0], points[1][1] - points[0][1]
    for before, after in itertools.pairwise(points):
        if after[0] - before[0] != source or after[1] - before[1] != target:
            return None
    return Level(len(points), source, target) if min(source, target) > 0 else None


def rows_of(
    nbytes: int, levels: Sequence[Level], offsets: Sequence[tuple[int, int]] = ((0, 0),)
) -> Rows:
    """Rows for `nbytes` bytes, repeated by every level, at each of `offsets`."""
    left = [level for level in levels if level.times > 1]
    nbytes, left = _grow_row(nbytes, left)
    left = _join(left)
    left.sort(key=lambda level: level.times)
    rows = left.pop() if left else Level(1, nbytes, nbytes)
    units = list(offsets)
    for level in left:
        units = [
            (source + i * level.source, target + i * level.target)
            for source, target in units
            for i in range(level.times)
        ]
    return Rows(nbytes, rows.times, rows.source, rows.target, tuple(units))


def _grow_row(nbytes: int, levels: list[Level]) -> tuple[int, list[Level]]:
    """Takes levels without gaps into the row."""
    for i, level in enumerate(levels):
        if level.source == level.target == nbytes:
            return _grow_row(nbytes * level.times, levels[:i] + levels[i + 1 :])
    return nbytes, levels


def _join(levels: list[Level]) -> list[Level]:
    """Makes one level of two where the outer one continues the inner one on both sides."""
    for outer in levels:
        for inner in levels:
            if (
                outer is not inner
                and outer.source == inner.times * inner.source
                and outer.target == inner.times * inner.target
            ):
                rest = [level for level in levels if level is not outer and level is not inner]
                joined = Level(outer.times * inner.times, inner.source, inner.target)
                return _join([*rest, joined])
    return levels
