"""Tests of calls, run with direct calls and without: every eager call returns equal bits."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from moe_p2p.moe import direct
from tests.support import recorded_bits, warm

ROOT = Path(__file__).resolve().parents[2]
CALLS = Path(__file__).parent
SHARE = ("test_sum_order", "test_opaque_rows", "test_options")
AROUND = ("test_interrupt", "test_count_ops")  # of the process, or of what Python runs: no results

pytestmark = pytest.mark.skipif(direct.FACTS is None, reason="this torch has no direct calls")


def recorded(folder: Path, files: list[str], *, is_direct: bool) -> dict[str, Counter[str]]:
    file = folder / f"direct_{is_direct}"
    environment = {"MOE_P2P_DIRECT": f"{is_direct:d}", recorded_bits.FILE: str(file)}
    plugins = ("-p", "tests.support.recorded_bits", "-p", "no:cacheprovider", "-p", "no:xdist")
    done = warm.without_moe_p2p().run(
        *("-m", "pytest", "-q", *plugins, *files),
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return recorded_bits.read(file)


def compare(folder: Path, names: list[str]) -> None:
    files = [f"tests/moe/{name}.py" for name in names]
    got = recorded(folder, files, is_direct=True)
    want = recorded(folder, files, is_direct=False)
    assert want.keys() <= got.keys()  # tests of direct calls alone are skipped
    judged = [test for test in want if not any("lost" in line for line in got[test] | want[test])]
    different = {test: (got[test] - want[test], want[test] - got[test]) for test in judged}
    assert {test: each for test, each in different.items() if any(each)} == {}
    assert sum(sum(counts.values()) for counts in got.values()) > 100


@pytest.mark.timeout(600)
def test_a_share_of_the_tests_has_equal_bits(tmp_path: Path) -> None:
    compare(tmp_path, list(SHARE))


@pytest.mark.more
@pytest.mark.timeout(2000)
def test_the_others_have_equal_bits(tmp_path: Path) -> None:
    """All that make calls with tensors of results that no clock and no race decides."""
    names = [file.stem for file in sorted(CALLS.glob("test_*.py"))]
    calling = [
        name
        for name in names
        if re.search(r"\.(dispatch|combine)\(", (CALLS / f"{name}.py").read_text())
    ]
    rest = [name for name in calling if name not in SHARE + AROUND and "direct" not in name]
    compare(tmp_path, rest)
