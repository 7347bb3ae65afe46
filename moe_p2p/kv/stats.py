"""States and figures of KV transfers: of one request, and of all requests of a worker since it was
made.

Both sides keep a `KVTransferStats` for each request, as `KVSending.stats` and
`KVReservation.stats`; it is filled while the request goes on and does not change once the request
is reusable. `KVWorker.totals` has the sums, for vLLM's connector stats (`to_dict`, `+`), SGLang's
metric and Prometheus (`prometheus_text`). All times are of `time.monotonic`, in seconds.
"""

from __future__ import annotations

import bisect
import enum
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol

from moe_p2p.engine.metrics import Buckets, Family, Sample, text_of
from moe_p2p.engine.transfers import Report, Request
from moe_p2p.machine import phases

# The later, the more was needed to get pages back.
FENCES = ("none", "drained", "queue_pair", "key")
SECONDS = tuple(1e-4 * 2**i for i in range(18))  # upper bounds of buckets: 100 us to 13.1 s


class _State(str, enum.Enum):
    """Compares with its word, and is printed as it."""

    __str__ = str.__str__


class RequestState(_State):
    """Of a `KVSending` and a `KVReservation`."""

    OPEN = "open"
    COMPLETE = "complete"
    FAILED = "failed"


class TransferState(_State):
    """Of a request between one sender and one receiver, at either of them."""

    WAITING = "waiting"  # at the sender: until the receiver has opened it, and a slot is free
    OPEN = "open"
    DRAINING = "draining"  # the request has failed: writes may still land
    SETTLED = "settled"  # nothing reads the pages for it, or lands in them, any more


@dataclass
class KVTransferStats:
    """One request at one side.

    queued_at: `start` or `reserve` was called.
    first_post_at: before the first write, or read, was given to a NIC here. None: nothing was.
    first_arrival_at: of a receiver: the first immediate was seen here, or of a pull the last read.
    last_completion_at: of a side that posts: the last completion was seen by the polling thread,
    so the peer has the bytes (of a read: this side has them). Of a receiver that is pushed to: the
    last announced immediate was seen. None: of a sender that is pulled from.
    ended_at: complete (after checksums, where they are made) or failed.
    reusable_at: nothing reads or writes the request's pages any more.

    nbytes: posted here; of a receiver that is pushed to, and complete: arrived here.
    writes: work requests posted here, reads and immediates included. merged: rows that needed none,
    as they travelled with the row before. packed: rows that went through the ring of a GPU.
    retries: fences that had to be tried again. fence: what gave the pages back: "none" (the request
    was complete, or nothing was under way), "drained" (the other side, or all own completions, say
    that nothing is under way any more), "queue_pair" (the pair's connections were severed), "key"
    (the pair's memory was withdrawn).
    submitted: layers and chunks with the time at which they were, while a trace is recorded.
    """

    request: str
    side: str  # "sender" or "receiver"
    queued_at: float
    first_post_at: float | None = None
    first_arrival_at: float | None = None
    last_completion_at: float | None = None
    ended_at: float | None = None
    reusable_at: float | None = None
    failed: bool = False
    nbytes: int = 0
    writes: int = 0
    merged: int = 0
    packed: int = 0
    retries: int = 0
    fence: str = "none"
    submitted: list[tuple[str, float]] = field(default_factory=list)

    @property
    def queue_s(self) -> float | None:
        """From queued to the first post; of a receiver that is pushed to, to the first arrival."""
        return _between(self.queued_at, self._first_at)

    @property
    def transfer_s(self) -> float | None:
        """From where `queue_s` ends to the last completion. Layers that were computed later, and
        what waited for them, are in it."""
        return _between(self._first_at, self.last_completion_at)

    @property
    def total_s(self) -> float | None:
        """From queued to the end."""
        return _between(self.queued_at, self.ended_at)

    @property
    def reclaim_s(self) -> float | None:
        """From the end to reusable pages; of requests that failed, else None."""
        return _between(self.ended_at, self.reusable_at) if self.failed else None

    @property
    def _first_at(self) -> float | None:
        return self.first_arrival_at if self.first_post_at is None else self.first_post_at

    def parts(self) -> list[tuple[str, float | None]]:
        """What it went through, as of a `phases.Phase`."""
        last = [("reclaim", self.reusable_at)] if self.failed else []
        return [
            (phases.WAIT, self._first_at),
            (phases.TRANSFER, self.last_completion_at),
            ("end", self.ended_at),
            *last,
        ]

    def submit(self, layers: tuple[int, ...], end: int, to: str) -> None:
        """While a trace is recorded."""
        what = f"layer {layers[0]}" + (f" to {layers[-1]}" if layers[1:] else "")
        self.submitted.append((f"{what}, up to token {end}, to {to}", time.monotonic()))

    def arrive(self, now: float) -> None:
        """Something has arrived."""
        if self.first_arrival_at is None:
            self.first_arrival_at = now

    def complete(self, now: float, nbytes: int) -> None:
        """All that one sender announced has arrived."""
        self.last_completion_at = now
        self.nbytes += nbytes

    def pack(self, rows: int) -> None:
        self.packed += rows

    def end(self, now: float, *, failed: bool = False) -> None:
        self.ended_at, self.failed = now, failed

    def free(self, now: float) -> None:
        self.reusable_at = now

    def take_done(self, requests: list[Request]) -> tuple[list[Request], list[Request]]:
        """Counts the engine's requests that are done; returns them, and those that are not."""
        done: list[Request] = []
        left: list[Request] = []
        for each in requests:
            (done if each.done() else left).append(each)
        for each in done:
            self.add(each.report())
        return done, left

    def add(self, report: Report) -> None:
        if report.first_post_at is None:
            return
        first, last = self.first_post_at, self.last_completion_at
        self.first_post_at = min(first or report.first_post_at, report.first_post_at)
        self.last_completion_at = max(last or report.ended_at, report.ended_at)
        self.nbytes += report.nbytes
        self.writes += report.writes
        self.merged += report.merged

    def fenced(self, kind: str, retries: int = 0) -> None:
        self.fence = FENCES[max(FENCES.index(self.fence), FENCES.index(kind))]
        self.retries += retries


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin


@dataclass
class Histogram:
    """counts: of each bucket of SECONDS, and of what is longer."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    sum: float = 0.0

    def observe(self, value: float | None) -> None:
        if value is not None:
            self.counts[bisect.bisect_left(SECONDS, value)] += 1
            self.sum += value

    def plus(self, other: Histogram, sign: int) -> Histogram:
        counts = [a + sign * b for a, b in zip(self.counts, other.counts, strict=True)]
        return Histogram(counts, self.sum + sign * other.sum)


@dataclass
class KVTotals:
    """Sums over requests that are reusable. `later - earlier` is what came between."""

    requests: int = 0
    failed: int = 0
    nbytes: int = 0
    writes: int = 0
    merged: int = 0
    packed: int = 0
    retries: int = 0
    drained: int = 0  # requests whose fence was "drained"
    queue_pair: int = 0  # "queue_pair"
    key: int = 0  # "key"
    queue_s: Histogram = field(default_factory=Histogram)
    transfer_s: Histogram = field(default_factory=Histogram)
    total_s: Histogram = field(default_factory=Histogram)
    reclaim_s: Histogram = field(default_factory=Histogram)

    def observe(self, stats: KVTransferStats) -> None:
        self.requests += 1
        for name in ("failed", "nbytes", "writes", "merged", "packed", "retries"):
            setattr(self, name, getattr(self, name) + int(getattr(stats, name)))
        if stats.fence != "none":
            setattr(self, stats.fence, getattr(self, stats.fence) + 1)
        for name in HISTOGRAMS:
            getattr(self, name).observe(getattr(stats, name))

    def __add__(self, other: KVTotals) -> KVTotals:
        return self._with(other, 1)

    def __sub__(self, other: KVTotals) -> KVTotals:
        return self._with(other, -1)

    def _with(self, other: KVTotals, sign: int) -> KVTotals:
        result = KVTotals()
        for each in fields(self):
            one, two = getattr(self, each.name), getattr(other, each.name)
            both = one.plus(two, sign) if isinstance(one, Histogram) else one + sign * two
            setattr(result, each.name, both)
        return result

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, for JSON or msgpack."""
        return {
            each.name: asdict(value) if isinstance(value, Histogram) else value
            for each in fields(self)
            for value in (getattr(self, each.name),)
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> KVTotals:
        totals = KVTotals()
        for name, value in data.items():
            histogram = name in HISTOGRAMS
            setattr(totals, name, Histogram(**value) if histogram else value)
        return totals


HISTOGRAMS = ("queue_s", "transfer_s", "total_s", "reclaim_s")
_HELP = {
    "requests": "KV requests whose pages are free again",
    "failed": "KV requests that failed or were cancelled",
    "nbytes": "Bytes posted, or arrived at a receiver that is pushed to",
    "writes": "Work requests posted, reads and immediates included",
    "merged": "Rows that travelled in the write of the row before",
    "packed": "Rows that went through the ring of a GPU",
    "retries": "Fences that had to be tried again",
    "drained": "Failed requests whose pages came back because all drained",
    "queue_pair": "Failed requests whose pages came back because queue pairs were reset",
    "key": "Failed requests whose pages came back because the key was withdrawn",
    "queue_s": "From start or reserve to the first post or arrival",
    "transfer_s": "From the first post or arrival to the last completion",
    "total_s": "From start or reserve to the end",
    "reclaim_s": "From the failure to reusable pages",
}


class Counted(Protocol):
    """A `KVWorker`."""

    role: str
    totals: KVTotals

    @property
    def name(self) -> str: ...


def families_of(workers: Iterable[Counted]) -> list[Family]:
    """Their totals as metrics (engine/metrics.py)."""
    named = [({"worker": each.name, "role": each.role}, each.totals) for each in workers]
    found = []
    for name, about in _HELP.items():
        if name in HISTOGRAMS:
            metric, kind = f"moe_p2p_kv_{name.removesuffix('_s')}_seconds", "histogram"
        else:
            metric, kind = f"moe_p2p_kv_{'bytes' if name == 'nbytes' else name}_total", "counter"
        samples = [Sample(labels, _value(getattr(totals, name))) for labels, totals in named]
        found.append(Family(metric, kind, about, samples))
    return found


def _value(value: float | Histogram) -> float | Buckets:
    return Buckets(SECONDS, value.counts, value.sum) if isinstance(value, Histogram) else value


def prometheus_text(*workers: Counted) -> str:
    """The totals of these workers in the text format of Prometheus. `moe_p2p.prometheus_text` has
    what their engines count, too."""
    return text_of(families_of(workers))
