"""Staging memory of a worker, in parts, what the packed writes are, and copies between the memory
and KV pages: on the CPU, or on a stream of the GPU.

A write takes parts that follow each other: a few, because Python takes as long for a small write as
for a large one, but an eighth of the ring at most, because others are gathered, written and
scattered meanwhile. A part is held like a page: by the sender until its NIC has read it, by the
receiver from the grant until it was scattered, or, after a cancel, until the sender has drained or
was fenced. Each use has a number of its own by which its immediates are counted, so a late one
counts for nobody. Used by moe_p2p/kv/packing.py (gather) and moe_p2p/kv/unpacking.py (scatter).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from moe_p2p.engine.engine import Engine
from moe_p2p.errors import ProtocolError, make, require
from moe_p2p.kv.footer import Slot, slots_for
from moe_p2p.kv.link import KVLink
from moe_p2p.kv.memory import KVRequest
from moe_p2p.library import call
from moe_p2p.machine import jit
from moe_p2p.machine.driver import relaxed_captures

_ALIGN = 256  # of parts: 16-byte accesses, and no line of a cache is of two parts
_HEADER = struct.Struct("<QIIQQQQ")  # nonce, layer, request, begin, end, first row, rows
HEADER_BYTES = _HEADER.size


class Parts(NamedTuple):
    """Where parts lie, as both sides must know it. A part's header lies in the control row of its
    number; numbers of requests lie below `first`."""

    first: int
    part_bytes: int

    def offset(self, number: int) -> int:
        return (number - self.first) * self.part_bytes


class Ring:
    """first: number of its first part. It has none where the link packs nothing. engine: where
    immediates of its parts arrive; None: not here."""

    def __init__(
        self, link: KVLink, device: torch.device, first: int, engine: Engine | None = None
    ) -> None:
        self.parts = Parts(first, -(-link.packed_write_bytes // _ALIGN) * _ALIGN)
        self.num_parts = link.ring_bytes // self.parts.part_bytes if link.pack is not False else 0
        self.most_parts = max(self.num_parts // 8, 1)  # of a write
        self.num_sms = link.num_sms
        require(
            self.num_parts >= 1 or link.pack is False,
            f"KVLink.ring_bytes is {link.ring_bytes}, must hold a packed write of "
            f"{self.parts.part_bytes} bytes",
        )
        self.slots = slots_for(self.num_parts, engine, first=first)
        nbytes = self.num_parts * self.parts.part_bytes
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if self.tensor.is_cuda:  # kernels that used this memory before must not write behind a NIC
            torch.cuda.current_stream(device).synchronize()

    @property
    def num_free(self) -> int:
        return self.num_parts - self.slots.num_taken

    def part(self, slot: Slot, nbytes: int) -> Tensor:
        begin = self.parts.offset(slot.number)
        return self.tensor[begin : begin + nbytes]


class Piece(NamedTuple):
    """Rows `first` to `first + rows` of one request of a layer and chunk: of a packed write, or
    those that are to be written."""

    layer: int
    request: int  # place of the request among those of the layer
    chunk: tuple[int, int]
    first: int
    rows: int

    def to_bytes(self, nonce: int) -> bytes:
        return _HEADER.pack(nonce, self.layer, self.request, *self.chunk, self.first, self.rows)

    def cut(self, rows: int) -> tuple[Piece, Piece | None]:
        """The first rows, up to so many, and what is left."""
        left = self.rows - rows
        if left <= 0:
            return self, None
        return self._replace(rows=rows), self._replace(first=self.first + rows, rows=left)

    @staticmethod
    def parse(data: memoryview, nonce: int, what: str) -> Piece:
        """Raises ProtocolError where it is of another reservation."""
        got, layer, request, begin, end, first, rows = _HEADER.unpack_from(data)
        if got != nonce:
            text = f"{what}: a packed write of nonce {got:x}, expected {nonce:x}"
            raise make(ProtocolError, text)
        return Piece(layer, request, (begin, end), first, rows)


# --- copies ---


class Placed(NamedTuple):
    """Units where a copy reads them, and the lowest and the highest one."""

    units: Tensor
    least: int
    most: int


class Rows(NamedTuple):
    """Row r of unit u of `units` begins at offset + u * unit + r * row_stride of `memory`; rows are
    numbered across units, and the copy is of those from first_row on."""

    memory: Tensor
    placed: Placed
    where: tuple[int, int, int, int, int]  # offset, unit, row_bytes, num_rows, row_stride
    first_row: int

    def check(self) -> None:
        """A kernel would not."""
        offset, unit, row_bytes, num_rows, row_stride = self.where
        begin = offset + self.placed.least * unit
        end = offset + self.placed.most * unit + (num_rows - 1) * row_stride + row_bytes
        nbytes = self.memory.numel() * self.memory.element_size()
        require(
            begin >= 0 and end <= nbytes,
            f"rows at bytes {begin} to {end} of KV memory of {nbytes} bytes",
        )


def rows_of_request(request: KVRequest, *, at_source: bool) -> tuple[int, int, int, int, int]:
    shape = request.move.shape
    if at_source:
        offset, unit, stride = request.source.offset, shape.source_unit, shape.source_row_stride
    else:
        offset, unit, stride = request.target.offset, shape.target_unit, shape.target_row_stride
    return offset, unit, shape.row_bytes, shape.num_rows, stride


class Copy:
    """One that was started. event: None where it is done already."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def done(self) -> bool:
        if self._event is None:
            return True
        with relaxed_captures():
            return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if self._event is not None:
            with relaxed_captures():
                self._event.synchronize()


def pack_kernel(device: torch.device) -> int:
    """Returns kernels/pack.cu."""
    return jit.load(device.index or 0, "pack.cu", "moe_p2p_pack", {})


class Copier:
    """num_sms: multiprocessors that a copy on a GPU takes. Its stream is its own, so neither the
    user's kernels nor these wait for each other; whoever needs the bytes asks the `Copy`. Any
    thread may call it, also while another one captures a CUDA graph."""

    def __init__(self, device: torch.device, num_sms: int) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._on_gpu = (0, 0, 0)  # last arguments of the op
        if device.type == "cuda":
            with relaxed_captures():
                self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                self._on_gpu = (pack_kernel(device), num_sms, self._stream.cuda_stream)

    def place(self, units: Tensor) -> Placed:
        bounds = int(units.min()), int(units.max())
        if self._stream is None:
            return Placed(units, *bounds)
        with self._on_stream():
            return Placed(units.to(self._stream.device), *bounds)

    def copy(self, rows: Rows, packed: Tensor, *, gather: bool) -> Copy:
        """As many rows as `packed` has room for."""
        rows.check()
        flat = rows.memory.reshape(-1).view(torch.uint8)
        where = (rows.placed.units, *rows.where, rows.first_row)
        arguments = (flat, packed, *where, gather, *self._on_gpu)
        if self._stream is None:
            call(torch.ops.moe_p2p.copy_rows.default, *arguments)
            return Copy(None)
        with relaxed_captures():
            call(torch.ops.moe_p2p.copy_rows.default, *arguments)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return Copy(event)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """On its device, also in threads whose current device is another."""
        with relaxed_captures(), torch.cuda.stream(self._stream):
            yield
