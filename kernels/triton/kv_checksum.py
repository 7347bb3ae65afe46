"""The checksum of moe_p2p/engine/checksum.py on a GPU: the same value, bit for bit."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # words of a program

# Numbers that differ from layer to layer. Specialized, they would be compiled anew in the middle of
# requests, under the worker's lock.
_RUNTIME = ("offset", "unit", "row_bytes", "num_rows", "row_stride", "first_row", "words", "blocks")


@triton.jit(do_not_specialize=_RUNTIME)
def _rows_kernel(
    memory_ptr,
    units_ptr,
    sum_ptr,
    offset,
    unit,
    row_bytes,
    num_rows,
    row_stride,
    first_row,
    words,
    blocks,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK words of one row. Example: a row of 12 bytes is read as 3 loads of 4 bytes, 2 words."""
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    word = program % blocks * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    begin = offset + tl.load(units_ptr + row // num_rows) * unit + row % num_rows * row_stride
    value = tl.zeros([BLOCK], tl.int64)
    for part in tl.static_range(8 // WIDTH):
        at = word * 8 + part * WIDTH
        loaded = tl.load(memory_ptr + (begin + at) // WIDTH, mask=at < row_bytes, other=0)
        value |= loaded.to(tl.int64) << (8 * WIDTH * part)
    x = value * -7046029254386353131 + ((first_row + row) * words + word) * -4417276706812531889
    x ^= x >> 32
    x *= 1609587929392839161
    x ^= x >> 29
    tl.atomic_add(sum_ptr, tl.sum(tl.where(word < words, x, 0)), sem="relaxed")


def rows_checksum(
    flat: Tensor, units: Tensor, where: tuple[int, int, int, int, int], first_row: int
) -> Tensor:
    """flat: uint8, of the whole memory. where: offset, unit, row_bytes, num_rows, row_stride.

    Returns an int64 on the device; the caller's stream is not waited for.
    """
    offset, unit, row_bytes, num_rows, row_stride = where
    width = math.gcd(8, *where[:3], row_stride, flat.data_ptr(), len(flat))
    # Narrow loads are unsigned, or their sign would fill the words.
    kind = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.int64}[width]
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    words = -(-row_bytes // 8)
    block = min(_BLOCK, triton.next_power_of_2(words))
    blocks = triton.cdiv(words, block)
    # In one dimension: of others a grid has at most 65,535, and a row may be a whole parameter. On
    # the memory's device, which the current one of the caller's thread need not be.
    with torch.cuda.device_of(flat):
        _rows_kernel[(len(units) * num_rows * blocks,)](
            flat.view(kind),
            units.to(device=flat.device, dtype=torch.int64),
            total,
            offset,
            unit,
            row_bytes,
            num_rows,
            row_stride,
            first_row,
            words,
            blocks,
            WIDTH=width,
            BLOCK=block,
        )
    return total
