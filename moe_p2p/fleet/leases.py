"""Leases: a record by name in a store, that its member renews; one that is not renewed is over.

Any store will do that has the three methods of `Leases`. `TorchLeases` is one over torch's stores:
a record counts, and a record that has not been renewed for `lease_s` of the reader's own clock is
over, so clocks of hosts need not agree. Used by member.py, and by moe_p2p.kv.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, Protocol

from moe_p2p.errors import require


class Leases(Protocol):
    def renew(self, name: str, record: bytes) -> None:
        """Makes or renews the lease of `name`."""

    def withdraw(self, name: str) -> None:
        """Ends it."""

    def members(self) -> dict[str, bytes]:
        """Returns records by name, of leases that are not over."""


class TorchLeases:
    """Leases in a torch store (TCPStore, FileStore, HashStore, PrefixStore).

    One key counts the places that were ever taken; each place holds one lease, and is taken again
    once its lease has been withdrawn or has been over for a while.
    """

    def __init__(
        self, store: Any, lease_s: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        require(
            hasattr(store, "compare_set"), f"TorchLeases: store is {store!r}, must be a torch store"
        )
        require(
            isinstance(lease_s, (int, float)) and 0 < lease_s < float("inf"),
            f"TorchLeases: lease_s is {lease_s!r}, must be a number of seconds above 0",
        )
        # A client of its own: a call that waits in another one would hold up the renewal.
        self.store = store.clone() if hasattr(store, "clone") else store
        self._lease_s, self._clock = lease_s, clock
        self._places: dict[str, tuple[int, str]] = {}  # by name: place, and what stands there
        self._renewals = 0
        self._seen: dict[int, tuple[bytes, float]] = {}  # by place: value, since when

    def renew(self, name: str, record: bytes) -> None:
        self._renewals += 1
        value = json.dumps([name, self._renewals, record.decode()])
        place, before = self._places.get(name, (-1, ""))
        # Somebody else may have cleared or taken the place of a worker that was stopped.
        if place < 0 or not self._replace(place, before, value):
            place = self._take_place(value)
        self._places[name] = (place, value)

    def withdraw(self, name: str) -> None:
        place, value = self._places.pop(name, (-1, ""))
        if place >= 0:
            self._replace(place, value, "")

    def members(self) -> dict[str, bytes]:
        now, found = self._clock(), {}
        for place in range(self._num_places()):
            value = self._read(place)
            age = self._age(place, value, now)
            if value and age <= self._lease_s:
                name, _, record = json.loads(value)
                found[name] = record.encode()
            elif value and age > 2 * self._lease_s:
                self._replace(place, value.decode(), "")  # for the next worker that comes
        return found

    def _age(self, place: int, value: bytes, now: float) -> float:
        """For how long the value has stood there, as far as this reader knows."""
        before, since = self._seen.get(place, (b"", now))
        if value != before:
            since = now
        self._seen[place] = (value, since)
        return now - since

    def _replace(self, place: int, before: str, value: str) -> bool:
        got = self.store.compare_set(self._key(place), before, value)
        return bytes(got) == value.encode()

    def _take_place(self, value: str) -> int:
        for place in range(self._num_places()):
            if not self._read(place) and self._replace(place, "", value):
                return place
        place = int(self.store.add("moe_p2p/kv/places", 1)) - 1
        if self._replace(place, "", value):
            return place
        return self._take_place(value)  # taken by another one just now

    def _num_places(self) -> int:
        return int(self.store.add("moe_p2p/kv/places", 0))

    def _read(self, place: int) -> bytes:
        """A place that was counted and not yet written is empty."""
        key = self._key(place)
        return bytes(self.store.get(key)) if self.store.check([key]) else b""

    @staticmethod
    def _key(place: int) -> str:
        return f"moe_p2p/kv/place/{place}"
