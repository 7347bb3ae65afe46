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
        self._lines: list[_Line] = []
        if listening is not None and key is not None:
            self._lines = self._accepted(listening, key, timeout_s)
        elif self.rank > 0:
            line = _Line(0, self._undo.enter_context(_connected(ranks[0], timeout_s)))
            line.send(bytes.fromhex(ranks[0]["key"]) + struct.pack("<I", self.rank))
            self._lines = [line]

    def _accepted(self, listening: socket.socket, key: bytes, timeout_s: float) -> list[_Line]:
        found: dict[int, _Line] = {}
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
                proof = _Line(-1, line).read(_KEY_BYTES + 4)
            except errors.MoeP2pError:
                proof = b""
            if not hmac.compare_digest(proof[:_KEY_BYTES], key):  # a stranger
                line.close()
                continue
            line.settimeout(timeout_s)
            (rank,) = struct.unpack("<I", proof[_KEY_BYTES:])
            found[rank] = _Line(rank, self._undo.enter_context(line))
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
                line.send(_PING)
                (other,) = struct.unpack("<q", line.read(8))
                pings.append((before, other, self._clock()))
            line.send(_END)
            found.append(bounds_of(pings) if pings else Bounds(now, 0, 0))
        return found

    def _answer(self, line: _Line) -> None:
        while line.read(1) == _PING:
            line.send(struct.pack("<q", self._clock()))

    def meet(self) -> None:
        """Returns when all ranks have called it, at about the same time."""
        if self.rank > 0:
            self._lines[0].send(_PING)
            self._lines[0].read(1)
            return
        for line in self._lines:
            line.read(1)
        for line in self._lines:
            line.send(_PING)

    def gather(self, data: bytes) -> list[bytes]:
        """Returns, at rank 0, everyone's data."""
        if self.rank > 0:
            self._lines[0].send(struct.pack("<Q", len(data)) + data)
            return []
        sizes = [struct.unpack("<Q", line.read(8))[0] for line in self._lines]
        return [data, *(line.read(size) for line, size in zip(self._lines, sizes, strict=True))]

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


class _Line:
    """A connection to `rank`. Errors name it; it has a timeout."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self._rank, self._connection = rank, connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes) -> None:
        try:
            self._connection.sendall(data)
        except OSError as error:
            raise self._failed(error) from None

    def read(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            try:
                part = self._connection.recv(min(size - len(found), 1 << 20))
            except OSError as error:
                raise self._failed(error) from None
            if not part:
                raise self._failed(None)
            found += part
        return bytes(found)

    def _failed(self, error: OSError | None) -> errors.MoeP2pError:
        what = f"a trace is gathered, and rank {self._rank}"
        if isinstance(error, TimeoutError):
            text = f"{what} is silent for {self._connection.gettimeout()} s: does its block end "
            return errors.make(errors.TimeoutError, f"{text}much later? Raise timeout_s of tracing")
        why = f" ({error.strerror or error})" if error else ""
        text = f"{what} has ended its connection{why}: its block raised, or it died; see what it "
        return errors.make(errors.PeerDeadError, f"{text}printed last")
