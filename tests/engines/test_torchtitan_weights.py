"""TorchTitan's own PolicyTrainer and VLLMGenerator, with ours in the place of TorchStore."""

from __future__ import annotations

import pytest

from tests.engines import scenarios
from tests.engines.torchtitan_weights_scenarios import scenario

pytestmark = [pytest.mark.engine("torchtitan"), pytest.mark.timeout(240)]


@pytest.fixture(name="results", scope="module")
def run_all(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    at = tmp_path_factory.mktemp("torchtitan_weights") / "results.json"
    return scenarios.results_of("tests.engines.torchtitan_weights_scenarios", at)


@pytest.mark.parametrize("name", scenario.named)
def test_scenario(results: dict[str, str], name: str) -> None:
    assert results[name] == ""
