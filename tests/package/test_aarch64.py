"""All of csrc compiles for hosts of GB200, which are Arm: Debian's compiler checks it.

Each file by itself, so that an include that is missing is found. torch's headers serve both; no
program is linked. test_jit.py compiles the kernels for every GPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.lint import torch_include

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "csrc").rglob("*.cpp"))
COMPILER = "aarch64-linux-gnu-g++"
FLAGS = ["-std=c++20", "-O1", "-fsyntax-only", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
FLAGS += [
    "-DMOE_P2P_LETTER=1",
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
    "-I.",
    "-Icsrc",
]


def problems_of(source: Path) -> str:
    command = [COMPILER, *FLAGS, *torch_include(), str(source)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stderr


def compile_all(sources: list[Path]) -> None:
    if shutil.which(COMPILER) is None:
        pytest.skip(f"{COMPILER} is not installed (apt-get install g++-aarch64-linux-gnu)")
    assert sources
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        problems = [text for text in pool.map(problems_of, sources) if text]
    assert not problems, "\n".join(problems)[:20_000]


def test_files_that_know_architectures_compile_for_aarch64() -> None:
    compile_all([source for source in SOURCES if "__aarch64__" in source.read_text()])


@pytest.mark.more
@pytest.mark.timeout(600)
def test_everything_compiles_for_aarch64() -> None:
    compile_all(SOURCES)
