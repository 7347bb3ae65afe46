"""Runs a program in which imports of another package give one of this package."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

from moe_p2p import env


def run(package: str, path: Path, install: Callable[[], None], arguments: list[str]) -> int:
    """Does what `python -m PACKAGE ARGUMENTS` does; returns an exit status.

    Processes that the program starts get it too: new programs through PYTHONPATH,
    multiprocessing's children through sys.path, which they copy.
    """
    if arguments == ["--path"]:
        print(path)
        return 0
    as_module = arguments[:1] == ["-m"]
    program = arguments[1:] if as_module else arguments
    if not program or program[0].startswith("-"):
        usage = f"python -m {package}"
        print(f"usage: {usage} SCRIPT [ARGS] | -m MODULE [ARGS] | --path", file=sys.stderr)
        return 2
    install()
    env.prepend_to_python_path(path)
    sys.argv = program
    if as_module:
        sys.path.insert(1, str(path))
    else:
        sys.path[:1] = [str(Path(program[0]).resolve().parent), str(path)]
    if not (_is_module(program[0]) if as_module else Path(program[0]).exists()):
        kind = "module" if as_module else "file"
        print(f"python -m {package}: there is no {kind} {program[0]}", file=sys.stderr)
        return 2
    if as_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program[0], run_name="__main__")
    return 0


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:  # a package above it, or what that one imports
        if f"{name}.".startswith(f"{error.name}."):
            return False
        raise
