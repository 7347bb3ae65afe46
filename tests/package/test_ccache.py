"""The C++ tests are compiled through ccache where it is installed, and never from a stale entry."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.package.test_cpp import ROOT, missing_tool

SOURCES = {
    "csrc/base/one.cpp": "int one() { return 1; }\n",
    "tests/cpp/kept.h": "#pragma once\ninline int kept() { return 1; }\n",
    "tests/cpp/precompiled.h": '#include "kept.h"\n',
    "tests/cpp/precompiled_tests.h": '#include "precompiled.h"\n',
    "tests/cpp/kept_test.cpp": "int seen() { return kept(); }\n",
    "tests/cpp/main.cpp": "int one();\nint seen();\nint main() { return 10 * one() + seen(); }\n",
}


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)
    os.utime(root / name, (1, 1))  # ccache mistrusts headers as young as the compilation


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree of a few lines that tests/cpp/build.py builds, and an empty cache."""
    if shutil.which("ccache") is None:
        pytest.skip("ccache is not installed")
    if reason := missing_tool():
        pytest.skip(reason)
    for name in [name for name in os.environ if name.startswith("CCACHE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CCACHE_DIR", str(tmp_path / "cache"))
    root = tmp_path / "tree"
    for name, text in SOURCES.items():
        write(root, name, text)
    for name in ("csrc/units.py", "csrc/letter.py", "tests/cpp/build.py"):
        shutil.copyfile(ROOT / name, root / name)
    return root


def built(root: Path) -> tuple[int, int, int]:
    """Builds; returns what the program returns, and how often the cache had it and had it not."""
    subprocess.run(["ccache", "--zero-stats"], check=True, capture_output=True)
    command = [sys.executable, str(root / "tests/cpp/build.py")]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    told = subprocess.run(["ccache", "--print-stats"], check=True, capture_output=True, text=True)
    counts = dict(line.split("\t") for line in told.stdout.splitlines())
    hits = int(counts["direct_cache_hit"]) + int(counts["preprocessed_cache_hit"])
    program = root / "build/cpp-debug/moe_p2p_tests"
    return subprocess.run([program], check=False).returncode, hits, int(counts["cache_miss"])


def test_second_build_comes_from_the_cache_and_one_with_a_changed_header_does_not(
    tree: Path,
) -> None:
    # Two headers, a unit of csrc, a test that uses the header, and main.cpp, which does not.
    assert built(tree) == (11, 0, 5)
    shutil.rmtree(tree / "build")
    assert built(tree) == (11, 5, 0)
    write(tree, "tests/cpp/kept.h", SOURCES["tests/cpp/kept.h"].replace("return 1", "return 2"))
    shutil.rmtree(tree / "build")
    assert built(tree) == (12, 1, 4)
