"""Passes open files among the L processes of a node over UNIX sockets. Control path only.

Every rank listens at an abstract address made from the key, connects to all others, sends its
descriptors and waits until they are received. No right to look into other processes is needed
(pidfd_getfd wants that of ptrace), and nothing is left in the file system. Ranks may be threads of
one process: then they get duplicates.

Abstract addresses are open to all users of a host, so each side checks that the other is of the
same user, and a connection that does not know the key is dropped.
"""

from __future__ import annotations

import array
import hashlib
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack

from moe_p2p import errors

MAX_FDS = 253  # of one message, in Linux
_HEADER = struct.Struct("<16sII")  # hash of the key, local rank, number of descriptors
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_RETRY_S = 0.005


def exchange_fds(
    local: int, num_local: int, *, key: str, fds: Sequence[int], deadline: float
) -> list[list[int]]:
    """The descriptors of all ranks of this node, in rank order, as new descriptors of this process.

    local, num_local: this rank within its node, and L.
    key: equal on all ranks of the node, different for every exchange of the host; the caller
        agrees on it through its Store.
    fds: at most 253, not closed here. Ranks may give different numbers of them.
    deadline: by time.monotonic(), in seconds.

    The caller closes what it gets, its own duplicates included. On an error nothing stays open.

    Raises TimeoutError naming the local ranks that did not come, PeerDeadError naming one that went
    away before it had received, InvalidArgumentError when the key is in use on this host.
    """
    errors.require(0 <= local < num_local, f"local rank is {local} of {num_local}")
    errors.require(len(fds) <= MAX_FDS, f"{len(fds)} descriptors, at most {MAX_FDS} fit a message")
    received: dict[int, list[int]] = {}
    try:
        received[local] = []
        for fd in fds:
            received[local].append(os.dup(fd))
        with _Meeting(local, num_local, key, fds, deadline, received) as meeting:
            meeting.run()
    except BaseException:
        for group in received.values():
            for fd in group:
                os.close(fd)
        raise
    return [received[rank] for rank in range(num_local)]


class _Meeting:
    """One exchange: three sets of ranks that shrink until all are empty."""

    def __init__(
        self,
        local: int,
        num_local: int,
        key: str,
        fds: Sequence[int],
        deadline: float,
        received: dict[int, list[int]],
    ) -> None:
        self._local, self._num_local, self._fds = local, num_local, fds
        self._deadline, self._received = deadline, received
        self._hash = hashlib.sha256(key.encode()).digest()[:16]
        peers = set(range(num_local)) - {local}
        self._to_reach, self._to_hear, self._unacknowledged = set(peers), set(peers), set(peers)
        self._sent: dict[int, socket.socket] = {}
        self._open = ExitStack()

    def __enter__(self) -> _Meeting:
        self._listener = self._socket()
        try:
            self._listener.bind(self._address(self._local))
        except OSError as error:
            self._open.close()
            raise errors.make(
                errors.InvalidArgumentError,
                f"local rank {self._local}: the key of this exchange is in use on this host: "
                f"{error}",
            ) from None
        self._listener.listen(self._num_local + 16)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def run(self) -> None:
        while self._to_reach or self._to_hear:
            self._check_deadline()
            self._to_reach = {peer for peer in self._to_reach if not self._reach(peer)}
            if self._to_hear:
                self._hear()
            elif self._to_reach:
                time.sleep(_RETRY_S)
        for peer, connection in self._sent.items():
            self._wait_acknowledgement(peer, connection)

    def _address(self, rank: int) -> bytes:
        return f"\0moe_p2p.{self._hash.hex()}.{rank}".encode()

    def _socket(self) -> socket.socket:
        return self._open.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))

    def _remaining_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.001)

    def _check_deadline(self) -> None:
        if time.monotonic() < self._deadline:
            return
        # A rank that came but waits for another one is not to blame.
        missing = sorted(self._to_reach | self._to_hear or self._unacknowledged)
        raise errors.make(
            errors.TimeoutError,
            f"local rank {self._local} of {self._num_local}: passing file descriptors, local "
            f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))} did not "
            "come before the deadline",
        )

    def _reach(self, peer: int) -> bool:
        """Sends to a rank that listens already."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(self._remaining_s())
            connection.connect(self._address(peer))
            self._check_user(connection, peer)
            header = _HEADER.pack(self._hash, self._local, len(self._fds))
            if self._fds:
                socket.send_fds(connection, [header], self._fds)
            else:
                connection.send(header)
        except (ConnectionError, TimeoutError, BlockingIOError):
            connection.close()
            return False
        except BaseException:
            connection.close()
            raise
        self._sent[peer] = self._open.enter_context(connection)
        return True

    def _hear(self) -> None:
        """Takes the descriptors of one rank, if one is at the door."""
        self._listener.settimeout(_RETRY_S if self._to_reach else self._remaining_s())
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            return
        self._open.enter_context(connection)
        if _user_of(connection) != os.geteuid():
            return
        connection.settimeout(self._remaining_s())
        try:
            data, fds, truncated = _receive(connection)
        except (ConnectionError, TimeoutError):
            return
        known = len(data) == _HEADER.size and data[:16] == self._hash
        _, peer, count = _HEADER.unpack(data) if known else (b"", -1, 0)
        if peer not in self._to_hear:
            for fd in fds:
                os.close(fd)
            return
        self._received[peer] = fds
        if truncated or len(fds) != count:
            raise errors.make(
                errors.ResourceExhaustedError,
                f"local rank {self._local}: {len(fds)} of the {count} file descriptors of local "
                f"rank {peer} came: this process may open no more files (ulimit -n)",
            )
        self._to_hear.remove(peer)
        connection.send(b"+")

    def _check_user(self, connection: socket.socket, peer: int) -> None:
        if _user_of(connection) != os.geteuid():
            raise errors.make(
                errors.ProtocolError,
                f"local rank {self._local}: the address of local rank {peer} belongs to another "
                "user of this host",
            )

    def _wait_acknowledgement(self, peer: int, connection: socket.socket) -> None:
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        while not poll.poll(self._remaining_s() * 1000):
            self._check_deadline()
        try:
            answer = connection.recv(1)
        except ConnectionError:
            answer = b""
        if answer != b"+":
            raise errors.make(
                errors.PeerDeadError,
                f"local rank {self._local}: local rank {peer} went away before it had received the "
                "file descriptors",
            )
        self._unacknowledged.remove(peer)


def _receive(connection: socket.socket) -> tuple[bytes, list[int], bool]:
    """One message, its descriptors, and whether some were lost.

    socket.recv_fds of Python 3.11 ignores its flags, so children would inherit the descriptors.
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
