"""Leases: a record by name in a store, that its member renews; one that is not renewed is over.

A record that has not been renewed for `lease_s` of the reader's own clock is over, so clocks of
hosts need not agree. Used by member.py; callers of moe_p2p.kv make them.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import Any

from moe_p2p.errors import require
from moe_p2p.fleet.client import Client, read


class TorchLeases:
    """Leases in a torch store (TCPStore, FileStore, HashStore, PrefixStore).

    One key counts the places that were ever taken; each place holds one lease, and is taken again
    once its lease has been withdrawn or has been over for a while. Nobody can renew while the store
    is away: who was there before stays for one more lease.

    prefix: of its keys. store may be a `Client` of one.
    """

    def __init__(
        self,
        store: Any,
        lease_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        *,
        prefix: str = "",
    ) -> None:
        require(
            hasattr(store, "compare_set") or isinstance(store, Client),
            f"TorchLeases: store is {store!r}, must be a torch store",
        )
        require(
            isinstance(lease_s, (int, float)) and 0 < lease_s < float("inf"),
            f"TorchLeases: lease_s is {lease_s!r}, must be a number of seconds above 0",
        )
        self.client = store if isinstance(store, Client) else Client(store)
        self._lease_s, self._clock, self.prefix = lease_s, clock, prefix
        self._at = f"{prefix}/moe_p2p/kv" if prefix else "moe_p2p/kv"
        self._places: dict[str, tuple[int, str]] = {}  # by name: place, and what stands there
        self._renewals = 0
        self._seen: dict[int, tuple[bytes, float]] = {}  # by place: value, since when
        self._found: dict[str, bytes] = {}  # at the last look
        self.renewed: set[str] = set()  # of these, who has renewed between two looks
        self._returns, self._back = self.client.returns, -math.inf  # when the store came back

    def renew(self, name: str, record: bytes) -> None:
        self._renewals += 1
        value = json.dumps([name, self._renewals, record.decode()])
        place, before = self._places.get(name, (-1, ""))
        now = self.client.run(lambda store: self._put(store, place, before, value))
        self._places[name] = now, value

    def withdraw(self, name: str) -> None:
        place, value = self._places.pop(name, (-1, ""))
        if place >= 0:
            self.client.run(lambda store: self._replace(store, place, value, ""))

    def end(self, name: str) -> None:
        """Of a process that another one has replaced: its place is free for that one."""

        def clear(store: Any) -> None:
            for place, value in enumerate(self._values(store)):
                if value and json.loads(value)[0] == name:
                    self._replace(store, place, value.decode(), "")

        self.client.run(clear)

    def members(self) -> dict[str, bytes]:
        values = self.client.run(self._values)
        now, found, over = self._clock(), {}, list[tuple[int, bytes]]()
        for place, value in enumerate(values):
            before, _ = self._seen.get(place, (value, now))
            age = self._age(place, value, now)
            if value and age <= self._lease_s:
                name, _, record = json.loads(value)
                found[name] = record.encode()
                if value != before:
                    self.renewed.add(name)
            elif value and age > 2 * self._lease_s:
                over.append((place, value))
        if self.client.returns != self._returns:
            self._returns, self._back = self.client.returns, now
        if now - self._back <= self._lease_s:
            found = {**self._found, **found}
        elif over:  # for the next worker that comes
            self.client.run(
                lambda store: [self._replace(store, i, v.decode(), "") for i, v in over]
            )
        self._found, self.renewed = found, self.renewed & found.keys()
        return dict(found)

    def _age(self, place: int, value: bytes, now: float) -> float:
        """For how long the value has stood there, as far as this reader knows."""
        before, since = self._seen.get(place, (b"", now))
        if value != before:
            since = now
        self._seen[place] = (value, since)
        return now - since

    def _put(self, store: Any, place: int, before: str, value: str) -> int:
        """Returns its place. Somebody else may have cleared or taken the one of a worker that was
        stopped, and a store that was lost has none."""
        if place >= 0 and self._replace(store, place, before, value):
            return place
        for free in range(self._num_places(store)):
            if not self._read(store, free) and self._replace(store, free, "", value):
                return free
        place = int(store.add(f"{self._at}/places", 1)) - 1
        return place if self._replace(store, place, "", value) else self._put(store, -1, "", value)

    def _values(self, store: Any) -> list[bytes]:
        return [self._read(store, place) for place in range(self._num_places(store))]

    def _num_places(self, store: Any) -> int:
        return int(store.add(f"{self._at}/places", 0))

    def _read(self, store: Any, place: int) -> bytes:
        """A place that was counted and not yet written is empty."""
        return read(store, self._key(place))

    def _replace(self, store: Any, place: int, before: str, value: str) -> bool:
        return bytes(store.compare_set(self._key(place), before, value)) == value.encode()

    def _key(self, place: int) -> str:
        return f"{self._at}/place/{place}"
