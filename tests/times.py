"""Where the time of the tests goes: wall and CPU seconds of each test, children included.

    make test TIMES=times.jsonl         # or: python -m pytest --times times.jsonl
    python -m tests.times times.jsonl   # the table of CONTRIBUTING.md, then the longest tests

A test's CPU time is what the tree of processes below its worker has used while it ran, so servers
that start ranks count where they work. What its worker compiles in threads counts too. The worker
adopts processes whose parent has ended (a subreaper, prctl(2)): they would leave the tree. Those
that have ended are waited for when a test has.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

TICK = os.sysconf("SC_CLK_TCK")
PR_SET_CHILD_SUBREAPER = 36  # <sys/prctl.h>
# A part of the table, and how ids of its tests begin, below tests/. The first that fits counts.
PARTS = (
    ("lint", ("package/test_lint.py",)),
    ("C++ programs, built and run", ("package/test_cpp.py",)),
    ("emulated GPU", ("gpu/test_emulated_gpu.py",)),
    ("NVRTC", ("gpu/test_jit.py",)),
    (
        "Triton's interpreter",
        ("gpu/test_triton", "weights/test_weights_fp8", "kv/test_kv_checksum"),
    ),
    ("soft-RoCE", ("engine/test_rdma.py",)),
    ("inductor", ("moe/test_compile.py",)),
    ("engines", ("engines/",)),
    ("wheel and README", ("package/test_wheel.py", "package/test_readme.py")),
    ("commands and examples", ("tools/",)),
    ("MoE calls", ("engine/", "fleet/", "moe/", "deep_ep/", "layer/")),
    ("KV", ("kv/",)),
    ("weights", ("weights/",)),
    ("everything else", ("",)),
)


class Took(NamedTuple):
    test: str
    wall_s: float
    cpu_s: float


def tree_cpu_s(process: int) -> float:
    """User and system time of a process, its descendants, and what they have waited for."""
    ticks, processes = 0, [process]
    for at in processes:
        try:
            fields = Path(f"/proc/{at}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
            for task in os.listdir(f"/proc/{at}/task"):
                children = Path(f"/proc/{at}/task/{task}/children").read_text()
                processes.extend(map(int, children.split()))
        except OSError:  # it has ended meanwhile
            continue
    return ticks / TICK


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", default="", help="a file for wall and CPU seconds of each test")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--times"):
        file = Path(config.invocation_params.dir, config.getoption("--times"))
        config.pluginmanager.register(_Times(file))


class _Times:
    def __init__(self, file: Path) -> None:
        self._file = file
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        began, before = time.monotonic(), tree_cpu_s(os.getpid())
        try:
            return (yield)
        finally:
            wall_s, cpu_s = time.monotonic() - began, tree_cpu_s(os.getpid()) - before
            _wait_for_ended()
            with self._file.open("a") as file:  # one write: workers share the file
                file.write(json.dumps(Took(item.nodeid, round(wall_s, 3), round(cpu_s, 3))) + "\n")


def _wait_for_ended() -> None:
    """Whoever starts processes has waited for its own, in the test that it started them in."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def part_of(test: str) -> str:
    return next(part for part, starts in PARTS if test.removeprefix("tests/").startswith(starts))


def read(files: Iterable[Path]) -> list[Took]:
    return [Took(*json.loads(line)) for file in files for line in file.read_text().splitlines()]


def table(took: list[Took], longest: int) -> Iterator[str]:
    yield "| part | tests | wall s | CPU s |"
    yield "|---|---|---|---|"
    for part, _ in PARTS:
        if its := [each for each in took if part_of(each.test) == part]:
            yield _row(part, its)
    yield _row("all", took)
    yield ""
    for each in sorted(took, key=lambda each: -each.cpu_s)[:longest]:
        yield f"{each.cpu_s:8.1f} CPU s {each.wall_s:8.1f} s  {each.test}"


def _row(part: str, took: list[Took]) -> str:
    wall_s, cpu_s = sum(each.wall_s for each in took), sum(each.cpu_s for each in took)
    return f"| {part} | {len(took)} | {wall_s:.0f} | {cpu_s:.0f} |"


if __name__ == "__main__":
    print("\n".join(table(read(map(Path, sys.argv[1:])), longest=40)))
