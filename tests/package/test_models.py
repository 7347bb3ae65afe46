"""The model of worlds that change (docs/elastic.md), by spin: no schedule breaks a promise.

Each broken rule does.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).resolve().parents[1] / "models" / "elastic.pml"
DEADLINE_S = 900
SLOTS = {"N1": 2, "N2": 1}  # steps of an epoch: both step slots are used
# BROKEN of the model, and its rule.
BROKEN = {1: "E1", 2: "E1", 3: "E2", 4: "E3", 5: "E4", 6: "E5", 7: "E6", 8: "E7", 9: "E8"}
BROKEN |= {10: "E9", 11: "R1"}


def explore(folder: Path, **defines: int) -> tuple[int, int]:
    """Returns how many errors spin found, and how many states it stored."""
    for tool in ("spin", "gcc"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (apt-get install {tool})")
    given = [f"-D{name}={value}" for name, value in defines.items()]
    for command in (
        ["spin", *given, "-a", str(MODEL)],
        ["gcc", "-O2", "-w", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=8000", "-o", "pan", "pan.c"],
    ):
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=DEADLINE_S)
    ran = subprocess.run(
        ["./pan", "-m500000"],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    errors = re.search(r"errors: (\d+)", ran.stdout)
    states = re.search(r"(\d+) states, stored", ran.stdout)
    assert errors is not None
    assert states is not None, ran.stdout
    assert "max search depth too small" not in ran.stdout
    return int(errors[1]), int(states[1])


@pytest.mark.more
@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.parametrize(
    "defines",
    [{"VICTIM": 0, **SLOTS}, {"VICTIM": 2, **SLOTS}, {"VICTIM": 2, "N1": 1, "N2": 1, "REFUSES": 1}],
    ids=["first", "last", "refused"],
)
def test_no_schedule_breaks_a_promise(
    defines: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    errors, states = explore(tmp_path, **defines)
    with capsys.disabled():
        print(f"\nelastic.pml, {defines}: {states} states, {errors} errors")
    assert errors == 0


@pytest.mark.more
@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.parametrize("broken", BROKEN, ids=lambda each: f"{BROKEN[each]}-{each}")
def test_a_broken_rule_has_a_counterexample(broken: int, tmp_path: Path) -> None:
    defines = {"N1": 3, "N2": 1} if BROKEN[broken] == "R1" else SLOTS
    assert explore(tmp_path, BROKEN=broken, **defines)[0] == 1
