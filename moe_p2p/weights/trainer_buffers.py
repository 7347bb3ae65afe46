"""What a trainer has to send: its tensors, their conversions, and writes to all replicas.

Used by trainer.py, which agrees with others on what is sent to whom; nothing here reads the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
from torch import Tensor

from moe_p2p.engine.engine import Engine
from moe_p2p.engine.transfers import Memory
from moe_p2p.errors import TimeoutError, make
from moe_p2p.fleet.client import Deadline
from moe_p2p.machine import phases
from moe_p2p.weights import attempt
from moe_p2p.weights.conversion import Conversions
from moe_p2p.weights.layout import WeightLayout
from moe_p2p.weights.maxima import MaximaExchange, synchronize
from moe_p2p.weights.plan import Maxima, WeightPlan, weight_plan
from moe_p2p.weights.sending import Batch, Prepared, RegionWriter, Replica, Stop, sums

GRACE = 0.25  # part of the timeout, added where the awaited ranks may wait for others themselves
Sending = dict[str, list[Prepared]]  # by engine rank


class TrainerBuffers:
    """device, watermark: as of `WeightTrainer`."""

    def __init__(
        self,
        engine: Engine,
        rank: int,
        plan: WeightPlan,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        watermark: int | None,
    ) -> None:
        self._engine, self._rank, self._device, self._watermark = engine, rank, device, watermark
        self._source, self._tensors, self._lost = plan.source, tensors, frozenset[int]()
        self.writer = RegionWriter(engine, rank)
        self._replicas = {"": Replica("", plan.target.digest, plan, rank)}
        self._registered: dict[str, Memory] = {}
        self._ring: Memory | None = None  # also where nothing is converted
        self._converts = False
        self._is_prepared = False  # all replicas are, with what is known of lost trainers
        self._exchange: MaximaExchange | None = None
        self._grouped: tuple[object, list[tuple[list[int], Batch]]] = ((), [])
        self._sending: tuple[Mapping[str, tuple[str, int]], Sending] = ({}, {})  # of all names
        self._deadline: Deadline | None = None
        self._stop: Stop = lambda missing: None
        self.totals = {"bytes_written": 0, "requests": 0, "staging_bytes": 0}
        self.seconds = {"convert": 0.0, "submit": 0.0, "wait": 0.0}  # of the last update
        self.marks: list[phases.Mark] = []  # the same, one by one, for a trace
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    # --- replicas ---

    def digest(self, replica: str) -> str:
        return self._replicas[replica].digest if replica in self._replicas else ""

    def targets(self, replica: str) -> set[int]:
        """Returns the ranks of this replica that the trainer writes to."""
        prepared = self._replicas[replica].prepared(self._numbers)
        return {each.write.target_rank for each in prepared}

    def add(self, replica: str, layout: WeightLayout) -> None:
        alike = [each for each in self._replicas.values() if each.digest == layout.digest]
        plan = alike[0].plan if alike else weight_plan(self._source, layout).without(self._lost)
        before = dict(self._replicas)
        self._replicas[replica] = Replica(replica, layout.digest, plan, self._rank)
        try:
            self._prepare()
        except BaseException:  # its copies do not fit, say: without it updates go on (`without`)
            self._replicas = before
            raise

    def without(self, lost: frozenset[int]) -> None:
        """Plans anew without the lost trainers: others send their shares. Also prepares what an
        error has left unprepared: called in each update."""
        if lost != self._lost:
            self._replicas = {
                name: Replica(name, each.digest, each.plan.without(lost), self._rank)
                for name, each in self._replicas.items()
            }
            self._lost, self._is_prepared = lost, False
        if not self._is_prepared:
            self._prepare()

    def _prepare(self) -> None:
        self._is_prepared = False
        plans = {each.digest: each.plan for each in self._replicas.values()}
        known = self._conversions.number if self._converts else {}
        if not self._converts or any(
            copy.tensor not in known for plan in plans.values() for copy in plan.copies(self._rank)
        ):
            self._convert_by(
                Conversions(list(plans.values()), self._rank, self._tensors, device=self._device,
                            watermark=self._watermark)
            )  # fmt: skip
        self._grouped, self._sending = ((), []), ({}, {})
        writes = [e.write for r in self._replicas.values() for e in r.prepared(self._numbers)]
        sources = {**self._tensors, **self._conversions.staged}
        names = dict.fromkeys(each.source_tensor for each in writes)
        attempt.check_there(f"trainer {self._rank}", names, sources)
        for name in names:
            staged = self._conversions.staged.get(name)
            if staged is not None:
                assert self._ring is not None
                at = int(staged.storage_offset()) * staged.element_size()
                self.writer.places[name] = self._ring, at
            elif name not in self._registered:
                self._registered[name] = self._engine.register(self._tensors[name])
                self.writer.places[name] = self._registered[name], 0
        self._is_prepared = True

    def _convert_by(self, conversions: Conversions) -> None:
        """In the place of the ones before, whose memory is given back first."""
        if self._ring is not None:
            self._ring.unregister()
        for name in [n for n, (memory, _) in self.writer.places.items() if memory is self._ring]:
            del self.writer.places[name]
        self._grouped = ((), [])
        self._ring, self._converts = None, False
        self._end_exchange()
        self._conversions = conversions
        conversions.allocate()
        self._numbers = self._conversions.number
        buffer = self._conversions.buffer
        self._ring = self._engine.register(buffer) if len(buffer) else None
        self._converts = True
        for each in self._replicas.values():
            each.forget()

    # --- maxima ---

    def exchange(self, digests: Collection[str]) -> MaximaExchange:
        """Makes it anew. digests: of the layouts that it is for, equal on all trainers: what this
        one has known besides is no part of it."""
        self._end_exchange()
        plans = {each.digest: each.plan for each in self._replicas.values()}
        found = dict[Maxima, None]()
        for digest in sorted(digests):  # both ends list cells in one order
            found |= dict.fromkeys(plans[digest].maxima(self._rank))
        self._exchange = MaximaExchange(self._engine, self._rank, found, self._conversions.grids)
        return self._exchange

    def _end_exchange(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = None

    def merge_maxima(self, number: int, names: set[str] | None) -> None:
        assert self._exchange is not None
        self._conversions.maxima(self._conversions.batches(names))
        self._exchange.run(number, self._until)

    @contextmanager
    def bounded(self, stop: Stop, deadline: Deadline) -> Iterator[None]:
        """Bounds all waits inside: by the deadline, and by stop(missing ranks), which may raise."""
        self._stop, self._deadline = stop, deadline
        yield

    def _until(
        self, condition: Callable[[], bool], trainers: tuple[int, ...], may_wait: bool
    ) -> None:
        assert self._deadline is not None
        grace_s = GRACE * self._deadline.timeout_s if may_wait else 0.0
        deadline = self._deadline.later(grace_s)
        who, pause = [f"trainer {i}" for i in trainers], 1e-4
        while not condition():
            if pause > 2e-3:
                self._stop(who)
            if not deadline.left:
                limit = deadline.timeout_s
                raise make(TimeoutError, f"within {limit:g} s no maxima of {', '.join(who)}")
            time.sleep(pause)
            pause = min(pause * 1.3, 0.01)

    # --- bytes ---

    def sending(self, members: Mapping[str, tuple[str, int]], names: set[str] | None) -> Sending:
        """Returns the writes of an update. members: replica and rank of each engine rank in it."""
        if names is None and self._sending[0] == members:
            return self._sending[1]
        who = {place: engine_rank for engine_rank, place in members.items()}
        found: Sending = {}
        for name in dict.fromkeys(replica for replica, _ in members.values()):
            for each in self._replicas[name].prepared(self._numbers):
                engine_rank = who.get((name, each.write.target_rank))
                if engine_rank and (names is None or each.write.name in names):
                    found.setdefault(engine_rank, []).append(each)
        if names is None:
            self._sending = dict(members), found
        return found

    def groups(self, sending: Sending, names: set[str] | None) -> list[tuple[list[int], Batch]]:
        """Returns batches of copies with the writes that follow each; own tensors' writes first."""
        key = (names is None, *((who, self.writer.generation(who)) for who in sending))
        if names is None and self._grouped[0] == key:
            return self._grouped[1]
        by_copy: dict[int, list[tuple[str, Prepared]]] = {}
        for engine_rank, writes in sending.items():
            for each in writes:
                by_copy.setdefault(each.copy, []).append((engine_rank, each))
        found = [(list[int](), self.writer.grouped(by_copy.pop(-1, [])))]
        for batch in self._conversions.batches(names):
            batch = [number for number in batch if number in by_copy]
            chosen = [pair for number in batch for pair in by_copy[number]]
            if batch:
                found.append((batch, self.writer.grouped(chosen)))
        self._grouped = key, found
        return found

    def send(
        self,
        groups: list[tuple[list[int], Batch]],
        imm: int,
        verify: bool,
        reached: Callable[[str], None],
    ) -> dict[str, dict[str, int]]:
        """Converts and writes, batch by batch; returns sums by engine rank and its tensor."""
        assert self._deadline is not None
        found: dict[str, dict[str, int]] = {}
        tensors = {**self._tensors, **self._conversions.staged}
        self.seconds, self.marks = {"convert": 0.0, "submit": 0.0, "wait": 0.0}, []
        on_gpu = [each for each in self._tensors.values() if each.is_cuda]
        if on_gpu:  # values that kernels are still writing
            synchronize(on_gpu[0])
        launched: _Launched | None = None  # the GPU converts it while the one before is submitted

        def submit() -> None:
            nonlocal launched
            if launched is not None:
                self._await(launched)
                self._submit(launched.chosen, imm)
                if verify:
                    sums(launched.chosen.groups, tensors, found)
            launched = None

        for batch, chosen in groups:
            if launched and launched.batch and self._conversions.after(batch) >= launched.batch[0]:
                submit()  # it lies where this one goes
            following = _Launched(batch, chosen, self._convert(batch, launched))
            submit()
            launched = following
        submit()
        reached("converted")
        reached("submitted")
        began = time.monotonic()
        self.writer.finish(None, self._deadline, self._stop)
        self._took("wait", began)
        reached("written")
        return found

    def _took(self, what: str, began: float) -> float:
        """Returns the time."""
        now = time.monotonic()
        self.seconds[what] += now - began
        if phases.take is not None:
            self.marks.append((what, began, now))
        return now

    def _convert(self, batch: list[int], before: _Launched | None) -> torch.cuda.Event | None:
        """Launches it; returns an event at its end, on a GPU. before: it is not submitted yet."""
        if not batch:
            return None
        assert self._deadline is not None
        began = time.monotonic()
        after = self._conversions.after(batch)
        if after >= 0:
            self.writer.finish(after, self._deadline, self._stop)
        self._stop([])
        middle = self._took("wait", began)
        self._conversions.convert(batch)
        end = None
        if self._conversions.buffer.is_cuda:
            end = torch.cuda.Event()  # type: ignore[no-untyped-call]
            end.record(torch.cuda.current_stream(self._conversions.buffer.device))
        oldest = self.writer.oldest()
        if oldest is None and before is not None and before.batch:
            oldest = before.batch[0]
        used = self._conversions.high_water(batch, oldest)
        self.totals["staging_bytes"] = max(self.totals["staging_bytes"], used)
        self._took("convert", middle)
        return end

    def _await(self, launched: _Launched) -> None:
        if launched.end is not None:
            began = time.monotonic()
            launched.end.synchronize()
            self._took("convert", began)

    def _submit(self, chosen: Batch, imm: int) -> None:
        began = time.monotonic()
        self.writer.write(chosen, imm)
        self.totals["bytes_written"] += sum(group.nbytes for group in chosen.groups)
        self.totals["requests"] += len(chosen.groups)
        self._took("submit", began)

    def cancel(self, timeout_s: float) -> None:
        others = self._exchange.take_requests() if self._exchange else []
        self.writer.cancel(others, timeout_s)

    def close(self) -> None:
        """Nothing of it is registered any more. Idempotent."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            with suppress(RuntimeError):
                exchange.close()
        for each in ([self._ring] if self._ring else []) + [*self._registered.values()]:
            with suppress(RuntimeError):  # the engine may be closed
                each.unregister()
        self._registered.clear()
        self._ring, self._converts = None, False


class _Launched(NamedTuple):
    """A batch of copies that is being converted, and the writes that follow."""

    batch: list[int]
    chosen: Batch
    end: torch.cuda.Event | None
