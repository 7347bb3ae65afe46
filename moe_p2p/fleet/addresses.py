"""Hosts and ports as users write them: names, IPv4 or IPv6, the latter with or without brackets.

Whatever listens, or names its own host, does so here, so that hosts whose only addresses are IPv6
are hosts like others.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from moe_p2p.errors import InvalidArgumentError, UnavailableError, make, require

# Of no host (RFC 5737, RFC 3849): a route to one tells under which address others see this host.
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
_PORT = 9
_CLIENTS = 2048  # that connect to a store at once; the system has a limit of its own


def bare(host: str) -> str:
    """Returns the host without the brackets that an address of IPv6 may have."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def split(address: str, what: str) -> tuple[str, int]:
    """Returns host and port of HOST:PORT or [HOST]:PORT. what: begins the text of the error."""
    host, _, port = address.rpartition(":")
    require(
        bool(bare(host)) and port.isdecimal() and 0 < int(port) < 1 << 16,
        f"{what} is {address!r}, must be HOST:PORT",
    )
    return bare(host), int(port)


def join(host: str, port: int | str) -> str:
    """Returns HOST:PORT, which split() takes apart again."""
    return f"[{bare(host)}]:{port}" if ":" in bare(host) else f"{host}:{port}"


def listen(host: str, port: int = 0, *, backlog: int) -> socket.socket:
    """Returns a socket that listens there; host "": at all addresses.

    Raises InvalidArgumentError if the host is not known, OSError if it is not this one (its errno
    is EADDRNOTAVAIL) or the port is in use.
    """
    if not host:
        both = socket.has_dualstack_ipv6()
        every = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", port), family=every, backlog=backlog, dualstack_ipv6=both)
    failed: OSError | None = None
    for family, address in _found(host, port):
        try:
            return socket.create_server(address, family=family, backlog=backlog)
        except OSError as error:
            if failed is None or error.errno != errno.EADDRNOTAVAIL:
                failed = error
    assert failed is not None
    raise failed


def serve(host: str, port: int = 0, *, timeout_s: float = 300.0) -> TCPStore:
    """Returns a store that this process serves, at all its addresses of `host`'s kind.

    torch's server asks for the name of each client that connects, and serves nobody until a name
    server has answered. To one that listens for IPv6, clients by IPv4 have addresses that no hosts
    file names: not even the loopback's.

    Raises InvalidArgumentError if the host is not known, UnavailableError if the port is in use.
    """
    kinds = {family for family, _ in _found(host, port)}
    limit = timedelta(seconds=timeout_s)
    try:
        at = listen("0.0.0.0" if socket.AF_INET in kinds else "", port, backlog=_CLIENTS)
    except OSError as error:
        where = f"no store can be served at {join(host, port)}"
        raise make(UnavailableError, f"{where}: {error}") from None
    port = at.getsockname()[1]
    return TCPStore(bare(host), port, is_master=True, wait_for_workers=False, timeout=limit,
                    master_listen_fd=at.detach())  # fmt: skip


def is_own(host: str) -> bool:
    """Whether a socket of this host can listen at this address."""
    try:
        listen(host, backlog=1).close()
    except OSError:
        return False
    return True


def resolve(host: str) -> str:
    """Returns the host's first address. Raises InvalidArgumentError if it is not known."""
    return next(_found(host, _PORT))[1][0]


def towards(host: str, port: int = _PORT) -> str:
    """Returns the address of this host that `host` sees. Raises UnavailableError without a way."""
    failed: OSError | None = None
    for family, address in _found(host, port):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # sends nothing
                return str(probe.getsockname()[0])
        except OSError as error:
            failed = error
    raise make(UnavailableError, f"there is no way from here to {host}: {failed}")


def own() -> str:
    """Returns the address of this host by its name, else by its routes, else the loopback's."""
    with suppress(InvalidArgumentError):
        if is_own(found := resolve(socket.gethostname())):
            return found
    for elsewhere in _ELSEWHERE:
        with suppress(UnavailableError):
            return towards(elsewhere)
    return loopback()


def loopback() -> str:
    """Returns 127.0.0.1, or ::1 where there is no IPv4."""
    return "127.0.0.1" if is_own("127.0.0.1") else "::1"


def _found(host: str, port: int) -> Iterator[tuple[int, tuple[str, int]]]:
    try:
        found = socket.getaddrinfo(bare(host), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # the latter of a label of more than 63 characters
        raise make(
            InvalidArgumentError, f"{host!r} is no host that is known here: {error}"
        ) from None
    for family, _, _, _, address in found:
        yield family, address  # type: ignore[misc]
