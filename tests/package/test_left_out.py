"""What `make test` leaves out, which part another run takes, and the times of a run."""

from __future__ import annotations

import subprocess
import sys
from itertools import chain, combinations
from pathlib import Path

import pytest

from tests import left_out, times
from tests.support import cells

ROOT = Path(__file__).resolve().parents[2]
CASE = """
import pytest
from tests.support import cells

@pytest.mark.parametrize(("a", "b", "c"), cells.pairwise("ab", "cd", "ef"))
def test_grid(a, b, c): pass

@pytest.mark.more
def test_long(): pass

def test_short(): pass
"""


def _ran(folder: Path, *options: str) -> list[str]:
    """Runs CASE as a file of a folder `kv`; returns the names of its tests that ran."""
    file = folder / "kv" / "test_case.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(CASE)
    plugins = ("-p", "tests.left_out", "-p", "no:cacheprovider", "--rootdir", str(folder))
    command = [sys.executable, "-m", "pytest", "-v", *plugins, "-c", "/dev/null", *options]
    done = subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.partition(" ")[0] for line in done.stdout.splitlines() if "PASSED" in line]
    return [line.partition("::")[2] for line in lines]


def test_make_test_and_the_rest_are_everything(tmp_path: Path) -> None:
    every = _ran(tmp_path, "--all-cells")
    assert len(every) == 8 + 1 + 1
    usual = _ran(tmp_path)
    assert "test_short" in usual
    assert "test_long" not in usual
    assert len(usual) == 4 + 1
    rest = _ran(tmp_path, "--left-out")
    assert sorted(usual + rest) == sorted(every)
    assert _ran(tmp_path, "--left-out", "--suites=kv") == rest
    fifths = [_ran(tmp_path, "--left-out", f"--fifth={fifth}") for fifth in range(left_out.FIFTHS)]
    assert sorted(chain(*fifths)) == sorted(rest)
    assert _ran(tmp_path, "kv/test_case.py::test_long") == ["test_long"]


def test_a_fifth_of_the_others_comes_to_the_chosen_suites() -> None:
    names = [f"tests/kv/test_a.py::test_{number}" for number in range(3)]
    names += [f"tests/engine/test_b.py::test_{number}" for number in range(10)]
    assert left_out.chosen(names, ["kv/", "rdma/"], None) == set(names[:3])
    assert left_out.chosen(names, ["kv/"], 6) == {*names[:3], names[4], names[9]}
    assert left_out.chosen(names, [], 6) == {names[1], names[6], names[11]}
    assert left_out.chosen(names, [], None) == set(names)


def test_pairwise_cells_hold_each_pair() -> None:
    axes = ((1, 2, 3, 4), "abc", (True, False), "xyz")
    params = cells.pairwise(*axes, keep=lambda number, *_: number == 4)
    assert len(params) == 4 * 3 * 2 * 3
    kept = [param.values for param in params if not param.marks]
    assert len(kept) < 18 + 13  # of 4: all 18; of the others about 4 * 3
    for (one, first), (two, second) in combinations(enumerate(axes), 2):
        met = {(values[one], values[two]) for values in kept}
        assert met == {(a, b) for a in first for b in second}
    assert [param.values for param in kept_of(cells.few([(1, 2), (3, 4)], keep=[(3, 4)]))] == [
        (3, 4)
    ]


def kept_of(params: list[object]) -> list[object]:
    return [param for param in params if not param.marks]  # type: ignore[attr-defined]


DAEMON = """
import os, sys, time
if os.fork() == 0:
    while time.process_time() < 0.5: pass
    os.write(int(sys.argv[1]), str(os.getpid()).encode())
"""
TIMED = """
import os, subprocess, sys
from tests.support import warm

def start(program, *more, **options):
    subprocess.run([sys.executable, "-c", program, *more], check=True, **options)

def test_child():
    start({burn!r})

def test_daemon():
    warm.Server(modules=()).run("-c", "pass")
    reader, writer = os.pipe()
    start({daemon!r}, str(writer), pass_fds=[writer])
    os.waitid(os.P_PID, int(os.read(reader, 20)), os.WEXITED | os.WNOWAIT)  # it is adopted

def test_nothing():
    children = open(f"/proc/self/task/{{os.getpid()}}/children").read().split()
    states = [open(f"/proc/{{each}}/stat").read().rpartition(") ")[2][0] for each in children]
    assert "Z" not in states
"""


def test_times_count_children_and_become_a_table(tmp_path: Path) -> None:
    file = tmp_path / "test_case.py"
    burn = "import time\nwhile time.process_time() < 0.5: pass"
    file.write_text(TIMED.format(burn=burn, daemon=DAEMON))
    options = ("-q", "-p", "tests.times", "--times", "times", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", *options, "-c", "/dev/null", str(file)]
    subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, check=True)
    took = times.read([tmp_path / "times"])
    assert [each.test.rpartition("::")[2] for each in took] == [
        "test_child", "test_daemon", "test_nothing",
    ]  # fmt: skip
    assert took[0].cpu_s > 0.4
    assert took[1].cpu_s > 0.4
    assert took[2].cpu_s < 0.4
    printed = subprocess.run(
        [sys.executable, "-m", "tests.times", str(tmp_path / "times")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert f"| all | 3 | {sum(each.wall_s for each in took):.0f} |" in printed


@pytest.mark.parametrize(
    ("test", "part"),
    [
        ("tests/package/test_cpp.py::test_cpp[asan]", "C++ programs, built and run"),
        ("tests/kv/test_kv_plan.py::test_it", "KV"),
        ("tests/kv/test_kv_checksum.py::test_it", "Triton's interpreter"),
        ("tests/package/test_docs.py::test_it", "everything else"),
    ],
)
def test_each_test_is_of_one_part(test: str, part: str) -> None:
    assert times.part_of(test) == part
