"""Texts in which settings go into the extension, and numbers come out of it."""

from __future__ import annotations

from typing import Any


def settings_text(**values: Any) -> str:
    """Returns "key=value,...", as ops take it (csrc/provider/settings.h); 1:2:3 for a list."""
    return ",".join(
        f"{key}={':'.join(map(str, value)) if isinstance(value, list) else value}"
        for key, value in values.items()
    )


def numbers_of(text: str) -> dict[str, int]:
    """Returns the numbers of lines "name number", as ops return them."""
    return {name: int(number) for name, number in (line.split() for line in text.splitlines())}
