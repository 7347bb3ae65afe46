"""What torch could not allocate, from its error texts: of sizes that a command was given."""

from __future__ import annotations

import re

_PATTERN = re.compile(
    r"tried to allocate (?P<size>[\d.]+ \w+)"
    r"|size calculation overflowed with sizes=(?P<sizes>\[.*?\])",
    re.IGNORECASE,
)


def not_allocated(error: BaseException) -> str:
    """Returns what it was; empty: the error is another one."""
    found = _PATTERN.search(str(error))
    if found is None:
        return "what was asked for" if isinstance(error, MemoryError) else ""
    return found["size"] or f"a tensor of {found['sizes']}"
