"""Files of what the proxies of a communicator did, for `python -m moe_p2p replay`.

    recording = comm.engine.record(0)                # after comm.engine.record(1 << 16) before
    mine = of_communicator(comm, recording)          # on each rank, right after that
    save("stall.jsonl", [mine, ...])                 # of as many ranks as could be gathered

    save("stall.jsonl", of_trace(traced.trace))      # of all ranks of a trace, at rank 0

A file is JSON, a value a line: a head with the format and the number of ranks; then for each rank a
line of facts, with the number of its events, and a line for each event. It has numbers, the error
text and the settings of the communicator, no payload, no host name and no address: posts have the
ids 1, 2, ... in place of addresses of their requests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from moe_p2p import errors
from moe_p2p.engine.recording import KINDS, PHASES, Event, Recording
from moe_p2p.library import call
from moe_p2p.moe.all_to_all import AllToAll
from moe_p2p.moe.communicator import Communicator
from moe_p2p.tools import output
from moe_p2p.tools.trace.recorded import Trace
from moe_p2p.version import __version__

FORMAT = 1
_HEAD = "moe_p2p_recording"
_LOW = (1 << 32) - 1
_PLACE = (1 << 30) - 1  # abi::BellWords


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What one rank's proxy did on one communicator, and whatever else its engine did meanwhile."""

    rank: int
    settings: str  # of the communicator: csrc/ops/communicator_settings.h
    transport: str
    nics: list[int]  # [N] of this rank and its partners, by node
    flags: list[int]  # [3 * S * W] of the host's calls at the end; empty of GPUs
    masked: list[int]
    error: str  # what broke the communicator; empty: nothing
    whole_from: int | None  # step; None: no step begins in it
    overwritten: int
    events: list[Event]

    def setting(self, name: str) -> int:
        values = dict(each.partition("=")[::2] for each in self.settings.split(","))
        value = values.get(name, "")
        errors.require(value.isdecimal(), f"rank {self.rank}: its settings have no {name}")
        return int(value)


def of_communicator(comm: AllToAll, recording: Recording) -> Rank:
    """`recording`: of comm.engine, just taken. Other communicators' commands are left out."""
    facts = facts_of(comm._communicator)
    return _rank_of(comm.rank, comm.engine.provider, facts, recording)


def facts_of(comm: Communicator) -> dict[str, Any]:
    """Fields of its Rank that it alone knows, and only while it is open."""
    settings, flags, nics = call(torch.ops.moe_p2p.all_to_all_snapshot.default, comm.number)
    masks = comm.config.mask_lost_ranks
    return {
        "settings": settings,
        "nics": list(nics),
        "flags": [] if comm.config.on_gpu else flags.flatten().tolist(),
        "masked": comm.masked.nonzero().flatten().tolist() if masks else [],
        "error": str(torch.ops.moe_p2p.all_to_all_broken.default(comm.number)),
    }


def of_trace(trace: Trace, communicator: str | None = None) -> list[Rank]:
    """All ranks of a communicator of a trace, by name (OfCommunicator.name); None: of the only one.

    Raises InvalidArgumentError where the trace has no such one, or several.
    """
    found = [
        (of, engine)
        for each in trace.ranks
        for of in each.communicators
        for engine in each.engines
        if engine.number == of.engine and communicator in (None, of.name)
    ]
    names = {of.name for of, _ in found}
    there = sorted({of.name for each in trace.ranks for of in each.communicators})
    wanted = "" if communicator is None else f", and none of the name {communicator!r}"
    text = f"the trace has {len(there)} communicators{wanted}; "
    text += f"name one of these: {', '.join(there)}" if there else "none was open inside the block"
    errors.require(len(names) == 1, text)
    ranks = [
        _rank_of(
            of.rank,
            engine.provider,
            of.facts,
            Recording(
                events=torch.tensor(engine.events).view(-1, 5),
                overwritten=engine.overwritten,
                counters=[],  # those of a trace are summed over NICs; a replay needs none
                from_start=engine.from_start,
            ),
        )
        for of, engine in found
    ]
    return sorted(ranks, key=lambda each: each.rank)


def _rank_of(rank: int, transport: str, facts: dict[str, Any], recording: Recording) -> Rank:
    made = Rank(
        rank=rank,
        transport=transport,
        whole_from=None,
        overwritten=recording.overwritten,
        events=[],
        **facts,
    )
    number, steps_in_flight = made.setting("communicator"), made.setting("steps_in_flight")
    kept = [
        event
        for event in recording.decoded()
        if event.kind in _FIELDS and communicator_of(event) in (None, number)
    ]
    begun = [e.a for e in kept if e.kind == "doorbell" and e.lane[1] == "dispatch"]
    # A partner may be ahead, by fewer steps than are in flight: what it sent may have arrived
    # before the first event.
    first = 0 if recording.from_start else begun[0] + steps_in_flight + 1 if begun else None
    return Rank(**{**vars(made), "whole_from": first, "events": _numbered(kept)})


def _numbered(events: Sequence[Event]) -> list[Event]:
    ids: dict[int, int] = {}
    return [
        event._replace(a=ids.setdefault(event.a, len(ids) + 1))
        if event.kind in ("posted", "completed")
        else event
        for event in events
    ]


# --- events as lines: fields by kind, from an Event and back ---


def _lane(event: Event) -> dict[str, Any]:
    communicator, phase, part = event.lane
    return {
        "communicator": communicator,
        "phase": phase,
        "step": event.a,
        "slot": event.nic,
        "part": part,
        "rank": event.peer,
    }


def _detail(line: dict[str, Any]) -> int:
    return int(line["communicator"] | PHASES.index(line["phase"]) << 9 | line["part"] << 11)


def _doorbell(line: dict[str, Any]) -> Event:
    tag = (line["step"] + 1 & _LOW) << 32
    return _event(
        line,
        nic=line["slot"],
        detail=_detail(line),
        peer=line["rank"],
        a=line["step"],
        b=tag | line["lines"],
        c=tag | line["parts"] - 1 << 30 | line["first"],
    )


def _event(line: dict[str, Any], **values: int) -> Event:
    rest = {"nic": 0, "detail": 0, "peer": 0, "a": 0, "b": 0, "c": 0} | values
    return Event(time_ns=line["ns"], kind=line["event"], **rest)


# By kind: what a line has beside `event` and `ns`, and the Event of such a line.
_FIELDS: dict[str, tuple[Callable[[Event], dict[str, Any]], Callable[[dict[str, Any]], Event]]] = {
    "doorbell": (
        lambda e: (
            _lane(e)
            | {"parts": ((e.c & _LOW) >> 30) + 1, "lines": e.b & _LOW, "first": e.c & _PLACE}
        ),
        _doorbell,
    ),
    "posted": (
        lambda e: {"nic": e.nic, "id": e.a, "bytes": e.b, "imm": e.c, "flags": e.detail},
        lambda d: _event(d, nic=d["nic"], detail=d["flags"], a=d["id"], b=d["bytes"], c=d["imm"]),
    ),
    "refused": (
        lambda e: {"nic": e.nic, "given": e.a, "taken": e.b},
        lambda d: _event(d, nic=d["nic"], a=d["given"], b=d["taken"]),
    ),
    "completed": (
        lambda e: {"nic": e.nic, "id": e.a, "count": e.b, "code": e.detail, "detail": e.c},
        lambda d: _event(d, nic=d["nic"], detail=d["code"], a=d["id"], b=d["count"], c=d["detail"]),
    ),
    "immediate": (
        lambda e: {"nic": e.nic, "imm": e.a, "counted": e.detail},
        lambda d: _event(d, nic=d["nic"], detail=d["counted"], a=d["imm"]),
    ),
    "farewell": (
        lambda e: {"communicator": e.lane[0], "rank": e.peer, "word": e.a},
        lambda d: _event(d, detail=d["communicator"] | 3 << 9, peer=d["rank"], a=d["word"]),
    ),
    "published": (
        lambda e: _lane(e) | {"word": e.b, "last": e.c},
        lambda d: _event(
            d,
            nic=d["slot"],
            detail=_detail(d),
            peer=d["rank"],
            a=d["step"],
            b=d["word"],
            c=d["last"],
        ),
    ),
}


def line_of(event: Event) -> dict[str, Any]:
    return {"ns": event.time_ns, "event": event.kind} | _FIELDS[event.kind][0](event)


def row_of(event: Event) -> list[int]:
    """Five int64, as the recorder has them. Raises ValueError for what is none."""
    for value, bits in zip(event[2:], (8, 16, 32, 64, 64, 64), strict=True):
        if type(value) is not int or value >> bits:  # -1 >> bits is -1
            raise ValueError(f"{value!r} is no number of {bits} bits")
    head = KINDS.index(event.kind) | event.nic << 8 | event.detail << 16 | event.peer << 32
    words = (head, event.a, event.b, event.c)
    return [event.time_ns, *(word - (1 << 64) if word >> 63 else word for word in words)]


# --- files ---


def save(path: str | Path, ranks: Sequence[Rank]) -> None:
    """Raises NotWrittenError."""
    lines: list[dict[str, Any]] = [{_HEAD: FORMAT, "package": __version__, "ranks": len(ranks)}]
    for rank in ranks:
        lines.append(asdict(rank) | {"events": len(rank.events)})
        lines += map(line_of, rank.events)
    output.write(path, "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def load(path: str | Path) -> list[Rank]:
    """Raises InvalidArgumentError with the file, the line and what is wrong there."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise errors.make(errors.InvalidArgumentError, f"{path}: cannot be read: {why}") from error
    lines = _lines(path, text)
    try:
        _, head = next(lines)
    except StopIteration:
        raise errors.make(errors.InvalidArgumentError, f"{path}: the file is empty") from None
    text = f"{path}: not a recording that moe_p2p's trace --record or recording.save wrote"
    errors.require(_HEAD in head, text)
    errors.require(
        head[_HEAD] == FORMAT,
        f"{path}: a recording of format {head[_HEAD]}, written by moe_p2p {head.get('package')}; "
        f"this version, {__version__}, reads format {FORMAT}",
    )
    ranks = [_rank(path, lines) for _ in range(_count(path, 1, head, "ranks"))]
    for at, _ in lines:
        text = f"{path}:{at}: a line behind the last event; were files joined? Name each of them"
        raise errors.make(errors.InvalidArgumentError, text)
    return ranks


_KINDS_OF_FACTS: dict[str, Any] = {
    "rank": int,
    "settings": str,
    "transport": str,
    "nics": list,
    "flags": list,
    "masked": list,
    "error": str,
    "whole_from": int | None,
    "overwritten": int,
}


def _lines(path: str | Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for at, line in enumerate(text.splitlines(), 1):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        errors.require(isinstance(value, dict), f"{path}:{at}: {line[:40]!r} is no JSON object")
        yield at, value


def _next(path: str | Path, lines: Iterator[tuple[int, dict[str, Any]]]) -> tuple[int, Any]:
    try:
        return next(lines)
    except StopIteration:
        text = f"{path}: the file ends early; was it cut off while it was copied?"
        raise errors.make(errors.InvalidArgumentError, text) from None


def _count(path: str | Path, at: int, line: dict[str, Any], name: str) -> int:
    value = line.get(name)
    errors.require(
        type(value) is int and value >= 0, f"{path}:{at}: {name} is {value!r}, must be a count"
    )
    return int(value)  # type: ignore[arg-type]


def _rank(path: str | Path, lines: Iterator[tuple[int, dict[str, Any]]]) -> Rank:
    at, facts = _next(path, lines)
    wanted = {field.name for field in fields(Rank)}
    differ = ", ".join(sorted(wanted ^ facts.keys()))
    errors.require(not differ, f"{path}:{at}: the facts of a rank lack, or have beside: {differ}")
    for name, kind in _KINDS_OF_FACTS.items():
        value = facts[name]
        numbers = value if isinstance(value, list) else [0 if value is None else value]
        fits = kind is str or all(type(n) is int and 0 <= n < 1 << 63 for n in numbers)
        text = f"{path}:{at}: {name} is {str(value)[:40]!r}"
        errors.require(isinstance(value, kind) and fits, text)
    events = []
    for _ in range(_count(path, at, facts, "events")):
        line_at, line = _next(path, lines)
        try:
            event = _FIELDS[line["event"]][1](line)
            row_of(event)  # all are numbers
            same = 0 <= line["ns"] < 1 << 63 and line_of(event) == line
        except (LookupError, TypeError, ValueError):
            same = False
        errors.require(same, f"{path}:{line_at}: not an event: {str(line)[:80]}")
        events.append(event)
    rank = Rank(**{**facts, "events": events})
    own = rank.setting("rank")
    errors.require(own == rank.rank, f"{path}:{at}: the settings are of rank {own}")
    return rank


def communicator_of(event: Event) -> int | None:
    """Whose event it is; None: of no communicator alone."""
    if event.kind in ("doorbell", "farewell", "published"):
        return event.lane[0]
    return None
