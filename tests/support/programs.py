"""Programs as a terminal starts them: in a group of processes, for Ctrl-C and what is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support import warm

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0


def until(condition: Callable[[], object], what: str) -> None:
    """Returns when it holds; what: what it was instead."""
    ends = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < ends, what
        time.sleep(0.05)


class Program:
    """A running program, its output line by line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def wait_for(self, text: str) -> str:
        """Returns what was printed up to a line with `text`."""
        assert self.process.stdout is not None
        seen = ""
        for line in self.process.stdout:
            seen += line
            if text in line:
                return seen
        raise AssertionError(f"it ended without {text!r}:\n{seen}")

    def interrupt(self, timeout_s: float) -> str:
        """Sends Ctrl-C to the group; returns what it prints until it has ended by that."""
        os.killpg(self.process.pid, signal.SIGINT)
        rest, _ = self.process.communicate(timeout=timeout_s)
        assert self.process.returncode == 128 + signal.SIGINT, rest
        return rest

    def memory(self) -> set[str]:
        """Shared memory of living processes of the group."""
        found = set()
        for name in os.listdir("/dev/shm"):
            if made := re.match(r"moe_p2p\.\w+\.(\d+)\.", name):
                with suppress(ProcessLookupError):
                    if os.getpgid(int(made[1])) == self.process.pid:
                        found.add(name)
        return found

    def wait_until_gone(self) -> None:
        """Returns when no process of the group is left: helpers end a moment later."""
        until(lambda: not self.processes(), "processes that stay")

    def processes(self) -> set[int]:
        """The group's, without what has ended and that init has yet to wait for."""
        found = set()
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                number, _, more = stat.read_text().partition(" ")
                state, _, group = more.rpartition(") ")[2].split()[:3]
                if int(group) == self.process.pid and state not in "ZX":
                    found.add(int(number))
        return found


def children(process: int) -> list[str]:
    """Returns the processes that a process has started, by number."""
    found = (file.read_text().split() for file in Path(f"/proc/{process}/task").glob("*/children"))
    return [child for each in found for child in each]


@contextmanager
def program(*arguments: str, stderr: int = subprocess.STDOUT) -> Iterator[Program]:
    """`python ARGUMENTS`; whatever is left of its group is killed in the end."""
    with warm.popen(
        *arguments,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield Program(process)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def handled(sigint: Any) -> Iterator[None]:
    """SIGINT has this handler here. Programs that are started meanwhile ignore it where that is
    signal.SIG_IGN, as under `nohup`; else they have Python's, wherever pytest itself runs."""
    before = signal.signal(signal.SIGINT, sigint)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
