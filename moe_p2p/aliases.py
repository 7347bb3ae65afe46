"""Makes imports of another package's modules give modules of this one, and runs programs so."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import runpy
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from moe_p2p import env

_HERE = Path(__file__).parent


class Aliases:
    """Names of modules, and the modules of this package that importing them shall give.

    package: all modules of this name and below it belong to the other package.
    ours: the name of the package here, for error texts.
    """

    def __init__(self, package: str, ours: str, modules: Mapping[str, str]) -> None:
        self._package = package
        self._ours = ours
        self._modules = modules
        self._replaced: dict[str, ModuleType] = {}

    def install(self, *, force: bool = False) -> None:
        """Makes imports of the other package give this one from now on. Idempotent.

        force: also after the real one was imported; modules that hold the real one keep it.

        Raises ImportError when the real one was imported and force is not set.
        """
        theirs = {name: m for name, m in sys.modules.items() if self._is_theirs(name, m)}
        if theirs and not force:
            file = getattr(next(iter(theirs.values())), "__file__", None)
            raise ImportError(
                f"{self._package} is imported already, from {file}: call {self._ours}.install() "
                "before, or install(force=True) if modules may keep the one they imported"
            )
        self._replaced.update(theirs)
        for name in theirs:
            del sys.modules[name]
        for alias, name in self._modules.items():
            sys.modules[alias] = importlib.import_module(name)

    def uninstall(self) -> None:
        """Undoes install: imports behave as before."""
        for alias in self._modules:
            if not self._is_theirs(alias, sys.modules.get(alias)):
                sys.modules.pop(alias, None)
        sys.modules.update(self._replaced)
        self._replaced.clear()

    def _is_theirs(self, name: str, module: ModuleType | None) -> bool:
        """Whether this is a module of the real package."""
        if module is None or not f"{name}.".startswith(f"{self._package}."):
            return False
        file = getattr(module, "__file__", None)
        return file is None or _HERE not in Path(file).parents


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


# --- modules of this package that have moved: found under their old names for one release ---

MOVED = {
    **{
        name: f"moe.{name}"
        for name in ("all_to_all", "config", "dispatched", "ops", "options", "pool", "reference",
                     "row_counts", "scale_rows")
    },
    **{f"reference.{name}": f"moe.reference.{name}" for name in ("int10", "routing", "wire")},
    "reference.fp8": "machine.fp8",
    "transfers": "engine.transfers",
    "kv.membership": "kv.lease_keeper",
    "kv.reservation": "kv.receiver",
    "kv.sending": "kv.sender",
    "weights.generator": "weights.engine_rank",
    **{
        f"integrations.{old}": f"integrations.{new}"
        for old, new in {
            "megatron": "moe.megatron",
            "sglang": "moe.sglang",
            "sglang_kv": "kv.sglang",
            "sglang_weights": "weights.sglang",
            "verl_weights": "weights.verl",
            "vllm": "moe.vllm",
            "vllm_kv": "kv.vllm",
            "vllm_weights": "weights.vllm",
        }.items()
    },
}  # fmt: skip


class _Moved(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked first: what is below a moved package would be found in its folder, as a copy."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, module = name.partition(".")
        if package != __package__ or module not in MOVED:
            return None
        return importlib.machinery.ModuleSpec(name, self)

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        new = f"{__package__}.{MOVED[old.partition('.')[2]]}"
        # Adapters are named on command lines; warnings of importlib, which imports them, are hidden
        kind = FutureWarning if ".integrations." in old else DeprecationWarning
        warnings.warn(f"{old} is {new} now", kind, stacklevel=2)
        sys.modules[old] = importlib.import_module(new)


def follow_moved() -> None:
    sys.meta_path.insert(0, _Moved())


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a module in which names were replaced by others."""

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        text = f"{module}.{name} is {module}.{names[name]} now"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], names[name])

    return find
