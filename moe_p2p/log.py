"""Lines of log from Python, in the form and at the levels of csrc/base/log.cpp."""

from __future__ import annotations

import os
import sys

from moe_p2p import env


def warning(text: str) -> None:
    """Something is amiss, and the job goes on."""
    if env.log_level() != "error":
        _line("warning", text)


def info(text: str) -> None:
    """A choice that was made."""
    if env.log_level() in ("info", "debug"):
        _line("info", text)


def _line(level: str, text: str) -> None:
    print(f"moe_p2p {level} [pid {os.getpid()}] {text}", file=sys.stderr)
