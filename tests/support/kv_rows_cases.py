"""The Triton gather and scatter move the bytes that the CPU moves; run by test_kv_copies.py and,
on a GPU, by tests/gpu/test_gpu_kv_rows.py.

TRITON_INTERPRET=1 python -m pytest tests/support/kv_rows_cases.py     # on the CPU
python -m pytest tests/support/kv_rows_cases.py                        # on a GPU
"""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from moe_p2p.kernels.triton.kv_rows import copy_rows  # noqa: E402

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
# offset, unit, row_bytes, num_rows, row_stride: items of 16, 8, 4, 2 and 1 bytes.
SHAPES = [
    (0, 4608, 576, 8, 576),
    (64, 2304, 576, 2, 1152),
    (8, 200, 24, 3, 56),
    (4, 100, 12, 3, 20),
    (2, 54, 10, 1, 10),
    (3, 71, 7, 2, 31),
]


@pytest.fixture(autouse=True)
def _needs_a_device() -> None:
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1")


@pytest.mark.parametrize("num_sms", [1, 3])
@pytest.mark.parametrize("where", SHAPES)
def test_both_move_the_same_bytes(where: tuple[int, int, int, int, int], num_sms: int) -> None:
    """A part of the rows, which begins and ends within a unit."""
    generator = torch.Generator().manual_seed(3)
    memory = torch.randint(0, 256, (80_001,), generator=generator).to(torch.uint8)
    units = torch.randperm(15, generator=generator)[:11]
    rows, first = 11 * where[3] - 1, min(1, where[3] - 1)
    by_cpu = torch.ops.moe_p2p.copy_rows.default
    wanted = torch.empty((rows - first) * where[2], dtype=torch.uint8)
    by_cpu(memory, wanted, units, *where, first, True)
    packed = torch.zeros_like(wanted, device=DEVICE)
    on_device = (memory.to(DEVICE), packed, units.to(DEVICE), where, first)
    copy_rows(*on_device, gather=True, num_sms=num_sms)
    assert torch.equal(packed.cpu(), wanted)

    target, there = torch.full_like(memory, 7), torch.full_like(memory, 7, device=DEVICE)
    by_cpu(target, wanted, units, *where, first, False)
    copy_rows(there, *on_device[1:], gather=False, num_sms=num_sms)
    assert torch.equal(there.cpu(), target)


def test_more_blocks_than_programs() -> None:
    units, where = torch.arange(400), (0, 576, 576, 1, 576)
    memory = torch.arange(400 * 576).to(torch.uint8).to(DEVICE)
    packed = torch.zeros_like(memory)
    copy_rows(memory, packed, units.flip(0).to(DEVICE), where, 0, gather=True, num_sms=2)
    assert torch.equal(packed.view(400, 576), memory.view(400, 576).flip(0))
