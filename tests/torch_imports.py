"""How many interpreters import torch in a run of the tests: it is 2 to 3 s of CPU in each.

Hooks of pytest, for conftest.py. The count stands in the summary. A whole `make test` fails where
it is above MOST: programs that need no interpreter of their own are copies of a warm server
(tests/support/warm.py). Not counted: an interpreter without this PYTHONPATH, and what it starts.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parent / "support" / "counted"
FILE = "TESTS_TORCH_IMPORTS"
MOST, MORE = 25, 3  # of two workers; and of each one more, which has servers of its own
CHOOSE = ("keyword", "markexpr", "deselect", "lf", "all_cells", "left_out", "collectonly")


def pytest_configure(config: pytest.Config) -> None:
    if FILE not in os.environ:  # it is no worker, nor a run in a test
        file = Path(tempfile.mkstemp(prefix="moe_p2p_torch_imports.")[1])
        file.write_text("the run itself\n")
        config.pluginmanager.register(Count(config, file, MOST))


class Count:
    def __init__(self, config: pytest.Config, file: Path, most: int) -> None:
        workers = getattr(config.option, "numprocesses", None) or 0
        self._most = most + MORE * max(workers - 2, 0)
        self._file, self._is_whole = file, is_whole(config)
        self._lines: list[str] = []
        before = os.environ.get("PYTHONPATH")
        os.environ[FILE] = str(file)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(FOLDER), *([before] if before else [])])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._lines = self._file.read_text().splitlines()
        self._file.unlink()
        os.environ.pop(FILE)
        if self._is_whole and session.exitstatus == 0 and len(self._lines) > self._most:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        count = len(self._lines)
        terminalreporter.write_line(
            f"{count} interpreters imported torch"
            + (f", of at most {self._most}" if self._is_whole else "")
        )
        if self._is_whole and count > self._most:
            for line in self._lines:
                terminalreporter.write_line(f"FAILED imports torch: {line}")


def is_whole(config: pytest.Config) -> bool:
    """Whether it is all that `make test` runs."""
    from_settings = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return from_settings and not any(config.getoption(name, None) for name in CHOOSE)
