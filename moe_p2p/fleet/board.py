"""What members say to each other: keys in a torch store, each wait bounded.

A key is written by one member, but for `decide`, where the first value stays and everybody gets
that one, and for `swap`, which fails where another one was faster.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from moe_p2p.errors import TimeoutError, make

# Between two looks at the store: at first, and at most. Too small: many ranks that wait keep the
# store's thread busy. Too large: an update, of some ten milliseconds, waits for looks.
_POLL_S, _MOST_POLL_S = 0.0002, 0.05


def newer(before: int) -> int:
    """A number above the one before, also where the store has lost that: not below the clock's."""
    return max(before + 1, int(time.time()))


class Deadline:
    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.at = time.monotonic() + timeout_s

    def later(self, grace_s: float) -> Deadline:
        """For who waits for ranks that wait too: the one that is missing is named, not these."""
        found = Deadline(self.timeout_s + grace_s)
        found.at = self.at + grace_s
        return found

    @property
    def left(self) -> float:
        return max(self.at - time.monotonic(), 0.0)


class Board:
    """store: any torch store that all reach. prefix: of the fleet. alone: no other thread uses
    this client of the store meanwhile; else the board connects with one of its own, because a call
    that waits would hold it up."""

    def __init__(self, store: Any, prefix: str = "", *, alone: bool = False) -> None:
        self._store = store.clone() if hasattr(store, "clone") and not alone else store
        self._prefix = f"{prefix}/" if prefix else ""

    def put(self, key: str, value: object) -> None:
        self._store.set(self._prefix + key, json.dumps(value))

    def get(self, key: str) -> Any:
        """None where nobody wrote it."""
        if not self._store.check([self._prefix + key]):
            return None
        return json.loads(self._store.get(self._prefix + key))

    def decide(self, key: str, value: object) -> Any:
        """Writes it unless there is a value; returns the one that is there."""
        return json.loads(self._store.compare_set(self._prefix + key, "", json.dumps(value)))

    def swap(self, key: str, before: object, after: object) -> bool:
        """Writes `after` where `before` is there still; None: nothing."""
        there = "" if before is None else json.dumps(before)
        new = json.dumps(after)
        return bytes(self._store.compare_set(self._prefix + key, there, new)) == new.encode()

    def count(self, key: str, more: int = 0) -> int:
        """Adds to a number; returns it."""
        return int(self._store.add(self._prefix + key, more))

    def drop(self, key: str) -> None:
        with suppress(Exception):  # a store that cannot delete keeps it
            self._store.delete_key(self._prefix + key)

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
        while True:
            for key in keys.keys() - found.keys():
                value = self.get(key)
                if value is not None:
                    found[key] = value
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
