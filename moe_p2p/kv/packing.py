"""The sender's half of packing: gathers small rows into its ring and writes each part at once.

    layer() --> rows wait --> want --> (receiver) grant --> gather, write, header --> parts are free

Rows that are one run at the target need no grant: they are written straight into the pages. Others
go into parts of the receiver's ring (moe_p2p/kv/unpacking.py) that were granted for one write, in
the order in which they were wanted. Beside the bytes travels a header, into the control row of the
first part; both count its immediate. Methods are called under the worker's lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from moe_p2p.kv.copies import Copier, Copy, Placed, Rows, rows_of_request
from moe_p2p.kv.memory import KVRequest
from moe_p2p.kv.pair import KVCache
from moe_p2p.kv.ring import HEADER_BYTES, Piece, Ring
from moe_p2p.kv.tail import Slot
from moe_p2p.kv.units import Chunk

if TYPE_CHECKING:
    from moe_p2p.engine.transfers import Gate
    from moe_p2p.kv.sending import Flight


class Granted(NamedTuple):
    number: int  # of the first part at the receiver
    imm: int
    parts: int


class Started(NamedTuple):
    """A packed write whose rows are being gathered. slots: parts of our ring; granted: None where
    the rows land in pages."""

    piece: Piece
    slots: list[Slot]
    copy: Copy
    granted: Granted | None


@dataclass(eq=False)
class Packing:
    """Of one flight. pending, landing: rows that wait for a grant, or need none. under_way: parts
    of our ring, with the requests that read them."""

    pending: deque[Piece] = field(default_factory=deque)
    landing: deque[Piece] = field(default_factory=deque)
    granted: deque[Granted] = field(default_factory=deque)
    under_way: list[tuple[list[Slot], list[Any]]] = field(default_factory=list)
    placed: dict[tuple[int, Chunk], Placed] = field(default_factory=dict)  # units, for the copier
    gates: dict[tuple[int, Chunk], Gate] = field(default_factory=dict)  # by layer: not computed yet
    written: int = 0

    def take(self, grants: list[list[int]]) -> None:
        self.granted.extend(Granted(*map(int, grant)) for grant in grants)

    @property
    def left(self) -> bool:
        return bool(self.pending or self.landing)

    @property
    def may_start(self) -> bool:
        """Some may, as soon as they are computed and the ring here has parts: no message will say
        so. Others wait for a grant."""
        return bool(self.granted or self.landing)

    def is_computed(self, piece: Piece) -> bool:
        key = (piece.layer, piece.chunk)
        if key in self.gates and self.gates[key].reached():
            del self.gates[key]  # asked no more
        return key not in self.gates

    def clear(self) -> None:
        """What has not begun will not."""
        for each in (self.pending, self.landing, self.granted):
            each.clear()

    def text(self) -> str:
        if not self.left:
            return ""
        piece = (self.pending or self.landing)[0]
        if not self.is_computed(piece):
            return f", packed writes wait for the signal of layer {piece.layer}"
        what = "of the receiver" if self.pending and not self.granted else "here"
        rows = sum(each.rows for each in (*self.pending, *self.landing))
        return f", {rows} packed rows from layer {piece.layer} on wait for parts of the ring {what}"


class Packer:
    def __init__(self, engine: Any, cache: KVCache, ring: Ring, control: tuple[Any, int]) -> None:
        """control: the worker's rows, and bytes of each."""
        self.engine, self.cache, self.ring = engine, cache, ring
        self.rows, self.row_bytes = control
        self.copier = Copier(cache.tensors[0].device, ring.num_sms)

    def add(self, flight: Flight, layer: int, chunk: Chunk, after: Gate | None) -> int:
        """Packed rows of one layer: starts what can start, asks for parts for the rest. Returns the
        number of rows. after: the layer is not computed yet, and is gathered when it is."""
        assert flight.units is not None
        assert flight.opened is not None
        packing, wants, rows = flight.packing, [], 0
        if after is not None:
            packing.gates[layer, chunk] = after
        for index, request in enumerate(flight.pair.requests[layer]):
            if not request.move.why_packed:
                continue
            ours, _ = flight.units.of(request.move, chunk)
            piece = Piece(layer, index, chunk, 0, len(ours) * request.move.shape.num_rows)
            if piece.rows:
                (packing.landing if request.move.lands else packing.pending).append(piece)
            if piece.rows and not request.move.lands:
                wants.append(_parts(piece, request))
            rows += piece.rows
        if wants:
            most = self.ring.most_parts
            flight.pair.send("want", nonce=flight.opened.nonce, parts=wants, most=most)
        self.advance(flight)
        return rows

    def advance(self, flight: Flight) -> None:
        """Frees parts that were read, and starts writes: the rows of each are gathered while the
        one before it is written."""
        self._reclaim(flight.packing)
        before: Started | None = None
        while (started := self._start(flight)) is not None:
            if before is not None:
                self._write(flight, before)
            before = started
        if before is not None:
            self._write(flight, before)

    def _start(self, flight: Flight) -> Started | None:
        """What the first grant is for, else what lands in pages; None: nothing can start now."""
        packing = flight.packing
        if packing.granted:
            found = self._take(flight, packing.pending, packing.granted[0].parts)
            if found is not None:
                return Started(*found, packing.granted.popleft())
        found = self._take(flight, packing.landing, 1)
        return None if found is None else Started(*found, None)

    def _take(
        self, flight: Flight, pieces: deque[Piece], parts: int
    ) -> tuple[Piece, list[Slot], Copy] | None:
        """Gathers rows into so many parts of our ring, if these are free and the rows computed."""
        if not pieces or not flight.packing.is_computed(pieces[0]):
            return None
        slots = self.ring.slots.take_run(parts, least=parts)
        if not slots:
            return None
        request = _request(flight, pieces[0])
        piece, left = pieces.popleft().cut(parts * request.move.rows_per_write)
        if left is not None:
            pieces.appendleft(left)
        flight.packing.under_way.append((slots, []))
        return piece, slots, self._gather(flight, piece, request, slots[0])

    def _reclaim(self, packing: Packing) -> None:
        kept = []
        for slots, requests in packing.under_way:
            if all(request.done() for request in requests):
                self.ring.slots.give_back_run(slots)
            else:
                kept.append((slots, requests))
        packing.under_way = kept

    def settle(self, flight: Flight) -> None:
        """Nothing of the flight is under way any more: its parts are free."""
        packing = flight.packing
        for slots, _ in packing.under_way:
            self.ring.slots.give_back_run(slots)
        flight.packing = Packing(written=packing.written)

    def _gather(self, flight: Flight, piece: Piece, request: KVRequest, slot: Slot) -> Copy:
        assert flight.units is not None
        key = (id(request.move), piece.chunk)
        placed = flight.packing.placed
        if key not in placed:
            placed[key] = self.copier.place(flight.units.of(request.move, piece.chunk)[0])
        rows = Rows(
            self.cache.tensors[request.source.region],
            placed[key],
            rows_of_request(request, at_source=True),
            piece.first,
        )
        packed = self.ring.part(slot, piece.rows * request.move.shape.row_bytes)
        return self.copier.copy(rows, packed, gather=True)

    def _write(self, flight: Flight, started: Started) -> None:
        piece, slots, copy, granted = started
        copy.wait()
        request = _request(flight, piece)
        under_way = next(found for at, found in flight.packing.under_way if at is slots)
        if granted is None:
            writes = self._to_pages(flight, piece, request, slots[0])
        else:
            nbytes = piece.rows * request.move.shape.row_bytes
            writes = self._to_part(flight, piece, (slots[0], nbytes), granted)
        for submitted in writes:  # noted one by one: a later one may fail
            under_way.append(submitted)
            flight.requests.append(submitted)
        flight.packing.written += 1

    def _to_pages(
        self, flight: Flight, piece: Piece, request: KVRequest, slot: Slot
    ) -> Iterator[Any]:
        assert flight.units is not None
        assert flight.opened is not None
        pair, shape = flight.pair, request.move.shape
        first, count = piece.first // shape.num_rows, piece.rows // shape.num_rows
        theirs = flight.units.of(request.move, piece.chunk)[1][first : first + count]
        yield self.engine.write_pages(
            pair.memory.ring,
            pair.regions[request.target.region],
            page_bytes=request.move.unit_bytes,
            row_bytes=request.move.unit_bytes,
            row_stride=request.move.unit_bytes,
            region_row_stride=request.move.unit_bytes,
            pages=torch.arange(count, device="cpu"),
            region_pages=theirs.contiguous(),
            stride=request.move.unit_bytes,
            region_stride=shape.target_unit,
            offset=self.ring.parts.offset(slot.number),
            region_offset=request.target.offset,
            imm=flight.opened.imm,
            imm_per_page=False,
        )

    def _to_part(
        self, flight: Flight, piece: Piece, packed: tuple[Slot, int], granted: Granted
    ) -> Iterator[Any]:
        assert flight.opened is not None
        pair, (slot, nbytes) = flight.pair, packed
        at = slot.number * self.row_bytes
        self.rows[at : at + HEADER_BYTES] = piece.to_bytes(flight.opened.nonce)
        yield self.engine.write(
            pair.memory.ring,
            pair.ring,
            nbytes=nbytes,
            offset=self.ring.parts.offset(slot.number),
            region_offset=pair.theirs.parts.offset(granted.number),
            imm=granted.imm,
        )
        yield self.engine.write(
            pair.memory.control,
            pair.control,
            nbytes=HEADER_BYTES,
            offset=at,
            region_offset=granted.number * self.row_bytes,
            imm=granted.imm,
        )


def _request(flight: Flight, piece: Piece) -> KVRequest:
    return flight.pair.requests[piece.layer][piece.request]


def _parts(piece: Piece, request: KVRequest) -> int:
    return -(-piece.rows // request.move.rows_per_write)
