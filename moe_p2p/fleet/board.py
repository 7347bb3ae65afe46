"""What members say to each other: keys in a torch store, each call and each wait bounded.

A key is written by one member, but for `decide`, where the first value stays and everybody gets
that one, and for `swap`, which fails where another one was faster.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

from moe_p2p.errors import TimeoutError, make
from moe_p2p.fleet.client import Client, Deadline, StoreError, read

# Between two looks at the store: at first, and at most. Too small: many ranks that wait keep the
# store's thread busy. Too large: an update, of some ten milliseconds, waits for looks.
_POLL_S, _MOST_POLL_S = 0.0002, 0.05


def newer(before: int) -> int:
    """A number above the one before, also where the store has lost that: not below the clock's."""
    return max(before + 1, int(time.time()))


class Board:
    """store: any torch store that all reach, or this member's client of it. prefix: of the fleet.
    alone: no other thread uses the store meanwhile. A call may raise StoreError."""

    def __init__(self, store: Any, prefix: str = "", *, alone: bool = False) -> None:
        self.client = store if isinstance(store, Client) else Client(store, alone=alone)
        self.prefix = prefix

    def _at(self, key: str) -> str:
        return f"{self.prefix}/{key}" if self.prefix else key

    def within(self, deadline: Deadline) -> AbstractContextManager[None]:
        """Calls of this thread end by then."""
        return self.client.within(deadline)

    def put(self, key: str, value: object, *, wait: bool = True) -> None:
        """Where it fails, or the store loses it, it is put again once the store is back, unless it
        was dropped. wait: for the answer."""
        answer = self.client.put(self._at(key), json.dumps(value))
        if wait:
            self.client.wait(answer)

    def say(self, key: str, value: object) -> None:
        """`put`, where nothing depends on when others see it."""
        with suppress(StoreError):
            self.put(key, value)

    def get(self, key: str) -> Any:
        """None where nobody wrote it."""
        return self.client.run(lambda store: self._read(store, key))

    def decide(self, key: str, value: object) -> Any:
        """Writes it unless there is a value; returns the one that is there."""
        return json.loads(self._replace(key, "", json.dumps(value)))

    def swap(self, key: str, before: object, after: object) -> bool:
        """Writes `after` where `before` is there still; None: nothing."""
        there = "" if before is None else json.dumps(before)
        new = json.dumps(after)
        return self._replace(key, there, new) == new.encode()

    def count(self, key: str, more: int = 0) -> int:
        """Adds to a number; returns it."""
        return self.client.run(lambda store: int(store.add(self._at(key), more)))

    def drop(self, key: str) -> None:
        self.client.words.pop(self._at(key), None)
        with suppress(StoreError):  # a store that cannot delete keeps it
            self.client.run(lambda store: store.delete_key(self._at(key)))

    def withdraw(
        self, over: Callable[[str], bool] = lambda key: True, *, leaves: bool = False
    ) -> None:
        """Drops what this client has put, where nobody reads it any more. leaves: it puts nothing
        from here on."""
        prefix = self._at("")
        self.client.take_back(
            lambda at: at.startswith(prefix) and over(at.removeprefix(prefix)), leaves=leaves
        )

    def sweep(self, over: Callable[[str], bool]) -> None:
        """Drops what members have put that are no more. A store that cannot list it keeps it."""
        prefix = self._at("")

        def drop(store: Any) -> None:
            try:
                keys = store.list_keys()
            except (AttributeError, NotImplementedError):
                return
            for at in keys:
                if at.startswith(prefix) and over(at.removeprefix(prefix)):
                    store.delete_key(at)

        with suppress(StoreError):
            self.client.run(drop)

    def wait(
        self,
        keys: Mapping[str, str],
        deadline: Deadline,
        meanwhile: Callable[[list[str]], None] = lambda missing: None,
    ) -> dict[str, Any]:
        """Values of all `keys`; each with who writes it, for the error. meanwhile: gets who has
        not; may raise."""
        found: dict[str, Any] = {}
        pause = _POLL_S
        with self.within(deadline):
            while True:
                found |= self._there([key for key in keys if key not in found])
                if len(found) == len(keys):
                    return found
                missing = [who for key, who in keys.items() if key not in found]
                meanwhile(missing)
                if not deadline.left:
                    names = ", ".join(who.partition("#")[0] for who in missing)
                    text = f"within {deadline.timeout_s:g} s no word from {names}"
                    raise make(TimeoutError, text)
                time.sleep(min(pause, deadline.left))
                pause = min(pause * 1.5, _MOST_POLL_S)

    def _there(self, keys: list[str]) -> dict[str, Any]:
        found = self.client.run(lambda store: {key: self._read(store, key) for key in keys})
        return {key: value for key, value in found.items() if value is not None}

    def _read(self, store: Any, key: str) -> Any:
        found = read(store, self._at(key))
        return json.loads(found) if found else None

    def _replace(self, key: str, before: str, new: str) -> bytes:
        return self.client.run(lambda store: bytes(store.compare_set(self._at(key), before, new)))
