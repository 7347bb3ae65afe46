"""SGLang's own session, loader, pause and continue with our weight updates."""

from __future__ import annotations

import pytest

from tests.engines import sglang_weights_scenarios

pytestmark = [pytest.mark.engine("sglang"), pytest.mark.timeout(400)]
SCENARIOS = [sglang_weights_scenarios]


def test_scenario(error_text: str) -> None:
    assert error_text == ""
