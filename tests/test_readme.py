"""README code runs: blocks whose fence says `python run` or `sh run` are executed as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 120
BLOCK = re.compile(r"^```(python|sh) run\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [(found[1], found[2]) for found in BLOCK.finditer((ROOT / "README.md").read_text())]


def first_line(block: tuple[str, str]) -> str:
    return re.sub(r"\W+", "-", block[1].splitlines()[0]).strip("-")[:40]


def test_readme_has_code_that_runs() -> None:
    assert {language for language, _ in BLOCKS} == {"python", "sh"}


@pytest.mark.timeout(DEADLINE_S + 30)
@pytest.mark.parametrize(("language", "code"), BLOCKS, ids=map(first_line, BLOCKS))
def test_block(language: str, code: str, tmp_path: Path) -> None:
    if language == "python":
        program = tmp_path / "readme.py"
        program.write_text(code)
        command = [sys.executable, str(program)]
    else:
        command = ["bash", "-euc", code]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        # `python` and `torchrun` in the README are the ones that run this test.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }
    run = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert run.returncode == 0, f"{code}\n{run.stdout[-4000:]}\n{run.stderr[-4000:]}"
