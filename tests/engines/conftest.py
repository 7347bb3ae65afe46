"""A test of each scenario in the modules that a test file lists in SCENARIOS."""

from __future__ import annotations

import pytest

from tests.engines import scenarios


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "error_text" in metafunc.fixturenames:
        named = [(m.__name__, name) for m in metafunc.module.SCENARIOS for name in m.scenario.named]
        metafunc.parametrize("error_text", named, indirect=True, ids=[name for _, name in named])


@pytest.fixture(name="error_texts", scope="module")
def run_all(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, str]]:
    at = tmp_path_factory.mktemp("scenarios")
    return {
        module.__name__: scenarios.results_of(module.__name__, at / f"{number}.json")
        for number, module in enumerate(request.module.SCENARIOS)
    }


@pytest.fixture(name="error_text")
def of_one(request: pytest.FixtureRequest, error_texts: dict[str, dict[str, str]]) -> str:
    """Of a scenario: empty where it passed."""
    module, name = request.param
    return error_texts[module][name]
