"""One e4m3: every implementation gives the same bits for all bf16 values in blocks of any maximum.

Here: the specification against numbers worked out in fp64, and Python's users and the host against
the specification. Triton's kernels are in tests/support/triton_number_cases.py, kernels of a GPU,
emulated or not, in tests/gpu/test_gpu_layouts.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_p2p import AllToAll, DispatchOptions
from moe_p2p.deep_ep.utils import math
from moe_p2p.machine import fp8
from moe_p2p.weights import block_amax, quantize, scales
from tests.support import cells
from tests.support.cases import make
from tests.support.every_value import BLOCKS, MAXIMA, every_value
from tests.support.ranks import Rank

FORMATS: tuple[fp8.ScaleFormat, ...] = ("float32", "power_of_two", "ue8m0")


def codes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def same_bits(got: Tensor, want: Tensor) -> bool:
    return torch.equal(codes(got), codes(want))


# Magnitudes of e4m3 by their codes, and the middles between them, where the even code wins.
_SIZES = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float64)
_MIDDLES = (_SIZES[1:] + _SIZES[:-1]) / 2


def rounded(x: Tensor) -> Tensor:
    """Codes of the e4m3 numbers nearest to fp32 x, by looking where x lies among all of them."""
    size = x.abs().to(torch.float64)
    above = torch.bucketize(size, _MIDDLES, right=True)
    below = torch.bucketize(size, _MIDDLES, right=False)
    code = torch.where(above % 2 == 0, above, below)  # they differ on a middle
    code = torch.where(x.isnan(), 0x7F, code | 0x80 * x.signbit())
    return code.to(torch.uint8)


@pytest.mark.parametrize("maximum", MAXIMA)
def test_the_specification_is_its_sentence(maximum: float) -> None:
    x = every_value(maximum)
    most = torch.tensor(maximum, dtype=torch.bfloat16).double()
    amax = torch.inf if most.isnan() else max(float(most), float(torch.tensor(1e-4)))
    exact = torch.tensor(amax, dtype=torch.float64)
    scale = (exact / 448).to(torch.float32)
    multiplier = (448 / exact).to(torch.float32)
    if not (most.isfinite()):
        multiplier = torch.tensor(0.0)
    q, found = fp8.quantize(x)
    assert same_bits(found, scale.expand(BLOCKS, 1))
    assert torch.equal(codes(q), rounded(x.float() * multiplier))
    for name in FORMATS[1:]:
        q, found = fp8.quantize(x, name)
        power = 2.0 ** (exact / 448).float().double().log2().ceil()
        assert same_bits(found, power.to(torch.float32).expand(BLOCKS, 1))
        assert torch.equal(codes(q), rounded(x.float() * (1 / power).to(torch.float32)))


@pytest.mark.parametrize("maximum", MAXIMA)
def test_users_in_python_have_the_bits_of_the_specification(maximum: float) -> None:
    x = every_value(maximum)
    q, wanted = fp8.quantize(x)
    amax = block_amax(x, (0, 0), (1, 128))
    assert same_bits(scales(amax), wanted)
    assert same_bits(quantize(x, (0, 0), amax, (1, 128)), q)
    cast, their_scales = math.per_token_cast_to_fp8(x)
    assert same_bits(cast, q)
    assert same_bits(their_scales, wanted)


@pytest.fixture(scope="module")
def alone() -> Iterator[AllToAll]:
    sizes = {"num_experts": 1, "topk": 1, "hidden_dim": 128, "max_tokens": BLOCKS}
    with make(Rank(0, 1, dist.HashStore()), **sizes, dtype=torch.bfloat16) as comm:
        yield comm


@pytest.mark.parametrize(
    ("maximum", "scale_format"),
    cells.few(
        itertools.product(MAXIMA, FORMATS),
        keep=lambda cell: cell[1] == "float32" or cell[0] in (1e-4, 448.0, 5.3),
    ),
)
def test_the_host_has_the_bits_of_the_specification(
    alone: AllToAll, maximum: float, scale_format: fp8.ScaleFormat
) -> None:
    x = every_value(maximum)
    options = DispatchOptions(layout="grouped", quantize=True, scale_format=scale_format)
    got = alone.dispatch(x, torch.zeros(BLOCKS, 1, dtype=torch.int64), options=options)
    q, wanted = fp8.quantize(x, scale_format)
    assert same_bits(got.x, q)
    assert got.scales is not None
    assert same_bits(got.scales, fp8.pack_ue8m0(wanted) if scale_format == "ue8m0" else wanted)
