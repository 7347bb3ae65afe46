"""Log lines of Python code, in the format and with the levels of csrc/base/log.cpp."""

from __future__ import annotations

import os
import sys

from moe_p2p import env


def warning(text: str) -> None:
    """Logs a problem that does not end the job."""
    if env.log_level() != "error":
        _line("warning", text)


def info(text: str) -> None:
    """Logs a choice."""
    if env.log_level() in ("info", "debug"):
        _line("info", text)


def _line(level: str, text: str) -> None:
    print(f"moe_p2p {level} [pid {os.getpid()}] {text}", file=sys.stderr)
