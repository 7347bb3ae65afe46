"""Staging memory of a worker, in parts, and what the packed writes are.

A write takes parts that follow each other: a few, because Python takes as long for a small write as
for a large one, but an eighth of the ring at most, because others are gathered, written and
scattered meanwhile. A part is held like a page: by the sender until its NIC has read it, by the
receiver from the grant until it was scattered, or, after a cancel, until the sender has drained or
was fenced. Each use has a number of its own by which its immediates are counted, so a late one
counts for nobody.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from moe_p2p.errors import ProtocolError, make, require
from moe_p2p.kv.link import KVLink
from moe_p2p.kv.tail import Slot, Slots

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
    """first: number of its first part. It has none where the link packs nothing."""

    def __init__(self, link: KVLink, device: torch.device, first: int) -> None:
        self.parts = Parts(first, -(-link.packed_write_bytes // _ALIGN) * _ALIGN)
        self.num_parts = link.ring_bytes // self.parts.part_bytes if link.pack is not False else 0
        self.most_parts = max(self.num_parts // 8, 1)  # of a write
        self.num_sms = link.num_sms
        require(
            self.num_parts >= 1 or link.pack is False,
            f"KVLink.ring_bytes is {link.ring_bytes}, must hold a packed write of "
            f"{self.parts.part_bytes} bytes",
        )
        self.slots: Slots = Slots(self.num_parts, first=first)
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
