"""vLLM's own factories, worker sessions and EngineCore with our weight-transfer backend."""

from __future__ import annotations

import pytest

from tests.engines import vllm_weights_scenarios

pytestmark = [pytest.mark.engine("vllm"), pytest.mark.timeout(400)]
SCENARIOS = [vllm_weights_scenarios]


def test_scenario(error_text: str) -> None:
    assert error_text == ""
