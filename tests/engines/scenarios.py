"""Scenarios that share one process, because importing an engine takes longer than they do."""

from __future__ import annotations

import json
import random
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm

ROOT = Path(__file__).resolve().parents[2]
_PORTS: list[socket.socket] = []
HANG_S = 60.0  # ends what would never end; on a busy machine all the rest may take seconds


class Scenarios:
    """logged: what moe_p2p has logged in the scenario that runs."""

    def __init__(self) -> None:
        self.named: dict[str, Callable[[], None]] = {}
        self.logged: list[str] = []

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self.named[run.__name__] = run
        return run

    def expect_logged(self, *words: str) -> None:
        found = any(all(word in line for word in words) for line in self.logged)
        assert found, (words, self.logged)

    def main(self, begin: Callable[[], None]) -> None:
        """Arguments: a file for {scenario: error text} as JSON, and names of some scenarios."""
        from moe_p2p import log

        begin()
        for level in ("warning", "info"):
            setattr(log, level, self.logged.append)
        found = {}
        for name, run in self.named.items():
            if len(sys.argv) > 2 and name not in sys.argv[2:]:
                continue
            self.logged.clear()
            began = time.monotonic()
            try:
                run()
                found[name] = ""
            except BaseException:
                found[name] = traceback.format_exc() + "\n".join(self.logged)
            print(f"{name}: {time.monotonic() - began:.2f} s {found[name]}", flush=True)
        Path(sys.argv[1]).write_text(json.dumps(found))


def results_of(module: str, at: Path) -> dict[str, str]:
    """Runs all scenarios of a module in a process of their own."""
    ran = warm.run(
        *("-m", module, str(at)), cwd=warm.ROOT, capture_output=True, text=True, timeout=220
    )
    assert at.exists(), ran.stdout + ran.stderr
    found: dict[str, str] = json.loads(at.read_text())
    return found


def refused(what: Callable[[], Any], *words: str) -> None:
    """It raises an error whose text has all the words."""
    with pytest.raises(Exception, match=re.escape(words[0])) as caught:
        what()
    assert all(word in str(caught.value) for word in words), caught.value


def free_port() -> int:
    """Bound until the process ends; who asks for this one may listen. The kernel gives those above
    to who asks for any port, even some that are bound (SO_REUSEADDR)."""
    while True:
        kept, port = socket.socket(), random.SystemRandom().randrange(10_000, 32_000)
        try:
            kept.bind(("127.0.0.1", port))
        except OSError:
            kept.close()
            continue
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _PORTS.append(kept)
        return port
