"""Processes of other ranks of this host, watched during set-up: one that is killed says nothing.

Control path only. Each rank gives the identity of its process to all others, who then hold a
descriptor of it (pidfd) that the kernel marks when the process has ended. Ranks of other hosts or
containers, and those that are threads of this process, are not watched; nor is any on a kernel
without pidfds.
"""

from __future__ import annotations

import os
import select
import time
from contextlib import suppress
from pathlib import Path


def _start_of(pid: int) -> str:
    """When a process began, in ticks since the host did: with its number it names a process."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return text.rpartition(")")[2].split()[19]


def own_identity() -> str:
    """Of this process; empty where the kernel does not say it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return (
            f"{boot}.{os.stat('/proc/self/ns/pid').st_ino} {os.getpid()} {_start_of(os.getpid())}"
        )
    except OSError:
        return ""


class Neighbours:
    """Other ranks of this host. `add` them once, then `wait` in place of sleeping."""

    def __init__(self) -> None:
        self.ranks: dict[int, int] = {}  # by descriptor
        self._gone: int | None = None  # one that had ended before it was watched

    def add(self, identities: list[str]) -> None:
        """identities: of the processes of all ranks, in rank order."""
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
        except OSError:  # a kernel without them, or no descriptors left
            return
        self.ranks[descriptor] = rank
        try:
            if _start_of(pid) != start:  # another process has its number by now
                self._gone = rank
        except OSError:
            self._gone = rank

    def wait(self, seconds: float) -> int | None:
        """A rank whose process has ended, as soon as one has; else None after so many seconds."""
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
