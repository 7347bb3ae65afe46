"""The receiver's half of packing: grants parts of its ring, scatters what arrives into the pages.

    want --> (parts are free) --> grant --> bytes and header arrive --> scatter --> parts are free

Parts that follow each other are granted for one write, and not again before they were scattered, or
before the sender that may write to them has drained or was fenced. It knows from the header what
they hold, so no order of arrival is assumed. Methods are called under the worker's lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_p2p.errors import (
    InvalidArgumentError,
    MoeP2pError,
    ProtocolError,
    TimeoutError,
    make,
    require,
)
from moe_p2p.kv.copies import Copier, Copy, Rows, rows_of_request
from moe_p2p.kv.memory import KVRequest
from moe_p2p.kv.pair import KVCache, Pair
from moe_p2p.kv.ring import HEADER_BYTES, Piece, Ring
from moe_p2p.kv.tail import CountedSlots, Slot
from moe_p2p.kv.units import Units

if TYPE_CHECKING:
    from moe_p2p.kv.legs import Leg
    from moe_p2p.kv.reservation import KVReservation

# Between looks at a scatter, which takes about as long. Too large: the sender waits for its parts.
_SCATTER_S = 5e-5


@dataclass(eq=False)
class Grant:
    """Parts of the ring that a sender may write to, once. copy: their scatter."""

    slots: list[Slot]
    copy: Copy | None = None

    @property
    def imm(self) -> int:
        return self.slots[0].imm


class Unpacker:
    def __init__(self, engine: Any, cache: KVCache, ring: Ring, control: tuple[Any, int]) -> None:
        """control: the worker's rows, and bytes of each."""
        self.engine, self.cache, self.ring = engine, cache, ring
        self.rows, self.row_bytes = control
        ring.slots = CountedSlots(ring.num_parts, engine, first=ring.parts.first)
        self.copier = Copier(cache.tensors[0].device, ring.num_sms)
        self._waiting: list[Leg] = []  # legs that want more parts, in turns
        self._held: Counter[Pair] = Counter()

    # --- grants ---

    def want(self, leg: Leg, parts: list[int], most: int) -> None:
        """parts: of each request of a layer. most: of a write."""
        require(
            min((most, *parts)) > 0 and leg.pair.packs,
            f"{leg.pair.name} wants {parts} parts of the ring, {most} in a write",
        )
        if leg not in self._waiting:
            self._waiting.append(leg)
        leg.wants += parts
        leg.most_parts = most
        self._serve()

    def _serve(self) -> None:
        """In turns."""
        granted: dict[Leg, list[list[int]]] = {}
        served = True
        while served:
            served = False
            self._waiting = [leg for leg in self._waiting if leg.wants]  # none after a cancel, too
            for leg in self._waiting:
                if slots := self._free_run(leg):
                    granted.setdefault(leg, []).append(self._grant(leg, slots))
                    served = True
        for leg, parts in granted.items():
            leg.pair.send("grant", nonce=leg.nonce, parts=parts)

    def _free_run(self, leg: Leg) -> list[Slot]:
        """A pair holds about as many parts as are free, or one: a sender that was stopped with all
        its parts leaves as many to others. While it holds some, it waits for a run as long as it
        wants: short ones would follow short ones for ever."""
        free, held = self.ring.num_free, self._held[leg.pair]
        wanted = min(leg.wants[0], leg.most_parts, self.ring.most_parts)
        most = min(wanted, free, (free - held + 1) // 2)
        return self.ring.slots.take_run(most, least=wanted if held else 1) if most > 0 else []

    def _grant(self, leg: Leg, slots: list[Slot]) -> list[int]:
        self._held[leg.pair] += len(slots)
        leg.grants.append(Grant(slots))
        leg.wants[0] -= len(slots)
        if not leg.wants[0]:
            del leg.wants[0]
        return [slots[0].number, slots[0].imm, len(slots)]

    def _give_back(self, leg: Leg, grant: Grant) -> None:
        self.ring.slots.give_back_run(grant.slots)
        self._held[leg.pair] -= len(grant.slots)
        if not self._held[leg.pair]:
            del self._held[leg.pair]

    # --- arrival ---

    def advance(self, reservation: KVReservation, leg: Leg) -> int:
        """Scatters what has arrived; returns the immediates of what is in the pages. In the order
        of the grants, in which senders use them: what overtakes another write waits for it."""
        nics = leg.pair.theirs.num_nics
        for grant in leg.grants:
            if grant.copy is None:
                if self.engine.imm_value(grant.imm) < 2 * nics:
                    break
                grant.copy = self._scatter(reservation, leg, grant)
        over = 0
        for grant in leg.grants:
            if grant.copy is None or not grant.copy.done():
                break
            self._give_back(leg, grant)
            leg.scattered += len(grant.slots)
            over += 1
        if over:
            del leg.grants[:over]
            self._serve()
        return leg.scattered * nics

    def awaited(self, legs: Iterable[Leg]) -> tuple[int, int] | None:
        """The immediate, and how many of it, that show the next packed write."""
        for leg in legs:
            for grant in leg.grants:
                if grant.copy is None:
                    return grant.imm, 2 * leg.pair.theirs.num_nics
        return None

    def patience(self, legs: Iterable[Leg], seconds: float) -> float:
        return min(seconds, _SCATTER_S) if any(leg.grants[0].copy for leg in legs) else seconds

    def wait(self, awaited: tuple[int, int] | None, seconds: float) -> bool:
        """Without the lock, for so long at most. False: it did not wait."""
        if awaited is None:
            return False
        try:
            self.engine.wait_imm(*awaited, seconds)
        except TimeoutError:
            return True
        except MoeP2pError:  # the engine is closed
            return False
        return True

    def _scatter(self, reservation: KVReservation, leg: Leg, grant: Grant) -> Copy:
        at = grant.slots[0].number * self.row_bytes
        what = f"request {reservation.request!r} from {leg.pair.name}"
        header = memoryview(self.rows)[at : at + HEADER_BYTES]
        piece = Piece.parse(header, leg.nonce, what)
        try:
            request, rows = self._rows(reservation, leg, piece, len(grant.slots))
        except (InvalidArgumentError, IndexError, KeyError) as error:
            raise make(ProtocolError, f"{what}: a packed write of {piece}: {error!r}") from error
        packed = self.ring.part(grant.slots[0], piece.rows * request.move.shape.row_bytes)
        return self.copier.copy(rows, packed, gather=False)

    def _rows(
        self, reservation: KVReservation, leg: Leg, piece: Piece, parts: int
    ) -> tuple[KVRequest, Rows]:
        begin, end = piece.chunk
        require(
            reservation.begin <= begin <= end <= reservation.total,
            f"tokens {reservation.begin} to {reservation.total} were reserved",
        )
        request = leg.pair.requests[piece.layer][piece.request]
        if leg.units is None:
            leg.units = Units(leg.pair, reservation.total, target=reservation.pages)
        _, theirs = leg.units.of(request.move, piece.chunk)
        key = (id(request.move), piece.chunk)
        if key not in leg.placed:
            leg.placed[key] = self.copier.place(theirs)
        total, of_part = len(theirs) * request.move.shape.num_rows, request.move.rows_per_write
        require(
            -(-piece.rows // of_part) == parts and piece.first + piece.rows <= total,
            f"there are {total} rows, {of_part} of them in each of {parts} parts",
        )
        where = rows_of_request(request, at_source=False)
        memory = self.cache.tensors[request.target.region]
        return request, Rows(memory, leg.placed[key], where, piece.first)

    # --- the end ---

    def settle(self, leg: Leg) -> None:
        """The sender writes nothing more: its parts are free once their scatters are over."""
        leg.wants.clear()
        for grant in leg.grants:
            if grant.copy is not None:
                grant.copy.wait()
            self._give_back(leg, grant)
        if leg.grants:
            leg.grants = []
            self._serve()
