"""A rank killed at each stage of an update, begun anew, replaced: some of the runs, or all
(weights_killed.py, weights_replaced.py). One that is stopped, and goes on (weights_stopped.py)."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.support import cells, warm
from tests.support.weights_killed import Run, chosen, faults, runs
from tests.support.weights_replaced import KINDS


def output_of(module: str, **environment: str) -> str:
    done = warm.run(
        *("-m", f"tests.support.{module}"), env=os.environ | environment, cwd=warm.ROOT,
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", cells.few(["few", "rest"], keep=["few"]))
def test_what_is_left_tells_the_truth(kills: str) -> None:
    """Together a fifth of the runs."""
    assert " 0 wrong" in output_of("weights_killed", MOE_P2P_WEIGHTS_KILLS=kills)


def test_an_engine_rank_that_is_stopped_is_left_out_and_comes_back() -> None:
    """Also while trainers wait for their writes to it."""
    assert "it came back" in output_of("weights_stopped")


def test_few_of_a_fifth_have_all_stages_and_both_modes_and_sides() -> None:
    few = chosen("few")
    for kind in ("alone", "replicas"):
        assert {(each.mode, each.side) for each in few if each.kind == kind} == {
            (mode, side) for mode in ("shadow", "in_place") for side in ("trainer", "generator")
        }
    for kind in KINDS:
        assert {each.side for each in few if each.kind == kind} == {"trainer", "generator"}
    stages = {(each.side, each.stage) for each in runs() if each.kind not in ("joining", *KINDS)}
    assert stages <= {(each.side, each.stage) for each in few}
    assert any(each.kind == "joining" for each in few)
    assert sorted(few + chosen("rest")) == sorted(chosen(""))
    assert len(few) < 36 < len(chosen("")) == len(chosen("all")) // 5 + 1


def test_lies_are_found() -> None:
    run = Run("shadow", "trainer", 2, "begin")
    told = {"error": "no word from trainer 2", "seconds": 1.0}
    state = {"version": 1, "holds": [1], "dirty": False, "refused": False}
    truth = {f"trainer {i}": told for i in (0, 1, 3)}
    truth |= {f"generator {i}": {**told, **state} for i in range(2)}
    assert faults(run, truth) == []
    changes: list[dict[str, Any]] = [
        {"version": 2}, {"holds": []}, {"dirty": True}, {"error": ""},
        {"error": "no word from trainer 1"}, {"seconds": 20.0},
    ]  # fmt: skip
    for change in changes:
        assert faults(run, {**truth, "generator 1": {**truth["generator 1"], **change}})
    assert faults(run, {**truth, "trainer 2": told})
    assert faults(run, {name: truth[name] for name in truth if name != "trainer 3"})
