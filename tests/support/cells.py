"""Cells of grids of parameters: some for `make test`, all of them with --all-cells.

    @pytest.mark.parametrize(("dtype", "topk", "world"), cells.pairwise(DTYPES, TOPKS, WORLDS))
    @pytest.mark.parametrize("name", cells.few(NAMES, keep=("first", "last")))

All cells are collected. Those that `make test` leaves out are marked `more` (tests/left_out.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def _marked(values: tuple[Any, ...], kept: bool) -> Any:
    return pytest.param(*values, marks=[] if kept else [pytest.mark.more])


def pairwise(*axes: Sequence[Any], keep: Callable[..., bool] | None = None) -> list[Any]:
    """Returns all cells of the grid. `make test` runs cells in which each value of an axis meets
    each value of every other axis, and those for which keep(*values) is true."""
    cells = list(itertools.product(*(range(len(axis)) for axis in axes)))
    pairs = {cell: set(itertools.combinations(enumerate(cell), 2)) for cell in cells}
    wanted = set[Any]().union(*pairs.values())
    taken = set()
    for cell in cells:
        if keep is not None and keep(*(axis[at] for axis, at in zip(axes, cell, strict=True))):
            taken.add(cell)
            wanted -= pairs[cell]
    while wanted:
        best = max(cells, key=lambda cell: len(pairs[cell] & wanted))
        taken.add(best)
        wanted -= pairs[best]
    return [
        _marked(tuple(axis[at] for axis, at in zip(axes, cell, strict=True)), cell in taken)
        for cell in cells
    ]


def few(values: Iterable[Any], *, keep: Callable[[Any], bool] | Sequence[Any]) -> list[Any]:
    """Returns all values, or rows of values; `make test` runs those that `keep` holds or allows."""
    is_kept = keep if callable(keep) else lambda value: value in keep
    return [
        _marked(value if isinstance(value, tuple) else (value,), bool(is_kept(value)))
        for value in values
    ]
