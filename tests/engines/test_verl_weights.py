"""verl's own registry and CheckpointEngineManager with our checkpoint engine."""

from __future__ import annotations

import pytest

from tests.engines import verl_weights_scenarios

pytestmark = [pytest.mark.engine("verl"), pytest.mark.timeout(400)]
SCENARIOS = [verl_weights_scenarios]


def test_scenario(error_text: str) -> None:
    assert error_text == ""
