"""The example of RL: an engine rank joins, each sample's version is true, and the policy learns."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from moe_p2p.examples import rl
from moe_p2p.tools import launch
from tests.support import warm
from tests.support.programs import children, program

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(420)  # of two runs that take 10 s on two cores with nothing else


@pytest.fixture(name="output", scope="module")
def output_of_a_run() -> str:
    done = run(20)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run(steps: int) -> subprocess.CompletedProcess[str]:
    return warm.run(
        *("-m", "moe_p2p.examples.rl", "--steps", str(steps)),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )


def rewards(output: str) -> list[str]:
    return re.findall(r"^version +\d+: +\d+% right; samples: [^;]*;", output, re.MULTILINE)


def test_a_policy_learns_while_an_engine_rank_joins(output: str) -> None:
    # Of 2,560 answers chance gives a tenth, and never a half. All seeds are fixed.
    learned = re.search(r"(\d+)% right at the end, 10% by chance", output)
    assert learned, output
    assert int(learned[1]) >= 55
    found = rewards(output)
    assert len(found) == 20
    assert "11% right; samples: 8 of 0;" in found[0]
    assert re.search(r"generator 2 joined at version \d+ in \d+ ms", output)
    assert "written into 3 generators" in output
    assert len((ROOT / "moe_p2p/examples/rl.py").read_text().splitlines()) <= 200


def test_runs_are_alike_and_ctrl_c_ends_one_without_a_traceback(output: str) -> None:
    with program("-m", "moe_p2p.examples.rl", "--steps", "2000") as running:
        seen = running.wait_for("version   2")
        assert rewards(seen) == rewards(output)[:2]
        # One process has imported torch for all ranks.
        servers = [Path(f"/proc/{child}/maps") for child in children(running.process.pid)]
        assert any("libtorch" in each.read_text() for each in servers)
        assert "Traceback (most recent" not in running.interrupt(100)


@pytest.mark.more  # the tests before and behind this one see both halves, each in another run
def test_a_short_run_begins_alike_and_need_not_have_learned(output: str) -> None:
    again = run(4)
    assert again.returncode == 0, again.stdout + again.stderr
    learned = re.search(r"(\d+)% right at the end", again.stdout)
    assert learned, again.stdout
    assert int(learned[1]) < 50  # which of 20 steps would be status 1
    assert rewards(again.stdout)[:2] == rewards(output)[:2], again.stdout + again.stderr


@pytest.mark.parametrize(("right", "status"), [(0.49, 1), (0.51, 0)])
def test_the_status_says_whether_it_has_learned(
    right: float, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = [right, right, Counter(), Counter(), Counter()]
    monkeypatch.setattr(launch, "run_ranks", lambda *_, **__: results)
    monkeypatch.setattr(sys, "argv", ["rl"])
    assert rl.main() == status


def test_fewer_versions_than_the_joiner_needs_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It hung: nobody called the joiner, and nobody told it that all was over."""
    monkeypatch.setattr(sys, "argv", ["rl", "--steps", "3"])
    with pytest.raises(SystemExit) as ended:
        rl.main()
    assert ended.value.code == 2
    reported = capsys.readouterr().err.splitlines()[-1]
    assert "argument --steps: '3' is not a whole number from 4 to" in reported


@pytest.mark.more  # as the test before, as a program
def test_a_program_of_fewer_versions_ends_in_one_line() -> None:
    done = run(3)
    assert done.returncode == 2
    assert "argument --steps: '3' is not a whole number from 4 to" in done.stderr.splitlines()[-1]
