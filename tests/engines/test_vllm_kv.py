"""vLLM's own scheduler, KV cache manager and connector classes with MoeP2pConnector."""

from __future__ import annotations

import pytest

from tests.engines import vllm_kv_scenarios

pytestmark = [pytest.mark.engine("vllm"), pytest.mark.timeout(400)]
SCENARIOS = [vllm_kv_scenarios]


def test_scenario(error_text: str) -> None:
    assert error_text == ""
