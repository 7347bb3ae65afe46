"""NaN goes through forward and backward as in the dense layer of test_autograd.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.moe import test_autograd
from tests.moe.test_autograd import COUNTS, NUM_EXPERTS, TOPK, Inputs, dense, inputs, run
from tests.support.ranks import run_threads


def inputs_with_nan(rank: int, *, step: int = 0) -> Inputs:
    """One value of rank 0's first token, which all of its K experts get, is none."""
    given = inputs(rank, step=step)
    if rank == 0:
        given.x[0, 3] = torch.nan
        given.topk_idx[0] = torch.arange(TOPK) * (NUM_EXPERTS // TOPK)
    return given


@pytest.mark.parametrize("layout", ["padded", "grouped"])
def test_nan_stays_with_its_token_and_its_experts(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_autograd, "inputs", inputs_with_nan)
    wanted, experts = dense(4)
    assert torch.equal(wanted[0].out.isnan().any(1), torch.arange(COUNTS[0]) == 0)
    hurt = experts.isnan().any(2).any(1)
    assert hurt.nonzero().flatten().tolist() == inputs_with_nan(0).topk_idx[0].tolist()
    results = run_threads(4, run, {"ranks_per_node": 2}, {"layout": layout}, 1)
    near: Any = {"rtol": 1e-5, "atol": 1e-5, "equal_nan": True}
    for rank, (got, want) in enumerate(zip(results, wanted, strict=True)):
        for mine, theirs in zip(got[:3], want[:3], strict=True):
            torch.testing.assert_close(mine, theirs, **near)
        torch.testing.assert_close(got.experts, experts[rank * 2 :][:2], **near)
