"""The transfer engine for users: one-sided writes and reads between processes, for KV or weights.

There is no world here: each engine gives its descriptors to any peer, in any way, and peers
connect and leave at any time. A write may carry an immediate, a number that the receiver counts;
when an immediate was counted, the bytes of that same write are there. Writes may arrive in any
order.

    receiver = Engine()                          sender = Engine()
    inbox = receiver.register(pages)             source = sender.register(my_pages)
    send(inbox.descriptor) ------------------->  region = sender.resolve(received)
    receiver.wait_imm(7, count)                  sender.write(source, region, imm=7).wait()

Immediates are counted per write, as each call documents; R is the sender's number of NICs.

`priority` of a request is 0 to 2: MoE (communicators on this engine), KV (the default), weights.
Requests of a lower number go first; docs/transfer_engine.md says how long they may have to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_p2p import errors
from moe_p2p.engine.awaiting import Awaiting
from moe_p2p.engine.communicators import Communicators
from moe_p2p.engine.config import EngineConfig
from moe_p2p.engine.lifetime import Closing, Owner, close_and_await
from moe_p2p.engine.metrics import Family, counter, note, of_nics
from moe_p2p.engine.recording import Recording
from moe_p2p.engine.transfers import (
    Gate,
    Grant,
    LayerPlace,
    Memory,
    NicCounters,
    PageRows,
    Peer,
    Region,
    Request,
    Slice,
    bytes_from,
    checked,
    counters_from,
    indices,
    rest_of,
    table_of,
    tensor_from,
)
from moe_p2p.library import call, refuse_lazy
from moe_p2p.machine import transport

_ops = torch.ops.moe_p2p


class Engine(Owner):
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
        errors.require_type("config", config, EngineConfig, "an EngineConfig")
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
        self._gpu = gpu
        self.timeout_s = config.timeout_s
        self.arrivals = config.arrivals  # EngineConfig.arrivals
        self.number = int(
            call(
                _ops.engine_create.default,
                self.provider,
                self.opening.num_nics,
                transport.with_row_kernel(self.provider, self.opening.settings, gpu),
                label,
                config.wait,
                config.proxy_cpu,
            )
        )
        self.num_nics = self.opening.num_nics
        self.communicators = Communicators()
        self._waiting: list[None] = []  # one for each thread in a call that waits
        self._from_start = False  # the recording that is being made
        self._closing = Closing(
            self, close_and_await, _ops.engine_close.default, self.number, self._waiting
        )
        self._awaiting = Awaiting(self.number)
        self._polled: dict[int, Request] = {}
        self._poll_queue: int | None = None
        note(self)

    @property
    def address(self) -> bytes:
        """What another engine needs to connect. Descriptors contain it."""
        return bytes_from(call(_ops.engine_address.default, self.number))

    @property
    def closed(self) -> bool:
        """True also in a child forked from the process that made it."""
        return bool(self._closing.why_closed)

    def register(self, tensor: Tensor, *, in_order: bool = False) -> Memory:
        """Lets transfers from here use a contiguous tensor, and peers write to it and read it.

        GPU memory of any allocator, but not managed memory; "loopback" takes memory of one GPU per
        engine. What a kernel writes must be done before `write` is called (synchronize its stream
        or event), and kernels launched after `wait_imm`, or `wait` of a read, on the tensor's GPU
        see what arrived. in_order: for `sever`, by NICs that have it.
        Raises InvalidArgumentError, and UnavailableError where the NIC cannot reach GPU memory.
        """
        errors.require_type("tensor", tensor, Tensor)
        refuse_lazy(tensor=tensor)
        self._check_gpu(tensor.device)
        number = call(_ops.engine_register.default, self.number, tensor, in_order)
        return Memory(self, tensor, int(number))

    def _check_gpu(self, device: torch.device) -> None:
        """The kernel that copies for a software NIC is loaded for one GPU, and starts there."""
        errors.require(
            device.type != "cuda"
            or self._gpu in (None, device.index)
            or self.provider not in transport.SOFTWARE,
            f"{self.label}: memory of GPU {device.index} at an engine of GPU {self._gpu}; make one "
            f"with gpu={device.index}",
        )

    def why_no_fence(self) -> str:
        """Why a peer that is stopped in the middle of a write may finish it after `unregister` and
        `revoke`; empty: it cannot. Of some software providers of libfabric (docs/providers.md)."""
        return str(call(_ops.engine_why_no_fence.default, self.number))

    def grant(self, memory: Memory, peer: str) -> Grant:
        """Lets one peer, and no other, write and read `memory` until `Grant.revoke`.

        A grant has a key of its own: give `descriptor` of it, and not of the memory, to that peer.
        peer: its name in errors. It costs a registration, so make it with the connection.
        """
        lent = checked("memory", memory, Memory).number
        number = int(call(_ops.engine_grant.default, self.number, lent))
        return Grant(memory, peer, number)

    def connect(self, address: bytes, *, priority: int = 1, tag: int = 0) -> Peer:
        """Connects to the engine of `address`, which need not do anything.

        Each call makes connections of their own, in the NIC's class for `priority` where there are
        classes (docs/providers.md). tag: a number by which either end may `sever` them.
        """
        data = tensor_from(address, "address")
        number = call(_ops.engine_connect.default, self.number, data, priority, tag)
        return Peer(self, int(number))

    def sever(self, tag: int, memories: Sequence[Memory], *, timeout_s: float = 1.0) -> None:
        """The fence by queue pair, of verbs (docs/providers.md).

        When it returns, nothing of connections of `tag` changes the memories any more, which were
        registered in_order; later ones are refused, and no immediate comes over them. Disconnect
        own peers first. Over loopback immediates alone are fenced. Raises UnavailableError where a
        transport has no such fence, TimeoutError: call it again.
        """
        numbers = [checked("memories", memory, Memory).number for memory in memories]
        call(_ops.engine_sever.default, self.number, tag, numbers, timeout_s)

    def resolve(self, descriptor: bytes, peer: Peer | None = None, *, priority: int = 1) -> Region:
        """The memory of `descriptor`, for transfers.

        Connects to its owner unless `peer` is it, or it is connected for `priority`. Communicators
        on this engine have priority 0, so 1 and 2 share no connection with them.
        """
        number = call(
            _ops.engine_resolve.default,
            self.number,
            tensor_from(descriptor, "descriptor"),
            None if peer is None else checked("peer", peer, Peer).number,
            priority,
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
        priority: int = 1,
    ) -> Request:
        """Writes nbytes (None: all from `offset` on), cut into R shards, one per NIC.

        imm: 0 to 2^31 - 1, counted R times at the peer. Raises InvalidArgumentError for a range
        outside the memory or the region, before anything is sent.
        """
        number = call(
            _ops.engine_write.default,
            self.number,
            checked("memory", memory, Memory).number,
            offset,
            checked("region", region, Region).number,
            region_offset,
            rest_of(memory, offset) if nbytes is None else nbytes,
            imm,
            priority,
        )
        return Request(self, number)

    def write_pages(
        self,
        memory: Memory,
        region: Region,
        *,
        pages: Tensor,
        region_pages: Tensor,
        rows: PageRows | None = None,
        offset: int = 0,
        region_offset: int = 0,
        imm: int | None = None,
        imm_per_page: bool = True,
        priority: int = 1,
        after: Gate | None = None,
        **moved: Any,
    ) -> Request:
        """Writes page pages[i] of `memory` to page region_pages[i] of `region`, for all i.

        pages, region_pages: int64 [n], numbers of pages. rows: how pages lie behind `offset` here
        and behind `region_offset` there. Pages and rows that follow each other on both sides travel
        as one, unless imm is counted per page.
        imm: counted n times at the peer; with imm_per_page=False R times, once by each NIC after
        all that it carried. Pages of several rows want the latter.
        after: nothing is posted before that layer was signalled (`kv.KVSignals`).
        Raises InvalidArgumentError for pages outside the memory or the region.
        """
        number = call(
            _ops.engine_write_pages.default,
            self.number,
            checked("memory", memory, Memory).number,
            offset,
            checked("region", region, Region).number,
            region_offset,
            PageRows.given(rows, moved).numbers,
            indices("pages", pages),
            indices("region_pages", region_pages),
            imm,
            imm_per_page,
            priority,
            [] if after is None else list(after),
        )
        return Request(self, number)

    def layer_places(self, places: Sequence[LayerPlace]) -> Tensor:
        """What `write_layers` takes: made once, for memory and regions that stay."""
        rows = [
            (
                checked("memory", each.memory, Memory).number,
                each.offset,
                checked("region", each.region, Region).number,
                each.region_offset,
                each.layer,
            )
            for each in places
        ]
        return torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 5)

    def write_layers(
        self,
        places: Tensor,
        *,
        rows: PageRows,
        pages: Tensor,
        region_pages: Tensor,
        imm: int | None = None,
        priority: int = 1,
        after: tuple[int, int] | None = None,
    ) -> list[Request]:
        """The same pages of several layers: `write_pages` of each, imm_per_page=False, in one call.

        places: `layer_places`. after: number and step of the `kv.KVSignals` whose layers are waited
        for. All are submitted, or, where an argument is wrong, none.
        """
        first = call(
            _ops.engine_write_layers.default,
            self.number,
            indices("places", places),
            checked("rows", rows, PageRows).numbers,
            indices("pages", pages),
            indices("region_pages", region_pages),
            imm,
            priority,
            [] if after is None else list(after),
        )
        return [Request(self, number) for number in range(int(first), int(first) + len(places))]

    def write_all(
        self,
        table: Tensor,
        pages: Tensor,
        region_pages: Tensor,
        *,
        imm: int | None = None,
        priority: int = 1,
    ) -> list[Request]:
        """Requests of any memories and regions: `write_pages` of each, imm_per_page=False.

        table: int64 [n, 8], of each memory.number, region.number, page_bytes, row_bytes,
        row_stride, region_row_stride, and its part of the pages: the first one, and how many.
        Pages are given by their first byte. All are submitted, or, where an argument is wrong,
        none.
        """
        op = _ops.engine_write_all.default
        first = int(call(op, self.number, table, pages, region_pages, imm, priority))
        return [Request(self, number) for number in range(first, first + len(table))]

    def read(
        self,
        memory: Memory,
        region: Region,
        *,
        nbytes: int | None = None,
        offset: int = 0,
        region_offset: int = 0,
        priority: int = 1,
    ) -> Request:
        """Reads nbytes of `region` into `memory` (None: all from `offset` on).

        The peer does nothing for it and does not learn of it. Arguments and errors as in `write`.
        After a failure any of these bytes of `memory` may have been overwritten.
        """
        number = call(
            _ops.engine_read.default,
            self.number,
            checked("memory", memory, Memory).number,
            offset,
            checked("region", region, Region).number,
            region_offset,
            rest_of(memory, offset) if nbytes is None else nbytes,
            priority,
        )
        return Request(self, int(number))

    def read_pages(
        self,
        memory: Memory,
        region: Region,
        *,
        pages: Tensor,
        region_pages: Tensor,
        rows: PageRows | None = None,
        offset: int = 0,
        region_offset: int = 0,
        priority: int = 1,
        **moved: Any,
    ) -> Request:
        """Reads page region_pages[i] of `region` into page pages[i] of `memory`, for all i.

        Arguments as in `write_pages`; a page of `memory` that is named twice may end up mixed.
        """
        number = call(
            _ops.engine_read_pages.default,
            self.number,
            checked("memory", memory, Memory).number,
            offset,
            checked("region", region, Region).number,
            region_offset,
            PageRows.given(rows, moved).numbers,
            indices("pages", pages),
            indices("region_pages", region_pages),
            priority,
        )
        return Request(self, int(number))

    def scatter(
        self,
        memory: Memory,
        slices: Sequence[Slice],
        *,
        by_bytes: bool = False,
        imm: int | None = None,
        priority: int = 1,
    ) -> Request:
        """Writes each slice of `memory` to its region, also to several peers at once.

        Slice i travels on NIC i mod R and counts imm once at its peer; with by_bytes each slice is
        cut into R shards and counts it R times.
        """
        from_, table = checked("memory", memory, Memory).number, table_of(slices)
        number = call(
            _ops.engine_scatter.default, self.number, from_, table, by_bytes, imm, priority
        )
        return Request(self, number)

    def send_imm(self, peer: Peer, imm: int, *, priority: int = 1) -> Request:
        """Sends an immediate without bytes; counted once at the peer."""
        to = checked("peer", peer, Peer).number
        return Request(self, call(_ops.engine_imm.default, self.number, to, imm, priority))

    def wait_imm(self, imm: int, count: int, timeout_s: float | None = None) -> int:
        """Waits until `imm` was counted `count` times in all; returns how often it was.

        Counters grow until `free_imm`: a second round waits for twice the count. Raises
        TimeoutError with how many arrived, ResourceExhaustedError when all counters are taken.
        """
        limit = self.timeout_s if timeout_s is None else timeout_s
        return int(self._call_waiting(_ops.engine_imm_wait.default, imm, count, limit))

    def _call_waiting(self, op: Callable[..., Any], *args: object) -> Any:
        """`call` of an op that waits, which close() waits for."""
        self._waiting.append(None)
        try:
            return call(op, self.number, *args)
        finally:
            self._waiting.pop()

    def watch(self, *requests: Request) -> None:
        """Makes `poll` return these requests once they have ended, also when they have by now.

        A request is watched or awaited (`await request`), in one event loop, not both.
        """
        for request in requests:
            number = checked("request", request, Request).number
            self._polled[number] = request
            try:
                call(_ops.engine_watch.default, self.number, self._queue(), number)
            except RuntimeError:
                self._polled.pop(number, None)
                raise

    def poll(self, timeout_s: float = 0.0) -> list[Request]:
        """Returns watched requests that have ended since the last call, well or not.

        Waits up to timeout_s until there is one; `wait` of each returns at once, or raises what it
        ended with. For one thread, and any number of requests.
        """
        ended = call(_ops.engine_take.default, self.number, self._queue(), timeout_s).tolist()
        return [self._polled.pop(number) for number in ended]

    def fileno(self) -> int:
        """A descriptor that is readable when `poll` has something, for `select` and the like.

        Of the engine: do not read or close it.
        """
        return int(call(_ops.engine_queue_fd.default, self.number, self._queue()))

    def _queue(self) -> int:
        if self._poll_queue is None:
            self._poll_queue = int(call(_ops.engine_queue.default, self.number))
        return self._poll_queue

    def _forget(self, request: int) -> None:
        try:
            if not self.closed:
                _ops.engine_forget.default(self.number, request)
        except RuntimeError:
            return  # closed between this check and the call

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
        return counters_from(call(_ops.engine_counters.default, self.number))

    def metrics(self) -> list[Family]:
        """For moe_p2p.prometheus_text."""
        if self.closed:
            return []
        own = {"engine": str(self.number), "name": self.label}
        names = transport.named_in(self.provider, self.opening.settings)
        if len(names) != self.num_nics:
            names = [str(i) for i in range(self.num_nics)]
        discarded = "Immediates that could not be counted"
        return [
            *of_nics(own, names, self.counters()),
            counter("engine_discarded_immediates", discarded, [(own, self.discarded_imms)]),
        ]

    def record(self, num_events: int) -> Recording:
        """Records the newest num_events of what the polling thread does from now on; 0: no more.

        Returns what was recorded since it was called last (moe_p2p/engine/recording.py). An event
        takes 40 bytes here, and a look at the clock of the polling thread. Raises
        InvalidArgumentError for more than 2**24, TimeoutError where the thread does not answer.
        """
        events, overwritten, rows = call(_ops.engine_record.default, self.number, num_events)
        counters = counters_from(rows)
        from_start, self._from_start = (
            self._from_start,
            not any(value for nic in counters for value in nic.values()),
        )
        return Recording(events, int(overwritten), counters, from_start and not overwritten)

    def close(self) -> None:
        """Idempotent. Waiters wake with ClosedError. Communicators on the engine keep it alive."""
        self._closing()
        self._awaiting.close()

    def __enter__(self) -> Engine:
        if self.closed:
            raise errors.make(errors.ClosedError, f"{self.label}: the engine is closed")
        return self

    def __repr__(self) -> str:
        state = self._closing.why_closed or f"{self.num_nics} NICs"
        return f"Engine({self.label!r}, {self.provider}, {state})"
