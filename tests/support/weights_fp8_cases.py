"""fp8 of weights by Triton has the bits of torch; run by tests/weights/test_weights_fp8.py.

TRITON_INTERPRET=1 python -m pytest tests/support/weights_fp8_cases.py     # on the CPU
python -m pytest tests/support/weights_fp8_cases.py                        # on a GPU
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from moe_p2p.weights import Blocks, Param, Placement, Replicate, Shard, WeightLayout, weight_plan
from moe_p2p.weights.conversion import Conversions
from tests.support import cells
from tests.support.every_value import BLOCKS, MAXIMA, every_value

triton = pytest.importorskip("triton")

DEVICE = torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")
ODD = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-30, 3e38, -448.0, 1e-4]


def case(
    shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    blocks: tuple[int, int],
    dtype: str = "bfloat16",
    **how: object,
) -> tuple[Param, Param]:
    mesh = (2,) * len(placements)
    source = Param("w", shape, dtype, range(2 ** len(placements)), mesh, placements)
    order = how.pop("order", ())
    target = Param("w", shape, "float8_e4m3fn", (0,), tensor="q", blocks=Blocks("s", 0, blocks))
    return dataclasses.replace(source, **how), dataclasses.replace(target, order=order)


CASES = {
    "rows": case((260, 136), (Shard(0),), (128, 128)),
    "columns": case((40, 272), (Shard(1),), (128, 128)),
    "both, odd": case((37, 51), (Shard(0), Shard(1)), (8, 16)),
    "strided": case((40, 24), (Shard(0, 3),), (8, 8)),
    "experts": case((3, 20, 24), (Shard(1),), (8, 8), "float32"),
    "transposed": case((24, 40), (Shard(0),), (8, 8), order=(1, 0)),
    "rows of blocks": case((6, 300), (Replicate(),), (1, 128), "float16"),
    "padded": case((16, 24), (Shard(0),), (5, 3), strides=(30, 1)),
    "one row": case((1, 300), (Shard(1),), (128, 128)),
    "four dimensions": case((2, 2, 9, 8), (Shard(2),), (4, 8)),
}


def values(param: Param, position: int) -> Tensor:
    generator = torch.Generator().manual_seed(position)
    count = 2 * torch.Size(param.shape).numel() + 512
    x = torch.randn(count, generator=generator) * torch.logspace(-7, 4, count)
    x[: len(ODD)] = torch.tensor(ODD)
    x[100:400] = 0
    return x.to(getattr(torch, param.dtype))


def run(
    params: tuple[Param, Param], position: int, x: Tensor, device: torch.device, by_triton: bool
) -> list[Tensor]:
    source, target = params
    plan = weight_plan(WeightLayout((source,), 4), WeightLayout((target,), 1))
    tensors = {"w": x.to(device)}
    made = Conversions([plan], position, tensors, device=device, triton=by_triton)
    made.allocate()
    made.buffer.zero_()
    batches = made.batches()
    made.maxima(batches)
    first = made.grids.flat.clone()
    made.grids.flat.mul_(1.5)  # as merged with others
    for batch in batches:
        made.convert(batch)
    staged = [each.contiguous().view(torch.uint8) for each in made.staged.values()]
    return [each.cpu() for each in (first.view(torch.uint8), *staged)]


def check(params: tuple[Param, Param], position: int, x: Tensor) -> None:
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1")
    wanted = run(params, position, x, torch.device("cpu"), by_triton=False)
    got = run(params, position, x, DEVICE, by_triton=True)
    for ours, theirs in zip(got, wanted, strict=True):
        assert torch.equal(ours, theirs)
    assert any(bool(each.any()) for each in wanted)


@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_torch(name: str) -> None:
    source = CASES[name][0]
    for position in range(len(source.ranks)):
        check(CASES[name], position, values(source, position))


@pytest.mark.parametrize("maximum", cells.few(MAXIMA, keep=[5.3]))
def test_bits_of_every_value_are_those_of_torch(maximum: float) -> None:
    check(case((BLOCKS, 128), (Replicate(),), (128, 128)), 0, every_value(maximum).flatten())
