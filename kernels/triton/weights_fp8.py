"""fp8 of weights in blocks, on a GPU: maxima, and values from merged maxima, of many boxes at once.

One launch converts what thousands of parameters of a rank hold: each box of elements is a row of
`FIELDS` numbers, addresses first. Bit for bit moe_p2p/weights/copies.py, which says what the
numbers are; moe_p2p/weights/conversion.py makes the rows.

A program has one block of a box: up to N x K elements of one grid cell. Example: with 128 x 128
blocks a box of 300 x 200 elements whose first one is element (100, 0) of its parameter has blocks
of rows 0..27, 28..155, 156..283 and 284..299, and of columns 0..127 and 128..199.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_p2p.kernels.triton.e4m3 import at_least, largest, magnitudes, multiplier_of, scale_of
from moe_p2p.kernels.triton.precision import to_nearest

# Of a box [lead, rows, columns]: addresses of its first element, of its fp8 and of the grid's cell
# of its first block; rows, columns; index of its first element modulo the block in both
# dimensions; strides in elements of source, fp8 and grid; its number of blocks along columns
# and in a plane; address and strides of the scales of blocks that begin in it.
FIELDS = 22
(_X, _Q, _GRID, _ROWS, _COLUMNS, _SKIP_N, _SKIP_K, _X0, _X1, _X2, _Q0, _Q1, _Q2, _G0, _G1, _G2,
 _ALONG, _PLANE, _SCALE, _S0, _S1, _S2) = range(FIELDS)  # fmt: skip


@triton.jit
def _block(table_ptr, box_ptr, first_ptr, N: tl.constexpr, K: tl.constexpr, FIELDS: tl.constexpr):
    """Row of the table, plane, and first row and column of this program's block in its box; they
    are below 0 where the box begins inside a block."""
    box = tl.load(box_ptr + tl.program_id(0)).to(tl.int64)
    number = tl.program_id(0) - tl.load(first_ptr + box)
    row = table_ptr + box * FIELDS
    along = tl.load(row + 16)
    plane_size = tl.load(row + 17)
    plane = number // plane_size
    down = number % plane_size // along
    across = number % along
    return row, plane, down, across, down * N - tl.load(row + 5), across * K - tl.load(row + 6)


@triton.jit
def _amax_kernel(
    table_ptr,
    box_ptr,
    first_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Merges max |x| of one block into its cell of the grid. Example: a cell of 2.0 where the box
    has -3.0 becomes 3.0."""
    row, plane, down, across, first_n, first_k = _block(table_ptr, box_ptr, first_ptr, N, K, FIELDS)
    x_ptr = tl.load(row + 0).to(tl.pointer_type(DTYPE))
    rows, columns = tl.load(row + 3), tl.load(row + 4)
    x0, x1, x2 = tl.load(row + 7), tl.load(row + 8), tl.load(row + 9)
    if ALIGNED:  # Triton 3.6 wants it of every addend, and forgets it of what a function returned
        x2 = 1
        x0 = tl.multiple_of(x0, 8)
        x1 = tl.multiple_of(x1, 8)
        columns = tl.multiple_of(columns, 8)
        first_k = tl.multiple_of(across * K - tl.load(row + 6), 8)
        x_ptr = tl.multiple_of(x_ptr, 16)
    in_block_k = tl.arange(0, TILE_K)
    k = first_k + in_block_k
    k_inside = (in_block_k < K) & (k >= 0) & (k < columns)
    most = tl.zeros([TILE_N, TILE_K], tl.int32)
    for begin in tl.static_range(0, N, TILE_N):
        in_block_n = begin + tl.arange(0, TILE_N)
        n = first_n + in_block_n
        inside = ((in_block_n < N) & (n >= 0) & (n < rows))[:, None] & k_inside[None, :]
        at = plane * x0 + n[:, None] * x1 + k[None, :] * x2
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        most = tl.maximum(most, magnitudes(x))
    # Threads meet once, behind all loads: they would wait for each tile's.
    amax = largest(tl.max(tl.max(most, axis=0), axis=0))
    grid_ptr = tl.load(row + 2).to(tl.pointer_type(tl.int32))
    grid_ptr += plane * tl.load(row + 13) + down * tl.load(row + 14) + across * tl.load(row + 15)
    tl.atomic_max(grid_ptr, amax, sem="relaxed")


@triton.jit
def _quantize_kernel(
    table_ptr,
    box_ptr,
    first_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """fp8 of one block. Example: where the grid has 2.0, an element of 1.0 becomes 224."""
    row, plane, down, across, first_n, first_k = _block(table_ptr, box_ptr, first_ptr, N, K, FIELDS)
    x_ptr = tl.load(row + 0).to(tl.pointer_type(DTYPE))
    q_ptr = tl.load(row + 1).to(tl.pointer_type(tl.uint8))
    rows, columns = tl.load(row + 3), tl.load(row + 4)
    x0, x1, x2 = tl.load(row + 7), tl.load(row + 8), tl.load(row + 9)
    q0, q1, q2 = tl.load(row + 10), tl.load(row + 11), tl.load(row + 12)
    grid_ptr = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    grid_ptr += plane * tl.load(row + 13) + down * tl.load(row + 14) + across * tl.load(row + 15)
    if ALIGNED:
        x2, q2 = 1, 1
        x0 = tl.multiple_of(x0, 8)
        x1 = tl.multiple_of(x1, 8)
        q0 = tl.multiple_of(q0, 8)
        q1 = tl.multiple_of(q1, 8)
        columns = tl.multiple_of(columns, 8)
        first_k = tl.multiple_of(across * K - tl.load(row + 6), 8)
        x_ptr = tl.multiple_of(x_ptr, 16)
        q_ptr = tl.multiple_of(q_ptr, 8)
    amax = at_least(tl.load(grid_ptr))
    multiplier = multiplier_of(tl.full([1], 0.0, tl.float32) + amax)
    in_block_k = tl.arange(0, TILE_K)
    k = first_k + in_block_k
    k_inside = (in_block_k < K) & (k >= 0) & (k < columns)
    for begin in tl.static_range(0, N, TILE_N):
        in_block_n = begin + tl.arange(0, TILE_N)
        n = first_n + in_block_n
        inside = ((in_block_n < N) & (n >= 0) & (n < rows))[:, None] & k_inside[None, :]
        at = plane * x0 + n[:, None] * x1 + k[None, :] * x2
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        scaled = x * multiplier[:, None]
        nan = scaled != scaled
        scaled = tl.clamp(tl.where(nan, 0.0, scaled), -448.0, 448.0)
        code = to_nearest(scaled, tl.float8e4nv).to(tl.uint8, bitcast=True)
        code = tl.where(nan, 0x7F, code).to(tl.uint8)  # without a sign
        to = plane * q0 + n[:, None] * q1 + k[None, :] * q2
        tl.store(q_ptr + to, code, mask=inside)
    if (first_n >= 0) & (first_k >= 0):  # the block begins here: its scale is this box's to write
        down -= (tl.load(row + 5) > 0).to(tl.int64)
        across -= (tl.load(row + 6) > 0).to(tl.int64)
        scale_ptr = tl.load(row + 18).to(tl.pointer_type(tl.float32)) + plane * tl.load(row + 19)
        scale_ptr += down * tl.load(row + 20) + across * tl.load(row + 21)
        tl.store(scale_ptr, scale_of(amax))


class Boxes:
    """Boxes that are converted together, all of one source type and one block shape.

    boxes: of `box_row`. What they point to must outlive this.
    """

    def __init__(
        self,
        boxes: Sequence[tuple[Sequence[int], int]],
        dtype: torch.dtype,
        block: tuple[int, int],
        device: torch.device,
    ) -> None:
        rows = [row for row, _ in boxes]
        counts = torch.tensor([row[_PLANE] * planes for row, planes in boxes], device="cpu")
        first = torch.cumsum(counts, 0) - counts
        box = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), counts)
        self.count = int(counts.sum())
        self._table = torch.tensor(rows, dtype=torch.int64, device="cpu").to(device)
        self._box, self._first = box.to(torch.int32).to(device), first.to(torch.int64).to(device)
        self._aligned = all(_aligned(row, dtype.itemsize, block) for row in rows)
        self._dtype = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16,
                       torch.float32: tl.float32}[dtype]  # fmt: skip
        self._block = block

    def maxima(self) -> None:
        """Merges maxima into the grid, which holds numbers of 0 or more."""
        self._launch(_amax_kernel)

    def quantize(self) -> None:
        """Writes fp8 and scales by the grid's maxima."""
        self._launch(_quantize_kernel)

    def _launch(self, kernel: triton.JITFunction) -> None:
        if not self.count:
            return
        n, k = self._block
        with torch.cuda.device_of(self._table):
            kernel[(self.count,)](
                self._table,
                self._box,
                self._first,
                N=n,
                K=k,
                TILE_N=min(32, triton.next_power_of_2(n)),
                TILE_K=triton.next_power_of_2(k),
                DTYPE=self._dtype,
                ALIGNED=self._aligned,
                FIELDS=FIELDS,
                num_warps=4,
            )


def _aligned(row: Sequence[int], item: int, block: tuple[int, int]) -> bool:
    """Returns whether eight elements can be loaded and stored together."""
    steps = (row[_X1], row[_Q1], row[_X0], row[_Q0], row[_SKIP_K], block[1], row[_COLUMNS])
    return (
        row[_X2] == row[_Q2] == 1
        and row[_X] % (8 * item) == 0
        and row[_X] % 16 == 0
        and row[_Q] % 8 == 0
        and all(step % 8 == 0 for step in steps)
    )


def box_row(
    parts: Sequence[Tensor], first: tuple[int, int], block: tuple[int, int]
) -> tuple[list[int], int]:
    """Returns the table's row of a box, and its number of planes.

    parts: four tensors [lead, rows, columns]: elements of a parameter; their fp8; the grid of the
    blocks that they touch; scales of the blocks that begin there. first: index of the first element
    in the last two dimensions of the parameter.
    """
    x, q, grid, scales = parts
    rows, columns = x.shape[1:]
    skip = [at % size for at, size in zip(first, block, strict=True)]
    down, across = grid.shape[1:]
    return [
        x.data_ptr(), q.data_ptr(), grid.data_ptr(), rows, columns, *skip, *x.stride(),
        *q.stride(), *grid.stride(), across, down * across,
        scales.data_ptr(), *scales.stride(),
    ], x.shape[0]  # fmt: skip
