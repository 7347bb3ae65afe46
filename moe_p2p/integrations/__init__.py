"""Adapters of other projects, by product: README.md says what is where.

    moe       vLLM, SGLang, Megatron: each has install(), which replaces their DeepEP counterpart
    kv        vLLM, SGLang
    weights   vLLM, SGLang, verl, slime, TorchTitan

Our classes get their base class from the project at first use, by `derived`, so importing a module
needs no other project. Where versions of a project differ, the names that exist decide.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from typing import Any


def required(name: str, project: str) -> Any:
    """Imports the module `name`. Raises ImportError that says what is missing and what to do."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"moe_p2p.integrations needs {name} for {project} ({error}): install {project}, or a "
            f"version of it that has this module"
        ) from error


@functools.cache  # a failing import takes long, and some are tried in every call
def optional(name: str) -> Any:
    """Imports the module `name`; None where this version of the project does not have it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def provide_deep_ep() -> None:
    """Makes `import deep_ep` work, which the projects check for.

    The real one, when the project has imported it already, serves as well: no call reaches it.
    """
    from moe_p2p import deep_ep

    with contextlib.suppress(ImportError):
        deep_ep.install()


def derived(ours: type, base: Any) -> Any:
    """Returns `ours` as a subclass of the project's `base`."""
    return type(base)(ours.__name__, (ours, base), {"__doc__": ours.__doc__})


def put(modules: dict[str, Any], values: dict[str, Any]) -> None:
    """Binds each value under its name in each module that exists."""
    for module in modules.values():
        for name, value in values.items():
            setattr(module, name, value)
