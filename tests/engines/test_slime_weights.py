"""slime's own training actor and weight updater with ours in its place, and SGLang's engines."""

from __future__ import annotations

import pytest

from tests.engines import slime_weights_scenarios

pytestmark = [
    *(pytest.mark.engine(project) for project in ("slime", "megatron-core", "sglang")),
    pytest.mark.timeout(400),
]
SCENARIOS = [slime_weights_scenarios]


def test_scenario(error_text: str) -> None:
    assert error_text == ""
