"""A 64-bit sum over the bytes that a request moves, equal at both sides however they lie there.

Rows are read in the order of the plan and cut into words of 8 bytes, the last one filled up with
zeros. Word w of row i, at position p = i * words + w, adds mix(word, p), so a row that arrives at
the wrong place, twice or half changes the sum:

    x = word * A + p * B;  x ^= x >> 32;  x *= C;  x ^= x >> 29

in int64, which wraps; >> keeps the sign.

On a GPU kernels/triton/kv_checksum.py gives the same value.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext, suppress

import torch
from torch import Tensor

from moe_p2p.errors import require
from moe_p2p.machine.driver import relaxed_captures

# Odd, so that no bit of a word is lost; as signed numbers, since torch has no shifts of uint64.
A = 0x9E3779B97F4A7C15 - (1 << 64)
B = 0xC2B2AE3D27D4EB4F - (1 << 64)
C = 0x165667B19E3779F9
_PIECE_BYTES = 1 << 20  # gathered at a time
_SIGN = 1 << 63


def rows_checksum(
    memory: Tensor,
    units: Tensor,
    *,
    offset: int,
    unit: int,
    row_bytes: int,
    num_rows: int,
    row_stride: int,
    first_row: int = 0,
) -> int:
    """Row r of unit u begins at offset + u * unit + r * row_stride of `memory`, in bytes.

    units: int32 or int64 [n]. first_row: number of the first row, where rows come in several calls.
    Sums of disjoint parts add up (`add`).
    """
    flat = memory.reshape(-1).view(torch.uint8)
    if not len(units):
        return 0
    last = offset + int(units.max()) * unit + (num_rows - 1) * row_stride + row_bytes
    require(
        offset >= 0 and int(units.min()) >= 0 and last <= len(flat),
        f"rows_checksum: rows end at byte {last} of memory of {len(flat)} bytes",
    )
    if memory.is_cuda:
        from moe_p2p.kernels.triton.kv_checksum import rows_checksum as on_gpu

        where = (offset, unit, row_bytes, num_rows, row_stride)
        with relaxed_captures():
            return int(on_gpu(flat, units, where, first_row))
    total, step = 0, max(_PIECE_BYTES // (row_bytes * num_rows), 1)
    for at in range(0, len(units), step):
        piece = units[at : at + step].to(torch.int64)
        words = _words(flat, piece, (offset, unit, row_bytes, num_rows, row_stride))
        total = add(total, _mix(words, (first_row + at * num_rows) * words.shape[1]))
    return total


@functools.cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    with relaxed_captures():
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def apart(device: torch.device) -> AbstractContextManager[object]:
    """Sums of bytes that are there already, on a stream of their own: on the caller's they would
    wait for the forward pass that is queued there, and other requests for them."""
    return nullcontext() if device.type != "cuda" else torch.cuda.stream(_stream_of(device))


def prepare(memory: Tensor, row_bytes: int) -> None:
    """Loads what sums of such rows need. The first request that is checked would do so while all
    others of its worker wait, and a cancel, too."""
    if memory.is_cuda and memory.numel() * memory.element_size() >= row_bytes:
        # Without Triton, the first request that is checked says so.
        with apart(memory.device), suppress(ImportError):
            place = {"offset": 0, "unit": row_bytes, "row_bytes": row_bytes, "num_rows": 1}
            one = torch.zeros(1, dtype=torch.int64, device="cpu")
            rows_checksum(memory, one, **place, row_stride=row_bytes)


def add(*sums: int) -> int:
    """Wraps like int64."""
    return (sum(sums) + _SIGN) % (2 * _SIGN) - _SIGN


def _words(flat: Tensor, units: Tensor, where: tuple[int, int, int, int, int]) -> Tensor:
    """The rows of `units`, [rows, words]."""
    offset, unit, row_bytes, num_rows, row_stride = where
    whole = all(n % 8 == 0 for n in (*where[:3], row_stride, flat.data_ptr(), len(flat)))
    size = 8 if whole else 1
    source = flat.view(torch.int64) if whole else flat
    shape = (int(units.max()) + 1, num_rows, row_bytes // size)
    begin = source.storage_offset() + offset // size  # memory may be a part of a tensor
    strided = source.as_strided(shape, (unit // size, row_stride // size, 1), begin)
    rows = strided.index_select(0, units).reshape(len(units) * num_rows, -1)
    if whole:
        return rows
    return torch.nn.functional.pad(rows, (0, -row_bytes % 8)).view(torch.int64)


def _mix(words: Tensor, first: int) -> int:
    at = torch.arange(first, first + words.numel(), device="cpu").view(words.shape)
    x = at.mul_(B).add_(words * A)
    x ^= x >> 32
    x *= C
    x ^= x >> 29
    return int(x.sum())
