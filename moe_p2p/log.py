"""Log lines of Python code, in the format and with the levels of csrc/base/log.cpp."""

from __future__ import annotations

import functools
import os
import sys

from moe_p2p import env

LEVELS = ("error", "warning", "info", "debug")


def warning(text: str) -> None:
    """Logs a problem that does not end the job."""
    if shows("warning"):
        _line("warning", text)


def info(text: str) -> None:
    """Logs a choice."""
    if shows("info"):
        _line("info", text)


def shows(level: str) -> bool:
    """Whether lines of a level are printed."""
    return LEVELS.index(level) <= LEVELS.index(_known(env.log_level()))


@functools.cache  # a wrong name is warned of once
def _known(name: str) -> str:
    if name.lower() in LEVELS:
        return name.lower()
    wanted = ", ".join(LEVELS)
    _line("warning", f"MOE_P2P_LOG is {name!r}, must be one of {wanted}; warning is used")
    return "warning"


def _line(level: str, text: str) -> None:
    print(f"moe_p2p {level} [pid {os.getpid()}] {text}", file=sys.stderr)
