"""benchmarks/gpu_figures.py without GPUs: its commands parse, limits end whole process groups."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shlex
import signal
import subprocess
import time
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

from moe_p2p.__main__ import main
from tests.support.programs import handled, program, until

ROOT = Path(__file__).resolve().parents[2]
TURNS = "benchmarks/turns.py"


@pytest.fixture(name="figures")
def load(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu_figures")


class ParsedError(Exception):
    """Raised where a command would begin."""


def test_commands_are_those_of_the_project(
    figures: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_only(*arguments: Any) -> NoReturn:
        parse(*arguments)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    found = list(figures.steps(8, "../before", "../first"))
    assert len({step.name for step in found}) == len(found)
    assert {f"nodes-{shape}" for shape in ("2x4", "4x2", "8x1")} <= {step.name for step in found}
    for step in found:
        words = figures.words_of(step, Path("out"), step.limit_s)[len(step.under.split()) + 1 :]
        if words[:2] == ["-m", "moe_p2p"]:
            with pytest.raises(ParsedError):
                main(words[2:])
        else:
            at = ROOT / (f"{words[1].replace('.', '/')}.py" if words[0] == "-m" else words[0])
            assert at.exists() or words[:2] == ["-m", "pytest"]
        if words[0] == TURNS:
            with pytest.raises(ParsedError):
                importlib.import_module("turns")._parser(words[1]).parse_args(words[2:])
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))


def test_each_test_of_a_gpu_is_in_one_step(figures: ModuleType) -> None:
    files = [w for s in figures.steps(2) if s.group == "correctness" for w in s.command.split()]
    wanted = {f"tests/gpu/{path.name}" for path in (ROOT / "tests/gpu").glob("test_gpu*.py")}
    assert sorted(each for each in files if each in wanted) == sorted(wanted)


def test_groups_end_within_a_call(figures: ModuleType) -> None:
    for gpus, groups in ((2, {*figures.GROUPS} - {"many"}), (4, {*figures.GROUPS})):
        steps = list(figures.steps(gpus, "../before", "../first"))
        assert {step.group for step in steps} == groups
        assert len({step.name for step in steps}) == len(steps)


def test_steps_end_by_their_limits_and_failures_are_told(
    figures: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit(3)")
    (tmp_path / "works.py").write_text("print('a table')")
    child = tmp_path / "child"
    (tmp_path / "hangs.py").write_text(
        "import pathlib, subprocess\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        f"pathlib.Path(r'{child}').write_text(f'{{child.pid}}\\n')\n"
        "child.wait()"
    )
    wait, limit_s = subprocess.Popen.wait, 5.0

    def wait_until_it_hangs(process: Any, timeout: float | None = None) -> int:
        """The limit has passed once the child is there, however long that takes."""
        if timeout != limit_s:
            return wait(process, timeout)
        ends = time.monotonic() + 60
        while not child.exists() or not child.read_text().endswith("\n"):
            assert time.monotonic() < ends
            time.sleep(0.02)
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(figures.subprocess.Popen, "wait", wait_until_it_hangs)
    monkeypatch.setattr(figures, "_count", lambda: 1)
    monkeypatch.setattr(
        figures,
        "steps",
        lambda gpus, base, first: iter(
            [
                figures.Step("works", f"{tmp_path}/works.py", 60, 1),
                figures.Step("fails", f"{tmp_path}/fails.py", 60, 1),
                figures.Step("hangs", f"{tmp_path}/hangs.py", limit_s, 1),
                figures.Step("empty", f"-m pytest -q -p no:cacheprovider -k no {tmp_path}", 60, 1),
                figures.Step("larger", f"{tmp_path}/works.py", 60, 2),
                figures.Step("absent", f"{tmp_path}/works.py", 60, 1, needs="no_such_module"),
            ]
        ),
    )
    assert figures.main(["--out", str(tmp_path / "out")]) == 1
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert [each["result"] for each in summary.values()] == [
        "ok",
        "status 3",
        "ended at its limit",
        "no test to run",
        "needs 2 GPUs, here are 1",
        "no_such_module is not installed",
    ]
    printed = capsys.readouterr().out
    assert "a table" in printed
    assert "not: fails, hangs" in printed
    deadline = time.monotonic() + 20
    while _runs(int(child.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.05)


STEP = """
import pathlib, signal, sys, time
pathlib.Path(sys.argv[1], "began").touch()
try: time.sleep(60)
except KeyboardInterrupt: pathlib.Path(sys.argv[1], "interrupted").touch()
"""
RUN = """
import sys
sys.path.insert(0, "benchmarks")
import gpu_figures as figures
step = figures.Step("waits", f"{sys.argv[1]}/step.py {sys.argv[1]}", 60, 0)
figures._count, figures.steps = lambda: 0, lambda *_: iter([step])
figures.handle_signals()
figures.main(["--out", f"{sys.argv[1]}/out"])
"""


def test_sigterm_ends_a_step_too_where_sigint_is_ignored(tmp_path: Path) -> None:
    """Such as under nohup."""
    (tmp_path / "step.py").write_text(STEP)
    with handled(signal.SIG_IGN), program("-c", RUN, str(tmp_path)) as running:
        until((tmp_path / "began").exists, "the step never begins")
        running.process.terminate()
        assert running.process.wait(15) == 128 + signal.SIGTERM  # not the 20 s of who ignores it
    assert (tmp_path / "interrupted").exists()


def _runs(pid: int) -> bool:
    """A zombie has ended; whoever adopted it may not have looked yet."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_wrong_names_are_refused(figures: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        figures.main(["--only", "nothing"])
    assert "--list prints them" in capsys.readouterr().err


def test_the_base_is_a_folder_wherever_it_lies(
    figures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one within this tree, which alone is carried to a machine that is lent."""
    (tmp_path / "a tree").mkdir()
    monkeypatch.chdir(tmp_path)
    ran: list[list[str]] = []

    def note(step: Any, *_: object) -> tuple[str, float]:
        ran.append(shlex.split(step.command))
        return "ok", 0.0

    monkeypatch.setattr(figures, "_count", lambda: 2)
    monkeypatch.setattr(figures, "run", note)
    given = ["--base", "a tree", "--only", "turns,host", "--out", str(tmp_path / "out")]
    assert figures.main([*given, "--first", "a tree"]) == 0
    assert [words[2] for words in ran if words[-1].endswith("turns.json")] == [
        str(tmp_path / "a tree")
    ]
    assert [
        words[2:4] for words in ran if words[-4:-3] == ["host"] or "host.json" in " ".join(words)
    ] == [[str(tmp_path / "a tree"), "."]]
