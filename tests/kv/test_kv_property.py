"""Every plan moves the bytes that the oracle says: any layout to any other, drawn.

200 cases, the same ones each time, most of them with packed rows. More, and others each time:

    MOE_P2P_KV_CASES=2000 python -m pytest tests/kv/test_kv_property.py --timeout 1200
"""

from __future__ import annotations

import pytest

pytest.importorskip("hypothesis", reason="hypothesis is missing: pip install hypothesis")

from hypothesis import given

from tests.support.drawn import drawn
from tests.support.kv_strategies import transfers
from tests.support.kv_transfer import Transfer, run


@drawn("MOE_P2P_KV_CASES", 200)
@given(transfers())
def test_bytes_equal_the_oracle(transfer: Transfer) -> None:
    run(transfer)
