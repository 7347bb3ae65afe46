"""vLLM's own scheduler, KV cache manager and connector classes with MoeP2pConnector."""

from __future__ import annotations

import pytest

from tests.engines import scenarios
from tests.engines.vllm_kv_scenarios import scenario

pytestmark = [pytest.mark.engine("vllm"), pytest.mark.timeout(400)]


@pytest.fixture(name="results", scope="module")
def run_all(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    at = tmp_path_factory.mktemp("vllm_kv") / "results.json"
    return scenarios.results_of("tests.engines.vllm_kv_scenarios", at)


@pytest.mark.parametrize("name", scenario.named)
def test_scenario(results: dict[str, str], name: str) -> None:
    assert results[name] == ""
