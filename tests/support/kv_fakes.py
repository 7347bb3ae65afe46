"""An engine and a network that do nothing by themselves: a test decides what happens next.

As strict as a NIC may be: rows of a request land in any order, one by one, read at that moment from
the source; immediates and completions come any time after their rows; what is posted is not taken
back by `cancel` or `disconnect`, and lands later unless the target's key was withdrawn, or its
connection severed. A NIC may have accepted a row that is not in memory yet: it lands after all,
before the key is withdrawn, or a read of that memory by the NIC, where it is registered in order.
"""

from __future__ import annotations

import dataclasses
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from moe_p2p import kv
from moe_p2p.engine.transfers import LayerPlace, Report
from moe_p2p.errors import ClosedError, PeerDeadError, RemoteAccessError, make
from moe_p2p.kv.channel import Message
from moe_p2p.kv.pair import Pair
from moe_p2p.kv.ring import Copier, Copy, Rows
from moe_p2p.kv.worker import KVWorker
from moe_p2p.machine.transport import Opening


class FakeRequest:
    def __init__(self) -> None:
        self.finished = self.cancelled = self.waited = False
        self.error: Exception | None = None

    def done(self) -> bool:
        return self.finished

    def wait(self, timeout_s: float = 0) -> None:
        assert self.finished, "the test waits for nothing"
        self.waited = True
        if self.error is not None:
            raise self.error

    def report(self) -> Report:
        assert self.finished
        assert not self.waited, "the engine knows it no more"
        return Report(None, 0.0, 0, 0, 0, 0)

    def cancel(self) -> None:
        self.cancelled = True


@dataclasses.dataclass(eq=False)
class Row:
    """One write or read of one row."""

    request: FakeRequest
    source: FakeMemory
    source_at: int
    target: FakeMemory
    target_at: int
    nbytes: int
    is_read: bool
    posted: bool = False
    accepted: bool = False  # by the target's NIC


class FakeMemory:
    def __init__(
        self, engine: FakeEngine, tensor: Tensor, number: int, *, in_order: bool = False
    ) -> None:
        self.engine, self.tensor, self.number = engine, tensor, number
        self.in_order = in_order
        self.valid = True
        self.flat = tensor.reshape(-1).view(torch.uint8)

    @property
    def descriptor(self) -> bytes:
        return struct.pack("<ii", self.engine.number, self.number)

    def unregister(self) -> None:
        self.engine.net.show_accepted(self)
        self.valid = False
        # Own requests that use it fail, and none of their rows moves a byte afterwards.
        self.engine.net.revoke(self)


class FakePeer:
    def __init__(self, engine: FakeEngine, other: FakeEngine, tag: int) -> None:
        self.engine, self.other, self.tag, self.connected = engine, other, tag, True

    @property
    def severed(self) -> bool:
        return any(self.tag in engine.severed for engine in (self.engine, self.other))

    def disconnect(self) -> None:
        self.connected = False
        for operation in self.engine.net.operations:
            if operation.peer is self:
                operation.request.error = make(ClosedError, "disconnected")
                operation.request.cancelled = operation.request.finished = True


@dataclasses.dataclass(eq=False)
class FakeRegion:
    memory: FakeMemory
    peer: FakePeer


@dataclasses.dataclass(eq=False)
class Operation:
    """rows: not landed. imm: delivered once, after all rows landed well."""

    request: FakeRequest
    peer: FakePeer
    rows: list[Row]
    imm: int | None
    target_engine: FakeEngine
    failed: bool = False


class FakeNet:
    def __init__(self) -> None:
        self.engines: list[FakeEngine] = []
        self.accepts = False  # rows are accepted apart from landing
        self.operations: list[Operation] = []
        self.copies: list[FakeCopy] = []  # started, and not done
        self.on_copy: Callable[[FakeCopy], None] = lambda copy: None
        self.on_land: Callable[[Row], None] = lambda row: None

    def revoke(self, memory: FakeMemory) -> None:
        for operation in self.operations:
            local = [row for row in operation.rows if _local(row, operation) is memory]
            if local:
                operation.rows = [row for row in operation.rows if row not in local]
                self._fail(operation, make(ClosedError, "memory was unregistered"))
                operation.request.finished = True

    def show_accepted(self, memory: FakeMemory) -> None:
        """What a NIC has accepted for this memory is in it from now on."""
        for operation in self.operations:
            for row in list(operation.rows):
                if row.accepted and row.target is memory:
                    operation.rows.remove(row)
                    self._land(operation, row)

    def _fail(self, operation: Operation, error: Exception) -> None:
        operation.failed = True
        operation.request.error = operation.request.error or error

    def moves(self) -> list[tuple[str, Any, Row | None]]:
        """All that may happen next."""
        found: list[tuple[str, Any, Row | None]] = [("copy", copy, None) for copy in self.copies]
        for operation in self.operations:
            for row in operation.rows:
                if row.posted:
                    found.append(("land", operation, row))
                    if self.accepts and not row.accepted and not operation.peer.severed:
                        found.append(("accept", operation, row))
                elif operation.request.cancelled or operation.failed:
                    found.append(("drop", operation, row))
                else:
                    found.append(("post", operation, row))
            if not operation.rows:
                if operation.imm is not None and not operation.failed:
                    found.append(("imm", operation, None))
                if not operation.request.finished:
                    found.append(("complete", operation, None))
        return found

    def move(self, what: str, operation: Any, row: Row | None) -> None:
        if what == "copy":
            operation.wait()
            return
        if row is not None:
            if what == "post":
                row.posted = True
                return
            if what == "accept":
                row.accepted = True
                return
            operation.rows.remove(row)
            if what == "land":
                self._land(operation, row)
            else:
                operation.failed = True
        elif what == "imm":
            operation.target_engine.counters[operation.imm] += 1
            operation.imm = None
        else:
            operation.request.finished = True
        over = operation.imm is None or operation.failed
        if operation.request.finished and not operation.rows and over:
            self.operations.remove(operation)

    def _land(self, operation: Operation, row: Row) -> None:
        if operation.peer.severed and not row.accepted:
            self._fail(operation, make(PeerDeadError, "the connection was severed"))
            return
        if not (row.source.valid and row.target.valid):
            self._fail(operation, make(RemoteAccessError, "the key was withdrawn"))
            return
        self.on_land(row)
        data = row.source.flat[row.source_at : row.source_at + row.nbytes]
        row.target.flat[row.target_at : row.target_at + row.nbytes] = data


def _local(row: Row, operation: Operation) -> FakeMemory:
    return row.source if row.source.engine is operation.peer.engine else row.target


class FakeCopy(Copy):
    """A kernel on a stream of its own: it reads and writes when the test says so."""

    def __init__(self, net: FakeNet, rows: Rows, packed: Tensor, *, gather: bool) -> None:
        super().__init__(None)
        self.net, self.rows, self.packed, self.gather = net, rows, packed, gather
        net.copies.append(self)

    def done(self) -> bool:
        return self not in self.net.copies

    def wait(self) -> None:
        if not self.done():
            self.net.copies.remove(self)
            self.net.on_copy(self)
            Copier.copy(_ON_CPU, self.rows, self.packed, gather=self.gather)


_ON_CPU = Copier(torch.device("cpu"), 1)


class FakeCopier(Copier):
    def __init__(self, net: FakeNet) -> None:
        super().__init__(torch.device("cpu"), 1)
        self.net = net

    def copy(self, rows: Rows, packed: Tensor, *, gather: bool) -> Copy:
        return FakeCopy(self.net, rows, packed, gather=gather)


class FakeEngine:
    num_nics = 1
    provider, opening, closed = "fake", Opening("fake", 1, ""), False

    def __init__(self, net: FakeNet) -> None:
        self.net = net
        self.number = len(net.engines)
        net.engines.append(self)
        self.memories: list[FakeMemory] = []
        self.counters: Counter[int | None] = Counter()
        self.severed: set[int] = set()

    @property
    def address(self) -> bytes:
        return struct.pack("<i", self.number)

    def register(self, tensor: Tensor, *, in_order: bool = False) -> FakeMemory:
        self.memories.append(FakeMemory(self, tensor, len(self.memories), in_order=in_order))
        return self.memories[-1]

    def why_no_fence(self) -> str:
        return ""

    def connect(self, address: bytes, *, tag: int = 0) -> FakePeer:
        return FakePeer(self, self.net.engines[struct.unpack("<i", address)[0]], tag)

    def sever(self, tag: int, memories: list[FakeMemory], *, timeout_s: float) -> None:
        self.severed.add(tag)
        for memory in memories:
            if memory.in_order:
                self.net.show_accepted(memory)

    def resolve(self, descriptor: bytes, peer: FakePeer) -> FakeRegion:
        engine, number = struct.unpack("<ii", descriptor)
        return FakeRegion(self.net.engines[engine].memories[number], peer)

    def write_pages(self, memory: FakeMemory, region: FakeRegion, **how: Any) -> FakeRequest:
        rows = [(memory, ours, region.memory, theirs) for ours, theirs in _places(how)]
        return self._submit(region.peer, rows, how["rows"].row_bytes, how["imm"], is_read=False)

    def layer_places(self, places: list[LayerPlace]) -> list[LayerPlace]:
        return places

    def write_layers(self, places: list[LayerPlace], **how: Any) -> list[FakeRequest]:
        return [
            self.write_pages(
                one.memory,  # type: ignore[arg-type]
                one.region,  # type: ignore[arg-type]
                offset=one.offset,
                region_offset=one.region_offset,
                **how,
            )
            for one in places
        ]

    def read_pages(self, memory: FakeMemory, region: FakeRegion, **how: Any) -> FakeRequest:
        rows = [(region.memory, theirs, memory, ours) for ours, theirs in _places(how)]
        return self._submit(region.peer, rows, how["rows"].row_bytes, None, is_read=True)

    def write(self, memory: FakeMemory, region: FakeRegion, **how: Any) -> FakeRequest:
        rows = [(memory, how["offset"], region.memory, how["region_offset"])]
        return self._submit(region.peer, rows, how["nbytes"], how["imm"], is_read=False)

    def read(self, memory: FakeMemory, region: FakeRegion, **how: Any) -> FakeRequest:
        rows = [(region.memory, how["region_offset"], memory, how["offset"])]
        return self._submit(region.peer, rows, how["nbytes"], None, is_read=True)

    def _submit(
        self,
        peer: FakePeer,
        rows: list[tuple[FakeMemory, int, FakeMemory, int]],
        nbytes: int,
        imm: int | None,
        *,
        is_read: bool,
    ) -> FakeRequest:
        if not peer.connected:
            raise make(ClosedError, "the peer was disconnected")
        request = FakeRequest()
        found = [Row(request, *row, nbytes, is_read) for row in rows]
        self.net.operations.append(Operation(request, peer, found, imm, peer.other))
        return request

    def imm_value(self, imm: int) -> int:
        return self.counters[imm]

    def free_imm(self, imm: int) -> int:
        return self.counters.pop(imm, 0)


class FakeVerbs(FakeEngine):
    """Its connections can be severed."""

    provider = "verbs"


def _places(how: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Of each row, here and at the peer."""
    _, stride, region_stride, row_bytes, row_stride, region_row_stride = how["rows"].numbers
    num_rows = how["rows"].page_bytes // row_bytes
    for ours, theirs in zip(how["pages"].tolist(), how["region_pages"].tolist(), strict=True):
        for row in range(num_rows):
            yield (
                how["offset"] + ours * stride + row * row_stride,
                how["region_offset"] + theirs * region_stride + row * region_row_stride,
            )


class FakeChannel:
    """Messages of one direction, delivered one by one, in their order, while it is not cut."""

    def __init__(self) -> None:
        self.queue: deque[bytes] = deque()
        self.closed = False

    def send(self, message: Message) -> None:
        if not self.closed:
            self.queue.append(message.to_bytes())

    def close(self) -> None:
        self.closed = True


class Link:
    """A pair of workers, both ends: what moe_p2p/kv/lease_keeper.py makes with sockets."""

    def __init__(self, one: KVWorker, other: KVWorker) -> None:
        self.workers = (one, other)
        self.channels = (FakeChannel(), FakeChannel())  # of messages from one, from the other
        memories = [worker.register() for worker in self.workers]
        hellos = [w.hello(m, w.worker) for w, m in zip(self.workers, memories, strict=True)]
        self.pairs: list[Pair] = []
        for i, worker in enumerate(self.workers):
            self.pairs.append(worker.meet(memories[i], hellos[1 - i], self.channels[i]))
        for worker, pair in zip(self.workers, self.pairs, strict=True):
            worker.attach(pair)

    def deliver(self, sender: int) -> None:
        """The oldest message that worker `sender` has sent, or the end of its channel."""
        channel, to = self.channels[sender], 1 - sender
        if channel.queue:
            data = channel.queue.popleft()
            header = int.from_bytes(data[4:8], "little")
            self.workers[to].on_message(self.pairs[to], Message.parse(data[8:], header))
        elif channel.closed:
            self.workers[to].lose(self.pairs[to], "its connection ended")

    def can_deliver(self, sender: int) -> bool:
        to = self.pairs[1 - sender]
        return bool(self.channels[sender].queue or (self.channels[sender].closed and not to.lost))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def cache_of(layout: kv.KVLayout, rank: int, num_pages: int, device: str = "cpu") -> kv.KVCache:
    memory, sizes = kv.dense_memory(layout, rank, num_pages)
    tensors = tuple(torch.zeros(max(size, 1), dtype=torch.uint8, device=device) for size in sizes)
    pages = {group.name: num_pages for group in layout.groups}
    return kv.KVCache(layout, rank, memory.layers, tensors, pages)
