"""Every plan moves the bytes that the oracle says: any layout to any other, drawn.

300 cases, the same ones each time. More, and others each time:

    MOE_P2P_WEIGHTS_CASES=3000 python -m pytest tests/weights --timeout 1200
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("hypothesis", reason="hypothesis is missing: pip install hypothesis")

from hypothesis import given

from moe_p2p.weights import WeightLayout, WeightPlan, weight_plan
from tests.support.drawn import drawn
from tests.support.weights_oracle import as_received, check
from tests.support.weights_strategies import updates


@drawn("MOE_P2P_WEIGHTS_CASES", 300)
@given(updates())
def test_bytes_equal_the_oracle(sides: tuple[WeightLayout, WeightLayout]) -> None:
    plan = weight_plan(*sides)
    assert WeightPlan.from_bytes(plan.to_bytes()) == plan
    torch.manual_seed(len(plan.to_bytes()))
    values = {
        each.name: (torch.randn(each.elements) * 50).to(getattr(torch, each.dtype))
        for each in plan.source.params
    }
    check(as_received(plan), values)
