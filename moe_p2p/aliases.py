"""Makes imports of another package's modules give modules of this one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

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
        """Idempotent. Raises ImportError when the real one was imported and force is not set."""
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
