"""Ops of KV transfer: their schemas and fake kernels."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from moe_p2p import Engine, EngineConfig

ops = torch.ops.moe_p2p
ONCE = ("test_schema", "test_faketensor")


def test_signals() -> None:
    words, step = torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    cache = torch.zeros(64, dtype=torch.uint8)
    with Engine(EngineConfig(transport="loopback", timeout_s=10)) as engine:
        arguments = (engine.number, words, step, [cache], 0)
        number = ops.signals_create(*arguments)
        with FakeTensorMode() as mode:  # opcheck would pass a copy of the cache, which is refused
            assert ops.signal(number, 1, mode.from_tensor(cache)) is None
        step.fill_(7)
        ops.signal(number, 1, cache)
        assert words.tolist() == [0, 7]
        ops.signals_close(number)
        opcheck(ops.signals_create.default, arguments, test_utils="test_schema")


@pytest.mark.parametrize("util", ONCE)
@pytest.mark.parametrize("gather", [True, False])
def test_copy_rows(util: str, gather: bool) -> None:
    memory, packed = torch.arange(64, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)
    units = torch.tensor([3, 1])
    arguments = (memory, packed, units, 0, 16, 8, 1, 8, 0, gather)
    opcheck(ops.copy_rows.default, arguments, test_utils=util)
