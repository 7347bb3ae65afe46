"""The sender's half of packing: gathers small rows into its ring and writes each part at once.

    layer() --> pieces wait --> want --> (receiver) grant --> gather, write, header --> part is free

A piece whose rows are one run at the target needs no grant: it is written straight into the pages.
Others go into a part of the receiver's ring (moe_p2p/kv/unpacking.py) that was granted for one
write. Beside the bytes travels a header, into the control row of that part; both count the part's
immediate. Methods are called under the worker's lock.
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
from moe_p2p.kv.ring import HEADER_BYTES, Piece, Ring, pieces_of
from moe_p2p.kv.tail import Slot
from moe_p2p.kv.units import Chunk

if TYPE_CHECKING:
    from moe_p2p.kv.sending import Flight
    from moe_p2p.transfers import Gate


class Granted(NamedTuple):
    number: int  # of the part at the receiver
    imm: int


@dataclass(eq=False)
class Packing:
    """Of one flight. under_way: parts of our ring, with the requests that read them."""

    pending: deque[Piece] = field(default_factory=deque)
    granted: deque[Granted] = field(default_factory=deque)
    under_way: list[tuple[Slot, list[Any]]] = field(default_factory=list)
    placed: dict[tuple[int, Chunk], Placed] = field(default_factory=dict)  # units, for the copier
    gates: dict[tuple[int, Chunk], Gate] = field(default_factory=dict)  # by layer: not computed yet
    landing: int = 0  # pending ones that need no grant
    written: int = 0

    def take(self, parts: list[list[int]]) -> None:
        self.granted.extend(Granted(int(number), int(imm)) for number, imm in parts)

    @property
    def may_start(self) -> bool:
        """Some may, as soon as they are computed and the ring here has a part: no message will say
        so. Others wait for a grant."""
        return bool(self.pending and (self.granted or self.landing))

    def is_computed(self, piece: Piece) -> bool:
        gate = self.gates.get((piece.layer, piece.chunk))
        return gate is None or gate.reached()

    def start(self, *, lands: bool) -> Granted | None:
        """Of a pending piece: the part that it is written to."""
        if lands:
            self.landing -= 1
            return None
        return self.granted.popleft()

    def text(self) -> str:
        if not self.pending:
            return ""
        if not self.is_computed(self.pending[0]):
            return f", packed writes wait for the signal of layer {self.pending[0].layer}"
        piece, what = self.pending[0], "of the receiver" if not self.granted else "here"
        count, layer = len(self.pending), piece.layer
        return f", {count} packed writes from layer {layer} on wait for parts of the ring {what}"


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
        wants = rows = 0
        if after is not None:
            flight.packing.gates[layer, chunk] = after
        for index, request in enumerate(flight.pair.requests[layer]):
            if not request.move.why_packed:
                continue
            ours, _ = flight.units.of(request.move, chunk)
            pieces = list(pieces_of(layer, index, chunk, request, len(ours)))
            flight.packing.pending.extend(pieces)
            rows += sum(piece.rows for piece in pieces)
            if request.move.lands:
                flight.packing.landing += len(pieces)
            else:
                wants += len(pieces)
        if wants:
            flight.pair.send("want", nonce=flight.opened.nonce, parts=wants)
        self.advance(flight)
        return rows

    def advance(self, flight: Flight) -> None:
        """Frees parts that were read, and starts pieces: each is gathered while the one before it
        is written."""
        packing = flight.packing
        self._reclaim(packing)
        before: tuple[Copy, Piece, Slot, Granted | None] | None = None
        waiting: list[Piece] = []
        shut: set[tuple[int, Chunk]] = set()
        while packing.may_start and self.ring.num_free:
            piece = packing.pending.popleft()
            request, of_layer = _request(flight, piece), (piece.layer, piece.chunk)
            ungranted = not request.move.lands and not packing.granted
            if ungranted or of_layer in shut or not packing.is_computed(piece):
                waiting.append(piece)
                if not ungranted:
                    shut.add(of_layer)  # asked once a call
                continue
            granted = packing.start(lands=request.move.lands)
            slot = self.ring.slots.take("ring")
            packing.under_way.append((slot, []))
            copy = self._gather(flight, piece, request, slot)
            if before is not None:
                self._write(flight, *before)
            before = (copy, piece, slot, granted)
        packing.pending.extendleft(reversed(waiting))
        if before is not None:
            self._write(flight, *before)

    def _reclaim(self, packing: Packing) -> None:
        kept = []
        for slot, requests in packing.under_way:
            if all(request.done() for request in requests):
                self.ring.slots.give_back(slot)
            else:
                kept.append((slot, requests))
        packing.under_way = kept

    def settle(self, flight: Flight) -> None:
        """Nothing of the flight is under way any more: its parts are free."""
        packing = flight.packing
        for slot, _ in packing.under_way:
            self.ring.slots.give_back(slot)
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

    def _write(
        self, flight: Flight, copy: Copy, piece: Piece, slot: Slot, granted: Granted | None
    ) -> None:
        copy.wait()
        request = _request(flight, piece)
        under_way = next(found for at, found in flight.packing.under_way if at is slot)
        if granted is None:
            writes = self._to_pages(flight, piece, request, slot)
        else:
            nbytes = piece.rows * request.move.shape.row_bytes
            writes = self._to_part(flight, piece, (slot, nbytes), granted)
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
