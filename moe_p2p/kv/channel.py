"""Messages between two workers of a KV transfer, over TCP: a header in JSON and arrays of bytes.

Nothing that carries KV travels here, and nothing is sent when a transfer is complete: messages open
a request, cancel it, and say that it drained. A connecting worker proves by HMAC-SHA256 that it
knows the secret of the worker that it connects to, which proves the same.

    length of all (4) | length of the header (4) | header | arrays, their lengths in the header
"""

from __future__ import annotations

import hmac
import json
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from moe_p2p.errors import PeerDeadError, ProtocolError, make
from moe_p2p.fleet.client import Deadline
from moe_p2p.fleet.listener import some

MAX_MESSAGE = 64 << 20  # of a worker that has proved that it belongs here
_LENGTHS = struct.Struct("<II")
_NONCE_BYTES = 32
_PROOF_BYTES = 32


class Message(NamedTuple):
    kind: str
    fields: dict[str, Any]
    arrays: tuple[bytes, ...] = ()

    def to_bytes(self) -> bytes:
        head = {**self.fields, "kind": self.kind, "arrays": [len(each) for each in self.arrays]}
        header = json.dumps(head, separators=(",", ":")).encode()
        size = len(header) + sum(len(each) for each in self.arrays)
        return b"".join([_LENGTHS.pack(size, len(header)), header, *self.arrays])

    @staticmethod
    def parse(body: bytes, header_bytes: int) -> Message:
        """Raises ProtocolError for what is not a message."""
        try:
            fields = json.loads(body[:header_bytes])
            kind, lengths = str(fields.pop("kind")), [int(n) for n in fields.pop("arrays")]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise make(ProtocolError, f"these bytes are not a KV message: {error!r}") from error
        arrays, at = [], header_bytes
        for length in lengths:
            arrays.append(body[at : at + length])
            at += length
        if at != len(body) or min(lengths, default=0) < 0:
            raise make(ProtocolError, f"a KV message {kind!r} has {len(body)} bytes, not {at}")
        return Message(kind, fields, tuple(arrays))


class Channel:
    """One end of a connection. `send` never waits: a thread writes what is queued."""

    def __init__(self, connection: socket.socket, limit_s: float) -> None:
        """limit_s: for the rest of a message that has begun."""
        self._socket, self._limit_s = connection, limit_s
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sent = threading.Event()

    def send(self, message: Message) -> None:
        self._queue.put(message.to_bytes())

    def start(
        self, name: str, handle: Callable[[Message], None], lost: Callable[[str], None]
    ) -> None:
        """handle: called for each message, one after the other. lost: called once, at the end."""
        threading.Thread(target=self._write, name=f"{name} write", daemon=True).start()
        threading.Thread(
            target=self._read, args=(handle, lost), name=f"{name} read", daemon=True
        ).start()

    def end(self) -> None:
        """Nothing is sent after what is queued."""
        self._queue.put(None)

    def wait_sent(self, deadline: Deadline) -> None:
        """After `end`: until the socket has all, or cannot take it in time."""
        self._sent.wait(deadline.left)

    def close(self) -> None:
        self.end()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes both threads; the reader closes it

    def _write(self) -> None:
        with suppress(OSError):
            while (data := self._queue.get()) is not None:
                self._socket.sendall(data)
        self._sent.set()

    def _read(self, handle: Callable[[Message], None], lost: Callable[[str], None]) -> None:
        why = "its connection ended"
        try:
            while True:
                handle(receive(self._socket, limit_s=self._limit_s))
        except (OSError, PeerDeadError) as error:
            why = f"{why} ({error})" if isinstance(error, OSError) else why
        except Exception as error:  # a message that this build does not understand
            why = f"its message was refused: {error!r}"
        self._queue.put(None)
        self._socket.close()
        lost(why)


def receive(
    connection: socket.socket, deadline: Deadline | None = None, *, limit_s: float | None = None
) -> Message:
    """Raises PeerDeadError at the end of the connection, OSError at the deadline: of all of it, or,
    by limit_s, of what follows its first byte."""
    head = exactly(connection, 1, deadline)
    if limit_s is not None:
        deadline = Deadline(limit_s)
    head += exactly(connection, _LENGTHS.size - 1, deadline)
    size, header_bytes = _LENGTHS.unpack(head)
    if size > MAX_MESSAGE or header_bytes > size:
        raise make(ProtocolError, f"a KV message of {size} bytes, {header_bytes} of them header")
    return Message.parse(exactly(connection, size, deadline), header_bytes)


def exactly(connection: socket.socket, size: int, deadline: Deadline | None) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        parts += some(connection, size - len(parts), deadline)
    return bytes(parts)


def prove(connection: socket.socket, secret: bytes, deadline: Deadline, *, dials: bool) -> None:
    """Both ends call it first. Raises ProtocolError where the other one does
    not know the secret."""
    ours = os.urandom(_NONCE_BYTES)
    if not dials:
        connection.sendall(ours)
        theirs, proof = _split(exactly(connection, _NONCE_BYTES + _PROOF_BYTES, deadline))
        _check(proof, _proof(secret, b"dials", ours + theirs))
        connection.sendall(_proof(secret, b"accepts", theirs + ours))
        return
    theirs = exactly(connection, _NONCE_BYTES, deadline)
    connection.sendall(ours + _proof(secret, b"dials", theirs + ours))
    _check(exactly(connection, _PROOF_BYTES, deadline), _proof(secret, b"accepts", ours + theirs))


def _split(data: bytes) -> tuple[bytes, bytes]:
    return data[:_NONCE_BYTES], data[_NONCE_BYTES:]


def _proof(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, role + nonces, "sha256")


def _check(got: bytes, wanted: bytes) -> None:
    if not hmac.compare_digest(got, wanted):
        raise make(ProtocolError, "the other worker does not know the secret of this one")
