"""What an `Engine` gives out: registered memory, peers, their regions, requests."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypedDict, TypeVar

import torch
from torch import Tensor

from moe_p2p import errors
from moe_p2p.engine.awaiting import Awaiting
from moe_p2p.library import call, register_fake

_ops = torch.ops.moe_p2p


class Owner(Protocol):
    """What is used here of an `Engine`, which gives all of this out."""

    number: int
    label: str
    timeout_s: float
    _awaiting: Awaiting

    def _call_waiting(self, op: Callable[..., Any], *args: object) -> Any: ...

    def _forget(self, request: int) -> None: ...


class NicCounters(TypedDict):
    """What one NIC did since its engine was made."""

    bytes_written: int
    writes: int  # posted work requests, immediates alone included, reads not
    immediates_sent: int
    immediates_received: int
    connections_refused: int  # from strangers, to the port of verbs' handshakes
    bytes_read: int
    reads: int  # posted work requests


def counters_from(rows: Tensor) -> list[NicCounters]:
    """rows: [nics, 7] int64, as ops return them."""
    return [
        NicCounters(
            bytes_written=row[0],
            writes=row[1],
            immediates_sent=row[2],
            immediates_received=row[3],
            connections_refused=row[4],
            bytes_read=row[5],
            reads=row[6],
        )
        for row in rows.tolist()
    ]


class Cancelled(NamedTuple):
    """How far a request was that was cancelled, over all NICs."""

    posted_bytes: int  # may have arrived
    posted_writes: int  # work requests, of reads too
    posted_imms: int  # these are counted at the peer, or lost with it
    taken_back_bytes: int  # never posted
    taken_back_imms: int


class Report(NamedTuple):
    """Statistics of a completed request. Times are of `time.monotonic`, in seconds."""

    first_post_at: float | None  # before its first work request was given to a NIC; None: none was
    ended_at: float  # after its last completion was seen, or whatever else ended it
    nbytes: int  # posted
    writes: int  # work requests that were posted, or reads; immediates alone included
    imms: int  # posted
    merged: int  # rows that travelled in the write of the row before; 0 where it did not end well


class Slice(NamedTuple):
    """One piece of a scatter, offsets and sizes in bytes."""

    offset: int
    region: Region
    region_offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class PageRows:
    """How pages lie on both sides, in bytes. Make one, and use it for all requests that are alike.

    page_bytes: what travels of a page.
    stride, region_stride: page p lies p * stride behind the first one. None: page_bytes.
    row_bytes: of a row; divides page_bytes. None: a page is one row.
    row_stride, region_row_stride: row r lies r * row_stride behind its page's begin. None:
        row_bytes.

    `stride` and `row_stride` are of the memory here, the others of the peer's region. Rows make a
    layer, a slice of heads or both one request. Raises InvalidArgumentError where row_bytes is 0.
    """

    page_bytes: int
    stride: int | None = None
    region_stride: int | None = None
    row_bytes: int | None = None
    row_stride: int | None = None
    region_row_stride: int | None = None
    numbers: list[int] = field(init=False, repr=False, compare=False)  # what ops take

    def __post_init__(self) -> None:
        errors.require(
            self.row_bytes != 0,
            "row_bytes is 0, must divide page_bytes, or be None where a page is one row",
        )
        page = self.page_bytes
        row = page if self.row_bytes is None else self.row_bytes
        numbers = [
            page,
            page if self.stride is None else self.stride,
            page if self.region_stride is None else self.region_stride,
            self.row_bytes or 0,
            row if self.row_stride is None else self.row_stride,
            row if self.region_row_stride is None else self.region_row_stride,
        ]
        object.__setattr__(self, "numbers", numbers)

    @classmethod
    def given(cls, rows: PageRows | None, moved: dict[str, Any]) -> PageRows:
        """`rows`, or what its fields make, which are taken as arguments for one release."""
        if moved:
            errors.require(rows is None, f"rows are given, and {', '.join(moved)} beside them")
            values = ", ".join(f"{name}={value!r}" for name, value in moved.items())
            text = f"{', '.join(moved)} became fields of PageRows: rows=PageRows({values})"
            warnings.warn(text, DeprecationWarning, stacklevel=3)
            return cls(**moved)
        if not isinstance(rows, PageRows):
            raise errors.wrong_type("rows", rows, "a PageRows")
        return rows


_Kind = TypeVar("_Kind")


def checked(name: str, value: object, kind: type[_Kind]) -> _Kind:
    """`value`, or InvalidArgumentError where it is no `kind`."""
    if not isinstance(value, kind):
        raise errors.wrong_type(name, value, f"a {kind.__name__}")
    return value


def indices(name: str, value: Tensor) -> Tensor:
    errors.require_type(name, value, Tensor)  # the op's own check lets None pass
    return value


def rest_of(memory: Memory, offset: int) -> int:
    """Bytes of the memory from `offset` on."""
    nbytes = memory.nbytes
    errors.require_type("offset", offset, int, "an int")
    errors.require(0 <= offset <= nbytes, f"offset is {offset}, must be 0 to {nbytes}")
    return nbytes - offset


def table_of(slices: Sequence[Slice]) -> Tensor:
    """[n, 4]: offset, region, offset in the region, bytes."""
    for each in slices:
        checked("slices", each, Slice)
        checked("region of a slice", each.region, Region)
        for name in ("offset", "region_offset", "nbytes"):
            checked(f"{name} of a slice", getattr(each, name), int)
    rows = [[s.offset, s.region.number, s.region_offset, s.nbytes] for s in slices]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(len(rows), 4)


def tensor_from(data: bytes, name: str) -> Tensor:
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise errors.wrong_type(name, data, "bytes")
    # frombuffer takes no device: its tensor is the host's, whatever the default device is.
    if data:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return torch.empty(0, dtype=torch.uint8, device="cpu")


def bytes_from(tensor: Tensor) -> bytes:
    return bytes(tensor.tolist())  # not through numpy, which torch can do without


class Gate(NamedTuple):
    """The moment when a layer of a step is computed, which a write may wait for (`after`).

    signals: number of a `kv.KVSignals`.
    """

    signals: int
    layer: int
    step: int

    def reached(self) -> bool:
        return not shut((self,))


def shut(gates: Iterable[Gate]) -> list[Gate]:
    """Returns the gates that are not reached. Reads each KVSignals once, not once a layer."""
    values: dict[int, list[int]] = {}
    found = []
    for gate in gates:
        if gate.signals not in values:
            values[gate.signals] = call(_ops.signals_values.default, gate.signals).tolist()
        if values[gate.signals][gate.layer] < gate.step:
            found.append(gate)
    return found


class LayerPlace(NamedTuple):
    """Where the pages of one layer begin, here and at the peer, in bytes."""

    memory: Memory
    offset: int
    region: Region
    region_offset: int
    layer: int


class Memory:
    """A registered tensor. Made by `Engine.register`; keeps the tensor alive."""

    def __init__(self, engine: Owner, tensor: Tensor, number: int) -> None:
        self.engine = engine
        self.tensor = tensor
        self.number = number
        self.registered = True

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def descriptor(self) -> bytes:
        """What another engine needs to write and read here (`Engine.resolve`)."""
        number = self.engine.number
        return bytes_from(call(_ops.engine_descriptor.default, number, self.number))

    def unregister(self) -> None:
        """Nothing of a peer reaches the tensor afterwards; requests that use it fail.

        Its grants are revoked. Raises TimeoutError where a peer may still answer a read into it
        (software providers of libfabric), or finish half a write to it (tcp); the tensor then stays
        alive, and a later call tries again.
        """
        call(_ops.engine_unregister.default, self.engine.number, self.number)
        self.registered = False

    def __repr__(self) -> str:
        return f"Memory({self.nbytes} bytes of {self.engine!r})"


class Grant:
    """Memory lent to one peer under a key of its own. Made by `Engine.grant`."""

    def __init__(self, memory: Memory, peer: str, number: int) -> None:
        self.memory = memory
        self.peer = peer
        self._number = number
        self._revoked = False

    @property
    def descriptor(self) -> bytes:
        """What the peer needs to write and read the memory (`Engine.resolve`)."""
        engine = self.memory.engine
        if self._revoked:
            text = f"{engine.label}: the grant for {self.peer} was revoked"
            raise errors.make(errors.ClosedError, text)
        return bytes_from(call(_ops.engine_descriptor.default, engine.number, self._number))

    def revoke(self) -> None:
        """The fence: when it returns no write or read of that peer reaches the memory any more.

        Nobody has to answer for it. The peer's requests that still use the grant fail with
        RemoteAccessError there; other peers, and other memory, are not affected. Idempotent.
        Raises TimeoutError where Memory.unregister does.
        docs/providers.md says what each transport does for it.
        """
        if self.memory.registered and not self._revoked:
            call(_ops.engine_unregister.default, self.memory.engine.number, self._number)
            self._revoked = True

    def __repr__(self) -> str:
        state = "revoked" if self._revoked else f"{self.memory.nbytes} bytes"
        return f"Grant({self.peer!r}, {state})"


class Peer:
    """A connected engine. Made by `Engine.connect`."""

    def __init__(self, engine: Owner, number: int) -> None:
        self.engine = engine
        self.number = number

    def disconnect(self) -> None:
        """Its unfinished requests fail with ClosedError; its regions are gone."""
        call(_ops.engine_disconnect.default, self.engine.number, self.number)


class Region:
    """Memory of a peer that may be written and read. Made by `Engine.resolve`."""

    def __init__(self, engine: Owner, number: int) -> None:
        self.engine = engine
        self.number = number
        self.nbytes = int(call(_ops.engine_region_bytes.default, engine.number, number))

    def __repr__(self) -> str:
        return f"Region({self.nbytes} bytes of a peer)"


class Request:
    """Something submitted. The memory here that it uses must be left alone until it is done.

    `await request` is `wait` in asyncio, with the engine's timeout; a task that is cancelled leaves
    the request as it is.
    """

    def __init__(self, engine: Owner, number: int) -> None:
        self._engine = engine
        self.number = number
        self._finished = False
        self._error: RuntimeError | None = None
        self._cancelled: Cancelled | None = None

    def done(self) -> bool:
        """True once it is done, well or not; `wait` returns or raises accordingly."""
        if self._finished:
            return True
        return bool(call(_ops.engine_poll.default, self._engine.number, self.number))

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when the bytes are visible at the peer, of a read here.

        timeout_s: seconds; None: the engine's. Raises TimeoutError when it passes, and the request
        goes on; else the transfer's own error: PeerDeadError, RemoteAccessError,
        TransportError, CancelledError or ClosedError.
        """
        if self._error is not None:
            raise self._error
        if self._finished:
            return
        limit = self._engine.timeout_s if timeout_s is None else timeout_s
        try:
            self._engine._call_waiting(_ops.engine_wait.default, self.number, limit)
        except errors.TimeoutError:
            raise
        except RuntimeError as error:
            self._finished, self._error = True, error
            raise
        self._finished = True

    def __await__(self) -> Generator[Any, None, None]:
        if not self.done():
            limit = self._engine.timeout_s
            ended = yield from self._engine._awaiting.ended(self.number, limit).__await__()
            if not ended and not self.done():
                self._engine._call_waiting(_ops.engine_wait.default, self.number, 0.0, limit)
        self.wait(0)

    def cancel(self) -> Cancelled | None:
        """Takes back what is not posted; returns what was, and what was not.

        The request ends when its posted part has completed: `wait` then raises CancelledError, all
        of that part has arrived and the memory here may be reused; or it raises that part's own
        error. Any thread may call it, also again: it returns the same. None: the request had ended
        before.
        """
        if self._cancelled is None and not self._finished:
            found = call(_ops.engine_cancel.default, self._engine.number, self.number).tolist()
            self._cancelled = Cancelled(*found) if found else None
        return self._cancelled

    def report(self) -> Report:
        """Of a request that is done, before `wait`: times, bytes and work requests.

        Raises InvalidArgumentError while it is not done, and once it was waited for.
        """
        first, end, *amounts = call(
            _ops.engine_report.default, self._engine.number, self.number
        ).tolist()
        return Report(first / 1e9 if first else None, end / 1e9, *amounts)

    def __del__(self) -> None:
        if not self._finished:
            self._engine._forget(self.number)


# --- for compilers ---


def _fake_number(*args: object) -> torch.SymInt:
    """For ops that return the number of a new object."""
    return torch.library.get_ctx().new_dynamic_size()


for _name in (
    "register",
    "connect",
    "resolve",
    "scatter",
    "write_pages",
    "write_all",
    "write_layers",
    "read",
    "read_pages",
):
    register_fake(f"engine_{_name}", _fake_number)
