"""The check of a clean clone: what it counts, and that only a test that fails twice fails it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECK = ROOT / ".ci" / "run"
MAKEFILE = """\
.PHONY: test test-changed test-again
test:
	@{first}
test-changed:
	@echo "==== 7 passed in 1.00s ===="
	@echo "changed: since 0123456789ab: 4 files"
	@echo "changed: mutations of kernels {mutations} (9 s): --since 01234"; test "{mutations}" = ok
test-again:
	@echo "once more, alone: what failed"
	@{again}
"""
PASSED = 'echo "==== 40 passed, 2 skipped in 9.10s ===="'
FAILED = (
    'echo "FAILED tests/test_a.py::test_b[1] - Error"; '
    'echo "==== 1 failed, 39 passed in 9.10s ===="; exit 1'
)
ONE_PASSED = 'echo "==== 1 passed in 0.10s ===="'
NOTHING = 'echo "==== no tests ran in 0.10s ===="; exit 5'


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("mutations", "first", "again", "said", "status"),
    [
        ("ok", PASSED, NOTHING, ["47 passed, 0 failed, 2 skipped"], 0),
        ("ok", FAILED, ONE_PASSED, ["failed once, passed alone: tests/test_a.py::test_b[1]",
                                    "47 passed, 0 failed, 0 skipped"], 0),
        ("ok", FAILED, FAILED.replace("39 passed", "0 passed"),
         ["failed twice: tests/test_a.py::test_b[1]", "46 passed, 1 failed, 0 skipped"], 2),
        ("FAILED", PASSED, NOTHING, ["47 passed, 1 failed, 2 skipped"], 2),
        ("FAILED", FAILED, ONE_PASSED, ["47 passed, 1 failed, 0 skipped"], 1),
        ("ok", "echo no compiler; exit 1", NOTHING, ["7 passed, 1 failed, 0 skipped"], 2),
    ],
)  # fmt: skip
def test_what_it_says(
    tmp_path: Path, mutations: str, first: str, again: str, said: list[str], status: int
) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(CHECK, tmp_path / ".ci" / "run")
    (tmp_path / "Makefile").write_text(
        MAKEFILE.format(mutations=mutations, first=first, again=again)
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["bash", str(tmp_path / ".ci" / "run")],
        capture_output=True,
        text=True,
        timeout=250,
        env=environment,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert all(line in lines for line in said), done.stdout
    assert lines[-1] == said[-1]
    assert lines[-3] == "changed: since 0123456789ab: 4 files"
    assert done.returncode == status, done.stdout


def test_tiers_hold_every_folder_of_tests() -> None:
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    tiers = dict(re.findall(r"^TIER_(\w+) := (.*)$", makefile, re.MULTILINE))
    assert re.search(rf"^TIERS := {' '.join(tiers)}$", makefile, re.MULTILINE)
    named = [path for tier in tiers.values() for path in tier.split()]
    assert all((ROOT / "tests" / path).exists() for path in named)
    here = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert here - set(named) == {"package", "tools"}  # the tree itself, and the laboratory
