"""Passes open files among the L processes of a node over UNIX sockets. Control path only.

Every rank listens at an abstract address made from the key, connects to all others, sends its
descriptors and waits until they are received. It needs no ptrace permission, as pidfd_getfd would,
and leaves nothing in the file system. Ranks may be threads of one process: they get duplicates.

Abstract addresses are open to all users of a host, and /proc/net/unix lists them. So each side
checks that the peer belongs to the same user, and both prove that they know the key, of which the
address is only a hash: the listener first, before a descriptor is sent, then the connecting side. A
proof names its sender and is valid once, so that nobody else can use it. A stranger's use of
resources is bounded: number and duration of open connections, and the bytes of one message each.
"""

from __future__ import annotations

import array
import hashlib
import hmac
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_p2p import errors, log

if TYPE_CHECKING:
    from moe_p2p.fleet.bootstrap import Bootstrap

MAX_FDS = 253  # per message, a limit of Linux
_PROOF_BYTES = 32
_HEADER = struct.Struct(f"<{_PROOF_BYTES}sII")  # proof, local rank, number of descriptors
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_RETRY_S = 0.005
# How long a connection may stay silent. Too short: a rank that is not scheduled in time has to
# connect again.
_PATIENCE_S = 5.0
_MORE_SESSIONS = 16  # open at once, in addition to one per rank


def exchange_fds(
    local: int,
    num_local: int,
    *,
    key: str,
    fds: Sequence[int],
    deadline: float,
    meeting: Bootstrap | None = None,
) -> list[list[int]]:
    """Returns all ranks' descriptors, in rank order, as new descriptors of this process.

    local, num_local: this rank within its node, and L.
    key: equal on all ranks of the node, different for every exchange on the host; ranks agree on it
        through their Store.
    fds: at most 253, not closed here. Their number may differ between ranks.
    deadline: by time.monotonic(), in seconds.
    meeting: of these ranks and perhaps others. With it, the end of a process on this host is
        noticed at once; it also counts refused connections.

    The caller closes all returned descriptors, duplicates of its own included. On an error nothing
    stays open.

    Raises TimeoutError naming the missing local ranks, PeerDeadError naming a rank that left before
    it had received, AbortedError naming a rank that failed, InvalidArgumentError when the key is in
    use on this host.
    """
    errors.require(0 <= local < num_local, f"local rank is {local} of {num_local}")
    errors.require(len(fds) <= MAX_FDS, f"{len(fds)} descriptors, at most {MAX_FDS} fit a message")
    received: dict[int, list[int]] = {}
    try:
        received[local] = []
        for fd in fds:
            received[local].append(os.dup(fd))
        with _Exchange(local, num_local, key, fds, deadline, received, meeting) as exchange:
            exchange.run()
    except BaseException:
        for group in received.values():
            for fd in group:
                os.close(fd)
        raise
    return [received[rank] for rank in range(num_local)]


@dataclass
class _Call:
    """A connection made to a listening rank."""

    peer: int
    connection: socket.socket
    sent: bool = False  # the peer has proved itself, and our descriptors are sent


@dataclass
class _Session:
    """An accepted connection whose peer has not proved itself yet."""

    connection: socket.socket
    expires: float


class _Exchange:
    """One exchange: a loop that waits for all connections at once."""

    def __init__(
        self,
        local: int,
        num_local: int,
        key: str,
        fds: Sequence[int],
        deadline: float,
        received: dict[int, list[int]],
        meeting: Bootstrap | None = None,
    ) -> None:
        self._local, self._num_local, self._fds = local, num_local, fds
        self._deadline, self._received, self._meeting = deadline, received, meeting
        self._watched = {} if meeting is None else meeting.neighbours.ranks
        self._key = key.encode()
        self._hash = hashlib.sha256(self._key).digest()[:16]
        peers = set(range(num_local)) - {local}
        self._unacknowledged, self._to_receive = set(peers), set(peers)
        self._calls: dict[int, _Call] = {}  # by file descriptor, like sessions
        self._sessions: dict[int, _Session] = {}
        self._retry_at = 0.0
        self._num_refused = 0
        self._refusal = ""

    def __enter__(self) -> _Exchange:
        self._listener = _socket()
        try:
            self._listener.bind(self._address(self._local))
        except OSError as error:
            self._listener.close()
            raise errors.make(
                errors.InvalidArgumentError,
                f"local rank {self._local}: the key of this exchange is in use on this host: "
                f"{error}",
            ) from None
        self._listener.listen(self._num_local + _MORE_SESSIONS)
        return self

    def __exit__(self, *_: object) -> None:
        for call in self._calls.values():
            call.connection.close()
        for session in self._sessions.values():
            session.connection.close()
        self._listener.close()
        if self._num_refused:
            log.warning(f"local rank {self._local}: passing file descriptors, {self._refused()}")

    def run(self) -> None:
        while self._unacknowledged or self._to_receive:
            self._check_deadline()
            self._drop_silent()
            self._connect()
            for fd in self._wait():
                if fd in self._calls:
                    self._advance(self._calls[fd])
                elif fd in self._sessions:
                    self._take(self._sessions.pop(fd).connection)
                elif fd in self._watched:
                    assert self._meeting is not None
                    self._meeting.check_neighbours(self._watched[fd], "file descriptors")
                else:
                    self._accept()

    def _address(self, rank: int) -> bytes:
        return f"\0moe_p2p.{self._hash.hex()}.{rank}".encode()

    def _proof(self, giver: int, receiver: int | None) -> bytes:
        """Proof of `giver` for a listening `receiver`; None: proof of a listener, for any peer."""
        return hmac.digest(self._key, f"{giver} to {receiver}".encode(), "sha256")

    def _refuse(self, why: str) -> None:
        self._num_refused += 1
        if self._meeting is not None:
            self._meeting.refused()
        self._refusal = why

    def _refused(self) -> str:
        return f"{self._num_refused} connections refused, the last one {self._refusal}"

    def _check_deadline(self) -> None:
        if time.monotonic() < self._deadline:
            return
        # A rank that was reached but waits for another one is not late.
        reached = {call.peer for call in self._calls.values() if call.sent}
        late = (self._unacknowledged - reached) | self._to_receive or self._unacknowledged
        missing = ", ".join(map(str, sorted(late)))
        raise errors.make(
            errors.TimeoutError,
            f"local rank {self._local} of {self._num_local}: passing file descriptors, local "
            f"{'rank' if len(late) == 1 else 'ranks'} {missing} did not come before the deadline"
            + (f"; {self._refused()}" if self._num_refused else ""),
        )

    def _wait(self) -> list[int]:
        """Returns the file descriptors, of connections and the listener, that are readable."""
        poll = select.poll()
        for fd in (*self._calls, *self._sessions, *self._watched):
            poll.register(fd, select.POLLIN)
        if len(self._sessions) < self._num_local + _MORE_SESSIONS:
            poll.register(self._listener, select.POLLIN)
        until = [self._deadline, *(one.expires for one in self._sessions.values())]
        if len(self._calls) < len(self._unacknowledged):
            until.append(self._retry_at)
        return [fd for fd, _ in poll.poll(max(1000 * (min(until) - time.monotonic()), 1))]

    # Outgoing connections.

    def _connect(self) -> None:
        if time.monotonic() < self._retry_at:
            return
        self._retry_at = time.monotonic() + _RETRY_S
        for peer in self._unacknowledged - {call.peer for call in self._calls.values()}:
            connection = _socket()
            try:
                connection.connect(self._address(peer))
                self._check_user(connection, peer)
            except (ConnectionError, BlockingIOError):  # not listening yet, or its backlog is full
                connection.close()
            except BaseException:
                connection.close()
                raise
            else:
                self._calls[connection.fileno()] = _Call(peer, connection)

    def _advance(self, call: _Call) -> None:
        try:
            data = call.connection.recv(_PROOF_BYTES + 1)
        except ConnectionError:
            data = b""
        if call.sent:
            if data != b"+":
                raise errors.make(
                    errors.PeerDeadError,
                    f"local rank {self._local}: local rank {call.peer} went away before it had "
                    "received the file descriptors",
                )
            self._unacknowledged.remove(call.peer)
            self._end_call(call)
        elif hmac.compare_digest(data, self._proof(call.peer, None)):
            try:
                self._send(call)
            except ConnectionError:
                self._end_call(call)
        else:
            if data:
                self._refuse(f"at the address of local rank {call.peer} without the key")
            self._end_call(call)

    def _send(self, call: _Call) -> None:
        header = _HEADER.pack(self._proof(self._local, call.peer), self._local, len(self._fds))
        if self._fds:
            socket.send_fds(call.connection, [header], self._fds)
        else:
            call.connection.send(header)
        call.sent = True

    def _end_call(self, call: _Call) -> None:
        del self._calls[call.connection.fileno()]
        call.connection.close()

    def _check_user(self, connection: socket.socket, peer: int) -> None:
        if _user_of(connection) != os.geteuid():
            raise errors.make(
                errors.ProtocolError,
                f"local rank {self._local}: the address of local rank {peer} belongs to another "
                "user of this host",
            )

    # Incoming connections.

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (ConnectionError, BlockingIOError):
            return
        connection.setblocking(False)
        if _user_of(connection) != os.geteuid():
            self._refuse(f"of user {_user_of(connection)}")
            connection.close()
            return
        try:
            connection.send(self._proof(self._local, None))
        except ConnectionError:
            self._refuse("without the key")
            connection.close()
            return
        expires = time.monotonic() + _PATIENCE_S
        self._sessions[connection.fileno()] = _Session(connection, expires)

    def _drop_silent(self) -> None:
        now = time.monotonic()
        for fd in [fd for fd, one in self._sessions.items() if one.expires <= now]:
            self._take(self._sessions.pop(fd).connection)

    def _take(self, connection: socket.socket) -> None:
        """Receives a rank's descriptors. Any other message ends the connection."""
        with connection:
            try:
                data, fds, truncated = _receive(connection)
            except (ConnectionError, BlockingIOError):
                data, fds, truncated = b"", [], False
            peer, count = self._prove(data)
            if peer not in self._to_receive:
                for fd in fds:
                    os.close(fd)
                self._refuse("without the key")
                return
            self._received[peer] = fds
            if truncated or len(fds) != count:
                raise errors.make(
                    errors.ResourceExhaustedError,
                    f"local rank {self._local}: {len(fds)} of the {count} file descriptors of "
                    f"local rank {peer} came: this process may open no more files (ulimit -n)",
                )
            self._to_receive.remove(peer)
            with suppress(ConnectionError):
                connection.send(b"+")

    def _prove(self, data: bytes) -> tuple[int, int]:
        """Returns the header's sender and its number of descriptors; sender -1: invalid proof."""
        if len(data) != _HEADER.size:
            return -1, 0
        proof, peer, count = _HEADER.unpack(data)
        known = hmac.compare_digest(proof, self._proof(peer, self._local))
        return (peer, count) if known else (-1, 0)


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    return made


def _receive(connection: socket.socket) -> tuple[bytes, list[int], bool]:
    """Returns one message, its descriptors, and whether some descriptors were lost.

    Not socket.recv_fds: in Python 3.11 it ignores its flags, so children would inherit descriptors.
    """
    fds = array.array("i")
    data, ancillary, flags, _ = connection.recvmsg(
        _HEADER.size + 1, socket.CMSG_LEN(MAX_FDS * fds.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds), bool(flags & socket.MSG_CTRUNC)


def _user_of(connection: socket.socket) -> int:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1])
