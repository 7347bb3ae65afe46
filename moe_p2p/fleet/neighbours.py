"""Watches the processes of this host's other ranks during set-up; a killed one reports nothing.

Control path only. Each rank sends the identity of its process to all others, which open a pidfd for
it; the kernel makes that readable when the process ends. Not watched: ranks of other hosts or
containers, ranks that are threads of this process, and any rank on a kernel without pidfds.
"""

from __future__ import annotations

import os
import select
import time
from contextlib import suppress
from pathlib import Path


def _start_of(pid: int) -> str:
    """Start time of a process, in ticks since boot. Unique together with the process id."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return text.rpartition(")")[2].split()[19]


def own_identity() -> str:
    """Identity of this process: "boot id.pid namespace, pid, start"; empty if /proc lacks it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return (
            f"{boot}.{os.stat('/proc/self/ns/pid').st_ino} {os.getpid()} {_start_of(os.getpid())}"
        )
    except OSError:
        return ""


def has_ended(identity: str) -> bool:
    """Whether the process with that own_identity() has ended; False where this host cannot know."""
    space = own_identity().rpartition(" ")[0].rpartition(" ")[0]
    if not space or not identity.startswith(f"{space} "):
        return False
    _, pid, start = identity.split(" ")
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return True
    return state[19] != start or state[0] in "ZX"  # its pid was reused, or nobody has reaped it


class Neighbours:
    """Other ranks of this host. Call `add` once, then `wait` instead of sleeping."""

    def __init__(self) -> None:
        self.ranks: dict[int, int] = {}  # rank by pidfd
        self._gone: int | None = None  # a rank whose process ended before it was watched

    def add(self, identities: list[str]) -> None:
        """identities: own_identity() of all ranks, in rank order."""
        space, pid, _ = (own_identity() or "  ").split(" ")
        for rank, identity in enumerate(identities):
            if not space or not identity.startswith(f"{space} "):
                continue
            _, other, start = identity.split(" ")
            if other != pid:
                self._watch(rank, int(other), start)

    def _watch(self, rank: int, pid: int, start: str) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._gone = rank
            return
        except OSError:  # a kernel without pidfds, or no descriptors left
            return
        self.ranks[descriptor] = rank
        try:
            if _start_of(pid) != start:  # the pid has been reused
                self._gone = rank
        except OSError:
            self._gone = rank

    def wait(self, seconds: float) -> int | None:
        """Returns a rank whose process has ended, as soon as one has; None after `seconds`."""
        if self._gone is not None:
            return self._gone
        if not self.ranks:
            time.sleep(seconds)
            return None
        poll = select.poll()
        for descriptor in self.ranks:
            poll.register(descriptor, select.POLLIN)
        ended = poll.poll(1000 * seconds)
        return self.ranks[ended[0][0]] if ended else None

    def close(self) -> None:
        for descriptor in self.ranks:
            with suppress(OSError):
                os.close(descriptor)
        self.ranks.clear()
