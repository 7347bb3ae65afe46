"""`python -m moe_p2p replay FILE ...`: a recording of a stall, stepped through on this machine.

What the proxies of a communicator saw (moe_p2p/tools/recording.py) is fed to the exchange and the
engine of this version, over NICs that do nothing by themselves (csrc/moe/replay). Who waits for
what at the end is then said by the code that says it in production, in the same words.
"""

from __future__ import annotations

import contextlib
import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from moe_p2p import errors
from moe_p2p.engine.recording import Event, imm_key
from moe_p2p.library import call
from moe_p2p.tools.option_types import Parser, at_least_0, zero_or_more
from moe_p2p.tools.recording import Rank, line_of, load, row_of

_ops = torch.ops.moe_p2p
_NOTHING = "waits for nothing"
_MOST_WRITES = 5  # that are not completed, which are printed


@dataclass
class Replayed:
    """One rank, as far as it was fed."""

    recorded: Rank
    number: int  # of the op's object
    events: list[Event]  # that belong to steps of which the recording has all
    fed: int = 0
    differs: str = ""
    in_flight: dict[tuple[int, int], list[Event]] = field(default_factory=dict)  # by NIC, id

    def feed(self, event: Event) -> None:
        if self.differs:
            return
        differs = call(_ops.replay_feed.default, self.number, row_of(event))
        self.fed += 1
        if differs:
            self.differs = f"event {self.fed}: {differs}"
        posts = self.in_flight.setdefault((event.nic, event.a), [])
        if event.kind == "posted":
            posts.append(event)
        elif event.kind == "completed":
            del posts[: event.b]

    def waits(self) -> tuple[list[str], int]:
        """A line for each wait, in the words of errors; and writes that no NIC has taken."""
        lines, untaken = call(_ops.replay_waits.default, self.number)
        return lines.splitlines(), int(untaken)


def whole_events(rank: Rank) -> list[Event]:
    """Returns the events of steps of which the recording has all, in order."""
    first, number = rank.whole_from, rank.setting("communicator")
    if first == 0:
        return [e for e in rank.events if e.kind != "posted" or _is_step(e, number)]
    if first is None:
        return []
    ends = {}  # of earlier steps, by lane
    for at, event in enumerate(rank.events):
        if event.kind == "published" and event.c and event.a < first:
            ends[event.lane[1], event.nic, event.peer] = at
    rung, events = set(), []
    for at, event in enumerate(rank.events):
        key = imm_key(event.a) if event.kind == "immediate" else None
        early = key is not None and at < ends.get((key.phase, key.slot, key.source), -1)
        if early or (event.kind in ("doorbell", "published") and event.a < first):
            continue
        if event.kind == "doorbell":
            rung.add((event.lane[1], event.nic, event.lane[2]))
        elif event.kind == "posted":
            sent = imm_key(event.c)
            if not _is_step(event, number) or sent is None or sent[1:4] not in rung:
                continue
        elif event.kind == "farewell":  # how many writes came before is not known
            event = event._replace(a=event.a & 3)
        events.append(event)
    return events


def _is_step(event: Event, communicator: int) -> bool:
    """Whether a post is of a step of the communicator: others are nothing to its exchange."""
    key = imm_key(event.c) if event.detail & 1 else None
    return key is not None and key.communicator == communicator and key.phase != "counts"


class Replay:
    """Ranks of a recording. Raises InvalidArgumentError for what no replay can be made of."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        worlds = {
            tuple(rank.setting(name) for name in ("world_size", "ranks_per_node", "communicator"))
            for rank in ranks
        }
        errors.require(len(worlds) == 1, "the recordings are of several communicators, or of none")
        twice = [rank for rank, count in Counter(rank.rank for rank in ranks).items() if count > 1]
        text = (
            f"several recordings are of rank {twice[0] if twice else ''}; name each file once, and"
        )
        errors.require(not twice, f"{text} of each rank the one that was taken last")
        self.ranks = []
        try:
            for rank in sorted(ranks, key=lambda each: each.rank):
                self.ranks.append(self._open(rank))
            call(_ops.replay_connect.default, [each.number for each in self.ranks])
        except BaseException:
            self.close()
            raise

    def _open(self, rank: Rank) -> Replayed:
        events = whole_events(rank)
        number = call(
            _ops.replay_create.default,
            rank.settings,
            rank.nics,
            rank.flags,
            rank.masked,
            rank.whole_from or 0,
        )
        return Replayed(rank, int(number), events)

    def close(self) -> None:
        for each in self.ranks:
            _ops.replay_close.default(each.number)
        self.ranks = []

    def run(
        self, *, step: int | None = None, until_ms: float | None = None
    ) -> Iterator[tuple[Replayed, Event]]:
        """Feeds what was recorded, in the order of time; yields each event that was fed.

        step: up to where the rank begins a later step. until_ms: up to so long after the first
        event of the rank.
        """
        ranks = [_until(each, step, until_ms) for each in self.ranks]
        for _, each, event in heapq.merge(*ranks, key=lambda item: item[0]):
            each.feed(event)
            yield each, event


def _until(
    each: Replayed, step: int | None, until_ms: float | None
) -> Iterator[tuple[int, Replayed, Event]]:
    """Events with times that do not fall: the order of a rank stays as it is."""
    start = time = each.recorded.events[0].time_ns if each.events else 0
    for event in each.events:
        begins = event.kind == "doorbell" and event.lane[1] == "dispatch"
        if step is not None and begins and event.a > step:
            return
        if until_ms is not None and event.time_ns - start > round(until_ms * 1e6):
            return
        time = max(time, event.time_ns)
        yield time, each, event


def report(each: Replayed) -> list[str]:
    """Who waits for what at this rank."""
    rank = each.recorded
    if rank.whole_from is None:
        return [f"rank {rank.rank}: no step begins in its {len(rank.events)} events; record more"]
    if not any(event.kind == "doorbell" for event in each.events):
        steps = [e.a for e in rank.events if e.kind == "doorbell"]
        ends = f" and ends in step {max(steps)}; record more events" if steps else ""
        return [f"rank {rank.rank}: its recording is whole from step {rank.whole_from} on{ends}"]
    waits, untaken = each.waits()
    lines = waits or [f"rank {rank.rank}: {_NOTHING}"]
    if untaken:
        lines.append(f"rank {rank.rank}: its NICs have not taken {untaken} of its writes")
    lines += _writes(each)
    if each.differs:
        lines.append(f"rank {rank.rank}: this version does otherwise: {each.differs}")
    if rank.error and each.fed == len(each.events):
        same = any(_all_in(line.partition(": ")[2], rank.error) for line in waits)
        lines.append(f"rank {rank.rank}: {'as in' if same else 'not in'} its error: {rank.error}")
    return lines


def _all_in(text: str, error: str) -> bool:
    """Whether an error says all of a text. Beside it, it may have a time, and words of a NIC."""
    return all(part in error for part in text.split("; "))


def _writes(each: Replayed) -> list[str]:
    """Writes of steps that their NIC has not completed."""
    rank, lines = each.recorded.rank, []
    left = [event for posts in each.in_flight.values() for event in posts]
    end = each.events[each.fed - 1].time_ns if each.fed else 0
    for event in left[:_MOST_WRITES]:
        key = imm_key(event.c)
        what = f"{key.phase}, step slot {key.slot}, part {key.part}" if key else "no step"
        lines.append(
            f"rank {rank}: NIC {event.nic} has not completed a write of {event.b} bytes ({what}), "
            f"posted {(end - event.time_ns) / 1e6:.3f} ms before the end"
        )
    if len(left) > _MOST_WRITES:
        lines.append(f"rank {rank}: and {len(left) - _MOST_WRITES} writes more")
    return lines


def describe(event: Event) -> str:
    line = line_of(event)
    key = imm_key(line["imm"]) if "imm" in line else None
    fields = [f"{name} {value}" for name, value in line.items() if name not in ("ns", "event")]
    if key is not None:
        fields.append(f"({key.phase} slot {key.slot} part {key.part} of rank {key.source})")
    return f"{line['event']}: {', '.join(fields)}"


def main(arguments: list[str]) -> int:
    parser = Parser(
        prog="python -m moe_p2p replay",
        description="Steps through what proxies did (docs/replay.md), and says who waits for what.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="recordings of one communicator")
    parser.add_argument("--step", type=at_least_0, help="end with this step, and print its events")
    parser.add_argument("--until", type=zero_or_more, metavar="MS", help="end so long after begin")
    options = parser.parse_args(arguments)
    try:
        ranks = [rank for file in options.files for rank in load(file)]
        with contextlib.closing(Replay(ranks)) as replay:
            return _run(replay, options.step, options.until)
    except errors.MoeP2pError as error:
        print(error)
        return 2


def _require_step(replay: Replay, step: int) -> None:
    whole = {e.a for each in replay.ranks for e in each.events if e.kind == "doorbell"}
    text = f"--step {step}: whole in these recordings are "
    text += f"steps {min(whole)} to {max(whole)}" if whole else "no steps; record more"
    errors.require(step in whole, text)


def _run(replay: Replay, step: int | None, until_ms: float | None) -> int:
    for each in replay.ranks:
        rank = each.recorded
        lost = f", {rank.overwritten} earlier ones overwritten" if rank.overwritten else ""
        start = "" if rank.whole_from is None else f", whole from step {rank.whole_from} on"
        print(f"rank {rank.rank}: {len(rank.events)} events over {rank.transport}{lost}{start}")
    if step is not None:
        _require_step(replay, step)
    shown: dict[int, list[str]] = {}
    begun: set[int] = set()
    for each, event in replay.run(step=step, until_ms=until_ms):
        rank = each.recorded
        if step is None:
            continue
        if event.kind == "doorbell" and event.a >= step:
            begun.add(rank.rank)
        if rank.rank in begun:
            ms = (event.time_ns - rank.events[0].time_ns) / 1e6
            print(f"rank {rank.rank} {ms:10.3f} ms  {describe(event)}")
            waits, _ = each.waits()
            if waits != shown.get(rank.rank):
                shown[rank.rank] = waits
                print(*(f"    {line}" for line in waits or [_NOTHING]), sep="\n")
    for each in replay.ranks:
        print(*report(each), sep="\n")
    return 1 if any(each.differs for each in replay.ranks) else 0
