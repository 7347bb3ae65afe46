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
from typing import NamedTuple

import torch

from moe_p2p.engine.transfers import Gate, PageRows, Request
from moe_p2p.kv.chunks import Chunk, ChunkRows
from moe_p2p.kv.footer import Slot
from moe_p2p.kv.memory import KVRequest
from moe_p2p.kv.pair import Pair
from moe_p2p.kv.ring import HEADER_BYTES, Copier, Copy, Piece, Placed, Rows, rows_of_request
from moe_p2p.kv.worker import KVWorker


class Granted(NamedTuple):
    number: int  # of the first part at the receiver
    imm: int
    parts: int


class Started(NamedTuple):
    """A packed write whose rows are being gathered. slots: parts of our ring, and `requests` will
    read them; granted: None where the rows land in pages."""

    piece: Piece
    slots: list[Slot]
    requests: list[Request]
    copy: Copy
    granted: Granted | None


class Packer:
    """What all packing of a sender shares."""

    def __init__(self, worker: KVWorker) -> None:
        self.worker = worker
        self.copier = Copier(worker.cache.tensors[0].device, worker.ring.num_sms)


class Packing:
    """Of a request to one receiver, from its opening on. requests: of its transfer, which those
    made here join. nonce, imm: of the opening. written: packed writes so far."""

    def __init__(
        self,
        packer: Packer,
        pair: Pair,
        rows: ChunkRows,
        requests: list[Request],
        *,
        nonce: int,
        imm: int,
    ) -> None:
        self.written = 0
        self._packer, self._worker, self._pair, self._rows = packer, packer.worker, pair, rows
        self._requests, self._nonce, self._imm = requests, nonce, imm
        self.pending: deque[Piece] = deque()  # rows that wait for a grant
        self._landing: deque[Piece] = deque()  # rows that need none
        self._granted: deque[Granted] = deque()
        # Parts of our ring, with the requests that read them.
        self._under_way: list[tuple[list[Slot], list[Request]]] = []
        self._placed: dict[tuple[int, Chunk], Placed] = {}  # units, for the copier
        self._gates: dict[tuple[int, Chunk], Gate] = {}  # by layer: not computed yet

    def take(self, grants: list[list[int]]) -> None:
        self._granted.extend(Granted(*map(int, grant)) for grant in grants)

    @property
    def left(self) -> bool:
        return bool(self.pending or self._landing)

    @property
    def may_start(self) -> bool:
        """Some may, as soon as they are computed and the ring here has parts: no message will say
        so. Others wait for a grant."""
        return bool(self._granted or self._landing)

    def _is_computed(self, piece: Piece) -> bool:
        key = (piece.layer, piece.chunk)
        if key in self._gates and self._gates[key].reached():
            del self._gates[key]  # asked no more
        return key not in self._gates

    def text(self) -> str:
        if not self.left:
            return ""
        piece = (self.pending or self._landing)[0]
        if not self._is_computed(piece):
            return f", packed writes wait for the signal of layer {piece.layer}"
        what = "of the receiver" if self.pending and not self._granted else "here"
        rows = sum(each.rows for each in (*self.pending, *self._landing))
        return f", {rows} packed rows from layer {piece.layer} on wait for parts of the ring {what}"

    def add(self, layer: int, chunk: Chunk, after: Gate | None) -> int:
        """Packed rows of one layer: starts what can start, asks for parts for the rest. Returns the
        number of rows. after: the layer is not computed yet, and is gathered when it is."""
        wants, rows = [], 0
        if after is not None:
            self._gates[layer, chunk] = after
        for index, request in enumerate(self._pair.requests[layer]):
            if not request.move.why_packed:
                continue
            ours, _ = self._rows.of(request.move, chunk)
            piece = Piece(layer, index, chunk, 0, len(ours) * request.move.shape.num_rows)
            if piece.rows:
                (self._landing if request.move.lands else self.pending).append(piece)
            if piece.rows and not request.move.lands:
                wants.append(-(-piece.rows // request.move.rows_per_write))
            rows += piece.rows
        if wants:
            most = self._worker.ring.most_parts
            self._pair.send("want", nonce=self._nonce, parts=wants, most=most)
        self.advance()
        return rows

    def advance(self) -> None:
        """Frees parts that were read, and starts writes: the rows of each are gathered while the
        one before it is written."""
        if self._under_way:
            self._reclaim()
        before: Started | None = None
        while (started := self._start()) is not None:
            if before is not None:
                self._write(before)
            before = started
        if before is not None:
            self._write(before)

    def _reclaim(self) -> None:
        kept = []
        for slots, requests in self._under_way:
            if all(request.done() for request in requests):
                self._worker.ring.slots.give_back_run(slots)
            else:
                kept.append((slots, requests))
        self._under_way = kept

    def _start(self) -> Started | None:
        """What the first grant is for, else what lands in pages; None: nothing can start now."""
        if self._granted:
            started = self._gather(self.pending, self._granted[0])
            if started is not None:
                self._granted.popleft()
                return started
        return self._gather(self._landing, None)

    def _gather(self, pieces: deque[Piece], granted: Granted | None) -> Started | None:
        """Into so many parts of our ring, if these are free and the rows computed."""
        ring, parts = self._worker.ring, 1 if granted is None else granted.parts
        if not pieces or not self._is_computed(pieces[0]):
            return None
        slots = ring.slots.take_run(parts, least=parts)
        if not slots:
            return None
        request = self._request(pieces[0])
        piece, left = pieces.popleft().cut(parts * request.move.rows_per_write)
        if left is not None:
            pieces.appendleft(left)
        requests: list[Request] = []
        self._under_way.append((slots, requests))
        rows = Rows(
            self._worker.cache.tensors[request.source.region],
            self._place(request, piece.chunk),
            rows_of_request(request, at_source=True),
            piece.first,
        )
        packed = ring.part(slots[0], piece.rows * request.move.shape.row_bytes)
        copy = self._packer.copier.copy(rows, packed, gather=True)
        return Started(piece, slots, requests, copy, granted)

    def _place(self, request: KVRequest, chunk: Chunk) -> Placed:
        key = (id(request.move), chunk)
        if key not in self._placed:
            self._placed[key] = self._packer.copier.place(self._rows.of(request.move, chunk)[0])
        return self._placed[key]

    def _write(self, started: Started) -> None:
        started.copy.wait()
        request = self._request(started.piece)
        if started.granted is None:
            writes = self._to_pages(started, request)
        else:
            writes = self._to_parts(started, started.granted, request)
        for submitted in writes:  # noted one by one: a later one may fail
            started.requests.append(submitted)
            self._requests.append(submitted)
        self.written += 1

    def _to_pages(self, started: Started, request: KVRequest) -> Iterator[Request]:
        pair, move, piece, worker = self._pair, request.move, started.piece, self._worker
        assert pair.memory.ring is not None
        shape = move.shape
        first, count = piece.first // shape.num_rows, piece.rows // shape.num_rows
        theirs = self._rows.of(move, piece.chunk)[1][first : first + count]
        yield worker.engine.write_pages(
            pair.memory.ring,
            pair.regions[request.target.region],
            rows=PageRows(
                page_bytes=move.unit_bytes,
                region_stride=shape.target_unit,
                row_bytes=move.unit_bytes,
            ),
            pages=torch.arange(count, device="cpu"),
            region_pages=theirs.contiguous(),
            offset=worker.ring.parts.offset(started.slots[0].number),
            region_offset=request.target.offset,
            imm=self._imm,
            imm_per_page=False,
        )

    def _to_parts(
        self, started: Started, granted: Granted, request: KVRequest
    ) -> Iterator[Request]:
        pair, piece, worker = self._pair, started.piece, self._worker
        assert pair.memory.ring is not None
        assert pair.ring is not None
        slot = started.slots[0]
        at = slot.number * worker.row_bytes
        worker.rows[at : at + HEADER_BYTES] = piece.to_bytes(self._nonce)
        yield worker.engine.write(
            pair.memory.ring,
            pair.ring,
            nbytes=piece.rows * request.move.shape.row_bytes,
            offset=worker.ring.parts.offset(slot.number),
            region_offset=pair.theirs.parts.offset(granted.number),
            imm=granted.imm,
        )
        yield worker.engine.write(
            pair.memory.control,
            pair.control,
            nbytes=HEADER_BYTES,
            offset=at,
            region_offset=granted.number * worker.row_bytes,
            imm=granted.imm,
        )

    def _request(self, piece: Piece) -> KVRequest:
        return self._pair.requests[piece.layer][piece.request]

    # --- the end ---

    def stop(self) -> None:
        """What has not begun will not."""
        for each in (self.pending, self._landing, self._granted):
            each.clear()

    def settle(self) -> None:
        """Nothing is under way any more: its parts are free."""
        for slots, _ in self._under_way:
            self._worker.ring.slots.give_back_run(slots)
        self.stop()
        for each in (self._under_way, self._placed, self._gates):
            each.clear()
