"""One process of a fleet: its name, its incarnation, and its lease, which a thread of it renews.

Used by weights' trainer.py and engine_rank.py, and by kv's lease_keeper.py; Mooncake's engine.py
has ids alone. The thread touches no
device, and keeps no reference to its rank but for `then`. README.md says what names, incarnations
and ids are.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from moe_p2p import log
from moe_p2p.errors import AbortedError, make
from moe_p2p.fleet.client import Deadline
from moe_p2p.fleet.leases import TorchLeases
from moe_p2p.fleet.letter import letter
from moe_p2p.fleet.store_keys import StoreKeys, newer

Record = dict[str, Any]
LEAVE_S = 1.0  # who leaves waits so long for a store that is gone


class ReplacedError(AbortedError):
    """Another process has this one's name now."""


def new_id(name: str) -> str:
    """Of a process that begins under this name: with an incarnation of its own."""
    return f"{name}#{secrets.token_hex(4)}"


def name_of(who: str) -> str:
    """Of an id: what people read."""
    return who.rpartition("#")[0] or who


class _Beat:
    """What the thread has: a lease to renew until it is stopped, or its name is another's."""

    def __init__(
        self,
        words: StoreKeys,
        leases: TorchLeases,
        who: str,
        record: Record,
        lease_s: float,
        then: Callable[[], None] | None,
    ) -> None:
        self.leases, self.who, self.record, self.every = leases, who, record, lease_s / 4
        self.words = words
        self.before = ""  # the id that had this name
        self.stopped, self.lock, self.replaced = threading.Event(), threading.Lock(), False
        self.awake = threading.Event()
        self._then = then  # at the end of each beat

    def claim(self) -> None:
        key = f"{name_of(self.who)} is"
        while True:
            before = self.words.get(key)
            claim = newer(before["claim"] if before else 0)
            if self.words.swap(key, before, {"id": self.who, "claim": claim}):
                self.record["claim"], self.before = claim, before["id"] if before else ""
                if self.before:
                    self.leases.end(self.before)
                return

    def give_up_the_name(self) -> None:
        """Who claims it within this moment claims it again at its next look. A name that another
        process had stays: by that it finds out, however late it goes on."""
        if self.before:
            return
        key = f"{name_of(self.who)} is"
        found = self.words.get(key)
        if found is not None and found["id"] == self.who:
            self.words.drop(key)

    def look(self) -> None:
        """Whether the name is still this process's. A store that has lost it has it again, and one
        that was away when this process began gets its claim."""
        found = self.words.get(f"{name_of(self.who)} is") if "claim" in self.record else None
        if found is None:
            self.claim()
        elif found["id"] != self.who:
            self.replaced = True
            self.stop()

    def announce(self, changes: Record) -> None:
        self.record |= changes
        self.renew()

    def renew(self) -> None:
        with self.lock:
            if not self.stopped.is_set():
                self.leases.renew(self.who, json.dumps(self.record).encode())

    def run(self) -> None:
        failing = False
        while True:
            self.awake.wait(self.every)
            self.awake.clear()
            if self.stopped.is_set():
                return
            try:
                self.look()
                self.renew()
                if self._then is not None:
                    self._then()
                failing = False
            except Exception as error:  # the store is gone: updates fail, the engine goes on
                if not failing:
                    log.warning(f"{self.who}: the store of leases does not answer: {error!r}")
                failing = True

    def stop(self) -> None:
        self.stopped.set()
        self.awake.set()
        if self.lock.acquire(timeout=LEAVE_S):  # else the store is gone, and the lease will be over
            try:
                with suppress(Exception), self.leases.client.within(Deadline(LEAVE_S)):
                    self.leases.withdraw(self.who)
                    self.give_up_the_name()
            finally:
                self.lock.release()


class Member:
    """words: of the fleet. name: "trainer 3". record: what others read of it.

    lease_s: after it without a renewal, by the reader's clock, a member is lost. leases: where a
    caller has some already. then: called by the thread after each renewal, and once when the name
    is another process's; the thread also claims the name then, where else the constructor does.
    """

    def __init__(
        self,
        words: StoreKeys,
        name: str,
        record: Record,
        lease_s: float,
        *,
        leases: TorchLeases | None = None,
        then: Callable[[Member], None] | None = None,
    ) -> None:
        self.name, self.id, self.lease_s = name, new_id(name), lease_s
        self._words = words
        self._leases = leases or TorchLeases(words.client, lease_s, prefix=words.prefix)
        record, after = {**record, "letter": letter()}, then and partial(then, self)
        self._beat = _Beat(words, self._leases, self.id, record, lease_s, after)
        self._looked = 0.0
        if then is None:
            self._beat.claim()
            self._beat.renew()
        else:
            self._beat.awake.set()
        threading.Thread(target=self._beat.run, name=f"lease of {name}", daemon=True).start()
        self.close = weakref.finalize(self, self._beat.stop)  # withdraws the lease; idempotent

    def announce(self, **changes: object) -> None:
        """Adds to the record that others read."""
        self._beat.announce(changes)

    def sweep(self) -> None:
        """Drops what the process before this one said, where that has not left by `close`."""
        before = self._beat.before
        if before:
            self._words.sweep(lambda key: before in key)

    def wake(self) -> None:
        """The thread looks and renews now."""
        self._beat.awake.set()

    @property
    def replaced(self) -> bool:
        """Another process has claimed the name; as far as the last look knew."""
        return self._beat.replaced

    def look(self) -> None:
        """Raises where another process has claimed the name by now."""
        self._beat.look()
        self.check()

    def check(self) -> None:
        """Raises where the last look found another process's claim."""
        if self.replaced:
            text = f"{self.name} was replaced: another process has taken its name"
            raise ReplacedError(str(make(AbortedError, text)))

    def members(self) -> dict[str, Record]:
        """Returns the records of all members with a lease by id, read from the store now: for each
        name, of the process that claimed it last."""
        self._looked = time.monotonic()
        found = {who: json.loads(each) for who, each in self._leases.members().items()}
        return current(found)

    def renewed(self) -> dict[str, Record]:
        """Of `members`, those that have renewed their lease since this one looked first: a process
        that was killed has one for a while."""
        found = self.members()
        return {who: each for who, each in found.items() if who in self._leases.renewed}

    def lost(self, among: Iterable[str], since: float) -> list[str]:
        """Returns the ids of `among` without a lease, and those that were replaced.

        since: when the caller began to wait. [] at first, and between looks: it reads the store
        once in a quarter of a lease.
        """
        now, pause = time.monotonic(), self.lease_s / 4
        if now - since < pause or now - self._looked < pause:
            return []
        members = self.members()
        return [who for who in among if who not in members]


def current(found: Mapping[str, Record]) -> dict[str, Record]:
    last: dict[str, str] = {}
    for who, record in found.items():
        before = last.setdefault(name_of(who), who)
        if record.get("claim", 0) > found[before].get("claim", 0):  # other versions have none
            last[name_of(who)] = who
    return {who: found[who] for who in last.values()}
