"""Run by each interpreter of a run of the tests as it starts: one that imports torch writes a line.

tests/torch_imports.py sets where. Copies of a process that has imported torch write none.
"""

import os
import sys


class _Finder:
    """Finds nothing. It is asked for torch once: another import finds it in sys.modules."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        file = os.environ.get("TESTS_TORCH_IMPORTS")
        if name == "torch" and file:
            with open(file, "a") as lines:  # one write: they share it
                lines.write(" ".join(sys.orig_argv).replace("\n", " ")[:200] + "\n")


sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
