"""Ways that a bench compares: they take turns, and a difference within a spread is none."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")


def in_turns(ways: Sequence[T], turn: int) -> list[T]:
    """Returns the ways in the order of this turn: each begins as often, ends as often."""
    first = turn % len(ways)
    return [*ways[first:], *ways[:first]]


class Alone(NamedTuple):
    """What others are put beside: its median, and how far its runs are apart."""

    median: float
    spread: float

    @classmethod
    def of(cls, runs: Sequence[float]) -> Alone:
        return cls(statistics.median(runs), max(runs) - min(runs))

    def is_seen(self, value: float) -> bool:
        """Returns False where a run alone may differ from another one by as much."""
        return abs(value - self.median) > self.spread

    @property
    def spread_percent(self) -> float:
        return self.spread / self.median * 100
