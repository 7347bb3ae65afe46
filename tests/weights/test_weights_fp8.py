"""Blocks of fp8 from shards are those of the whole tensor, bit for bit."""

from __future__ import annotations

import os

import pytest
import torch

from moe_p2p.machine import fp8 as reference
from moe_p2p.weights import block_amax, merge, quantize, scales
from tests.support import warm

ODD = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-30, 3e38, -448.0, 1e-4]


def whole(dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(300, 200) * torch.logspace(-6, 4, 300).unsqueeze(1)
    x[:9, 130] = torch.tensor(ODD)
    x[128:256, :128] = 0  # a block of zeros
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shards_with_merged_maxima_equal_the_gathered_tensor(dtype: torch.dtype) -> None:
    x = whole(dtype)
    wanted = block_amax(x, (0, 0))
    grid = torch.zeros_like(wanted)
    cuts = [(0, 0, 37, 50), (0, 50, 37, 150), (37, 0, 263, 129), (37, 129, 263, 71)]
    for r, c, n, k in cuts:
        part = grid[r // 128 : -(-(r + n) // 128), c // 128 : -(-(c + k) // 128)]
        part.copy_(merge([part, block_amax(x[r : r + n, c : c + k], (r, c))]))
    assert torch.equal(grid, wanted)
    q = quantize(x, (0, 0), wanted).view(torch.uint8)
    for r, c, n, k in cuts:
        part = grid[r // 128 : -(-(r + n) // 128), c // 128 : -(-(c + k) // 128)]
        ours = quantize(x[r : r + n, c : c + k], (r, c), part).view(torch.uint8)
        assert torch.equal(ours, q[r : r + n, c : c + k])


def test_numbers_are_those_of_the_reference() -> None:
    """A block of 1 x 128 is a block of the reference's rows."""
    x = whole(torch.bfloat16)
    q, wanted = reference.quantize(x)
    amax = block_amax(x, (0, 0), (1, 128))
    assert torch.equal(scales(amax), wanted)
    ours = quantize(x, (0, 0), amax, (1, 128))
    assert torch.equal(ours.view(torch.uint8), q.view(torch.uint8))


def test_leading_dimensions_are_blocks_of_their_own() -> None:
    x = whole(torch.bfloat16).view(3, 100, 200)
    amax = block_amax(x, (0, 28, 0))
    assert torch.equal(amax, torch.stack([block_amax(each, (28, 0)) for each in x]))
    q = quantize(x, (0, 28, 0), amax).view(torch.uint8)
    assert torch.equal(q[1], quantize(x[1], (28, 0), amax[1]).view(torch.uint8))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "interpret", [True, pytest.param(False, marks=pytest.mark.gpu)], ids=["interpreter", "gpu"]
)
def test_the_triton_kernels_have_the_bits_of_torch(interpret: bool) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_INTERPRET": "1"} if interpret else {}
    done = warm.run(
        *("-m", "pytest", "-q", "tests/support/weights_fp8_cases.py"),
        cwd=warm.ROOT, env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout, done.stdout
