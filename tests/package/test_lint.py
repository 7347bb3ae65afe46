"""Formatters and checkers over the tree, beside the tests. `make lint` runs them alone.

clang-tidy looks at what changed since the last green commit; with --all-cells at everything.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import lint

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "options",
    [
        ("--only=ruff",),
        ("--only=clang-format",),
        ("--only=mypy",),
        ("--only=shellcheck",),
        ("--only=hadolint",),
        ("--only=clang-tidy", "--changed"),
        pytest.param(("--only=clang-tidy",), marks=pytest.mark.more),
    ],
    ids=lambda options: " ".join(options).replace("--only=", ""),
)
def test_lint(options: tuple[str, ...]) -> None:
    command = [sys.executable, "tests/lint.py", *options]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    if "skipped" in ran.stdout:
        pytest.skip(ran.stdout.strip())


def test_a_header_that_changed_is_read_where_it_is_included() -> None:
    (found,) = lint.sources_of(["csrc/provider/verbs/wire.h", "docs/kv.md", "csrc/no/longer.h"])
    assert '"provider/verbs/wire.h"' in (ROOT / found).read_text()
    source = "csrc/base/sha256.cpp"
    assert lint.sources_of(["csrc/base/sha256.h", source]) == [source]
    (found,) = lint.sources_of(["csrc/engine/nic_counters.h"])  # which only headers include
    assert '"engine/nic_counters.h"' not in (ROOT / found).read_text()
