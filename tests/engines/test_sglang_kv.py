"""SGLang's own KV managers, senders, receivers, bootstrap server and queues over our classes."""

from __future__ import annotations

import pytest

from tests.engines import scenarios
from tests.engines import sglang_kv_scenarios as calls
from tests.engines import sglang_queues_scenarios as queues

pytestmark = [pytest.mark.engine("sglang"), pytest.mark.timeout(400)]


MODULES = {"calls": calls, "queues": queues}
Results = dict[str, dict[str, str]]


@pytest.fixture(name="results", scope="module")
def run_all(tmp_path_factory: pytest.TempPathFactory) -> Results:
    at = tmp_path_factory.mktemp("sglang_kv")
    return {
        kind: scenarios.results_of(module.__name__, at / f"{kind}.json")
        for kind, module in MODULES.items()
    }


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, module in MODULES.items() for name in module.scenario.named],
)
def test_scenario(results: Results, kind: str, name: str) -> None:
    assert results[kind][name] == ""
