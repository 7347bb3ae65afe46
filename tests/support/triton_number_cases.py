"""NaN, inf and -0.0 in the Triton kernels; run by test_triton_kernels.py, like triton_cases.py."""

from __future__ import annotations

import pytest
import torch

from moe_p2p.moe import reference
from tests.support import cells
from tests.support.cases import NO_NUMBERS, assert_combined
from tests.support.every_value import MAXIMA, every_value
from tests.support.triton_cases import (
    DEVICE,
    FLOATS,
    Fp8,
    grouped_gemm,
    grouped_swiglu,
    ints,
    quantize,
    rand,
    same_bits,
)


@pytest.mark.parametrize("dtype", FLOATS)
def test_no_number_comes_of_what_is_none(dtype: torch.dtype) -> None:
    x = torch.randn(6, 200).to(dtype)
    for row, value in zip(x, NO_NUMBERS, strict=False):
        row[7] = value
    x[4, 100:104] = torch.tensor(NO_NUMBERS)
    q, scales = quantize.quantize(x.to(DEVICE))
    want_q, want_scales = reference.quantize(x)
    assert same_bits(scales, want_scales)
    assert same_bits(q, want_q)
    got = quantize.dequantize(q, scales, dtype=dtype)
    assert_combined(got.cpu(), reference.dequantize(want_q, want_scales).to(dtype))


@pytest.mark.parametrize("maximum", cells.few(MAXIMA, keep=[5.3]))
def test_every_value_in_a_block_has_the_bits_of_the_reference(maximum: float) -> None:
    x = every_value(maximum)
    q, scales = quantize.quantize(x.to(DEVICE))
    want_q, want_scales = reference.quantize(x)
    assert same_bits(scales, want_scales)
    assert same_bits(q, want_q)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_that_are_no_numbers_leave_fp8_experts_as_such(value: float) -> None:
    x = rand(8, 256)
    x[3, 70] = value
    gate, up = (Fp8(*quantize.quantize_weights(rand(2, 256, 128) / 16)) for _ in range(2))
    down = Fp8(*quantize.quantize_weights(rand(2, 128, 136) / 12))
    h = grouped_swiglu(Fp8(*quantize.quantize(x)), gate, up, ints(3, 5))
    y = grouped_gemm(h, down, ints(3, 5))
    assert y[3].isnan().all()
    assert y[[0, 1, 2, 4, 5, 6, 7]].isfinite().all()


def test_poisoned_weights_leave_fp8_experts_as_such() -> None:
    weights = [rand(2, 256, 128) / 16 for _ in range(2)]
    weights[0][1, 9, 9] = float("nan")
    gate, up = (Fp8(*quantize.quantize_weights(w)) for w in weights)
    h = grouped_swiglu(Fp8(*quantize.quantize(rand(8, 256))), gate, up, ints(3, 5))
    assert isinstance(h, Fp8)
    rows = reference.dequantize(h.values.cpu(), h.scales.cpu())
    assert rows[:3].isfinite().all()
    assert rows[3:].isnan().all()
