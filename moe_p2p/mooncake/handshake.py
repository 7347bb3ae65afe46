"""How transfer engines find each other: by host:port, as Mooncake's P2P handshake.

Each engine answers requests at a port of its own: one JSON object in a line, one line back. Whoever
reaches the port learns the keys of the registered memory, as with Mooncake: keep it within the
cluster. A request that is too long, too late or no request is dropped.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable
from typing import Any

from moe_p2p import errors
from moe_p2p.fleet import addresses
from moe_p2p.fleet.client import Deadline
from moe_p2p.fleet.listener import Listener, some

_LIMIT_S = 10.0  # of a whole exchange
_MOST_BYTES = 64 << 20  # of an answer: memory registered in 300,000 pieces
_MOST_ASKED = 1 << 20  # of a request, with what it notifies of
_BACKLOG = 1024
_PIECE = 1 << 18  # of a line, read at a time
VERSION = 2

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def split(session: str) -> tuple[str, int]:
    """Returns host and port of "host:port" or "[host]:port"."""
    return addresses.split(session, "a session, host and get_rpc_port() of an engine,")


def ask(session: str, request: dict[str, Any]) -> dict[str, Any]:
    """Returns the answer of the engine at host:port.

    Raises PeerDeadError when nobody answers, ProtocolError when it is no engine of this version.
    """
    try:
        with socket.create_connection(split(session), timeout=_LIMIT_S) as connection:
            deadline = Deadline(_LIMIT_S)
            connection.sendall(json.dumps(request | {"version": VERSION}).encode() + b"\n")
            line = _line(connection, _MOST_BYTES, deadline)
    except OSError as error:
        raise errors.make(
            errors.PeerDeadError, f"the transfer engine at {session} does not answer: {error}"
        ) from None
    try:
        answer = json.loads(line)
        if answer["version"] == VERSION:
            return dict(answer)
    except (ValueError, KeyError, TypeError):
        pass
    raise errors.make(
        errors.ProtocolError,
        f"what answers at {session} is no transfer engine of this version of moe_p2p; all peers "
        "must use moe_p2p in place of Mooncake",
    )


class Service:
    """Answers at an ephemeral port until close()."""

    def __init__(self, host: str, answer: Answer) -> None:
        self._answer = answer
        self._listener = Listener("moe_p2p.mooncake", _listening(host), self._exchange, _LIMIT_S)
        self.port = self._listener.port

    def close(self) -> None:
        self._listener.close()

    def _exchange(
        self, connection: socket.socket, deadline: Deadline, proved: Callable[[], None]
    ) -> None:
        # What fails is of one stranger or a peer that left; nothing is lost.
        with connection, contextlib.suppress(Exception):
            connection.settimeout(_LIMIT_S)  # of what is sent
            request = json.loads(_line(connection, _MOST_ASKED, deadline))
            if request["version"] == VERSION:
                answer = self._answer(request) | {"version": VERSION}
                connection.sendall(json.dumps(answer).encode() + b"\n")


def _line(connection: socket.socket, most: int, deadline: Deadline) -> bytes:
    """Reads to the end of a line, or of the connection."""
    line = bytearray()
    with contextlib.suppress(errors.PeerDeadError):
        while not line.endswith(b"\n") and len(line) < most:
            line += some(connection, min(most - len(line), _PIECE), deadline)
    return bytes(line)


def _listening(host: str) -> socket.socket:
    try:
        return addresses.listen(host or "0.0.0.0", backlog=_BACKLOG)
    except errors.InvalidArgumentError as error:
        text = f"local_hostname is {host!r}, which is no name of a host here"
        raise errors.make(errors.InvalidArgumentError, text) from error
    except OSError:  # the name of another interface, as behind an address translation
        return addresses.listen("", backlog=_BACKLOG)
