"""Code of README and docs: blocks that begin with `python run`, `python torchrun`, with a number of
processes where it is not 2, or `sh run`."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.support.installation import copy_installed

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120
BLOCK = re.compile(
    r"^```(python run|python torchrun(?: \d)?|sh run)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
FOUND = [(found[1], found[2]) for page in PAGES for found in BLOCK.finditer(page.read_text())]
BLOCKS = list(dict.fromkeys(FOUND))  # what stands on two pages runs once


def torchrun(processes: str) -> list[str]:
    options = ("--standalone", "--nproc-per-node", processes)
    return ["-m", "torch.distributed.run", *options, "readme.py"]


COMMANDS = {
    "python run": ["readme.py"],
    "python torchrun": torchrun("2"),
    "python torchrun 3": torchrun("3"),
}
# Sizes in docs are real ones: room for all tokens at each expert is 3.7 GiB with README's, and a
# snippet that touches it is slow, or ends with its memory.
TOUCHES_LITTLE = """
import resource

assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 1 << 20, "KiB"
"""


def first_line(block: tuple[str, str]) -> str:
    return re.sub(r"\W+", "-", block[1].splitlines()[0]).strip("-")[:40]


def test_readme_has_code_that_runs() -> None:
    assert {kind for kind, _ in BLOCKS} == {*COMMANDS, "sh run"}


@pytest.mark.timeout(DEADLINE_S + 30)
@pytest.mark.parametrize(("kind", "code"), BLOCKS, ids=map(first_line, BLOCKS))
def test_block(kind: str, code: str, installed: Path, tmp_path: Path) -> None:
    """Where a user is: in another folder, with the wheel and torch and nothing else."""
    ends = TOUCHES_LITTLE if kind.startswith("python torchrun") else ""
    (tmp_path / "readme.py").write_text(code + ends)
    if kind in COMMANDS:
        arguments = COMMANDS[kind]
    else:  # one command, without what a shell would expand
        python, *arguments = shlex.split(code)
        assert (python, len(code.splitlines())) == ("python", 1)
    run = copy_installed(installed, *arguments, cwd=tmp_path, timeout_s=DEADLINE_S)
    assert run.returncode == 0, f"{code}\n{run.stdout[-4000:]}\n{run.stderr[-4000:]}"
