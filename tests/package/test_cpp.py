"""The C++ tests, built without torch: with ASan and UBSan; with --all-cells plain and TSan too.

TSan's program leaves out tests of one thread.

doctest names the case and the seed of a failure; CONTRIBUTING.md tells how to run one case alone.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD_DEADLINE_S = 1200
RUN_DEADLINE_S = 3000  # ends what hangs; at a load of 20 two cores take half of it
SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1:strict_init_order=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}


def reporting_to(file: Path) -> dict[str, str]:
    """Sanitizers' options: reports go to a file, because a test may read standard error."""
    return {name: f"{options}:log_path={file}" for name, options in SANITIZER_OPTIONS.items()}


def missing_tool() -> str:
    """Why the program cannot be built here; empty when it can."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"no C++ compiler: {compiler} is not installed"
    sys.path.insert(0, str(ROOT / "tests/cpp"))
    try:
        from build import find_doctest  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    return "" if find_doctest() else "doctest is not installed (apt-get install doctest-dev)"


def without_address_randomisation() -> list[str]:
    """TSan's fixed mappings collide with the wide randomisation of newer kernels."""
    command = ["setarch", platform.machine(), "-R"]
    if shutil.which("setarch") is None:
        return []
    tried = subprocess.run([*command, "true"], capture_output=True, check=False)
    return command if tried.returncode == 0 else []


def build_program(sanitize: str | None) -> str:
    command = [sys.executable, str(ROOT / "tests/cpp/build.py")]
    if sanitize:
        command += ["--sanitize", sanitize]
    built = subprocess.run(
        command, capture_output=True, text=True, timeout=BUILD_DEADLINE_S, check=False
    )
    assert built.returncode == 0, f"build failed:\n{built.stderr[-8000:]}"
    return built.stdout.strip().splitlines()[-1]


@pytest.mark.timeout(BUILD_DEADLINE_S + RUN_DEADLINE_S)
@pytest.mark.parametrize(
    "sanitize",
    [
        pytest.param("address", id="asan"),
        pytest.param("thread", id="tsan", marks=pytest.mark.more),
        pytest.param(None, id="plain", marks=pytest.mark.more),
    ],
)
def test_cpp(sanitize: str | None, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if reason := missing_tool():
        pytest.skip(reason)
    program = build_program(sanitize)
    command = [program, "--no-version"]
    if sanitize == "thread":
        command = [*without_address_randomisation(), *command]
    try:
        run = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | reporting_to(tmp_path / "report"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        output = (expired.stdout or b"").decode(errors="replace")
        pytest.fail(f"still running after {RUN_DEADLINE_S} s; last output:\n{output[-4000:]}")
    with capsys.disabled():
        for line in run.stdout.splitlines():
            if line.startswith("[doctest]") and ("|" in line or "Status" in line):
                print(f"\n{line}", end="")
        print(flush=True)
    cases = run.stdout.split("=" * 79)
    failed = [case for case in cases if "ERROR" in case or "Sanitizer" in case]
    reports = [file.read_text() for file in tmp_path.glob("report.*")]
    text = "\n".join([*failed, run.stdout[-4000:], *reports])
    assert run.returncode == 0, f"exit status {run.returncode}:\n{text[-30_000:]}"
