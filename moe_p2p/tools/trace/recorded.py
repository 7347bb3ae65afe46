"""What ranks recorded, and the same on the clock of rank 0's host. Pure: nothing here records.

W ranks, L ranks per node. Times are nanoseconds.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from moe_p2p.engine.recording import Event, decode
from moe_p2p.machine.phases import Phase
from moe_p2p.tools.trace.hub import Bounds

BEGUN, SENT, RINGS, RUNG, ARRIVED, ENDED = range(6)  # kernels/device/stamps.cuh
GPU_PHASES = ("dispatch", "combine", "weights")  # of StepStamps, in this order
SHARED_CLOCK = Bounds(0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class OfEngine:
    """counters: of all NICs, what they did while it recorded. number: in its process."""

    number: int
    label: str
    provider: str
    events: list[list[int]]  # rows of moe_p2p/engine/recording.py
    overwritten: int
    from_start: bool  # as of a Recording
    counters: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class OfCommunicator:
    """A rank's end. name: the same on all its ranks. engine: OfEngine.number; number: in that one's
    events. spans: of calls on CPUs. stamps: rows of StepStamps, of kernels. stamped: False where
    its kernels have none."""

    name: str
    engine: int
    number: int
    rank: int
    world_size: int
    ranks_per_node: int
    device: str
    spans: list[list[int]]
    overwritten: int
    stamps: list[list[int]]
    stamped: bool
    facts: dict[str, Any]  # for a replay (tools/recording.py)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Of one process. gpu_clock: at the beginning and the end, of communicators with stamps."""

    rank: int
    engines: list[OfEngine] = field(default_factory=list)
    communicators: list[OfCommunicator] = field(default_factory=list)
    gpu_clock: list[Bounds] = field(default_factory=list)
    busy: list[Phase] = field(default_factory=list)  # of KV and weights
    ended_ns: int = 0
    lost: list[str] = field(default_factory=list)  # what is missing, and why

    def encode(self) -> bytes:
        return zlib.compress(json.dumps(asdict(self)).encode(), 1)

    @staticmethod
    def decode(data: bytes) -> Recorded:
        found = json.loads(zlib.decompress(data))
        return Recorded(
            rank=found["rank"],
            engines=[OfEngine(**each) for each in found["engines"]],
            communicators=[OfCommunicator(**each) for each in found["communicators"]],
            gpu_clock=[Bounds(*each) for each in found["gpu_clock"]],
            busy=[Phase(*each) for each in found["busy"]],
            ended_ns=found["ended_ns"],
            lost=found["lost"],
        )


@dataclass(frozen=True)
class Clock:
    """A clock beside another one, at the beginning and at the end of a trace."""

    first: Bounds
    last: Bounds

    @property
    def error(self) -> int:
        """Times that were converted are right within this, if the clock drifts evenly."""
        return max(self.first.error, self.last.error)

    @property
    def drift_ppm(self) -> float:
        """How much faster it runs, in millionths."""
        took = self.last.at - self.first.at
        return 1e6 * (self.last.offset - self.first.offset) / took if took > 0 else 0.0

    def other(self, time: int) -> int:
        """Returns what the other clock shows when this one shows `time`."""
        begun = self.first.at + self.first.offset
        away = self.first.offset + (time - begun) * self.drift_ppm / 1e6
        return time - round(away)


@dataclass(frozen=True)
class StepPhase:
    """One rank's part of a phase of a step. Times of rank 0's host. process: of Trace.ranks.

    sent: it has nothing left to send. waited: all that it waited for was there; where it is not
    known by itself, as arrivals of the other ranks have it. end: it has received.
    """

    communicator: str
    step: int
    name: str
    process: int
    rank: int
    begin: int
    sent: int
    waited: int
    end: int


class Arrival(NamedTuple):
    """What `source` sent in a phase of a step is visible to `rank`, or to its whole node."""

    communicator: str
    step: int
    phase: str
    rank: int
    source: int


@dataclass(frozen=True, kw_only=True)
class Trace:
    """All ranks. hosts: of each rank's host clock; gpus: of its GPU's, beside its host's."""

    ranks: list[Recorded]
    hosts: list[Clock]
    gpus: list[Clock | None]

    @staticmethod
    def of(ranks: list[Recorded], clocks: Sequence[Clock | None]) -> Trace:
        """clocks: of hosts, beside rank 0's; None: the same one."""
        gpus = [Clock(*each.gpu_clock) if len(each.gpu_clock) == 2 else None for each in ranks]
        same = Clock(SHARED_CLOCK, SHARED_CLOCK)
        return Trace(ranks=ranks, hosts=[each or same for each in clocks], gpus=gpus)

    def events(self, process: int, engine: OfEngine) -> list[Event]:
        """Of one engine, with times of rank 0's host. process: of `ranks`."""
        clock = self.hosts[process]
        found = [decode(row) for row in engine.events]
        return [each._replace(time_ns=clock.other(each.time_ns)) for each in found]

    def without_phases(self) -> list[str]:
        """Of communicators whose phases are missing: which, why, and what to do."""
        found = {
            each.name: each
            for recorded in self.ranks
            for each in recorded.communicators
            if not each.stamped
        }
        return [
            f"no phases of communicator {name} ({each.world_size} ranks, {each.ranks_per_node} a "
            "node): its kernels have no time stamps, as it was made before the trace; what its "
            "proxies and NICs did is here. Make it inside the block"
            for name, each in found.items()
        ]

    def error_ns(self, process: int) -> int:
        """Times of this rank are right within this."""
        gpu = self.gpus[process]
        return self.hosts[process].error + (0 if gpu is None else gpu.error)

    def of_gpu(self, process: int, time: int) -> int:
        gpu = self.gpus[process]
        return self.hosts[process].other(time if gpu is None else gpu.other(time))
