"""Runs the benchmarks of tests/cpp as pytest benchmarks: built with optimization, or skipped."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

ROOT = Path(__file__).resolve().parents[1]


def build(timeout_s: float) -> str:
    """Returns the path of the C++ test program."""
    made = subprocess.run(
        [sys.executable, "tests/cpp/build.py", "--optimize"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    if made.returncode:
        pytest.skip(f"the C++ tests cannot be built: {(made.stdout + made.stderr)[-300:]}")
    return made.stdout.strip().splitlines()[-1]


def run(
    benchmark: BenchmarkFixture,
    command: list[str],
    *,
    name: str,
    timeout_s: float = 120.0,
    also: str | None = None,
) -> list[str]:
    """Returns the result lines of `command`'s benchmarks; prints them and stores them as `name`.

    also: a pattern of whole result lines of other programs.
    """

    def call() -> str:
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=timeout_s
        ).stdout

    printed = benchmark.pedantic(call, rounds=1)
    wanted = "MESSAGE: .+" if also is None else f"MESSAGE: .+|^(?:{also})$"
    lines = [line.removeprefix("MESSAGE: ") for line in re.findall(wanted, printed, re.MULTILINE)]
    assert lines, printed
    benchmark.extra_info[name] = lines
    print("\n" + "\n".join(lines))
    return lines


def median_s(benchmark: BenchmarkFixture) -> float:
    assert benchmark.stats is not None
    return float(benchmark.stats.stats.median)
