"""A trainer's writes: to which memory of which engine rank, in as few requests as can be.

Used by trainer_buffers.py. A replica is a set of engine ranks with one layout: the engine ranks of
the set-up, or an inference engine that joined. Writes go from the trainer's own tensors or from
copies in its ring.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_p2p.engine import checksum
from moe_p2p.engine.engine import Engine
from moe_p2p.engine.strides import Rows
from moe_p2p.engine.transfers import Memory, Peer, Region, Request
from moe_p2p.errors import MoeP2pError, TimeoutError, make
from moe_p2p.fleet.client import Deadline
from moe_p2p.fleet.member import name_of
from moe_p2p.weights import attempt
from moe_p2p.weights.attempt import PRIORITY
from moe_p2p.weights.plan import WeightPlan, Write


class Prepared(NamedTuple):
    """copy: number of the copy that the bytes come from; -1: the trainer's own tensor."""

    write: Write
    copy: int


class Group(NamedTuple):
    """Writes of one batch with rows alike, from one memory to one region: a single request.

    copy: the first one that it is written from. rows: without offsets.
    """

    engine_rank: str
    copy: int
    memory: Memory
    region: Region
    rows: Rows
    pages: Tensor
    region_pages: Tensor
    writes: list[Write]

    @property
    def nbytes(self) -> int:
        return self.rows.row_bytes * self.rows.num_rows * len(self.pages)


class Batch(NamedTuple):
    """Requests that are submitted in one call, in the order of their copies. table, pages,
    region_pages: as `Engine.write_all` takes them."""

    groups: list[Group]
    table: Tensor
    pages: Tensor
    region_pages: Tensor

    @staticmethod
    def of(groups: list[Group]) -> Batch:
        rows, first = [], 0
        for group in groups:
            one, count = group.rows, len(group.pages)
            strides = (one.source_stride or one.row_bytes, one.target_stride or one.row_bytes)
            numbers = (group.memory.number, group.region.number)
            sizes = (one.row_bytes * one.num_rows, one.row_bytes)
            rows.append((*numbers, *sizes, *strides, first, count))
            first += count
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        return Batch(
            groups,
            torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 8),
            torch.cat([none, *(group.pages for group in groups)]),
            torch.cat([none, *(group.region_pages for group in groups)]),
        )


class Replica:
    """name: "" of the set-up. digest: of its layout. plan: without lost trainers."""

    def __init__(self, name: str, digest: str, plan: WeightPlan, rank: int) -> None:
        self.name, self.digest, self.plan, self._rank = name, digest, plan, rank
        self._prepared: list[Prepared] | None = None

    def prepared(self, copies: Mapping[str, int]) -> list[Prepared]:
        """copies: numbers, by tensor."""
        if self._prepared is None:
            self._prepared = [
                Prepared(each, copies.get(each.source_tensor.removesuffix(":scales"), -1))
                for each in self.plan.of_source(self._rank)
            ]
        return self._prepared

    def forget(self) -> None:
        """Called when the numbers of copies have changed."""
        self._prepared = None


class _Target(NamedTuple):
    """What an engine rank lends: regions that this trainer may write."""

    generation: str
    peer: Peer
    regions: dict[str, tuple[Region, int]]


Stop = Callable[[list[str]], None]  # gets ranks that are waited for; may raise
_UnderWay = deque[tuple[Group, Request]]

# Between two looks whether the wait has a point. Too small: many trainers keep the store's thread
# busy.
_LOOK_S = 0.1
# Writes that were posted end within it, unless their engine rank has been stopped.
_ANSWER_S = 1.0


class RegionWriter:
    """places: of each source tensor, its memory and its first byte there."""

    def __init__(self, engine: Engine, rank: int) -> None:
        self._engine, self._rank = engine, rank
        self.places: dict[str, tuple[Memory, int]] = {}
        self._targets: dict[str, _Target] = {}
        self._direct: _UnderWay = deque()
        self._staged: _UnderWay = deque()  # by copy

    def generation(self, engine_rank: str) -> str:
        found = self._targets.get(engine_rank)
        return found.generation if found else ""

    def connect(self, engine_rank: str, lent: Mapping[str, Any]) -> None:
        """Called at first, and again after an update that failed: engine ranks then lend new
        keys."""
        self.forget(engine_rank)
        peer = self._engine.connect(bytes.fromhex(lent["address"]), priority=PRIORITY)
        try:
            resolved = [
                self._engine.resolve(bytes.fromhex(each), peer, priority=PRIORITY)
                for each in lent["to"].get(str(self._rank), ())
            ]
        except BaseException:
            peer.disconnect()
            raise
        regions = {
            tensor: (resolved[number], offset)
            for tensor, (number, offset) in (lent["tensors"].items() if resolved else ())
        }
        self._targets[engine_rank] = _Target(lent["generation"], peer, regions)

    def forget(self, engine_rank: str) -> None:
        if engine_rank in self._targets:
            with suppress(RuntimeError):  # it may be gone with what failed
                self._targets.pop(engine_rank).peer.disconnect()

    def grouped(self, chosen: Iterable[tuple[str, Prepared]]) -> Batch:
        """Returns requests for writes that may be made together, in the order of their copies."""
        found: dict[object, list[tuple[str, Prepared]]] = {}
        for engine_rank, each in chosen:
            region, _ = self._targets[engine_rank].regions[each.write.target_tensor]
            memory, _ = self.places[each.write.source_tensor]
            key = (engine_rank, region.number, memory.number, each.write.rows[:4])
            found.setdefault(key, []).append((engine_rank, each))
        groups = (self._group(each) for each in found.values())
        return Batch.of(sorted(groups, key=lambda each: each.copy))

    def _group(self, chosen: list[tuple[str, Prepared]]) -> Group:
        engine_rank, first = chosen[0]
        pages: list[tuple[int, int]] = []
        for _, each in chosen:
            region, there = self._targets[engine_rank].regions[each.write.target_tensor]
            memory, here = self.places[each.write.source_tensor]
            pages += [(here + a, there + b) for a, b in each.write.rows.offsets]
        table = torch.tensor(pages, dtype=torch.int64, device="cpu").t().contiguous()
        return Group(
            engine_rank=engine_rank,
            copy=min(each.copy for _, each in chosen),
            memory=memory,
            region=region,
            rows=first.write.rows._replace(offsets=()),
            pages=table[0],
            region_pages=table[1],
            writes=[each.write for _, each in chosen],
        )

    def write(self, batch: Batch, imm: int) -> None:
        if not batch.groups:
            return
        requests = self._engine.write_all(*batch[1:], imm=imm, priority=PRIORITY)
        for group, request in zip(batch.groups, requests, strict=True):
            (self._direct if group.copy < 0 else self._staged).append((group, request))

    def finish(self, copy: int | None, deadline: Deadline, stop: Stop) -> None:
        """Waits for writes from copies up to a number, or for all. Raises UnwrittenError."""
        while self._staged and (copy is None or self._staged[0][0].copy <= copy):
            _await(self._staged, deadline, stop)
        while copy is None and self._direct:
            _await(self._direct, deadline, stop)

    def oldest(self) -> int | None:
        """Number of the first copy from which a write is under way."""
        return self._staged[0][0].copy if self._staged else None

    def cancel(self, others: Iterable[Request], timeout_s: float) -> None:
        """Ends what is under way, so that the tensors may be changed; where an engine rank does not
        answer, which may be stopped, by disconnecting from it."""
        under_way = [*self._direct, *self._staged]
        requests = [*(request for _, request in under_way), *others]
        for request in requests:
            with suppress(RuntimeError):
                request.cancel()
        deadline = Deadline(timeout_s)
        _end(requests, Deadline(min(timeout_s, _ANSWER_S)))
        for group, request in under_way:
            with suppress(RuntimeError):
                if not request.done():
                    self.forget(group.engine_rank)
        _end(requests, deadline)
        self._direct.clear()
        self._staged.clear()


def _end(requests: Iterable[Request], deadline: Deadline) -> None:
    for request in requests:
        with suppress(RuntimeError):
            request.wait(deadline.left)


class UnwrittenError(Exception):
    """A write of parameter `what` to rank `who`, an id, failed."""

    def __init__(self, who: str, what: str, error: MoeP2pError) -> None:
        super().__init__(str(error))
        self.who, self.what, self.error = who, what, error

    def named(self, stages: Mapping[str, float]) -> Exception:
        """The provider's error with parameter and rank. stages: seconds from the attempt's begin;
        a write that began late, because ranks waited for another one, is late itself."""
        text = f"writing {self.what} to {name_of(self.who)}: {self.error}"
        if isinstance(self.error, TimeoutError):
            reached = (f"{stage} after {seconds:.1f} s" for stage, seconds in stages.items())
            text = f"{text}; this attempt was at {', '.join(reached)}"
        return make(type(self.error), text)


def _await(queue: _UnderWay, deadline: Deadline, stop: Stop) -> None:
    group, request = queue[0]
    while True:
        try:
            request.wait(min(deadline.left, _LOOK_S))
        except TimeoutError as error:
            if not deadline.left:
                over = f"{deadline.timeout_s:g} s are over: {error}"
                raise _unwritten(group, make(TimeoutError, over)) from error
            stop([group.engine_rank])
        except MoeP2pError as error:
            raise _unwritten(group, error) from error
        else:
            queue.popleft()
            return


def _unwritten(group: Group, error: MoeP2pError) -> UnwrittenError:
    names = list(dict.fromkeys(write.name for write in group.writes))
    what = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    return UnwrittenError(group.engine_rank, what, error)


def sums(
    groups: Iterable[Group], tensors: Mapping[str, Tensor], found: dict[str, dict[str, int]]
) -> None:
    """Adds 64-bit sums of what is written to `found`, by engine rank and its tensor."""
    for group in groups:
        into = found.setdefault(group.engine_rank, {})
        for name, one in attempt.sums(group.writes, tensors, 0).items():
            into[name] = checksum.add(into.get(name, 0), one)
