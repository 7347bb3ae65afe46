"""slime's own training actor and weight updater with ours in its place, and SGLang's engines."""

from __future__ import annotations

import pytest

from tests.engines import scenarios
from tests.engines.slime_weights_scenarios import scenario

pytestmark = [
    *(pytest.mark.engine(project) for project in ("slime", "megatron-core", "sglang")),
    pytest.mark.timeout(400),
]


@pytest.fixture(name="results", scope="module")
def run_all(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    at = tmp_path_factory.mktemp("slime_weights") / "results.json"
    return scenarios.results_of("tests.engines.slime_weights_scenarios", at)


@pytest.mark.parametrize("name", scenario.named)
def test_scenario(results: dict[str, str], name: str) -> None:
    assert results[name] == ""
