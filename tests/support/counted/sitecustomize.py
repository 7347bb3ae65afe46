"""Run by each interpreter of a run of the tests as it starts: one that imports torch writes a line.

tests/torch_imports.py sets where. Copies of a process that has imported torch write none.
"""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _Finder:
    @staticmethod
    def find_spec(name: str, *_: object) -> "ModuleSpec | None":
        """That of torch, with a loader that writes: who only asks where it is has not loaded it."""
        file = os.environ.get("TESTS_TORCH_IMPORTS")
        spec = PathFinder.find_spec(name) if name == "torch" and file else None
        if not file or spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with open(file, "a") as lines:  # one write: processes share the file
                lines.write(" ".join(sys.orig_argv).replace("\n", " ")[:200] + "\n")
            load(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
