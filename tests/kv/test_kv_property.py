"""Every plan moves the bytes that the oracle says: any layout to any other, drawn.

200 cases, the same ones each time, most of them with packed rows. More, and others each time:

    MOE_P2P_KV_CASES=2000 python -m pytest tests/kv/test_kv_property.py --timeout 1200
"""

from __future__ import annotations

import os

import pytest

pytest.importorskip("hypothesis", reason="hypothesis is missing: pip install hypothesis")

from hypothesis import HealthCheck, given, settings

from tests.support.kv_strategies import transfers
from tests.support.kv_transfer import Transfer, run

CASES = os.environ.get("MOE_P2P_KV_CASES")


@settings(
    max_examples=int(CASES or 200),
    derandomize=CASES is None,
    deadline=None,  # other tests take the CPU
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(transfers())
def test_bytes_equal_the_oracle(transfer: Transfer) -> None:
    run(transfer)
