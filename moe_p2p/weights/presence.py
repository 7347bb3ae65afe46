"""Which ranks of a fleet are there: each has a lease in the store, which a thread of it renews.

The leases of moe_p2p/kv/leases.py. Used by trainer.py, which drops ranks whose lease is over,
and by generator.py. The thread touches no device and keeps no reference to its rank.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from torch._C._distributed_c10d import PrefixStore

from moe_p2p import log
from moe_p2p.kv.leases import TorchLeases

Record = dict[str, Any]


class _Beat:
    """What the thread has: a lease to renew until it is stopped."""

    def __init__(self, leases: TorchLeases, who: str, record: Record, lease_s: float) -> None:
        self.leases, self.who, self.record, self.every = leases, who, record, lease_s / 4
        self.stopped, self.lock = threading.Event(), threading.Lock()

    def renew(self) -> None:
        with self.lock:
            if not self.stopped.is_set():
                self.leases.renew(self.who, json.dumps(self.record).encode())

    def run(self) -> None:
        failing = False
        while not self.stopped.wait(self.every):
            try:
                self.renew()
                failing = False
            except Exception as error:  # the store is gone: updates fail, the engine goes on
                if not failing:
                    log.warning(f"{self.who}: the store of leases does not answer: {error!r}")
                failing = True

    def stop(self) -> None:
        self.stopped.set()
        with self.lock, suppress(Exception):  # the store may be gone
            self.leases.withdraw(self.who)


class Presence:
    """store, name: of the fleet. who: "trainer 3". record: what others read of it.

    lease_s: after it without a renewal, by the reader's clock, a rank is lost.
    """

    def __init__(self, store: Any, name: str, who: str, record: Record, lease_s: float) -> None:
        of_fleet = PrefixStore(f"moe_p2p weights/{name}", store)
        self.lease_s, self.incarnation = lease_s, secrets.token_hex(8)
        record = {**record, "incarnation": self.incarnation}
        self._leases = TorchLeases(of_fleet, lease_s)  # the caller's thread looks, another renews
        self._beat = _Beat(self._leases, who, record, lease_s)
        self._looked = 0.0
        self._beat.renew()
        threading.Thread(target=self._beat.run, name=f"lease of {who}", daemon=True).start()
        self.close = weakref.finalize(self, self._beat.stop)  # withdraws the lease; idempotent

    def announce(self, **changes: object) -> None:
        """Adds to the record that others read."""
        self._beat.record |= changes
        self._beat.renew()

    def members(self) -> dict[str, Record]:
        """Returns the records of all ranks with a lease, read from the store now."""
        self._looked = time.monotonic()
        return {who: json.loads(each) for who, each in self._leases.members().items()}

    def lost(self, among: Iterable[str], since: float) -> list[str]:
        """Returns the ranks of `among` without a lease.

        since: when the caller began to wait. [] at first, and between looks: it reads the store
        once in a quarter of a lease.
        """
        now, pause = time.monotonic(), self.lease_s / 4
        if now - since < pause or now - self._looked < pause:
            return []
        members = self.members()
        return [who for who in among if who not in members]
