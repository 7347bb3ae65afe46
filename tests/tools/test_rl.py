"""The example of RL: a generator joins, each sample's version is true, and the policy learns."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.programs import program

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(420)  # of two runs that take 15 s on two cores with nothing else


def run(steps: int) -> subprocess.CompletedProcess[str]:
    return warm.run(
        *("-m", "moe_p2p.examples.rl", "--steps", str(steps)),
        capture_output=True,
        text=True,
        timeout=200,
    )


def rewards(output: str) -> list[str]:
    return re.findall(r"^version +\d+: +\d+% right; samples: [^;]*;", output, re.MULTILINE)


def test_a_policy_learns_while_a_generator_joins() -> None:
    done = run(20)
    assert done.returncode == 0, done.stdout + done.stderr
    # Of 2,560 answers chance gives a tenth, and never a half. All seeds are fixed.
    learned = re.search(r"(\d+)% right at the end, 10% by chance", done.stdout)
    assert learned, done.stdout
    assert int(learned[1]) >= 55
    found = rewards(done.stdout)
    assert len(found) == 20
    assert "11% right; samples: 8 of 0;" in found[0]
    assert re.search(r"generator 2 joined at version \d+ in \d+ ms", done.stdout)
    assert "written into 3 generators" in done.stdout
    assert len((ROOT / "moe_p2p/examples/rl.py").read_text().splitlines()) <= 200
    again = run(4)
    assert again.returncode == 1  # it has learned nothing yet
    assert rewards(again.stdout)[:2] == found[:2], again.stdout + again.stderr


def test_ctrl_c_ends_it_without_a_traceback() -> None:
    with program("-m", "moe_p2p.examples.rl", "--steps", "2000") as running:
        running.wait_for("version   2")
        assert "Traceback (most recent" not in running.interrupt(100)


def test_fewer_versions_than_the_joiner_needs_are_refused() -> None:
    """It hung: nobody called the joiner, and nobody told it that all was over."""
    done = run(3)
    assert done.returncode == 2
    assert "argument --steps: '3' is not a whole number from 4 to" in done.stderr.splitlines()[-1]
