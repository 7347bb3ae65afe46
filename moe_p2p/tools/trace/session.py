"""Records what this process does between two lines of a program, and gathers it at rank 0."""

from __future__ import annotations

import os
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store

from moe_p2p import errors, log
from moe_p2p.engine import lifetime, metrics
from moe_p2p.engine.engine import Engine
from moe_p2p.engine.recording import Recording
from moe_p2p.fleet.bootstrap import Bootstrap
from moe_p2p.library import call
from moe_p2p.machine import phases
from moe_p2p.machine.phases import Phase
from moe_p2p.moe.communicator import Communicator
from moe_p2p.moe.gpu import kernels
from moe_p2p.moe.gpu.prepared import is_captured
from moe_p2p.tools import recording
from moe_p2p.tools.output import NotWrittenError
from moe_p2p.tools.trace import gpu_clock
from moe_p2p.tools.trace.hub import Bounds, Hub
from moe_p2p.tools.trace.perfetto import write
from moe_p2p.tools.trace.recorded import Clock, OfCommunicator, OfEngine, Recorded, Trace

_record = torch.ops.moe_p2p.all_to_all_record.default
STAMPS = "MOE_P2P_STAMPS"
MATCHED = 2  # how often clocks are matched: at the beginning and at the end


class tracing:  # noqa: N801  it is used like a function
    """Traces engines, communicators and kernels of this process, and of all ranks on one clock.

        with moe_p2p.tracing("trace.json"):
            step()

    path: of the file that rank 0 writes, for ui.perfetto.dev. group_or_store, rank, world_size: the
    ranks that are traced, as AllToAll takes them; without any and without a default group this
    process alone.
    Beginning and end are collective. num_events: of each engine and communicator, the newest count;
    40 bytes each.

    Kernels note their phases in communicators that are made inside: others have other machine code,
    and of those the file has what their proxies do. All that is open, or made, inside is traced, on
    whichever thread; requests of KV and updates of weights also where they began before, or are
    under way at the end. `trace` is at rank 0 what was gathered (moe_p2p/tools/trace/recorded.py).
    If the block of a rank raises, or a rank dies, nothing is gathered: the others raise
    PeerDeadError, and each writes its own events to a file whose name has its rank, on its own
    clock.

    Raises InvalidArgumentError for wrong arguments, inside another one and while a CUDA graph is
    captured, TimeoutError if ranks do not come within timeout_s, NotWrittenError if the file cannot
    be written.
    """

    def __init__(
        self,
        path: str | Path,
        group_or_store: dist.ProcessGroup | Store | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        num_events: int = 1 << 17,
        timeout_s: float = 60.0,
    ) -> None:
        self.path, self.trace = Path(path), None
        self._who = group_or_store, rank, world_size
        self._num_events, self._timeout_s = num_events, timeout_s

    trace: Trace | None

    def __enter__(self) -> tracing:
        text = "a trace is recorded already in this process; end it first"
        errors.require(not any(isinstance(each, Session) for each in lifetime.watchers), text)
        text = f"num_events is {self._num_events!r}, must be a whole number above 0"
        errors.require(type(self._num_events) is int and self._num_events > 0, text)
        errors.require(not is_captured(), "a trace cannot begin while a CUDA graph is captured")
        self._session, self._pid = Session(self._num_events), os.getpid()
        session = self._session
        group_or_store, rank, world_size = self._who
        if group_or_store is None and not dist.is_initialized():
            group_or_store, rank, world_size = HashStore(), 0, 1
        meeting = Bootstrap(
            group_or_store, rank=rank, world_size=world_size, timeout_s=self._timeout_s
        )
        with meeting:
            self._hub = Hub(meeting, timeout_s=self._timeout_s)
        try:
            self._begun = self._hub.match()
            session.begin()
            self._hub.meet()
        except BaseException:
            session.stop()
            self._hub.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        hub, session = self._hub, self._session
        if os.getpid() != self._pid:  # a forked child: the connections are its parent's
            return
        try:
            session.stop()
            recorded = session.recorded(hub.rank)
            if error is not None:
                self._write_own(recorded)
                return
            try:
                self._gather(recorded)
            except errors.MoeP2pError:  # another rank's block raised, or it died
                self._write_own(recorded)
                raise
        finally:
            hub.close()

    def _gather(self, recorded: Recorded) -> None:
        hub = self._hub
        hub.meet()  # else who goes on sends what is of no step inside to who still records
        ended = hub.match()
        data = hub.gather(recorded.encode())
        if hub.rank == 0:
            clocks = [Clock(*each) for each in zip(self._begun, ended, strict=True)]
            self.trace = Trace.of([Recorded.decode(each) for each in data], clocks)
            write(self.path, self.trace)

    def _write_own(self, recorded: Recorded) -> None:
        """Where ranks cannot gather. Raises nothing: an error is on its way."""
        path = self.path.with_name(f"{self.path.stem}.rank{self._hub.rank}{self.path.suffix}")
        try:
            write(path, Trace.of([recorded], [None]))
        except NotWrittenError as failed:
            log.warning(f"the trace of a block that failed is lost: {failed}")
        else:
            log.warning(f"the trace was not gathered; this rank's own events are in {path}")


class Session:
    """What one process records. A watcher of its engines and communicators."""

    def __init__(self, num_events: int) -> None:
        self._num_events = num_events
        self._counters: weakref.WeakKeyDictionary[Engine, Counter[str]] = (
            weakref.WeakKeyDictionary()
        )
        self._named: dict[int, str] = {}  # what is recorded and not yet taken
        self._engines: list[OfEngine] = []
        self._communicators: list[OfCommunicator] = []
        self._gpu_clock: list[Bounds] = []
        self._gpus: set[int] = set()
        self._busy: deque[Phase] = deque(maxlen=num_events)
        self._num_busy = self._ended_ns = 0
        self._lost: list[str] = []
        self._with_clocks = False

    def begin(self, *, with_clocks: bool = True) -> None:
        self._with_clocks = with_clocks
        if with_clocks and torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._gpu_clock.append(gpu_clock.match(torch.cuda.current_device()))
        kernels.measuring[STAMPS] = 1
        lifetime.watchers.append(self)
        phases.begin(self._take_phase)
        for owner in list(lifetime.owners):
            self.opened(owner)

    def stop(self) -> None:
        kernels.measuring.pop(STAMPS, None)
        if self not in lifetime.watchers:
            return
        lifetime.watchers.remove(self)
        phases.begin(None)
        self._ended_ns = time.monotonic_ns()
        for each in metrics.noted():
            if isinstance(each, phases.Busy):
                self._noting(each, self._take_busy)
        for owner in list(lifetime.owners):
            self.closes(owner)
        if self._gpus and self._with_clocks:
            self._noting(min(self._gpus), lambda gpu: self._gpu_clock.append(gpu_clock.match(gpu)))

    def recorded(self, rank: int) -> Recorded:
        lost = list(self._lost)
        for each in self._named.values():
            lost.append(f"{each} was collected, not closed: its events are lost")
        counts = [(f"engine {each.label!r}", each.overwritten) for each in self._engines]
        counts += [
            (f"communicator {each.number}", each.overwritten) for each in self._communicators
        ]
        counts.append(("requests and updates", self._num_busy - len(self._busy)))
        lost += [
            f"{count} events of {name} were overwritten; raise num_events"
            for name, count in counts
            if count
        ]
        return Recorded(
            rank=rank,
            engines=self._engines,
            communicators=self._communicators,
            gpu_clock=self._gpu_clock[:: max(1, len(self._gpu_clock) - 1)],
            busy=list(self._busy),
            ended_ns=self._ended_ns,
            lost=lost,
        )

    def _take_phase(self, phase: Phase) -> None:
        """Of any thread."""
        self._num_busy += 1
        self._busy.append(phase)

    def _take_busy(self, worker: phases.Busy) -> None:
        for each in worker.under_way():
            self._take_phase(each)

    def opened(self, owner: Any) -> None:
        self._noting(owner, self._begin)

    def closes(self, owner: Any) -> None:
        if self._named.pop(id(owner), None) is not None:
            self._noting(owner, self._take)

    def _noting(self, owner: Any, what: Callable[[Any], None]) -> None:
        """A trace breaks nothing: what cannot be recorded is noted."""
        try:
            what(owner)
        except (errors.MoeP2pError, RuntimeError) as error:
            self._lost.append(f"{_name_of(owner)}: {error}")

    def _begin(self, owner: Any) -> None:
        if isinstance(owner, Engine):
            self._counters[owner] = _sums(owner.record(self._num_events))
        elif isinstance(owner, Communicator):
            call(_record, owner.number, self._num_events)
            if self._with_clocks and not self._gpu_clock and _on_gpu(owner):
                self._gpu_clock.append(gpu_clock.match(torch.cuda.current_device()))
        self._named[id(owner)] = _name_of(owner)

    def _take(self, owner: Any) -> None:
        if isinstance(owner, Engine):
            found = owner.record(0)
            now, before = _sums(found), self._counters[owner]
            self._engines.append(
                OfEngine(
                    number=owner.number,
                    label=owner.label,
                    provider=owner.provider,
                    events=found.events.tolist(),
                    overwritten=found.overwritten,
                    from_start=found.from_start,
                    counters={name: now[name] - before[name] for name in now},
                )
            )
            return
        spans, overwritten, number = call(_record, owner.number, 0)
        rows: list[list[int]] = []
        if (stamps := _stamps(owner)) is not None:
            if stamps.is_cuda:
                torch.cuda.synchronize(stamps.device)
                self._gpus.add(stamps.device.index)
            rows = sorted(stamps[stamps[:, 0] > 0].tolist())
        self._communicators.append(
            OfCommunicator(
                name=owner.name,
                engine=owner.engine.number,
                number=int(number),
                rank=owner.rank,
                world_size=owner.world_size,
                ranks_per_node=owner.ranks_per_node,
                device="cpu" if owner.device is None else "cuda",
                spans=spans.tolist(),
                overwritten=int(overwritten),
                stamps=rows,
                stamped=owner.device is None or stamps is not None,
                facts=recording.facts_of(owner),
            )
        )


def _name_of(owner: Any) -> str:
    if isinstance(owner, Engine):
        return f"engine {owner.label!r}"
    if isinstance(owner, Communicator):
        return f"communicator {owner.number}"
    return f"GPU {owner}" if isinstance(owner, int) else getattr(owner, "name", str(owner))


def _on_gpu(owner: Communicator) -> bool:
    return (stamps := _stamps(owner)) is not None and stamps.is_cuda


def _stamps(owner: Communicator) -> torch.Tensor | None:
    stamps = None if owner.device is None else owner.device.stamps
    return stamps if stamps is not None and len(stamps) else None


def _sums(recording: Recording) -> Counter[str]:
    """Counters of all NICs, which count what was recorded: asked for later, they count more."""
    found: Counter[str] = Counter()
    for nic in recording.counters:
        found.update(nic)
    return found
