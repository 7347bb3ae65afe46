"""A listening socket that strangers cannot exhaust: bounded in threads, and in time for all of it.

Used by moe_p2p.kv's lease_keeper.py and moe_p2p.mooncake's handshake.py. A thread serves each
connection. Until it has proved that it belongs here it is a stranger: the longest one there is
closed for the next.
"""

from __future__ import annotations

import ipaddress
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from moe_p2p import env, log
from moe_p2p.errors import PeerDeadError, make
from moe_p2p.fleet import addresses
from moe_p2p.fleet.client import Deadline

MOST_STRANGERS = 128  # at once
_GRACE_S = 1.0  # that one has at least. Too small: bursts of real peers are cut off
_PAUSE_S = 0.1  # where there are no more file descriptors

# What serves a connection, and closes it: until the deadline, and calls the last one after a proof.
Serve = Callable[[socket.socket, Deadline, Callable[[], None]], None]


class Listener:
    """limit_s: for all that a stranger says."""

    def __init__(self, name: str, listening: socket.socket, serve: Serve, limit_s: float) -> None:
        self.name, self.port = name, int(listening.getsockname()[1])
        self._listening, self._serve, self._limit_s = listening, serve, limit_s
        self._strangers: dict[socket.socket, float] = {}  # since when, in this order
        self._changed = threading.Condition()
        self._closed = False
        self._thread = self._start("accept", self._accept)

    def _start(self, what: str, run: Callable[..., None], *args: object) -> threading.Thread:
        thread = threading.Thread(target=run, args=args, name=f"{self.name} {what}", daemon=True)
        thread.start()
        return thread

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listening.accept()
            except OSError:  # closed, or no file descriptors
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, _PAUSE_S)
                continue
            self._take(connection)
            try:
                self._start("meets", self._meet, connection)
            except RuntimeError:  # this process may have no more threads
                self._forget(connection)
                connection.close()

    def _take(self, connection: socket.socket) -> None:
        """Makes room for one more."""
        with self._changed:
            while len(self._strangers) >= MOST_STRANGERS and not self._closed:
                longest, since = next(iter(self._strangers.items()))
                left = since + _GRACE_S - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                else:
                    del self._strangers[longest]
                    end(longest)
            self._strangers[connection] = time.monotonic()

    def _meet(self, connection: socket.socket) -> None:
        try:
            self._serve(connection, Deadline(self._limit_s), lambda: self._forget(connection))
        finally:
            self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        with self._changed:
            self._strangers.pop(connection, None)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        end(self._listening)
        self._thread.join(self._limit_s)
        self._listening.close()
        with self._changed:
            for each in self._strangers:
                end(each)


def end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # its thread wakes, and closes it


def some(connection: socket.socket, most: int, deadline: Deadline | None) -> bytes:
    """Returns what is there next, at least a byte. Raises PeerDeadError at the end of the
    connection, OSError at the deadline, which is of many calls; None: there is none."""
    if deadline is not None:
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        if not poll.poll(deadline.left * 1000):
            raise OSError(f"nothing more was said within {deadline.timeout_s:g} s")
    part = connection.recv(most)
    if not part:
        raise make(PeerDeadError, "the other worker closed the connection")
    return part


def warn_of_strangers(who: str, host: str, what: str) -> None:
    """Where others than this machine's processes reach `host`, and no secret protects `what`."""
    if env.secret():
        return
    with suppress(OSError):
        asked = addresses.bare(host) or "0.0.0.0"
        address = socket.getaddrinfo(asked, 0, type=socket.SOCK_STREAM)[0][4][0]
        if not ipaddress.ip_address(str(address).partition("%")[0]).is_loopback:
            log.warning(
                f"{who}: {what}; keep {host or 'its port'} within the cluster, or set "
                "MOE_P2P_SECRET to the same long random text in all processes"
            )
