"""Small rows of KV pages, gathered into one packed run or scattered from it, on a GPU.

The same bytes as torch.ops.moe_p2p.copy_rows moves in host memory; moe_p2p/kv/copies.py calls both.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

# 32 KiB of 16-byte items are under way in each multiprocessor: enough for 6 of them to carry a NIC.
_BLOCK, _WARPS = 2048, 16
# By width of an item in bytes: the type that is loaded, and how many of them are one item.
_KINDS = {
    1: (torch.uint8, 1),
    2: (torch.int16, 1),
    4: (torch.int32, 1),
    8: (torch.int64, 1),
    16: (torch.int64, 2),
}

# Numbers that differ from layer to layer and from part to part. Specialized, they would be compiled
# anew in the middle of requests, under the worker's lock.
_RUNTIME = (
    "offset",
    "unit",
    "row_items",
    "num_rows",
    "row_stride",
    "first_row",
    "num_items",
)


@triton.jit(do_not_specialize=_RUNTIME)
def _rows_kernel(
    memory_ptr,
    packed_ptr,
    units_ptr,
    offset,
    unit,
    row_items,
    num_rows,
    row_stride,
    first_row,
    num_items,
    GATHER: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Distances are in items, LANES values each; every program takes blocks in turns.

    Example: rows of 48 bytes at multiples of 16 are 3 items of 2 int64; item 4 is item 1 of row 1.
    """
    lane = tl.arange(0, LANES)[None, :]
    for begin in range(tl.program_id(0) * BLOCK, num_items, tl.num_programs(0) * BLOCK):
        item = begin + tl.arange(0, BLOCK)
        inside = item < num_items
        row = first_row + item // row_items
        index = tl.load(units_ptr + row // num_rows, mask=inside, other=0)
        place = offset + index * unit + (row % num_rows).to(tl.int64) * row_stride
        place += item % row_items
        mask = inside[:, None]
        strided = memory_ptr + (place[:, None] * LANES + lane)
        packed = packed_ptr + (item.to(tl.int64)[:, None] * LANES + lane)
        if GATHER:
            tl.store(packed, tl.load(strided, mask=mask), mask=mask)
        else:
            tl.store(strided, tl.load(packed, mask=mask), mask=mask)


def copy_rows(
    memory: Tensor,
    packed: Tensor,
    units: Tensor,
    where: tuple[int, int, int, int, int],
    first_row: int,
    *,
    gather: bool,
    num_sms: int,
) -> None:
    """memory, packed: uint8. units: int64, on the device. where: offset, unit, row_bytes, num_rows,
    row_stride. num_sms: programs, each of which fills a multiprocessor; the stream is not waited
    for."""
    offset, unit, row_bytes, num_rows, row_stride = where
    addresses = (memory.data_ptr(), packed.data_ptr())
    width = math.gcd(16, *where[:3], row_stride if num_rows > 1 else 0, *addresses)
    kind, lanes = _KINDS[width]
    whole = len(memory) // width * width
    num_items = len(packed) // width
    _rows_kernel[(min(num_sms, triton.cdiv(num_items, _BLOCK)),)](
        memory[:whole].view(kind),
        packed.view(kind),
        units,
        offset // width,
        unit // width,
        row_bytes // width,
        num_rows,
        row_stride // width,
        first_row,
        num_items,
        GATHER=gather,
        LANES=lanes,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
