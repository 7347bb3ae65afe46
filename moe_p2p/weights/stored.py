"""Templates of a plan as bytes, and plans on disk. Used by moe_p2p/weights/plan.py."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

from moe_p2p.engine.strides import Rows
from moe_p2p.errors import InvalidArgumentError, make, require
from moe_p2p.weights.flows import Exchange, Flow, Stage, Template

_SUM_BYTES = 32
Stored = tuple[tuple[Template, ...], tuple[int, ...]]


def pack(templates: tuple[Template, ...], numbers: tuple[int, ...]) -> bytes:
    text = json.dumps([templates, numbers], separators=(",", ":"))
    return zlib.compress(text.encode(), 1)


def unpack(data: bytes) -> Stored:
    try:
        templates, numbers = json.loads(zlib.decompress(data))
        return tuple(_template(*each) for each in templates), tuple(numbers)
    except (ValueError, TypeError, zlib.error) as error:
        raise make(InvalidArgumentError, f"these bytes are no weight plan: {error}") from error


def _template(flows: Any, stages: Any, exchanges: Any, received: Any) -> Template:
    return Template(
        tuple(_flow(*each) for each in flows),
        tuple(Stage(*_tuples(each)) for each in stages),
        tuple(Exchange(*_tuples(each)) for each in exchanges),
        _tuples(received),
    )


def _flow(sources: Any, targets: Any, part: Any, stage: int, scales: bool, rows: Any) -> Flow:
    return Flow(
        _tuples(sources), _tuples(targets), _tuples(part), stage, scales, Rows(*_tuples(rows))
    )


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value


def read(file: Path, key: str) -> bytes:
    """Returns what was written for that key. Raises OSError, or InvalidArgumentError where the file
    holds anything else."""
    whole = file.read_bytes()
    data = whole[_SUM_BYTES:]
    require(whole[:_SUM_BYTES] == _sum(key, data), f"{file} is not the plan of {key}")
    return data


def write(file: Path, key: str, data: bytes) -> None:
    """Others see the old file or the whole new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=file.parent)
    with os.fdopen(number, "wb") as out:
        out.write(_sum(key, data) + data)
    os.replace(name, file)


def _sum(key: str, data: bytes) -> bytes:
    return hashlib.sha256(key.encode() + data).digest()
