"""Signals of SGLang's single-batch overlap in low_latency_combine, on CPU ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from moe_p2p import InvalidArgumentError, deep_ep
from tests.deep_ep.test_deep_ep_bad_input import Alone

SIGNALS = torch.full((4,), 3, dtype=torch.int32)


@pytest.fixture(name="buffer", scope="module")
def buffer_of_one_rank() -> Iterator[deep_ep.Buffer]:
    buffer = deep_ep.Buffer(Alone(), low_latency_mode=True, explicitly_destroy=True)
    yield buffer
    buffer.destroy()


def combined(buffer: Any, **given: Any) -> Tensor:
    x = torch.ones(3, 128, dtype=torch.bfloat16)
    ids = torch.tensor([[1, 3], [2, -1], [0, 1]])
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, 4, 4, use_fp8=False)
    weights = torch.ones(3, 2)
    sums, _, hook = buffer.low_latency_combine(rows, ids, weights, handle, overlap=True, **given)
    if hook is not None:
        hook()
    return cast("Tensor", sums)


@pytest.mark.parametrize("how", [{}, {"return_recv_hook": True}, {"async_finish": True}], ids=str)
@pytest.mark.parametrize(
    "signals",
    [
        {"comp_signal": SIGNALS, "block_m": 64, "threshold": 3, "num_sms": 3},
        {"src_signals": SIGNALS.view(torch.uint32), "src_signal_expect_value": 3},
    ],
    ids=["blocks", "experts"],
)
def test_low_latency_combine_takes_both_kinds_of_signals(
    buffer: Any, how: dict[str, Any], signals: dict[str, Any]
) -> None:
    waited = torch.zeros(1, dtype=torch.int64)
    more = {"packed_recv_count": SIGNALS, "combine_wait_recv_cost_stats": waited}
    sums = combined(buffer, **how, **signals, **more)
    assert torch.equal(sums[:, 0].float(), torch.tensor([2.0, 1.0, 2.0]))


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({}, "or src_signals with src_signal_expect_value; neither is given"),
        ({"comp_signal": SIGNALS, "src_signals": SIGNALS}, "both are given"),
        ({"comp_signal": SIGNALS}, "threshold 0, must be at least 1"),
        ({"comp_signal": SIGNALS, "block_m": 0, "threshold": 1}, "block_m is 0 and"),
        ({"src_signals": SIGNALS}, "src_signal_expect_value is 0, must be at least 1"),
        (
            {"comp_signal": SIGNALS, "threshold": 1, "packed_recv_count": SIGNALS[:3]},
            r"packed_recv_count has shape \(3,\), must have \(4,\)",
        ),
    ],
)
def test_signals_that_say_nothing_are_refused_by_name(
    buffer: Any, given: dict[str, Any], match: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        combined(buffer, **given)
