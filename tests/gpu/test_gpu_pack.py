"""kernels/pack.cu and its twin on hosts: the bytes that both move."""

from __future__ import annotations

import pytest
import torch

from moe_p2p import InvalidArgumentError
from moe_p2p.kv import ring
from moe_p2p.library import call
from tests.support.gpu_ranks import DEVICE

pytestmark = pytest.mark.gpu

# offset, unit, row_bytes, num_rows, row_stride: items of 16, 8, 4 and 1 bytes.
SHAPES = [
    (0, 4608, 576, 8, 576),
    (64, 2304, 576, 2, 1152),
    (32, 64, 16, 1, 3),
    (8, 200, 24, 3, 56),
    (4, 100, 12, 3, 20),
    (2, 54, 10, 1, 10),
    (3, 71, 7, 2, 31),
]
Where = tuple[int, int, int, int, int]


def pack(
    memory: torch.Tensor,
    packed: torch.Tensor,
    units: torch.Tensor,
    where: Where,
    first_row: int,
    *,
    gather: bool,
    num_sms: int,
) -> None:
    device = torch.device(DEVICE)
    stream = 0 if DEVICE == "cpu" else torch.cuda.current_stream().cuda_stream
    on_gpu = (ring.pack_kernel(device), num_sms, stream)
    op = torch.ops.moe_p2p.copy_rows.default
    call(op, memory, packed, units, *where, first_row, gather, *on_gpu)


@pytest.mark.parametrize("num_sms", [1, 3])
@pytest.mark.parametrize("where", SHAPES)
def test_both_move_the_same_bytes(where: Where, num_sms: int) -> None:
    """A part of the rows, which begins and ends within a unit."""
    generator = torch.Generator().manual_seed(3)
    memory = torch.randint(0, 256, (80_001,), generator=generator).to(torch.uint8)
    units = torch.randperm(15, generator=generator)[:11]
    rows, first = 11 * where[3] - 1, min(1, where[3] - 1)
    by_host = torch.ops.moe_p2p.copy_rows.default
    wanted = torch.empty((rows - first) * where[2], dtype=torch.uint8)
    by_host(memory, wanted, units, *where, first, True)
    packed = torch.zeros_like(wanted, device=DEVICE)
    on_device = (packed, units.to(DEVICE), where, first)
    pack(memory.to(DEVICE), *on_device, gather=True, num_sms=num_sms)
    assert torch.equal(packed.cpu(), wanted)

    target, there = torch.full_like(memory, 7), torch.full_like(memory, 7, device=DEVICE)
    by_host(target, wanted, units, *where, first, False)
    pack(there, *on_device, gather=False, num_sms=num_sms)
    assert torch.equal(there.cpu(), target)


@pytest.mark.parametrize("num_sms", [1, 2, 64])
def test_threads_that_go_on_through_rows_and_units(num_sms: int) -> None:
    """36 items a row and 3 rows a unit: two items of a thread are no whole rows apart."""
    units, where = torch.randperm(400), (16, 3 * 592, 576, 3, 592)
    memory = torch.arange(16 + 400 * 3 * 592).to(torch.uint8)
    packed = torch.zeros(400 * 3 * 576, dtype=torch.uint8, device=DEVICE)
    pack(memory.to(DEVICE), packed, units.to(DEVICE), where, 0, gather=True, num_sms=num_sms)
    rows = memory[16:].view(400, 3, 592)[units, :, :576]
    assert torch.equal(packed.cpu().view(400, 3, 576), rows)


def test_what_is_not_whole_rows_is_refused() -> None:
    memory, packed = (torch.zeros(n, dtype=torch.uint8, device=DEVICE) for n in (64, 4))
    with pytest.raises(InvalidArgumentError, match="4 packed bytes are not rows of 3"):
        pack(
            memory,
            packed,
            torch.zeros(1).long().to(DEVICE),
            (0, 16, 3, 2, 8),
            0,
            gather=True,
            num_sms=1,
        )
