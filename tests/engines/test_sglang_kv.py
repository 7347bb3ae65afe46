"""SGLang's own KV managers, senders, receivers, bootstrap server and queues over our classes."""

from __future__ import annotations

import pytest

from tests.engines import sglang_kv_scenarios, sglang_queues_scenarios

pytestmark = [pytest.mark.engine("sglang"), pytest.mark.timeout(400)]
SCENARIOS = [sglang_kv_scenarios, sglang_queues_scenarios]


def test_scenario(error_text: str) -> None:
    assert error_text == ""
