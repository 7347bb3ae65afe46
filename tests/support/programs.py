"""Commands of the package as a terminal starts them: in a group of processes, for Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support import warm

ROOT = Path(__file__).resolve().parents[2]


class Program:
    """A running `python -m NAME`, its output line by line."""

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


def children(process: int) -> list[str]:
    """Returns the processes that a process has started, by number."""
    found = (file.read_text().split() for file in Path(f"/proc/{process}/task").glob("*/children"))
    return [child for each in found for child in each]


@contextmanager
def program(*arguments: str) -> Iterator[Program]:
    """`python -m ARGUMENTS`; whatever is left of its group is killed in the end."""
    process = warm.popen(
        "-m",
        *arguments,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield Program(process)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
