"""Where the time of steps went, out of a trace: phases of each rank, waits, and who was waited for.

On CPUs a phase is known by spans of its calls, on GPUs by stamps of its kernels. What a rank waits
for has arrived from another node when its gateway's proxy has published it, and from a rank of the
own node when that rank had sent everything.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from moe_p2p.engine.recording import PHASES
from moe_p2p.tools.trace.recorded import (
    ARRIVED,
    BEGUN,
    ENDED,
    GPU_PHASES,
    SENT,
    Arrival,
    OfCommunicator,
    StepPhase,
    Trace,
)

PAIR = ("dispatch", "combine")
PARTS = ("send", "wait", "receive")
SPAN_SEND, SPAN_RECEIVE, SPAN_SUM = range(3)  # csrc/base/recorder.h, kSpan
_NAMED = 0.1  # of a step's time, waited for one rank: it is a straggler
_OVER_NEXT = 2.0  # times the waits for any other rank


def arrivals(trace: Trace) -> dict[Arrival, int]:
    """Of all that came from other nodes: when it was published, by the rank whose proxy did."""
    found = {}
    for process, recorded in enumerate(trace.ranks):
        of = {(each.engine, each.number): each for each in recorded.communicators}
        for engine in recorded.engines:
            for event in trace.events(process, engine):
                if event.kind != "published" or not event.c:
                    continue
                number, phase, _ = event.lane
                if (owner := of.get((engine.number, number))) is not None:
                    key = Arrival(owner.name, event.a, phase, owner.rank, event.peer)
                    found[key] = event.time_ns
    return found


def phases(trace: Trace) -> list[StepPhase]:
    """Of dispatch and combine, by their beginning."""
    found: list[StepPhase] = []
    for process, recorded in enumerate(trace.ranks):
        for each in recorded.communicators:
            of_rank = _of_gpu if each.stamps else _of_cpu
            found += of_rank(trace, process, each)
    return sorted(found, key=lambda each: each.begin)


def _of_cpu(trace: Trace, process: int, of: OfCommunicator) -> Iterable[StepPhase]:
    spans = defaultdict[tuple[int, str], dict[int, tuple[int, int]]](dict)
    for time, head, step, end, _ in of.spans:
        detail = head >> 16 & 0xFFFF
        phase, part = PHASES[detail >> 9 & 3], detail >> 11
        spans[step, phase][part] = (time, end)
    other = trace.hosts[process].other
    for (step, name), parts in spans.items():
        if name in PAIR and {SPAN_SEND, SPAN_RECEIVE} <= parts.keys():
            times = map(other, (*parts[SPAN_SEND], *parts[SPAN_RECEIVE]))
            yield StepPhase(of.name, step, name, process, of.rank, *times)


def _of_gpu(trace: Trace, process: int, of: OfCommunicator) -> Iterable[StepPhase]:
    for word, *times in of.stamps:
        each = len(times) // len(GPU_PHASES)
        for i, name in enumerate(GPU_PHASES):
            stamps = times[i * each : (i + 1) * each]
            begin, sent, end = stamps[BEGUN], stamps[SENT], stamps[ENDED]
            if not begin or min(sent, end) < begin:  # of an earlier lap, or of a half alone
                continue
            end = max(sent, end)  # a warp without tokens may end late
            known = stamps[ARRIVED] >= begin
            waited = min(max(stamps[ARRIVED], sent), end) if known else 0
            at = [trace.of_gpu(process, time) if time else 0 for time in (begin, sent, waited, end)]
            yield StepPhase(of.name, word - 1, name, process, of.rank, *at)


@dataclass(frozen=True, kw_only=True)
class Step:
    """All ranks' phases of a step that have both, dispatch and combine."""

    communicator: str
    number: int
    dispatch: dict[int, StepPhase]  # by rank
    combine: dict[int, StepPhase]
    blamed: dict[tuple[int, str], int]  # (rank, phase): who was waited for last

    @property
    def begin(self) -> int:
        return min(each.begin for each in self.dispatch.values())

    @property
    def end(self) -> int:
        return max(each.end for each in self.combine.values())

    @property
    def took(self) -> int:
        return self.end - self.begin

    def late(self, rank: int) -> float:
        """How long behind the median rank this one began."""
        begins = [each.begin for each in self.dispatch.values()]
        return self.dispatch[rank].begin - statistics.median(begins)


def parts_of(phase: StepPhase) -> tuple[int, int, int]:
    """Lengths of PARTS."""
    return phase.sent - phase.begin, phase.waited - phase.sent, phase.end - phase.waited


def steps(trace: Trace) -> list[Step]:
    """Whole ones, of all ranks that a communicator has, in their order."""
    layout = {each.name: each for recorded in trace.ranks for each in recorded.communicators}
    by_step = defaultdict[tuple[str, int], dict[str, dict[int, StepPhase]]](
        lambda: defaultdict(dict)
    )
    for phase in phases(trace):
        by_step[phase.communicator, phase.step][phase.name][phase.rank] = phase
    arrived, found = arrivals(trace), []
    for (name_of, step), named in by_step.items():
        of = layout[name_of]
        if any(len(named[name]) < of.world_size for name in PAIR):
            continue
        whole, blamed = {}, {}
        for name in PAIR:
            ranks = named[name]
            for rank, phase in ranks.items():
                last, at = _last(of, phase, ranks, arrived)
                blamed[rank, name] = last
                waited = phase.waited or min(max(at, phase.sent), phase.end)
                whole[rank, name] = replace(phase, waited=waited)
        found.append(
            Step(
                communicator=name_of,
                number=step,
                dispatch={rank: whole[rank, "dispatch"] for rank in named["dispatch"]},
                combine={rank: whole[rank, "combine"] for rank in named["combine"]},
                blamed=blamed,
            )
        )
    return sorted(found, key=lambda each: each.begin)


def _last(
    of: OfCommunicator, phase: StepPhase, ranks: dict[int, StepPhase], arrived: dict[Arrival, int]
) -> tuple[int, int]:
    """Returns which other rank's data came last, and when."""
    local = of.ranks_per_node
    node = phase.rank // local
    times: dict[int, int] = {}
    for source, sent in ranks.items():
        if source == phase.rank:
            continue
        if source // local == node:
            times[source] = sent.sent
        elif phase.name == "dispatch":
            gateway = node * local + source % local
            key = Arrival(phase.communicator, phase.step, phase.name, gateway, source)
            times[source] = arrived.get(key, sent.sent)
        else:  # the node's sum comes from our partner there, once its last rank has sent
            partner = source // local * local + phase.rank % local
            slowest = max(
                range(source // local * local, (source // local + 1) * local),
                key=lambda rank: ranks[rank].sent,
            )
            key = Arrival(phase.communicator, phase.step, phase.name, phase.rank, partner)
            times[slowest] = arrived.get(key, ranks[slowest].sent)
    if not times:
        return phase.rank, phase.sent
    last = max(times, key=lambda source: times[source])
    return last, times[last]


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """waited: mean of a step, of the rank that waited longest for it, ns. share: of all waiting.
    late: how long behind the median rank it begins, mean."""

    rank: int
    waited: float
    share: float
    late: float


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Means of whole steps, in nanoseconds. W ranks.

    parts: by rank and (phase, part). between: by rank, from a dispatch's end to its combine.
    waited: by source rank, what each other rank waited for it in a step, [W][W].
    """

    steps: list[Step]
    took: float
    parts: dict[int, dict[tuple[str, str], float]]
    between: dict[int, float]
    waited: list[list[float]]
    straggler: Straggler | None

    @property
    def middle(self) -> Step:
        """The step of median length."""
        return sorted(self.steps, key=lambda each: each.took)[len(self.steps) // 2]


def judge(found: list[Step]) -> Judged | None:
    """None: there are no whole steps."""
    if not found:
        return None
    ranks = sorted(found[0].dispatch)
    found = [each for each in found if sorted(each.dispatch) == ranks]
    mean = statistics.fmean
    parts: dict[int, dict[tuple[str, str], float]] = {rank: {} for rank in ranks}
    between, waited = {}, [[0.0] * len(ranks) for _ in ranks]
    for rank in ranks:
        pairs = [(each.dispatch[rank], each.combine[rank]) for each in found]
        between[rank] = mean(combine.begin - dispatch.end for dispatch, combine in pairs)
        for name, of_phase in zip(PAIR, zip(*pairs, strict=True), strict=True):
            lengths = zip(*map(parts_of, of_phase), strict=True)
            parts[rank] |= {
                (name, part): mean(each) for part, each in zip(PARTS, lengths, strict=True)
            }
    for step in found:
        for (rank, name), source in step.blamed.items():
            phase = (step.dispatch if name == "dispatch" else step.combine)[rank]
            waited[source][rank] += max(0, phase.waited - phase.sent) / len(found)
    took = mean(each.took for each in found)
    return Judged(
        steps=found,
        took=took,
        parts=parts,
        between=between,
        waited=waited,
        straggler=_straggler(found, waited, took),
    )


def _straggler(found: list[Step], waited: list[list[float]], took: float) -> Straggler | None:
    most = [max(of) for of in waited]
    rank = max(range(len(most)), key=most.__getitem__)
    others = max((most[i] for i in range(len(most)) if i != rank), default=0.0)
    if most[rank] < max(_NAMED * took, _OVER_NEXT * others):
        return None
    late = statistics.fmean(each.late(rank) for each in found)
    share = sum(waited[rank]) / (sum(map(sum, waited)) or 1.0)
    return Straggler(rank=rank, waited=most[rank], share=share, late=late)
