"""The count of interpreters that import torch, and that it fails a run which has too many."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import torch_imports

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = """
from pathlib import Path
import pytest
from tests import torch_imports

@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    count = torch_imports.Count(config, Path("imports"), {most})
    count._is_whole = {whole}
    config.pluginmanager.register(count)
"""
TEST = """
import os, subprocess, sys

def start(program):
    subprocess.run([sys.executable, "-c", program], check=True)

def test_it():
    start("import torch, os; os.fork(); import torch")
    start("import os; os.fork() and os.wait(); import torch")
    start("import importlib.util; assert importlib.util.find_spec('torch')")
"""


def run(folder: Path, most: int, whole: bool) -> subprocess.CompletedProcess[str]:
    (folder / "torch.py").touch()
    (folder / "conftest.py").write_text(CONFTEST.format(most=most, whole=whole))
    (folder / "imports").touch()
    (folder / "test_case.py").write_text(TEST)
    environment = {name: os.environ[name] for name in os.environ if name != torch_imports.FILE}
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, "test_case.py"],
        cwd=folder,
        env=environment | {"PYTHONPATH": f"{folder}:{ROOT}"},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("most", "whole", "status"), [(3, True, 0), (2, True, 1), (2, False, 0)], ids=str
)
def test_a_whole_run_of_too_many_fails(most: int, whole: bool, status: int, tmp_path: Path) -> None:
    """A copy that has torch does not count, copies that import it do."""
    done = run(tmp_path, most, whole)
    assert done.returncode == status, done.stdout + done.stderr
    assert "3 interpreters imported torch" in done.stdout
    assert ("FAILED imports torch: " in done.stdout) == (status == 1)


@pytest.mark.parametrize(
    ("source", "given", "whole"),
    [("TESTPATHS", {}, True), ("TESTPATHS", {"keyword": "a"}, False), ("ARGS", {}, False)],
)
def test_what_is_chosen_is_no_whole_run(source: str, given: dict[str, Any], whole: bool) -> None:
    config: Any = SimpleNamespace(
        args_source=pytest.Config.ArgsSource[source],
        getoption=lambda name, default: given.get(name, default),
    )
    assert torch_imports.is_whole(config) == whole
