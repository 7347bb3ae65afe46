"""Names that programs of the bench have and keep: options of command lines, keys of JSON.

tests/tools/bench_names.json was recorded when the bench was frozen. A name that it has may not go,
and a new one has to be added there.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

NAMES = Path(__file__).resolve().parents[1] / "tools/bench_names.json"
RECORDED: dict[str, dict[str, list[str]]] = json.loads(NAMES.read_text())


def keys_of(body: Any) -> set[str]:
    """Keys of a JSON object or of rows, and of the objects in it: `figures.update_ms`."""
    found = set[str]()
    for row in body if isinstance(body, list) else [body]:
        for key, value in row.items():
            inner = value if isinstance(value, list) else [value]
            names = {name for each in inner if isinstance(each, dict) for name in each}
            found |= {key, *(f"{key}.{name}" for name in names)}
    return found


def assert_keys(program: str, body: Any) -> None:
    assert sorted(keys_of(body)) == RECORDED["keys"][program]


def options_of(printed: str) -> list[str]:
    """Options in the usage that a program prints."""
    return sorted({*re.findall(r"(?<![\w-])--[a-z][a-z-]*", printed.split("\n\n")[0])})
