"""How transfer engines find each other: by host:port, as Mooncake's P2P handshake.

Each engine answers requests at a port of its own: one JSON object in a line, one line back. Whoever
reaches the port learns the keys of the registered memory, as with Mooncake: keep it within the
cluster. A request that is too long, too late or no request is dropped.
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Callable
from typing import Any

from moe_p2p import errors

_LIMIT_S = 10.0  # of a whole exchange
_MOST_BYTES = 64 << 20  # of a line: memory registered in 300,000 pieces
_MOST_CONNECTIONS = 128  # at once
VERSION = 1

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def split(session: str) -> tuple[str, int]:
    """Returns host and port of "host:port" or "[host]:port"."""
    host, _, port = session.rpartition(":")
    errors.require(
        bool(host) and port.isdecimal() and 0 < int(port) < 1 << 16,
        f"{session!r} names no transfer engine; it must be host:port, from get_rpc_port()",
    )
    return host.strip("[]"), int(port)


def ask(session: str, request: dict[str, Any]) -> dict[str, Any]:
    """Returns the answer of the engine at host:port.

    Raises PeerDeadError when nobody answers, ProtocolError when it is no engine of this version.
    """
    try:
        with socket.create_connection(split(session), timeout=_LIMIT_S) as connection:
            connection.sendall(json.dumps(request | {"version": VERSION}).encode() + b"\n")
            with connection.makefile("rb") as lines:
                line = lines.readline(_MOST_BYTES)
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
        self._server = _Server(host, answer)
        self.port: int = self._server.server_address[1]
        thread = threading.Thread(
            target=self._server.serve_forever, name="moe_p2p.mooncake", daemon=True
        )
        thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024

    def __init__(self, host: str, answer: Answer) -> None:
        self.answer = answer
        self.room = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        found = socket.getaddrinfo(host or "0.0.0.0", 0, type=socket.SOCK_STREAM)
        self.address_family = found[0][0]
        try:
            super().__init__((str(found[0][4][0]), 0), _Exchange)
        except OSError:  # the name of another interface, as behind an address translation
            self.address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
            super().__init__(("", 0), _Exchange)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return self.room.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # of one stranger or a peer that left; nothing is lost


class _Exchange(socketserver.StreamRequestHandler):
    timeout = _LIMIT_S
    server: _Server

    def handle(self) -> None:
        request = json.loads(self.rfile.readline(_MOST_BYTES))
        if request["version"] == VERSION:
            answer = self.server.answer(request) | {"version": VERSION}
            self.wfile.write(json.dumps(answer).encode() + b"\n")
