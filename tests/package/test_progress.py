"""How tests are divided among workers, and which GPU a worker begins with."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests import conftest, progress
from tests.support import warm

ROOT = Path(__file__).resolve().parents[2]
CASES = """
import pathlib, time
import pytest

@pytest.mark.parametrize("number", range(4))
def test_case(number, worker_id):
    pathlib.Path("ran by", worker_id).touch()
    time.sleep(0.3)  # the other worker begins meanwhile
    assert number != 3, "three is wrong"
"""

BROKEN = """
import torch
from tests.conftest import pytest_runtest_logfinish, pytest_runtest_logreport

def synchronize():
    if hasattr(torch, "broken"):
        raise RuntimeError("an illegal memory access was encountered")

torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, synchronize
"""
BREAKS = """
import torch

def test_first():
    torch.broken = True
    assert False, "breaks the GPU"

def test_second():
    assert not hasattr(torch, "broken")
"""


def test_workers_begin_with_another_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    seen = []
    for worker in ("", "gw0", "gw1", "gw2", "gw3"):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
        conftest.spread_over_gpus()
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert seen == ["4,7", "4,7", "7,4", "4,7", "7,4"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw1")
    conftest.spread_over_gpus()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,0"


def test_a_worker_alone_or_without_gpus_sees_what_it_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw1")
    for gpus in (0, 1):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        conftest.spread_over_gpus()
        assert "CUDA_VISIBLE_DEVICES" not in os.environ


def run_pytest(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return warm.run(
        *("-m", "pytest", *options, "-p", "no:cacheprovider", "test_case.py"),
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=250,
    )


def test_a_file_is_one_workers_unless_its_tests_are_apart(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    (tmp_path / "test_case.py").write_text(CASES)
    (tmp_path / "conftest.py").write_text("from tests.progress import *  # noqa\n")
    for options, workers in ((), 1), (("--apart",), 2):
        shutil.rmtree(tmp_path / "ran by", ignore_errors=True)
        (tmp_path / "ran by").mkdir()
        done = run_pytest(tmp_path, "-n", "2", "--progress", *options, "--tb=line")
        assert "3 passed" in done.stdout, done.stdout
        assert "FAILED test_case.py::test_case[3] (call) AssertionError: three is wrong" in (
            done.stdout
        )
        assert len(list((tmp_path / "ran by").iterdir())) == workers


def test_runs_of_the_fault_matrix_are_one_workers_and_begin_early() -> None:
    name = "tests/faults/test_faults.py::test_joins[{}]".format
    assert progress.unit_of(name("kill")) == progress.unit_of(name("stop"))
    assert progress._place(name("kill")) < progress._place("tests/moe/test_masks.py::test_it")
    assert progress.unit_of("test_cpp.py::test_a") != progress.unit_of("test_cpp.py::test_b")


def test_a_worker_without_a_usable_gpu_is_replaced(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    (tmp_path / "conftest.py").write_text(BROKEN)
    (tmp_path / "test_case.py").write_text(BREAKS)
    done = run_pytest(tmp_path, "-n", "1")
    assert "breaks the GPU" in done.stdout, done.stdout + done.stderr
    assert "1 passed" in done.stdout, done.stdout
    assert "FAILED test_case.py::test_second" not in done.stdout
