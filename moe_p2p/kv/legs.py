"""What a reservation knows of one of its senders. Used by moe_p2p/kv/receiver.py."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from moe_p2p.kv.copies import Placed
from moe_p2p.kv.pair import KVCache, Pair
from moe_p2p.kv.stats import KVTransferStats
from moe_p2p.kv.tail import Slot, Tail
from moe_p2p.kv.units import Chunk, Pages, Units
from moe_p2p.kv.unpacking import Grant


class LegState(enum.Enum):
    OPEN = "open"
    DRAINING = "draining"  # cancelled: writes may still land
    SETTLED = "settled"  # nothing lands any more


@dataclass(eq=False)
class Leg:
    """nonce: of this reservation at this sender; a message or a tail without it is of another one.
    least: immediates, where the request comes as one chunk; expected: as its tail says. counted:
    immediates, or reads that are done, at the last look."""

    pair: Pair
    slot: Slot
    nonce: int
    least: int = 0
    expected: int = 0
    nbytes: int = 0  # of all chunks
    counted: int = 0
    state: LegState = LegState.OPEN
    tail: Tail | None = None
    drain_until: float = 0.0
    drained: bool = False  # the sender has said so
    # of a pull
    reads: list[Any] = field(default_factory=list)
    nonce_read: bool = False
    export_row: int = 0
    # of packed rows (moe_p2p/kv/unpacking.py)
    wants: list[int] = field(default_factory=list)  # parts of the ring that the sender waits for
    most_parts: int = 1  # of a write, as its ring allows
    grants: list[Grant] = field(default_factory=list)
    scattered: int = 0  # parts that are in the pages
    units: Units | None = None
    placed: dict[tuple[int, Chunk], Placed] = field(default_factory=dict)

    def text(self) -> str:
        layers, want = len(self.pair.layers), self.expected or self.least
        if self.reads:
            count = f"{self.counted} of {len(self.reads)} reads"
        elif self.counted > want:
            count = f"{self.counted} immediates, of more than one chunk, and no tail"
        elif want > self.least:
            count = f"{self.counted} of {want} immediates"
        else:
            at = min(self.counted * layers // want, layers) if want else layers
            count = f"{self.counted} of {want} immediates (about layer {at} of {layers})"
        return f"{self.pair.name} {count}"

    def idle(self) -> bool:
        """Nothing that was begun here still writes to its pages."""
        copies = [grant.copy for grant in self.grants if grant.copy is not None]
        return all(each.done() for each in (*self.reads, *copies))

    def settle_drained(self, stats: KVTransferStats) -> bool:
        """Once the sender has said so and nothing that was begun here is under way."""
        if self.state is not LegState.DRAINING or not self.drained:
            return False
        self.reads = stats.take_done(self.reads)[1]
        if not self.idle():
            return False
        self.state = LegState.SETTLED
        stats.fenced("drained")
        return True

    def settle_fenced(self, stats: KVTransferStats) -> None:
        if self.state is LegState.SETTLED:
            return
        self.reads = stats.take_done(self.reads)[1]
        self.state = LegState.SETTLED
        stats.fenced(self.pair.fenced_by, self.pair.fence_retries)


def sum_of_layers(cache: KVCache, pages: Pages, leg: Leg) -> list[int]:
    """What arrived, in the order of `leg.pair.layers`."""
    assert leg.tail is not None
    begin, total = leg.tail.begin, leg.tail.total
    units = Units(leg.pair, total, begin=begin, target=pages)
    return [
        units.checksum(cache, layer, (begin, total), at_source=False) for layer in leg.pair.layers
    ]


def wrong_sum(cache: KVCache, pages: Pages, leg: Leg) -> str:
    """Names the first layer whose bytes are not those that were sent."""
    assert leg.tail is not None
    sums = sum_of_layers(cache, pages, leg)
    for layer, got, sent in zip(leg.pair.layers, sums, leg.tail.checksums, strict=True):
        if got != sent:
            hexed = [f"{each & (1 << 64) - 1:016x}" for each in (got, sent)]
            return f"layer {layer} from {leg.pair.name}: {hexed[0]}, sent {hexed[1]}"
    return ""


def pull_pages(engine: Any, leg: Leg, source: Pages, target: Pages) -> list[Any]:
    assert leg.tail is not None
    units = Units(leg.pair, leg.tail.total, source=source, target=target)
    return units.read(engine, (leg.tail.begin, leg.tail.total))


def pull_nonce(engine: Any, leg: Leg, row_bytes: int) -> Any:
    """Reads the nonce under which the sender keeps the pages, into the leg's own row. Where it is
    still there after all else was read, the pages had not been given to another request."""
    return engine.read(
        leg.pair.memory.control,
        leg.pair.control,
        nbytes=8,
        offset=leg.slot.number * row_bytes,
        region_offset=leg.export_row * row_bytes,
    )
