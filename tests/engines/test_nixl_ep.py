"""NIXL EP's own files: its elastic test driver with its plans over moe_p2p.nixl_ep, on CPU ranks,
and the parameters of its buffer.py."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from moe_p2p import nixl_ep
from tests.engines import nixl_ep_driver as driver
from tests.engines import packages
from tests.nixl_ep.test_nixl_ep_signatures import SIGNATURES, signatures_of
from tests.support.ranks import DiedError, run_processes

pytestmark = [pytest.mark.engine("nixl"), pytest.mark.timeout(400)]

# How many processes begin, and how many come after ranks were released.
PLANS = {
    "no_expansion": (4, 0),
    "single_rank": (1, 0),
    "single_expansion": (8, 0),
    "double_expansion": (8, 0),
    "expansion_contraction": (8, 2),
    "expansion_fault_contraction": (4, 0),
    "single_expansion_16_ranks": (16, 0),
}


@pytest.mark.parametrize("name", PLANS)
def test_its_driver_finds_nothing_wrong(name: str, tmp_path: Path) -> None:
    at = driver.copied(tmp_path)
    begins, later = PLANS[name]
    arguments = {
        "plan": str(at / f"{name}.json"),
        "num_tokens": 16,
        "num_experts_per_rank": 2,
        "hidden_dim": 1024,
        "num_topk": 2,
        "tcp_server": "127.0.0.1",
        "kineto": False,
        "disable_ll_nvlink": False,
        "timeout_ms": 60_000,
        "validate_phase_failures": True,
    }
    with driver.rank_server(at) as port:
        results = run_processes(
            begins + later,
            driver.work,
            *(str(at), port, begins, arguments),
            return_errors=True,
            deadline_s=380,
        )
    phases = json.loads((at / f"{name}.json").read_text())
    killed = sum(rank < 0 for phase in phases for rank in phase)
    ended = [result for result in results if isinstance(result, DiedError)]
    wrong = [result for result in results if result not in ("done", *ended)]
    assert not wrong, [getattr(each, "__dict__", {}).get("traceback", each) for each in wrong]
    assert len(ended) == killed, results


def test_all_its_plans_are_here() -> None:
    found = {path.stem for path in (packages.where("nixl") / "tests" / "elastic").glob("*.json")}
    assert found == set(PLANS)


def test_the_table_of_parameters_is_that_of_its_files() -> None:
    """tests/nixl_ep/test_nixl_ep_signatures.py compares the table with ours."""
    folder = packages.where("nixl") / "nixl_ep"
    assert signatures_of(folder) == SIGNATURES
    names = {
        element.value
        for node in ast.parse((folder / "__init__.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for element in getattr(node.value, "elts", [])
    }
    assert names
    assert {name for name in names if not hasattr(nixl_ep, name)} == set()
