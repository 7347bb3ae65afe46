"""Requests of KV and updates of weights, out of a trace: what each went through, on one clock.

Workers have seen arrivals when they looked; the polling thread knows when they were there. So the
parts that wait for immediates, and that take them, end where the engine's events say.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from moe_p2p.machine.phases import TRANSFER, WAIT
from moe_p2p.tools.trace.recorded import Trace

GOES_ON = "goes on"
UNSEEN = "unseen"  # from the last immediate until somebody looked


class Part(NamedTuple):
    name: str
    begin: int
    end: int


class Work(NamedTuple):
    """One request or update. Times are nanoseconds of rank 0's host. parts: in their order, without
    gaps. marks: inside. process: of Trace.ranks."""

    process: int
    track: str
    user: str
    name: str
    begin: int
    end: int
    parts: list[Part]
    marks: list[Part]
    args: dict[str, Any]

    def part(self, name: str) -> Part:
        return next(each for each in self.parts if each.name == name)


def work(trace: Trace) -> list[Work]:
    """All that was under way, in the order of their beginnings."""
    found = [each for process in range(len(trace.ranks)) for each in _of(trace, process)]
    return sorted(found, key=lambda each: (each.begin, -each.end))


def _of(trace: Trace, process: int) -> Iterator[Work]:
    recorded, clock = trace.ranks[process], trace.hosts[process]
    came = defaultdict[tuple[int, int], list[int]](list)  # by engine and immediate
    wanted = {(each.engine, imm) for each in recorded.busy for imm in each.imms}
    for engine in recorded.engines if wanted else ():
        for event in trace.events(process, engine):
            key = (engine.number, event.a)
            if event.kind == "immediate" and key in wanted:
                came[key].append(event.time_ns)

    def ns(seconds: float) -> int:
        return clock.other(round(seconds * 1e9))

    until = clock.other(recorded.ended_ns)
    for each in recorded.busy:
        times = sorted(time for imm in each.imms for time in came[each.engine, imm])
        ends = [(name, None if end is None else ns(end)) for name, end in each.parts]
        begin = min([ns(each.begin), *times])
        parts = _parts(begin, _exact(ends, times), None if each.is_over else until)
        end = parts[-1].end if parts else begin
        marks = [Part(name, ns(first), ns(last)) for name, first, last in each.marks]
        args = each.args if each.is_over else each.args | {"unfinished": True}
        marks = [mark for mark in marks if begin <= mark.begin and mark.end <= end]
        yield Work(process, each.track, each.user, each.name, begin, end, parts, marks, args)


def _exact(ends: list[tuple[str, int | None]], times: list[int]) -> list[tuple[str, int | None]]:
    """times: of immediates. What was not seen may have begun to arrive."""
    found: list[tuple[str, int | None]] = []
    for name, seen in ends:
        if name == WAIT and times:
            found.append((name, times[0]))
        elif name == TRANSFER and times and seen is not None and times[-1] < seen:
            found += [(name, times[-1]), (UNSEEN, seen)]
        else:
            found.append((name, seen))
    return found


def _parts(begin: int, ends: list[tuple[str, int | None]], until: int | None) -> list[Part]:
    """until: where it goes on; then the part after the last end has not ended."""
    found, at, last = list[Part](), begin, -1
    for i, (name, end) in enumerate(ends):
        if end is not None:
            last = i
            if end > at:
                found.append(Part(name, at, end))
                at = end
    if until is not None and until > at:
        following = ends[last + 1][0] if last + 1 < len(ends) else GOES_ON
        found.append(Part(following, at, until))
    return found
