"""The transfer engine for users: one-sided writes between processes, for KV pages or weights.

There is no world here: each engine gives its descriptors to any peer, in any way, and peers
connect and leave at any time. A write may carry an immediate, a number that the receiver counts;
when an immediate was counted, the bytes of that same write are there. Writes may arrive in any
order.

    receiver = Engine()                          sender = Engine()
    inbox = receiver.register(pages)             source = sender.register(my_pages)
    send(inbox.descriptor) ------------------->  region = sender.resolve(received)
    receiver.wait_imm(7, count)                  sender.write(source, region, imm=7).wait()

Immediates are counted per write, as each call documents; R is the sender's number of NICs.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from moe_p2p import errors
from moe_p2p.config import EngineConfig
from moe_p2p.lifetime import Closing, NotCopied
from moe_p2p.nics import transport
from moe_p2p.ops import call

_ops = torch.ops.moe_p2p


class NicCounters(TypedDict):
    """What one NIC did since its engine was made."""

    bytes_written: int
    writes: int  # posted work requests
    immediates_sent: int
    immediates_received: int
    connections_refused: int  # from strangers, to the port of verbs' handshakes


class Slice(NamedTuple):
    """One piece of a scatter, offsets and sizes in bytes."""

    offset: int
    region: Region
    region_offset: int
    nbytes: int


def tensor_from(data: bytes) -> Tensor:
    # frombuffer takes no device: its tensor is the host's, whatever the default device is.
    if data:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return torch.empty(0, dtype=torch.uint8, device="cpu")


def bytes_from(tensor: Tensor) -> bytes:
    return bytes(tensor.tolist())  # not through numpy, which torch can do without


class Memory:
    """A registered tensor. Made by `Engine.register`; keeps the tensor alive."""

    def __init__(self, engine: Engine, tensor: Tensor, number: int) -> None:
        self.engine = engine
        self.tensor = tensor
        self.number = number

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def descriptor(self) -> bytes:
        """What another engine needs to write here (`Engine.resolve`)."""
        number = self.engine.number
        return bytes_from(call(_ops.engine_descriptor.default, number, self.number))

    def unregister(self) -> None:
        """No peer's write reaches the tensor afterwards; requests that read from it fail."""
        call(_ops.engine_unregister.default, self.engine.number, self.number)

    def __repr__(self) -> str:
        return f"Memory({self.nbytes} bytes of {self.engine!r})"


class Peer:
    """A connected engine. Made by `Engine.connect`."""

    def __init__(self, engine: Engine, number: int) -> None:
        self.engine = engine
        self.number = number

    def disconnect(self) -> None:
        """Its unfinished requests fail with ClosedError; its regions are gone."""
        call(_ops.engine_disconnect.default, self.engine.number, self.number)


class Region:
    """Memory of a peer that may be written to. Made by `Engine.resolve`."""

    def __init__(self, engine: Engine, number: int) -> None:
        self.engine = engine
        self.number = number
        self.nbytes = int(call(_ops.engine_region_bytes.default, engine.number, number))

    def __repr__(self) -> str:
        return f"Region({self.nbytes} bytes of a peer)"


class Request:
    """Something submitted. The memory it reads must stay as it is until it is done."""

    def __init__(self, engine: Engine, number: int) -> None:
        self._engine = engine
        self._number = number
        self._finished = False

    def done(self) -> bool:
        """True once it is done, well or not; `wait` returns or raises accordingly."""
        if self._finished:
            return True
        return bool(call(_ops.engine_poll.default, self._engine.number, self._number))

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when the bytes are visible at the peer.

        timeout_s: seconds; None: the engine's. Raises TimeoutError when it passes, and the request
        goes on; else the transfer's own error: PeerDeadError, RemoteAccessError,
        TransportError or ClosedError.
        """
        if self._finished:
            return
        limit = self._engine.timeout_s if timeout_s is None else timeout_s
        try:
            call(_ops.engine_wait.default, self._engine.number, self._number, limit)
        except errors.TimeoutError:
            raise
        except RuntimeError:
            self._finished = True
            raise
        self._finished = True

    def __del__(self) -> None:
        if not self._finished and not self._engine.closed:
            self._engine._forget(self._number)


class Engine(NotCopied):
    """NICs of one GPU or CPU rank, with the thread that owns them.

    config: transport, NICs, settings and deadline. label: used in errors.
    gpu: CUDA device whose memory will be registered. None: host memory.
    share: (i, n): the i-th of n engines that divide this host's NICs, if `gpu` does not decide.

    Any thread may call it. Raises UnavailableError when the provider cannot run here. A forked
    child makes its own: calls on an engine of its parent raise ClosedError and change nothing.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        label: str = "engine",
        gpu: int | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        config = EngineConfig() if config is None else config
        choice = transport.choose(config.transport, nics=config.nics)
        pci = "" if gpu is None else transport.pci_of(gpu)
        self.opening = transport.open_with(
            choice.provider,
            config.provider_settings,
            transport.Wish(config.nics_per_rank, config.nics, pci, share),
        )
        if choice.automatic:
            transport.announce(label, choice, self.opening)
        self.provider = choice.provider
        self.label = label
        self.timeout_s = config.timeout_s
        self.number = int(
            call(
                _ops.engine_create.default,
                self.provider,
                self.opening.num_nics,
                self.opening.settings,
                label,
                config.wait,
                config.proxy_cpu,
            )
        )
        self.num_nics = self.opening.num_nics
        self.next_communicator = 0  # numbers below it were used by communicators on this engine
        self._closing = Closing(self, _ops.engine_close.default, self.number)

    @property
    def address(self) -> bytes:
        """What another engine needs to connect. Descriptors contain it."""
        return bytes_from(call(_ops.engine_address.default, self.number))

    @property
    def closed(self) -> bool:
        """True also in a child forked from the process that made it."""
        return bool(self._closing.why_closed)

    def register(self, tensor: Tensor) -> Memory:
        """Lets writes from here read a contiguous tensor, and peers write to it.

        GPU memory of any allocator, but not managed memory; "loopback" takes memory of one GPU per
        engine. What a kernel writes must be done before `write` is called (synchronize its stream
        or event), and kernels launched after `wait_imm` on the tensor's GPU see what arrived.
        Raises InvalidArgumentError, and UnavailableError where the NIC cannot reach GPU memory.
        """
        return Memory(self, tensor, int(call(_ops.engine_register.default, self.number, tensor)))

    def connect(self, address: bytes) -> Peer:
        """Connects to the engine of `address`, which need not do anything."""
        number = call(_ops.engine_connect.default, self.number, tensor_from(address))
        return Peer(self, int(number))

    def resolve(self, descriptor: bytes, peer: Peer | None = None) -> Region:
        """The memory of `descriptor`, to write to. Connects to its owner unless `peer` is it."""
        number = call(
            _ops.engine_resolve.default,
            self.number,
            tensor_from(descriptor),
            None if peer is None else peer.number,
        )
        return Region(self, int(number))

    def write(
        self,
        memory: Memory,
        region: Region,
        *,
        nbytes: int | None = None,
        offset: int = 0,
        region_offset: int = 0,
        imm: int | None = None,
    ) -> Request:
        """Writes nbytes (None: all from `offset` on), cut into R shards, one per NIC.

        imm: 0 to 2^31 - 1, counted R times at the peer. Raises InvalidArgumentError for a range
        outside the memory or the region, before anything is sent.
        """
        number = call(
            _ops.engine_write.default,
            self.number,
            memory.number,
            offset,
            region.number,
            region_offset,
            memory.nbytes - offset if nbytes is None else nbytes,
            imm,
        )
        return Request(self, number)

    def write_pages(
        self,
        memory: Memory,
        region: Region,
        *,
        page_bytes: int,
        pages: Tensor,
        region_pages: Tensor,
        stride: int | None = None,
        region_stride: int | None = None,
        offset: int = 0,
        region_offset: int = 0,
        imm: int | None = None,
    ) -> Request:
        """Writes page pages[i] of `memory` to page region_pages[i] of `region`, for all i.

        Page p lies at offset + p * stride bytes (None: page_bytes). pages, region_pages: int64 [n].
        imm is counted n times at the peer.
        """
        number = call(
            _ops.engine_write_pages.default,
            self.number,
            memory.number,
            region.number,
            page_bytes,
            pages,
            page_bytes if stride is None else stride,
            offset,
            region_pages,
            page_bytes if region_stride is None else region_stride,
            region_offset,
            imm,
        )
        return Request(self, number)

    def scatter(
        self,
        memory: Memory,
        slices: Sequence[Slice],
        *,
        by_bytes: bool = False,
        imm: int | None = None,
    ) -> Request:
        """Writes each slice of `memory` to its region, also to several peers at once.

        Slice i travels on NIC i mod R and counts imm once at its peer; with by_bytes each slice is
        cut into R shards and counts it R times.
        """
        rows = [[s.offset, s.region.number, s.region_offset, s.nbytes] for s in slices]
        table = torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(len(rows), 4)  # [n, 4]
        number = call(_ops.engine_scatter.default, self.number, memory.number, table, by_bytes, imm)
        return Request(self, number)

    def send_imm(self, peer: Peer, imm: int) -> Request:
        """Sends an immediate without bytes; counted once at the peer."""
        return Request(self, call(_ops.engine_imm.default, self.number, peer.number, imm))

    def wait_imm(self, imm: int, count: int, timeout_s: float | None = None) -> int:
        """Waits until `imm` was counted `count` times in all; returns how often it was.

        Counters grow until `free_imm`: a second round waits for twice the count. Raises
        TimeoutError with how many arrived, ResourceExhaustedError when all counters are taken.
        """
        limit = self.timeout_s if timeout_s is None else timeout_s
        return int(call(_ops.engine_imm_wait.default, self.number, imm, count, limit))

    def imm_value(self, imm: int) -> int:
        """Returns how often `imm` was counted so far."""
        return int(call(_ops.engine_imm_value.default, self.number, imm))

    def free_imm(self, imm: int) -> int:
        """Gives the counter of `imm` back; returns how often it was counted.

        An engine counts 4,096 values at a time, each from its first immediate on. For users who
        number their transfers: call it once all immediates of a value have arrived; a later one
        counts from 0. Raises InvalidArgumentError while another thread waits for the value.
        """
        return int(call(_ops.engine_imm_free.default, self.number, imm))

    @property
    def discarded_imms(self) -> int:
        """Immediates that arrived and could not be counted: with values beyond the 4,096, or for
        communicators that were closed."""
        return int(call(_ops.engine_imm_discarded.default, self.number))

    def counters(self) -> list[NicCounters]:
        """Per NIC, since the engine was made."""
        rows = call(_ops.engine_counters.default, self.number).tolist()  # [nics, 5]
        return [
            NicCounters(
                bytes_written=row[0],
                writes=row[1],
                immediates_sent=row[2],
                immediates_received=row[3],
                connections_refused=row[4],
            )
            for row in rows
        ]

    def close(self) -> None:
        """Idempotent. Waiters wake with ClosedError. Communicators on the engine keep it alive."""
        self._closing()

    def _forget(self, request: int) -> None:
        try:
            _ops.engine_forget.default(self.number, request)
        except RuntimeError:
            return  # closed between this check and the call

    def __enter__(self) -> Engine:
        if self.closed:
            raise errors.make(errors.ClosedError, f"{self.label}: the engine is closed")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = self._closing.why_closed or f"{self.num_nics} NICs"
        return f"Engine({self.label!r}, {self.provider}, {state})"
