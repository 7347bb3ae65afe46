"""The last write of a request, its *footer*, and the numbers that requests are counted by.

A footer names the reservation (nonce), the number of immediates of all chunks that were sent,
checksums and what the user adds (a first token, say). It arrives like any other write, maybe before
what it speaks of: only the count of immediates says that all is there. It ends with a checksum of
its own, so that half of one is not taken for one.
"""

from __future__ import annotations

import secrets
import struct
import zlib
from typing import NamedTuple

from moe_p2p.engine.engine import Engine
from moe_p2p.errors import (
    ClosedError,
    InvalidArgumentError,
    ResourceExhaustedError,
    make,
    require,
)

MAX_USER_BYTES = 256
_HEAD = struct.Struct("<QIIIHH")  # nonce, begin, total, immediates, checksums, user bytes
_CRC = struct.Struct("<I")
# Of immediates: moe_p2p/engine/README.md has the table of who counts which.
_KV_BIT = 1 << 30
_SLOT_BITS, _EPOCH_BITS = 12, 18
MAX_SLOTS = 1 << _SLOT_BITS


class Footer(NamedTuple):
    """Of tokens `begin` to `total`. immediates: of all that was sent for them, the footer included.
    checksums: by place of the layer among the source's layers; empty where they are not sent."""

    nonce: int
    begin: int
    total: int
    immediates: int
    checksums: tuple[int, ...]
    user: bytes

    def to_bytes(self) -> bytes:
        head = _HEAD.pack(
            self.nonce,
            self.begin,
            self.total,
            self.immediates,
            len(self.checksums),
            len(self.user),
        )
        body = head + struct.pack(f"<{len(self.checksums)}q", *self.checksums) + self.user
        return body + _CRC.pack(zlib.crc32(body))

    @staticmethod
    def parse(data: bytes | bytearray | memoryview) -> Footer | None:
        """None: not all of it is there."""
        nonce, begin, total, immediates, checksums, user = _HEAD.unpack_from(data)
        size = _HEAD.size + 8 * checksums + user
        if nonce == 0 or size + _CRC.size > len(data):
            return None
        body = bytes(data[:size])
        if _CRC.unpack_from(data, size)[0] != zlib.crc32(body):
            return None
        sums = struct.unpack_from(f"<{checksums}q", body, _HEAD.size)
        return Footer(nonce, begin, total, immediates, sums, body[size - user : size])


def footer_bytes(num_layers: int) -> int:
    """Of the largest footer, a multiple of 64."""
    size = _HEAD.size + 8 * num_layers + MAX_USER_BYTES + _CRC.size
    return -(-size // 64) * 64


def immediate(slot: int, epoch: int) -> int:
    """What a request is counted by. An immediate of an earlier use of the slot, which may arrive
    late, counts for another number."""
    return _KV_BIT | slot << _EPOCH_BITS | epoch % (1 << _EPOCH_BITS)


class Slot(NamedTuple):
    number: int
    epoch: int

    @property
    def imm(self) -> int:
        return immediate(self.number, self.epoch)


class Slots:
    """Places of requests under way; each use of one has a number of its own."""

    def __init__(self, count: int, *, first: int = 0) -> None:
        least, most = 0 if first else 1, MAX_SLOTS - first
        require(
            type(count) is int and least <= count <= most,
            f"{'parts of the ring are' if first else 'max_requests is'} {count!r}, must be an "
            f"integer from {least} to {most}",
        )
        self.count, self._first = count, first
        self._free = list(reversed(range(count)))
        # Not from 0: receivers that follow each other on an engine must not share numbers.
        self._epochs = [secrets.randbelow(1 << _EPOCH_BITS)] * count

    def take(self, what: str) -> Slot:
        if not self._free:
            raise make(
                ResourceExhaustedError,
                f"{what}: all {self.count} requests are under way; raise max_requests, or wait",
            )
        return self._take(self._free[-1])

    def take_run(self, most: int, *, least: int = 1) -> list[Slot]:
        """Places that follow each other, from the longest unused one on that begins a run of at
        least `least` free ones; else none. The first one's number counts for all."""
        free = set(self._free)
        for begin in reversed(self._free):
            end = begin + 1
            while end < begin + most and end in free:
                end += 1
            if end - begin >= least:
                rest = (Slots._take(self, number) for number in range(begin + 1, end))
                return [self._take(begin), *rest]
        return []

    def give_back_run(self, slots: list[Slot]) -> None:
        self.give_back(slots[0])
        for slot in slots[1:]:
            Slots.give_back(self, slot)

    def _take(self, number: int) -> Slot:
        self._free.remove(number)
        self._epochs[number] += 1
        return Slot(self._first + number, self._epochs[number])

    def give_back(self, slot: Slot) -> None:
        self._free.insert(0, slot.number - self._first)  # the longest unused one is taken next

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_taken(self) -> int:
        return self.count - len(self._free)


class CountedSlots(Slots):
    """Slots whose immediates arrive at `engine`: their counters are given back with them."""

    def __init__(self, count: int, engine: Engine, *, first: int = 0) -> None:
        super().__init__(count, first=first)
        self._engine = engine
        self._last_imm: dict[int, int] = {}  # by number

    def _take(self, number: int) -> Slot:
        slot = super()._take(number)
        if number in self._last_imm:
            self._drop(self._last_imm[number])  # what arrived late
        self._last_imm[number] = slot.imm
        return slot

    def give_back(self, slot: Slot) -> None:
        self._drop(slot.imm)
        super().give_back(slot)

    def _drop(self, imm: int) -> None:
        try:
            self._engine.free_imm(imm)
        except (InvalidArgumentError, ClosedError):
            return  # a thread waits for it: the next use of the slot drops it


def slots_for(count: int, engine: Engine | None, *, first: int = 0) -> Slots:
    """engine: where immediates of the slots arrive; None: not here."""
    return Slots(count, first=first) if engine is None else CountedSlots(count, engine, first=first)
