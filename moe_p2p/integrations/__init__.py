"""MoE interfaces of other projects over moe_p2p.AllToAll.

    vllm      all2all managers and prepare-finalize objects of vLLM's modular MoE kernel
    sglang    a token dispatcher of SGLang
    megatron  a dispatch manager of Megatron's flexible token dispatcher
    sizes     how many rows a call brings, on the host, for layouts without spare rows

Each has install(), which puts it where that project makes its DeepEP counterpart. Classes of ours
get their base class from the project when they are first asked for, by `derived`, so importing a
module here takes no other project. Where versions of a project differ, what exists decides.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any


def required(name: str, project: str) -> Any:
    """The module `name`; ImportError that says what is missing and what can be done."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"moe_p2p.integrations.{project} needs {name} ({error}): install {project}, or a "
            f"version of it that has this module"
        ) from error


@functools.cache  # to look for a module in vain takes long, and some are asked for in every call
def optional(name: str) -> Any:
    """The module `name`, or None where this version of the project does not have it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def derived(ours: type, base: Any) -> Any:
    """`ours` as a subclass of the project's `base`."""
    return type(base)(ours.__name__, (ours, base), {"__doc__": ours.__doc__})


def put(modules: dict[str, Any], classes: dict[str, Any]) -> None:
    """Binds each class under its name in each module that is there."""
    for module in modules.values():
        for name, value in classes.items():
            setattr(module, name, value)
