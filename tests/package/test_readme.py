"""Code of README and docs: blocks that begin with `python run`, `python torchrun`, with a number of
processes where it is not 2, or `sh run`. A `text` block right behind one is all that it prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.support.installation import copy_installed

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120
BLOCK = re.compile(
    r"^```(python run|python torchrun(?: \d)?|sh run)\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
FOUND = [found.groups() for page in PAGES for found in BLOCK.finditer(page.read_text())]
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


def name_of(block: tuple[str | None, ...]) -> str:
    """Its first line, or of what it prints."""
    _, code, printed = block
    return re.sub(r"\W+", "-", (printed or code or "").splitlines()[0]).strip("-")[:40]


def test_readme_has_code_that_runs() -> None:
    assert {kind for kind, *_ in BLOCKS} == {*COMMANDS, "sh run"}


@pytest.mark.timeout(DEADLINE_S + 30)
@pytest.mark.parametrize(("kind", "code", "printed"), BLOCKS, ids=map(name_of, BLOCKS))
def test_block(kind: str, code: str, printed: str | None, installed: Path, tmp_path: Path) -> None:
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
    assert printed is None or run.stdout == printed
