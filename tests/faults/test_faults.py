"""Each run of the matrix of faults (matrix.py), and that the matrix is whole and says the truth."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.faults import calls, joins, transfers
from tests.faults.matrix import (
    CELLS,
    FAULTS,
    JOIN,
    LOCAL,
    POINTS,
    UNHARMED,
    Case,
    Elsewhere,
    Never,
    Pair,
    Run,
    cases,
    few,
    keys,
)
from tests.support import hosts
from tests.support.ranks import DiedError, run_processes

ROOT = Path(__file__).resolve().parents[2]
OUTCOMES = cases()
HERE = [case for case in OUTCOMES if case.over in LOCAL]
SOON = few(HERE)


def parameters(kind: type[Case]) -> list[object]:
    return [
        pytest.param(case, id=str(case), marks=() if case in SOON else pytest.mark.more)
        for case in HERE
        if isinstance(case, kind)
    ]


def need(case: Case) -> None:
    if case.over == "tcp":
        why = hosts.why_no_tcp()
        if why and (case.needs_links or "netns" not in why):
            pytest.skip(why)


@pytest.mark.parametrize("case", parameters(calls.Case))
def test_calls(case: calls.Case) -> None:
    need(case)
    with hosts.Hosts(calls.WORLD if case.needs_links else 0) as made:
        places = [made.place(host) for host in range(len(made.names))]
        results = run_processes(calls.WORLD, calls.run_rank, case, places, return_errors=True)
    assert not calls.wrong_in(case, OUTCOMES[case], results)


@pytest.mark.gpu
@pytest.mark.multi_gpu
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case)) for case in OUTCOMES if case.over == "gpu"]
)
def test_calls_on_gpus(case: calls.Case) -> None:
    results = run_processes(calls.WORLD, calls.run_rank, case, [], return_errors=True)
    assert not calls.wrong_in(case, OUTCOMES[case], results)


@pytest.mark.parametrize("case", parameters(transfers.Case))
def test_transfers(case: transfers.Case) -> None:
    need(case)
    if (case.fault, case.point) == ("kill", "KV push"):
        assert len(transfers.killed_senders(case.over)) == 2
        return
    with hosts.Hosts(1 if case.needs_links else 0) as made:
        places = [made.place(host) for host in range(len(made.names))]
        (texts,) = run_processes(1, transfers.run_case, case, places)
    if OUTCOMES[case] == UNHARMED:
        assert not any(texts), texts
    elif case.fault == "NIC error":
        assert any(texts), "nothing failed"
        assert case.over == "tcp" or not texts[-1], "the next one was not right"


@pytest.mark.parametrize("case", parameters(joins.Case))
def test_joins(case: joins.Case) -> None:
    need(case)
    with hosts.Hosts(case.num_processes if case.needs_links else 0, num_interfaces=2) as made:
        places = [made.place(host) for host in range(len(made.names))]
        results = run_processes(
            case.num_processes, joins.run_process, case, places, return_errors=True
        )
    assert not joins.wrong_in(case, OUTCOMES[case], results)


# --- the table -----------------------------------------------------------------------------------


def test_the_table_is_the_whole_product() -> None:
    assert len(FAULTS) == 8
    assert len(JOIN) == 10
    assert len(POINTS) == 17
    assert len(CELLS) == len(set(keys())) == 3 * 8 * 17 + 2 * 17


def test_every_outcome_is_a_row_of_the_docs() -> None:
    text = (ROOT / "docs/failure.md").read_text()
    section = text.partition("\n## Outcomes\n")[2].partition("\n## ")[0]
    rows = set(re.findall(r"^\| \*(.+?)\* \|", section, re.MULTILINE))
    used = set[str]().union(
        *(cell.outcomes for cell in CELLS.values() if isinstance(cell, Run | Elsewhere))
    )
    assert used == rows


@pytest.mark.parametrize(
    "name",
    sorted(
        {
            test
            for cell in CELLS.values()
            if isinstance(cell, Run | Elsewhere)
            for test in cell.tests
        }
    ),
)
def test_what_a_cell_names_is_there(name: str) -> None:
    path, _, test = name.partition("::")
    source = (ROOT / path).read_text()
    if path.startswith("tests/cpp/"):
        assert f'"{test}"' in source
        return
    assert f"def {test.partition('[')[0]}(" in source


def test_what_is_left_to_pairs_is_run_in_both_ways() -> None:
    ran = {key for key, cell in CELLS.items() if isinstance(cell, Run | Elsewhere)}
    for (fault, point, over), cell in CELLS.items():
        if isinstance(cell, Pair):
            assert any(key[0] == fault and key[2] == over for key in ran), (fault, point)
            others = [CELLS[fault, point, each] for each in LOCAL]
            assert any(not isinstance(other, Never) for other in others), (fault, point)


def test_few_have_every_fault_and_point_over_each_transport() -> None:
    for over in LOCAL:
        assert {case.fault for case in SOON if case.over == over} == {
            case.fault for case in HERE if case.over == over
        }
        assert {case.point for case in SOON if case.over == over} == {
            case.point for case in HERE if case.over == over
        }
    assert len(SOON) < len(HERE) / 3


def test_wrong_reports_are_seen() -> None:
    """What the runs are judged by sees a silent loss, an error without a name, and a late one."""
    killed = DiedError("killed")
    case = calls.Case("kill", "dispatch_send", "tcp")
    text = "PeerDeadError: rank 1 is gone"
    right: dict[str, Any] = {"steps": 3, "seconds": 1.0, "masks": [], "error": text}
    right["happened"] = True
    assert not calls.wrong_in(case, "named", [right, killed, right])
    changes: tuple[dict[str, Any], ...]
    changes = ({"error": ""}, {"error": "lost"}, {"seconds": 50.0}, {"happened": False})
    for change in changes:
        changed = {**right, **change}
        assert calls.wrong_in(case, "named", [changed, killed, right])
    assert calls.wrong_in(case, "named", [right, right, right])
    assert calls.wrong_in(case, "named", [right, killed, killed])
    masks = case._replace(masks=True)
    right |= {"steps": calls.STEPS, "masks": [1], "error": ""}
    assert not calls.wrong_in(masks, "masked", [right, killed, right])
    changes = ({"masks": []}, {"masks": [0, 1]}, {"steps": 5}, {"error": "rank 1"})
    for change in changes:
        changed = {**right, **change}
        assert calls.wrong_in(masks, "masked", [changed, killed, right])


def test_wrong_reports_of_joins_are_seen() -> None:
    killed, text = DiedError("killed"), "PeerDeadError: the process of rank 3 has ended"
    case = joins.Case("kill", joins.MAKES, "tcp", "joiner")
    right: dict[str, Any] = {"steps": 9, "noes": [text], "masked": [], "seconds": 1.0}
    right |= {"happened": True, "left": [], "error": ""}
    spare = {**right, "noes": []}
    whole = [right, right, right, killed, spare]
    assert not joins.wrong_in(case, "tried again", whole)
    changes: tuple[dict[str, Any], ...] = (
        *({"noes": []}, {"noes": [text, text]}, {"noes": ["somebody has ended"]}, {"masked": [2]}),
        *({"left": [3]}, {"seconds": 50.0}, {"happened": False}, {"error": "rank 3"}),
    )
    for change in changes:
        assert joins.wrong_in(case, "tried again", [{**right, **change}, *whole[1:]]), change
    assert joins.wrong_in(case, "tried again", [*whole[:3], right, spare]), "it was not killed"
    assert joins.wrong_in(case, "tried again", [*whole[:4], killed]), "the spare was"
    case = case._replace(point=joins.STAGED)
    masked = {**spare, "masked": [3]}
    assert not joins.wrong_in(case, "masked", [masked, masked, masked, killed, spare])
    assert joins.wrong_in(case, "masked", [spare, spare, spare, killed, spare])
    assert joins.wrong_in(case, "masked", [*[{**masked, "noes": [text]}] * 3, killed, spare])
    case = case._replace(fault="slow")
    assert not joins.wrong_in(case, "unharmed", [spare] * 4)
    assert joins.wrong_in(case, "unharmed", [spare, masked, spare, spare])
