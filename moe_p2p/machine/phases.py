"""Phases of what objects of this process do, for whoever records them (moe_p2p/tools/trace).

KV workers say what a request went through once it is over, ranks of weight updates what an attempt
did. Off, that is a look whether somebody takes them.

    if phases.take is not None:
        phases.take(Phase(...))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol, runtime_checkable

# Of a Phase with `imms`: this part ends with the first of them, and that one with the last.
WAIT, TRANSFER = "wait", "transfer"


Mark = tuple[str, float, float]  # a name, begin and end


class Phase(NamedTuple):
    """Times are of `time.monotonic`, in seconds.

    track: whose it is. user: "kv" or "weights". parts: names with their ends, in their order; None:
    not reached. is_over: it ended with the last part; else it goes on. args: numbers and texts.
    marks: what was done inside. imms: immediates that arrive for it at `engine`
    (Engine.number), whose polling thread knows when they did; parts have when that was seen.
    """

    track: str
    user: str
    name: str
    begin: float
    parts: list[tuple[str, float | None]]
    is_over: bool
    args: dict[str, Any]
    marks: list[Mark]
    engine: int
    imms: list[int]


@runtime_checkable
class Busy(Protocol):
    """An object that says its phases, and is among engine/metrics.py's."""

    def under_way(self) -> Iterable[Phase]:
        """What is not over. Takes no lock."""


take: Callable[[Phase], None] | None = None  # of whoever records; None: nobody does


def begin(taken: Callable[[Phase], None] | None) -> None:
    """None: ends it."""
    global take
    take = taken
