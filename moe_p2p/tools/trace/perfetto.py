"""A trace as JSON of Chrome's trace events, which ui.perfetto.dev opens.

Each rank is a process. Threads: a lane for phases that follow each other, NICs of each engine.
A post and the immediate that it became are joined by an arrow. Requests are asynchronous slices.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from moe_p2p.engine.recording import Event, imm_key
from moe_p2p.tools import output
from moe_p2p.tools.trace.busy import work
from moe_p2p.tools.trace.recorded import OfEngine, StepPhase, Trace
from moe_p2p.tools.trace.steps import PAIR, PARTS, phases, steps

# Numbers of the first thread of what is missing, of a request or update, and of a NIC; phases have
# those below.
_MISSING, _WORK, _NICS = 900, 1000, 1 << 16
_PER_ENGINE = 16
# Of immediates (moe_p2p/engine/README.md), highest first: whose they are.
_USERS = (
    (1 << 31, "moe"),
    (1 << 30, "kv"),
    ((1 << 29) + (3 << 20), "votes"),
    (1 << 29, "weights"),
    (0, "engine"),
)
KINDS = {
    "doorbell": "doorbell",
    "posted": "post",
    "refused": "refused",
    "completed": "completion",
    "immediate": "immediate",
    "farewell": "farewell",
    "published": "arrival",
}


class End(NamedTuple):
    """Of a write with an immediate. error: of its rank's clock. of: the communicator, or nothing.
    Engines number theirs by themselves."""

    event: Event
    of: str
    imm: int
    rank: int
    tid: int
    error: int

    @property
    def time(self) -> int:
        return self.event.time_ns


def user_of(imm: int) -> str:
    return next(name for least, name in _USERS if imm >= least)


def write(path: Path, trace: Trace) -> None:
    """Raises NotWrittenError."""
    output.write(path, json.dumps(document(trace), separators=(",", ":")) + "\n")


def document(trace: Trace) -> dict[str, Any]:
    """An object with `traceEvents`, in microseconds from the first event on, and `otherData`."""
    found = list(_events(trace))
    begin = min((each["ts"] for each in found if "ts" in each), default=0)
    for each in found:
        if "ts" in each:
            each["ts"] = (each["ts"] - begin) / 1e3
        if "dur" in each:
            each["dur"] /= 1e3
    clocks = [
        {
            "rank": recorded.rank,
            "error_us": trace.error_ns(process) / 1e3,
            "host_offset_us": host.first.offset / 1e3,
            "host_drift_ppm": host.drift_ppm,
            "gpu_error_us": None if gpu is None else gpu.error / 1e3,
        }
        for process, (recorded, host, gpu) in enumerate(
            zip(trace.ranks, trace.hosts, trace.gpus, strict=True)
        )
    ]
    lost = [f"rank {each.rank}: {text}" for each in trace.ranks for text in each.lost]
    other = {"clock": "of rank 0's host", "begin_ns": begin, "clocks": clocks, "lost": lost}
    other["without_phases"] = trace.without_phases()
    return {"traceEvents": found, "displayTimeUnit": "ns", "otherData": other}


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    for recorded in trace.ranks:
        yield _named(recorded.rank, 0, "process_name", f"rank {recorded.rank}")
        yield {
            "ph": "M",
            "name": "process_sort_index",
            "pid": recorded.rank,
            "tid": 0,
            "args": {"sort_index": recorded.rank},
        }
    yield from _phases(trace)
    yield from _missing(trace)
    yield from _work(trace)
    posts, arrived = list[End](), list[End]()
    for process, recorded in enumerate(trace.ranks):
        of = {(each.engine, each.number): each.name for each in recorded.communicators}
        for place, engine in enumerate(recorded.engines):
            found = trace.events(process, engine)
            first = _NICS + _PER_ENGINE * place
            yield from _engine(recorded.rank, first, engine, found)
            for event in found:
                is_post = event.kind == "posted" and event.detail & 1
                if not is_post and event.kind != "immediate":
                    continue
                imm = event.c if is_post else event.a
                key, error = imm_key(imm), trace.hosts[process].error
                name = "" if key is None else of.get((engine.number, key.communicator), "")
                end = End(event, name, imm, recorded.rank, first + 1 + event.nic, error)
                (posts if is_post else arrived).append(end)
    yield from _arrows(posts, arrived)


def _named(pid: int, tid: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(
    pid: int, tid: int, name: str, begin: int, end: int, category: str, **args: Any
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": begin,
        "dur": max(0, end - begin),
        "args": args,
    }


class _Lanes:
    """Threads of a rank for slices that may overlap: each goes to the first one that is free."""

    def __init__(self, first: int) -> None:
        self.named: list[dict[str, Any]] = []
        self._ends = defaultdict[tuple[int, str], dict[int, int]](dict)  # by thread
        self._next = defaultdict[int, int](lambda: first)  # by rank

    def of(self, rank: int, track: str, begin: int, end: int) -> int:
        """Returns the thread. Begins must not fall."""
        lanes = self._ends[rank, track]
        free = (each for each, until in lanes.items() if until <= begin)
        if (lane := next(free, None)) is None:
            lane = self._next[rank]
            self._next[rank] += 1
            name = f"{track} {len(lanes) + 1}" if lanes else track
            self.named.append(_named(rank, lane, "thread_name", name))
        lanes[lane] = end
        return lane


# --- phases ---


def _phases(trace: Trace) -> Iterator[dict[str, Any]]:
    """Each with its parts inside. Phases that overlap lie on different lanes."""
    blamed = {
        (each.communicator, each.number, name, rank): (source, phase)
        for each in steps(trace)
        for name in PAIR
        for rank, phase in getattr(each, name).items()
        for source in (each.blamed[rank, name],)
    }
    lanes = _Lanes(1)
    for phase in phases(trace):
        key = (phase.communicator, phase.step, phase.name, phase.rank)
        source, phase = blamed.get(key, (None, phase))
        rank = trace.ranks[phase.process].rank
        lane = lanes.of(rank, "phases", phase.begin, phase.end)
        yield from _phase(rank, lane, phase, source)
    yield from lanes.named


def _missing(trace: Trace) -> Iterator[dict[str, Any]]:
    """A track as long as the events of the engines, which says what is missing and why."""
    lanes = _Lanes(_MISSING)
    for process, recorded in enumerate(trace.ranks):
        times = [
            event.time_ns for each in recorded.engines for event in trace.events(process, each)
        ]
        if times and not all(each.stamped for each in recorded.communicators):
            begin, end, rank = min(times), max(times), recorded.rank
            for text in trace.without_phases():
                lane = lanes.of(rank, "phases that are missing", begin, end)
                yield _slice(rank, lane, text, begin, end, "phase")
    yield from lanes.named


def _phase(rank: int, lane: int, phase: StepPhase, source: int | None) -> Iterator[dict[str, Any]]:
    args = {"step": phase.step}
    yield _slice(rank, lane, phase.name, phase.begin, phase.end, "phase", **args)
    waited = phase.waited or phase.end  # not known: what is received while others are waited for
    times = (phase.begin, phase.sent, waited, phase.end)
    for part, begin, end in zip(PARTS, times, times[1:], strict=False):
        if end > begin:
            more = {"last": f"rank {source}"} if part == "wait" and source is not None else {}
            yield _slice(rank, lane, f"{phase.name}: {part}", begin, end, part, **args, **more)


# --- requests of KV and updates of weights ---


def _work(trace: Trace) -> Iterator[dict[str, Any]]:
    """Each with its parts inside, and in these what was done."""
    lanes = _Lanes(_WORK)
    for each in work(trace):
        rank = trace.ranks[each.process].rank
        lane = lanes.of(rank, each.track, each.begin, each.end)
        yield _slice(rank, lane, each.name, each.begin, each.end, each.user, **each.args)
        for part in each.parts:
            yield _slice(rank, lane, part.name, part.begin, part.end, each.user, of=each.name)
        for mark in each.marks:
            yield _slice(rank, lane, mark.name, mark.begin, mark.end, each.user, of=each.name)
    yield from lanes.named


# --- what proxies did ---


def _engine(
    rank: int, first: int, engine: OfEngine, found: list[Event]
) -> Iterator[dict[str, Any]]:
    nics = {event.nic for event in found if event.kind in ("posted", "completed", "immediate")}
    for nic in sorted(nics):
        name = f"{engine.label}: NIC {nic} ({engine.provider})"
        yield _named(rank, first + 1 + nic, "thread_name", name)
    yield _named(rank, first, "thread_name", f"{engine.label}: doorbells and arrivals")
    for event in found:
        name, category, args = _described(event)
        is_of_nic = event.kind in ("posted", "refused", "completed", "immediate")
        tid = first + (1 + event.nic if is_of_nic else 0)
        yield _slice(rank, tid, name, event.time_ns, event.time_ns, category, **args)
    yield from _requests(rank, first, found)


def _described(event: Event) -> tuple[str, str, dict[str, Any]]:
    """Name, category and arguments."""
    kind = KINDS[event.kind]
    if event.kind in ("doorbell", "published"):
        _, phase, part = event.lane
        whom = "target" if event.kind == "doorbell" else "source"
        args: dict[str, Any] = {"step": event.a, "part": part, whom: event.peer}
        if event.kind == "published":
            args["last"] = bool(event.c)
        return f"{kind}: {phase}", "moe", args
    if event.kind == "posted":
        what = "read" if event.detail & 2 else "write"
        args = {"bytes": event.b, "id": event.a, "what": what}
        if event.detail & 1:
            return kind, user_of(event.c), args | {"immediate": event.c}
        return kind, "engine", args
    if event.kind == "immediate":
        args = {"immediate": event.a, "counted": bool(event.detail)}
        if (key := imm_key(event.a)) is not None:
            args |= {"phase": key.phase, "source": key.source, "part": key.part}
        return kind, user_of(event.a), args
    if event.kind == "completed":
        return kind, "engine", {"id": event.a, "posts": event.b, "code": event.detail}
    if event.kind == "refused":
        return kind, "engine", {"given": event.a, "taken": event.b}
    return kind, "moe", {"source": event.peer, "word": event.a}


def _requests(rank: int, first: int, found: list[Event]) -> Iterator[dict[str, Any]]:
    """From the first post of a request until all of its posts have completed, by each NIC."""
    open_: Counter[tuple[int, int]] = Counter()
    begun: dict[tuple[int, int], dict[str, Any]] = {}
    count = 0
    for event in found:
        key = (event.nic, event.a)
        if event.kind == "posted":
            if not open_[key]:
                count += 1
                what = "read" if event.detail & 2 else "write"
                user = user_of(event.c) if event.detail & 1 else "engine"
                begun[key] = {
                    "name": f"{what}, NIC {event.nic}",
                    "cat": f"request {user}",
                    "pid": rank,
                    "tid": first + 1 + event.nic,
                    "id": f"{rank}.{first}.{count}",
                }
                yield {"ph": "b", "ts": event.time_ns, "args": {"bytes": event.b}, **begun[key]}
            open_[key] += 1
        elif event.kind == "completed" and open_[key]:  # it may have been posted before
            open_[key] = max(0, open_[key] - event.b)
            if not open_[key]:
                yield {"ph": "e", "ts": event.time_ns, "args": {}, **begun.pop(key)}
    for made in begun.values():
        yield {"ph": "e", "ts": found[-1].time_ns, "args": {"unfinished": True}, **made}


def _arrows(posts: Iterable[End], arrived: Iterable[End]) -> Iterator[dict[str, Any]]:
    """Joins each immediate with the post that it was, where there can be no other one.

    A number's next post waits until the one before has arrived, so both come in one order. Where
    several ranks are sent the same number nothing is joined.
    """
    sent = defaultdict[tuple[str, int, int], list[End]](list)
    came = defaultdict[tuple[str, int, int], list[End]](list)
    for end in sorted(posts, key=lambda each: each.time):
        sent[end.of, end.imm, end.event.nic].append(end)
    for end in sorted(arrived, key=lambda each: each.time):
        came[end.of, end.imm, end.event.nic].append(end)
    number = 0
    for key, found in came.items():
        of_post = sent[key]
        ways = {(each.rank, each.tid, each.event.peer) for each in of_post}
        if len(ways) != 1 or len({(each.rank, each.tid) for each in found}) > 1:
            continue
        first = of_post[0]
        # What was posted before the trace.
        found = [each for each in found if each.time + each.error + first.error >= first.time]
        for one, other in zip(of_post, found, strict=False):
            number += 1
            for end, more in ((one, {"ph": "s"}), (other, {"ph": "f", "bp": "e"})):
                yield {
                    **more,
                    "name": "on its way",
                    "cat": "arrow",
                    "id": number,
                    "pid": end.rank,
                    "tid": end.tid,
                    "ts": end.time,
                }
