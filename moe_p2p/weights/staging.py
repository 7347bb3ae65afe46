"""Where a trainer's conversions land before they are written: a bounded ring of device memory.

Each copy of the plan has a place in the ring, the same one in every update, so that it is
registered once and requests are made once. A copy may be converted when all that lay in its place
before has been written. Used by conversion.py; pure but for the buffer itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from moe_p2p.errors import ResourceExhaustedError, make

_ALIGN = 256
_BATCH_BYTES = 256 << 20  # converted by one launch and written while the next is converted


class Need(NamedTuple):
    """Bytes of a copy: what is written, its scales, and its source where it is loaded first."""

    name: str
    elements: int
    scales: int = 0
    loaded: int = 0


class RingPlace(NamedTuple):
    """Offsets in the ring. after: number of the last copy that must be written before; -1: none."""

    elements: int
    scales: int
    loaded: int
    end: int
    after: int


def sizes(need: Need) -> tuple[int, int, int]:
    elements, scales, loaded = (-(-each // _ALIGN) * _ALIGN for each in need[1:])
    return elements, scales, loaded


def ring(needs: Sequence[Need], limit: int | None, who: str) -> tuple[list[RingPlace], int]:
    """Places of copies, in their order, and the size of the ring.

    Raises ResourceExhaustedError with a copy that is larger than `limit` by itself.
    """
    totals = [sum(sizes(need)) for need in needs]
    size = sum(totals) if limit is None else min(sum(totals), max(limit, 0) // _ALIGN * _ALIGN)
    for need, total in zip(needs, totals, strict=True):
        if total > size:
            text = (
                f"{who}: converting {need.name} takes {total} bytes, its watermark leaves {size}; "
                "raise watermark"
            )
            raise make(ResourceExhaustedError, text)
    places: list[RingPlace] = []
    at = lap = oldest = 0  # of the lap before, copies from `oldest` on lie in the ring
    for i, (need, total) in enumerate(zip(needs, totals, strict=True)):
        if at + total > size:
            at, oldest, lap = 0, lap, i
        while oldest < lap and places[oldest].elements < at + total:
            oldest += 1
        elements, scales, _ = sizes(need)
        places.append(RingPlace(at, at + elements, at + elements + scales, at + total, oldest - 1))
        at += total
    return places, size


def batches(places: Sequence[RingPlace], chosen: Sequence[int], size: int) -> Iterator[list[int]]:
    """Yields the numbers of copies to convert together: at most a quarter of the ring, and no two
    of them in the same place."""
    most = min(max(size // 4, 1), _BATCH_BYTES)
    batch: list[int] = []
    nbytes = 0
    for number in chosen:
        place = places[number]
        length = place.end - place.elements
        if batch and (nbytes + length > most or place.after >= batch[0]):
            yield batch
            batch, nbytes = [], 0
        batch.append(number)
        nbytes += length
    if batch:
        yield batch
