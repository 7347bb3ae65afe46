"""moe_p2p.nixl_ep while ranks come, leave, are killed and replaced, as NIXL's plans have it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.nixl_ep_cases import Phase, Process, run_plan
from tests.support.ranks import DiedError, run_processes

NICS = {"disable_ll_nvlink": True}
PLANS: dict[str, tuple[list[Phase], list[Process]]] = {
    "one rank": ([Phase((0,))], [Process(0)]),
    "nobody comes": ([Phase((0, 1, 2))], [Process(0), Process(1), Process(2)]),
    "two expansions": (
        [Phase((0, 1)), Phase((0, 1, 2)), Phase((0, 1, 2, 3))],
        [Process(0), Process(1), Process(2, 1), Process(3, 2)],
    ),
    "expansion, fault, contraction": (
        [Phase((0, 1)), Phase((0, 1, 2, 3)), Phase((0, 1, 3), (2,)), Phase((0, 3))],
        [Process(0), Process(1), Process(2, 1), Process(3, 1)],
    ),
    "fault and expansion": (
        [
            Phase((0, 1, 2)),
            Phase((0, 2), (1,)),
            Phase((0, 1, 2, 3)),
            Phase((0, 1, 3), (2,)),
            Phase((0, 1, 2, 3)),
        ],
        [Process(0), Process(1), Process(2), Process(1, 2), Process(3, 2), Process(2, 4)],
    ),
}


def ends(name: str) -> list[str]:
    """How each process of a plan ends."""
    plan, processes = PLANS[name]

    def end(process: Process) -> str:
        for phase in plan[process.first :]:
            if process.rank in phase.killed:
                return "killed"
            if process.rank not in phase.active:
                return "left"
        return "done"

    return [end(process) for process in processes]


def cells() -> Iterator[Any]:
    kept = ("fault and expansion", {}), ("expansion, fault, contraction", NICS)
    for name in PLANS:
        for options, how in (({}, "memory"), (NICS, "NICs")):
            marks = [] if (name, options) in kept else [pytest.mark.more]
            yield pytest.param(name, options, marks=marks, id=f"{name}, {how}")


@pytest.mark.parametrize(("name", "options"), list(cells()))
def test_each_phase_is_that_of_its_ranks(name: str, options: dict[str, Any]) -> None:
    plan, processes = PLANS[name]
    results = run_processes(len(processes), run_plan, plan, processes, options, return_errors=True)
    found = ["killed" if isinstance(result, DiedError) else result for result in results]
    assert found == ends(name), results
