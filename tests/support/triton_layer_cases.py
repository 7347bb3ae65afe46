"""The experts of `bench --layer`; run by test_triton_kernels.py, like triton_cases.py."""

from __future__ import annotations

import itertools

import pytest
import torch

from moe_p2p.bench import gpu_layer
from tests.support import cells
from tests.support.triton_cases import DEVICE, Fp8, ints, quantize, rand


@pytest.fixture(autouse=True)
def _seed() -> None:
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1")
    torch.manual_seed(5)


def twice(gate: Fp8, up: Fp8, down: Fp8) -> gpu_layer.Experts:
    """Another library's products, as bench --gemm takes them."""
    ours = gpu_layer.of_triton(gate, up, down)
    return lambda x, scales, counts: 2 * ours(x, scales, counts)


@pytest.mark.parametrize(
    ("fp8", "padded"),
    cells.few(itertools.product([False, True], [False, True]), keep=[(False, True), (True, False)]),
)
def test_experts_of_the_bench_are_alike(fp8: bool, padded: bool) -> None:
    plain = [rand(5, *shape, dtype=torch.bfloat16) for shape in ((144, 72), (144, 72), (72, 144))]
    weights = [Fp8(*quantize.quantize_weights(each)) for each in plain] if fp8 else plain
    counts = ints(3, 0, 7, 1, 9)
    x = rand(5, 12, 144, dtype=torch.bfloat16) if padded else rand(24, 144, dtype=torch.bfloat16)
    rows, scales = quantize.quantize(x) if fp8 else (x, None)
    made = {
        gemm: gpu_layer.experts_of(gemm, *weights)(rows, scales, counts)
        for gemm in ("triton", "torch", "auto", f"{__name__}:twice")
    }
    made[f"{__name__}:twice"] /= 2
    used = torch.arange(12, device=DEVICE) < counts[:, None] if padded else torch.arange(20)
    want = made["triton"][used]
    # Values of two roundings to fp8 in between, where torch has none.
    assert all(gpu_layer.difference(got[used], want) < 0.05 for got in made.values())
    assert float(want.float().norm()) > 0
