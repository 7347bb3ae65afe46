"""The receiver's half of packing: grants parts of its ring, scatters what arrives into the pages.

    want --> (parts are free) --> grant --> bytes and header arrive --> scatter --> parts are free

Parts that follow each other are granted for one write, and not again before they were scattered, or
before the sender that may write to them has drained or was fenced. It knows from the header what
they hold, so no order of arrival is assumed. Methods are called under the worker's lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from moe_p2p.errors import (
    InvalidArgumentError,
    MoeP2pError,
    ProtocolError,
    TimeoutError,
    make,
    require,
)
from moe_p2p.kv.chunks import Chunk, ChunkRows
from moe_p2p.kv.footer import Slot
from moe_p2p.kv.memory import KVRequest
from moe_p2p.kv.pair import Pair
from moe_p2p.kv.ring import HEADER_BYTES, Copier, Copy, Piece, Placed, Rows, rows_of_request
from moe_p2p.kv.stats import KVTransferStats
from moe_p2p.kv.worker import KVWorker

# Between looks at a scatter, which takes about as long. Too large: the sender waits for its parts.
_SCATTER_S = 5e-5


class Reserved(Protocol):
    """What is used of a `KVReservation` here and in moe_p2p/kv/source_transfer.py."""

    request: str
    pages: dict[str, Tensor]
    begin: int
    total: int
    pull: bool
    verified: bool
    stats: KVTransferStats


class Grant:
    """Parts of the ring that a sender may write to, once. copy: their scatter, once it began."""

    def __init__(self, slots: list[Slot]) -> None:
        self.slots = slots
        self.copy: Copy | None = None

    @property
    def imm(self) -> int:
        return self.slots[0].imm

    def scatter(self, copy: Copy) -> None:
        self.copy = copy


class Unpacker:
    """What all unpacking of a receiver shares: who is granted which parts of the ring."""

    def __init__(self, worker: KVWorker) -> None:
        self.worker = worker
        self.copier = Copier(worker.cache.tensors[0].device, worker.ring.num_sms)
        self._waiting: list[Unpacking] = []  # that want more parts, in turns
        self._held: Counter[Pair] = Counter()

    def want(self, unpacking: Unpacking) -> None:
        if unpacking not in self._waiting:
            self._waiting.append(unpacking)
        self.serve()

    def serve(self) -> None:
        """In turns."""
        granted: dict[Unpacking, list[list[int]]] = {}
        served = True
        while served:
            served = False
            self._waiting = [each for each in self._waiting if each.wants]  # none after a cancel
            for each in self._waiting:
                if slots := self._free_run(each):
                    self._held[each.pair] += len(slots)
                    each.grant(slots)
                    granted.setdefault(each, []).append([slots[0].number, slots[0].imm, len(slots)])
                    served = True
        for each, parts in granted.items():
            each.pair.send("grant", nonce=each.nonce, parts=parts)

    def _free_run(self, unpacking: Unpacking) -> list[Slot]:
        """A pair holds about as many parts as are free, or one: a sender that was stopped with all
        its parts leaves as many to others. While it holds some, it waits for a run as long as it
        wants: short ones would follow short ones for ever."""
        ring, held = self.worker.ring, self._held[unpacking.pair]
        wanted = min(unpacking.wants[0], unpacking.most_parts, ring.most_parts)
        most = min(wanted, ring.num_free, (ring.num_free - held + 1) // 2)
        return ring.slots.take_run(most, least=wanted if held else 1) if most > 0 else []

    def give_back(self, pair: Pair, slots: list[Slot]) -> None:
        self.worker.ring.slots.give_back_run(slots)
        self._held[pair] -= len(slots)
        if not self._held[pair]:
            del self._held[pair]

    # --- waits for arrivals ---

    def awaited(self, unpackings: Iterable[Unpacking]) -> tuple[int, int] | None:
        """The immediate, and how many of it, that show the next packed write."""
        for each in unpackings:
            for grant in each.grants:
                if grant.copy is None:
                    return grant.imm, 2 * each.pair.theirs.num_nics
        return None

    def patience(self, unpackings: Iterable[Unpacking], seconds: float) -> float:
        scatters = any(each.grants[0].copy for each in unpackings)
        return min(seconds, _SCATTER_S) if scatters else seconds

    def wait(self, awaited: tuple[int, int] | None, seconds: float) -> bool:
        """Without the lock, for so long at most. False: it did not wait."""
        if awaited is None:
            return False
        try:
            self.worker.engine.wait_imm(*awaited, seconds)
        except TimeoutError:
            return True
        except MoeP2pError:  # the engine is closed
            return False
        return True


class Unpacking:
    """Of a request from one sender. wants: parts that the sender waits for, of each request of a
    layer. most_parts: of a write, as its ring allows."""

    def __init__(self, unpacker: Unpacker, pair: Pair, nonce: int, reserved: Reserved) -> None:
        self.pair, self.nonce = pair, nonce
        self.grants: list[Grant] = []
        self.wants: list[int] = []
        self.most_parts = 1
        self._unpacker, self._worker, self._reserved = unpacker, unpacker.worker, reserved
        self._scattered = 0  # parts that are in the pages
        self._rows: ChunkRows | None = None
        self._placed: dict[tuple[int, Chunk], Placed] = {}

    def want(self, parts: list[int], most: int) -> None:
        require(
            min((most, *parts)) > 0 and self.pair.packs,
            f"{self.pair.name} wants {parts} parts of the ring, {most} in a write",
        )
        self.wants += parts
        self.most_parts = most
        self._unpacker.want(self)

    def grant(self, slots: list[Slot]) -> None:
        self.grants.append(Grant(slots))
        self.wants[0] -= len(slots)
        if not self.wants[0]:
            del self.wants[0]

    def advance(self) -> int:
        """Scatters what has arrived; returns the immediates of what is in the pages. In the order
        of the grants, in which senders use them: what overtakes another write waits for it."""
        nics = self.pair.theirs.num_nics
        for grant in self.grants:
            if grant.copy is None:
                if self._worker.engine.imm_value(grant.imm) < 2 * nics:
                    break
                grant.scatter(self._scatter(grant.slots))
        over = 0
        for grant in self.grants:
            if grant.copy is None or not grant.copy.done():
                break
            self._unpacker.give_back(self.pair, grant.slots)
            self._scattered += len(grant.slots)
            over += 1
        if over:
            del self.grants[:over]
            self._unpacker.serve()
        return self._scattered * nics

    def _scatter(self, slots: list[Slot]) -> Copy:
        worker = self._worker
        at = slots[0].number * worker.row_bytes
        what = f"request {self._reserved.request!r} from {self.pair.name}"
        header = memoryview(worker.rows)[at : at + HEADER_BYTES]
        piece = Piece.parse(header, self.nonce, what)
        try:
            request, rows = self._rows_of(piece, len(slots))
        except (InvalidArgumentError, IndexError, KeyError) as error:
            raise make(ProtocolError, f"{what}: a packed write of {piece}: {error!r}") from error
        packed = worker.ring.part(slots[0], piece.rows * request.move.shape.row_bytes)
        return self._unpacker.copier.copy(rows, packed, gather=False)

    def _rows_of(self, piece: Piece, parts: int) -> tuple[KVRequest, Rows]:
        (begin, end), reserved = piece.chunk, self._reserved
        require(
            reserved.begin <= begin <= end <= reserved.total,
            f"tokens {reserved.begin} to {reserved.total} were reserved",
        )
        request = self.pair.requests[piece.layer][piece.request]
        if self._rows is None:
            self._rows = ChunkRows(self.pair, reserved.total, target=reserved.pages)
        _, theirs = self._rows.of(request.move, piece.chunk)
        key = (id(request.move), piece.chunk)
        if key not in self._placed:
            self._placed[key] = self._unpacker.copier.place(theirs)
        total, of_part = len(theirs) * request.move.shape.num_rows, request.move.rows_per_write
        require(
            -(-piece.rows // of_part) == parts and piece.first + piece.rows <= total,
            f"there are {total} rows, {of_part} of them in each of {parts} parts",
        )
        where = rows_of_request(request, at_source=False)
        memory = self._worker.cache.tensors[request.target.region]
        return request, Rows(memory, self._placed[key], where, piece.first)

    # --- the end ---

    def stop(self) -> None:
        """Nothing more is granted."""
        self.wants.clear()

    def settle(self) -> None:
        """The sender writes nothing more: its parts are free once their scatters are over."""
        self.stop()
        if not self.grants:
            return
        while self.grants:
            grant = self.grants[0]
            if grant.copy is not None:
                grant.copy.wait()
            self._unpacker.give_back(self.pair, grant.slots)
            del self.grants[0]
        self._unpacker.serve()
