"""Faults of the matrix, as a process causes them in itself, and what each needs around it.

`cause` happens at a point that a run reaches. CONDITIONS hold from the begin of a run to its end.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import resource
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from tests.support.hosts import Place

SLOW_S = 0.5  # more than 100 steps of these sizes take on a quiet machine
DOWN_S = 0.5  # of a link that comes back
CONDITIONS = ("full queue", "no locked memory")
LINK = ("NIC error", "link flap")  # over tcp; they need a network namespace of their own
_CAP_IPC_LOCK, _CAPABILITY_VERSION_3 = 14, 0x20080522  # <linux/capability.h>


def settings_of(over: str, fault: str, interface: str = "lo") -> dict[str, str]:
    """Returns the transport's fields of a configuration."""
    if over == "loopback":
        smallest = "ring_kib=4,max_in_flight=1" if fault == "full queue" else "seed=7"
        return {"transport": "loopback", "transport_settings": smallest}
    settings = f"provider=tcp,interfaces={interface}"
    settings += {"full queue": ",max_in_flight=1", "NIC error": ",timeout_ms=3000"}.get(fault, "")
    return {"transport": "libfabric", "transport_settings": settings}


_entered: list[Place] = []  # the host of this process


def enter(place: Place) -> None:
    """Moves this process, which has one thread, to a network namespace whose links may go down."""
    place.enter()
    _entered.append(place)


def cause(fault: str, interface: str = "lo") -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "slow":
        time.sleep(SLOW_S)
    elif fault == "NIC error":
        _set_link(interface, "down")
    elif fault == "link flap":
        _set_link(interface, "down")
        time.sleep(DOWN_S)
        _set_link(interface, "up")
    elif fault == "wrong handshake":
        speak_to_own_ports()


def _set_link(interface: str, state: str) -> None:
    """Never of the machine: everything else on it would lose its link too."""
    assert _entered, "no link of this process may go down"
    here, own = Path("/proc/self/ns/net"), Path("/run/netns") / _entered[-1].name
    assert here.stat().st_ino == own.stat().st_ino, "this is not the namespace of the test"
    subprocess.run(["ip", "link", "set", interface, state], check=True)


def own_ports() -> list[tuple[str, int]]:
    """Addresses at which this process listens by TCP over IPv4."""
    sockets = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            sockets.add(os.readlink(f"/proc/self/fd/{fd}"))
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
            address, port = fields[1].split(":")
            found.append((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


def speak_to_own_ports() -> None:
    """A stranger's words at each port of this process: noise, another protocol, nothing."""
    ports = own_ports()
    assert ports, "nothing listens here"
    for address, port in ports:
        where = ("127.0.0.1" if address == "0.0.0.0" else address, port)
        for words in (random.Random(port).randbytes(4096), b"GET / HTTP/1.1\r\n\r\n", b""):
            with socket.create_connection(where, 20) as stranger, suppress(OSError):
                stranger.sendall(words)
                stranger.settimeout(0.05)
                stranger.recv(4096)


def forbid_locking() -> None:
    """No page of this process may be locked, also where root runs it."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then the upper halves
    assert libc.capget(header, sets) == 0
    for at in range(2):
        sets[at] &= ~(1 << _CAP_IPC_LOCK)
    assert libc.capset(header, sets) == 0
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    page = mmap.mmap(-1, mmap.PAGESIZE)
    at_page = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    assert libc.mlock(at_page, mmap.PAGESIZE) != 0, "it may lock all the same"


def is_over(pid: int) -> bool:
    """Whether this process has ended or is stopped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZXTt"
