"""Each run of the matrix of faults (matrix.py), and that the matrix is whole and says the truth.

Runs go on side by side, as their processes wait for deadlines, leases and links most of the time:
the first test starts the runs of those behind it too, and each waits for its own. A file's tests
are one worker's (tests/progress.py).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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
# How many runs at once, of those that wait and of others: what a deadline decides must not be
# decided by how many processes share a core. A run that waits uses a fifth of one, others most.
AT_ONCE = {True: 6, False: 2}


def parameters(kind: type[Case]) -> list[object]:
    return [
        pytest.param(case, id=str(case), marks=() if case in SOON else pytest.mark.more)
        for case in HERE
        if isinstance(case, kind)
    ]


@functools.cache
def why_no_tcp() -> str:
    return hosts.why_no_tcp()


def why_not(case: Case) -> str:
    """Why it cannot run here; empty where it can."""
    if case.over != "tcp" or (not case.needs_links and "netns" in why_no_tcp()):
        return ""
    return why_no_tcp()


def run(case: Case) -> list[Any]:
    """What its processes report."""
    if isinstance(case, calls.Case):
        links, count, body = calls.WORLD, calls.WORLD, calls.run_rank
    elif isinstance(case, joins.Case):
        links, count, body = case.num_processes, case.num_processes, joins.run_process
    elif (case.fault, case.point) == ("kill", "KV push"):
        return transfers.killed_senders(case.over)
    else:
        links, count, body = 1, 1, transfers.run_case
    interfaces = 1 + isinstance(case, joins.Case)
    with hosts.Hosts(links if case.needs_links else 0, num_interfaces=interfaces) as made:
        places = [made.place(host) for host in range(len(made.names))]
        errors = not isinstance(case, transfers.Case)
        return run_processes(count, body, case, places, return_errors=errors)


Runs = Callable[[Case], list[Any]]


@pytest.fixture(name="reports", scope="module")
def runs_side_by_side(request: pytest.FixtureRequest) -> Iterator[Runs]:
    """Returns what the processes of a case have reported, once they have ended."""
    pools = {waits: ThreadPoolExecutor(count) for waits, count in AT_ONCE.items()}

    @functools.cache
    def begun(case: Case) -> Future[list[Any]]:
        return pools[case.waits].submit(run, case)

    def reports(case: Case) -> list[Any]:
        if why := why_not(case):
            pytest.skip(why)
        return begun(case).result()

    apart = request.config.getoption("--apart")  # other workers have the tests behind this one
    for case in () if apart else cases_of(request.session.items):
        if not why_not(case):
            begun(case)
    try:
        yield reports
    finally:
        for pool in pools.values():
            pool.shutdown(cancel_futures=True)


def cases_of(items: list[pytest.Item]) -> list[Case]:
    """In the order of their tests, each of which then waits for nothing but its own."""
    given = (item.callspec.params for item in items if hasattr(item, "callspec"))
    found = (each.get("case") for each in given)
    return [case for case in found if isinstance(case, Case) and case in HERE]


@pytest.mark.parametrize("case", parameters(calls.Case))
def test_calls(case: calls.Case, reports: Runs) -> None:
    assert not calls.wrong_in(case, OUTCOMES[case], reports(case))


def on_gpus(kind: type[Case]) -> list[object]:
    found = [case for case in OUTCOMES if case.over == "gpu" and isinstance(case, kind)]
    return [pytest.param(case, id=str(case)) for case in found]


@pytest.mark.gpu
@pytest.mark.multi_gpu
@pytest.mark.parametrize("case", on_gpus(calls.Case))
def test_calls_on_gpus(case: calls.Case) -> None:
    assert not calls.wrong_in(case, OUTCOMES[case], run(case))


@pytest.mark.gpu
@pytest.mark.parametrize("case", on_gpus(joins.Case))
def test_joins_on_gpus(case: joins.Case) -> None:
    assert not joins.wrong_in(case, OUTCOMES[case], run(case))


@pytest.mark.parametrize("case", parameters(transfers.Case))
def test_transfers(case: transfers.Case, reports: Runs) -> None:
    found = reports(case)
    if (case.fault, case.point) == ("kill", "KV push"):
        assert len(found) == 2
        return
    (texts,) = found
    if OUTCOMES[case] == UNHARMED:
        assert not any(texts), texts
    elif case.fault == "NIC error":
        assert any(texts), "nothing failed"
        assert case.over == "tcp" or not texts[-1], "the next one was not right"


@pytest.mark.gpu
@pytest.mark.parametrize("case", on_gpus(transfers.Case))
def test_transfers_on_gpus(case: transfers.Case) -> None:
    run(case)  # which asserts


@pytest.mark.parametrize("case", parameters(joins.Case))
def test_joins(case: joins.Case, reports: Runs) -> None:
    assert not joins.wrong_in(case, OUTCOMES[case], reports(case))


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


def test_runs_begin_in_the_order_of_their_tests(request: pytest.FixtureRequest) -> None:
    """Those chosen, of this file, and none of GPUs: a test waits for its own run alone."""
    items = [item for item in request.session.items if item.path == request.path]
    names = [str(case) for case in cases_of(items)]
    here = {str(case) for case in HERE}
    ids = [item.name.partition("[")[2].rstrip("]") for item in items]
    assert names == [each for each in ids if each in here]


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
