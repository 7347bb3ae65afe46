"""Connections of all ranks to rank 0, for clocks and events: TCP, beside what is traced.

Clocks are matched by pings. Rank 0 reads its clock before and behind each: the other's time lies
between, whatever the network did, so each ping bounds the difference of the clocks on both sides,
and the narrowest pair of bounds is kept. Nothing is assumed to take as long there as back.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from moe_p2p import errors
from moe_p2p.fleet import addresses
from moe_p2p.fleet.bootstrap import Bootstrap

PINGS = 200
_KEY_BYTES = 32
_PATIENCE_S = 5.0  # for a connection that has not proved that it is a rank
_PING, _END = b"p", b"e"
Clock = Callable[[], int]


class Bounds(NamedTuple):
    """Of what a clock shows when another one shows `at`, less that: nanoseconds."""

    at: int
    low: int
    high: int

    @property
    def offset(self) -> int:
        return (self.low + self.high) // 2

    @property
    def error(self) -> int:
        """The offset is right within this."""
        return -(-(self.high - self.low) // 2)


def bounds_of(pings: list[tuple[int, int, int]]) -> Bounds:
    """pings: this clock before, the other clock, this clock behind."""
    low = max(other - behind for _, other, behind in pings)
    high = min(other - before for before, other, _ in pings)
    return Bounds(pings[-1][2], min(low, high), max(low, high))


def clock_name() -> str:
    """Processes with equal names have one clock: of one boot, and of one time namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/time')}"


class Hub:
    """Collective, as all its calls. Rank 0 has the others' connections, in order of ranks."""

    def __init__(
        self, meeting: Bootstrap, *, timeout_s: float, clock: Clock = time.monotonic_ns
    ) -> None:
        self.rank, self.world_size, self._clock = meeting.rank, meeting.world_size, clock
        self._undo = ExitStack()
        try:
            self._connect(meeting, timeout_s)
        except BaseException:
            self.close()
            raise

    def _connect(self, meeting: Bootstrap, timeout_s: float) -> None:
        listening = key = None
        mine: dict[str, Any] = {"clock": clock_name()}
        if self.rank == 0 and self.world_size > 1:
            key = secrets.token_bytes(_KEY_BYTES)
            listening = self._undo.enter_context(addresses.listen("", backlog=self.world_size))
            mine |= {"hosts": _own_hosts(), "key": key.hex()}
            mine |= {"port": listening.getsockname()[1]}
        payloads = meeting.exchange(json.dumps(mine).encode(), "where a trace is gathered")
        ranks = [json.loads(each) for each in payloads]
        self.clocks = [str(each["clock"]) for each in ranks]
        self._lines: list[socket.socket] = []
        if listening is not None and key is not None:
            self._lines = self._accepted(listening, key, timeout_s)
        elif self.rank > 0:
            line = self._undo.enter_context(_connected(ranks[0], timeout_s))
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line.sendall(bytes.fromhex(ranks[0]["key"]) + struct.pack("<I", self.rank))
            self._lines = [line]

    def _accepted(
        self, listening: socket.socket, key: bytes, timeout_s: float
    ) -> list[socket.socket]:
        found: dict[int, socket.socket] = {}
        ends = time.monotonic() + timeout_s
        while len(found) < self.world_size - 1:
            listening.settimeout(max(0.001, ends - time.monotonic()))
            try:
                line, _ = listening.accept()
            except TimeoutError:
                missing = sorted({*range(1, self.world_size)} - {*found})
                text = f"a trace is gathered: ranks {missing} did not come within {timeout_s} s"
                raise errors.make(errors.TimeoutError, text) from None
            line.settimeout(_PATIENCE_S)
            try:
                proof = _read(line, _KEY_BYTES + 4)
            except (errors.MoeP2pError, OSError):
                proof = b""
            if not hmac.compare_digest(proof[:_KEY_BYTES], key):  # a stranger
                line.close()
                continue
            line.settimeout(timeout_s)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            found[struct.unpack("<I", proof[_KEY_BYTES:])[0]] = self._undo.enter_context(line)
        return [found[rank] for rank in sorted(found)]

    def match(self) -> list[Bounds]:
        """Returns, at rank 0, how each rank's clock stands to that of rank 0."""
        if self.rank > 0:
            self._answer(self._lines[0])
            return []
        now = self._clock()
        found = [Bounds(now, 0, 0)]
        for line, name in zip(self._lines, self.clocks[1:], strict=True):
            pings = []
            for _ in range(PINGS if name != self.clocks[0] else 0):
                before = self._clock()
                line.sendall(_PING)
                (other,) = struct.unpack("<q", _read(line, 8))
                pings.append((before, other, self._clock()))
            line.sendall(_END)
            found.append(bounds_of(pings) if pings else Bounds(now, 0, 0))
        return found

    def _answer(self, line: socket.socket) -> None:
        while _read(line, 1) == _PING:
            line.sendall(struct.pack("<q", self._clock()))

    def meet(self) -> None:
        """Returns when all ranks have called it, at about the same time."""
        if self.rank > 0:
            self._lines[0].sendall(_PING)
            _read(self._lines[0], 1)
            return
        for line in self._lines:
            _read(line, 1)
        for line in self._lines:
            line.sendall(_PING)

    def gather(self, data: bytes) -> list[bytes]:
        """Returns, at rank 0, everyone's data."""
        if self.rank > 0:
            self._lines[0].sendall(struct.pack("<Q", len(data)) + data)
            return []
        sizes = [struct.unpack("<Q", _read(line, 8))[0] for line in self._lines]
        return [data, *(_read(line, size) for line, size in zip(self._lines, sizes, strict=True))]

    def close(self) -> None:
        self._undo.close()


def _own_hosts() -> list[str]:
    """Under which other ranks may find this one: a name may stand for the loopback's address."""
    found = []
    for elsewhere in ("192.0.2.1", "2001:db8::1"):  # of no host (RFC 5737, RFC 3849)
        with suppress(errors.UnavailableError):
            found.append(addresses.towards(elsewhere))
    return list(dict.fromkeys([*found, addresses.own(), addresses.loopback()]))


def _connected(first: dict[str, Any], timeout_s: float) -> socket.socket:
    failed = ""
    for host in first["hosts"]:
        try:
            return socket.create_connection((host, first["port"]), timeout=timeout_s)
        except OSError as error:
            failed += f"; {addresses.join(host, first['port'])}: {error}"
    text = f"a trace is gathered at rank 0, which this rank cannot reach{failed}"
    raise errors.make(errors.TransportError, text)


def _read(line: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        try:
            part = line.recv(min(size - len(found), 1 << 20))
        except TimeoutError:
            text = (
                f"a trace is gathered, and a rank is silent for {line.gettimeout()} s: does it end"
            )
            raise errors.make(errors.TimeoutError, f"{text} its trace much later?") from None
        if not part:
            text = "a rank's connection ended while a trace was gathered; see what it printed last"
            raise errors.make(errors.PeerDeadError, text)
        found += part
    return bytes(found)
