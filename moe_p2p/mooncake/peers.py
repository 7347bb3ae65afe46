"""Engines by host:port: what each has registered, and a connection to it."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from moe_p2p import errors
from moe_p2p.engine.engine import Engine
from moe_p2p.engine.transfers import Region
from moe_p2p.mooncake import handshake
from moe_p2p.mooncake.memory import Table

# Regions of memory that is gone stay with a connection; above this many it is made anew.
_MOST_GONE = 64
# Peers that are known: one that began anew has another port, and the one before is asked for no
# more. Too few: transfers to many peers connect each time.
_MOST_KNOWN = 1024


class Remote:
    """A peer's memory by address, as it was when the peer was asked. id: with the incarnation: a
    process that was started again may have the port and the addresses of the one before."""

    def __init__(self, engine: Engine, answer: dict[str, Any]) -> None:
        self.id: str = answer["id"]
        self._users, self._dropped = 0, False  # under the lock of Peers
        self.first = 0
        self._engine = engine
        self._regions: dict[str, Region] = {}  # by descriptor
        self.update(answer)
        self._peer = engine.connect(bytes.fromhex(answer["address"]))
        self._connected, self._disconnecting = True, threading.Lock()

    def taken(self) -> None:
        self._users += 1

    @property
    def is_idle(self) -> bool:
        """No transfer uses it."""
        return not self._users

    def given_back(self) -> None:
        self._users -= 1
        self._disconnect_unused()

    def drop(self) -> None:
        """It is taken no more."""
        self._dropped = True
        self._disconnect_unused()

    def _disconnect_unused(self) -> None:
        if self._dropped and self.is_idle:
            self.disconnect()

    def update(self, answer: dict[str, Any]) -> None:
        """Takes a newer answer; regions that are known stay resolved."""
        table = Table()
        for address, nbytes, descriptor in answer["memory"]:
            table.add(address, nbytes, descriptor)
        self._table = table
        self.first = answer["first"]

    def is_outdated_by(self, answer: dict[str, Any]) -> bool:
        """Returns whether it holds more regions that are gone than are worth a connection."""
        registered = {descriptor for _, _, descriptor in answer["memory"]}
        return len(self._regions.keys() - registered) > _MOST_GONE

    def find(self, address: int, nbytes: int) -> tuple[Region, int] | None:
        found = self._table.find(address, nbytes)
        if found is None:
            return None
        descriptor, offset = found
        region = self._regions.get(descriptor)
        if region is None:
            region = self._engine.resolve(bytes.fromhex(descriptor), self._peer)
            self._regions[descriptor] = region
        return region, offset

    def key_of(self, address: int, nbytes: int) -> str:
        """Returns the descriptor of the memory that holds this; empty: none does."""
        found = self._table.find(address, nbytes)
        return found[0] if found else ""

    def disconnect(self) -> None:
        """When it returns, nothing is under way to it; calling it again changes nothing."""
        with self._disconnecting:  # who calls it meanwhile waits for it
            if self._connected:
                self._connected = False  # once, whatever it raises: the engine knows it no more
                with contextlib.suppress(errors.ClosedError):
                    self._peer.disconnect()


class Peers:
    """Peers by host:port, each connected while a transfer uses it or the next one may."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.RLock()  # of what follows, and of the remotes' counts
        self._remotes: dict[str, Remote] = {}

    def take(self, session: str, *, asks: bool = False) -> Remote:
        """Returns the peer, until give_back; asks: with what it has registered by now."""
        with self._lock:
            known = self._remotes.get(session)
            if known is not None and not asks:
                known.taken()
                self._remotes[session] = self._remotes.pop(session)  # it was used last
                return known
        answer = handshake.ask(session, {"memory": True})
        with self._lock:
            known = self._remotes.get(session)
            if known is not None and (known.id != answer["id"] or known.is_outdated_by(answer)):
                self.drop(session, known)
                known = None
            if known is None:
                known = self._remotes[session] = Remote(self._engine, answer)
            known.update(answer)
            known.taken()
            self._remotes[session] = self._remotes.pop(session)
            idle = [name for name, each in self._remotes.items() if each.is_idle]
            for name in idle[: max(len(self._remotes) - _MOST_KNOWN, 0)]:
                self.drop(name, self._remotes[name])
            return known

    def give_back(self, remote: Remote) -> None:
        with self._lock:
            remote.given_back()

    def drop(self, session: str, remote: Remote) -> None:
        """The next transfer asks the peer again; transfers that use `remote` go on."""
        with self._lock:
            if self._remotes.get(session) is remote:
                del self._remotes[session]
            remote.drop()
