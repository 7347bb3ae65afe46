"""Stand-ins for other projects: modules with their names and signatures, and little behind them."""

from __future__ import annotations

import sys
import types
from typing import Any


def module(name: str, **contents: Any) -> types.ModuleType:
    """Puts a module, and packages above it that are missing, into sys.modules."""
    parent, _, last = name.rpartition(".")
    above = sys.modules.get(parent) or module(parent) if parent else None
    made = types.ModuleType(name)
    made.__path__ = []
    made.__dict__.update(contents)
    sys.modules[name] = made
    if above is not None:
        setattr(above, last, made)
    return made
