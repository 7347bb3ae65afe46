"""TorchTitan's own PolicyTrainer and VLLMGenerator, with ours in the place of TorchStore."""

from __future__ import annotations

import pytest

from tests.engines import torchtitan_weights_scenarios

pytestmark = [pytest.mark.engine("torchtitan"), pytest.mark.timeout(240)]
SCENARIOS = [torchtitan_weights_scenarios]


def test_scenario(error_text: str) -> None:
    assert error_text == ""
