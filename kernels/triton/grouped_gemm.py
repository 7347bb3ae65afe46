"""Matrix products of rows that are grouped by expert, in Triton: the kernels and their tiles.

grouped_ops.py wraps them as torch operators. A fixed number of programs take tiles in turn and find
each tile's expert on the device, from the counts. So the host never waits, a launch can be captured
in a graph, and capacity beyond the rows that arrived costs nothing.

Shapes: R rows, E experts; A [R, K], B [E, K, N], C [R, N]. Expert e has the rows starts[e] up to
starts[e] + counts[e]; other rows are neither read nor written.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from moe_p2p.kernels.triton.precision import dot, dot_fp8, to_nearest
from moe_p2p.kernels.triton.quantize import quantize_block

WINDOW = tl.constexpr(8)  # tiles among which a program takes first what is here
_FEW_ROWS = 256  # up to this capacity per expert, reading weights takes most of the time


class Tiles(NamedTuple):
    """Tile sizes of a product, chosen for the shared memory and registers of sm_90 and sm_100."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def choose_tiles(dtype: torch.dtype, rows_per_expert: int, *, gated: bool) -> Tiles:
    """Tiles for operands of dtype. gated: two products share the tile of A.

    A scale of fp8 weights covers 128 x 128 values, so a tile lies within one. A sum of 64 x 128 per
    128 threads takes 64 of their 255 registers, and so does a product that is not scaled yet. Two
    sums and a product do not fit beside everything else, so they use 256 threads.
    """
    if dtype == torch.float32:  # exact fp32 without tensor cores: for tests and demos
        return Tiles(32, 64, 32, num_warps=4, num_stages=2)
    fp8 = dtype == torch.float8_e4m3fn
    block_k = 128 if fp8 else 64
    num_stages = 3 if gated else 4
    if rows_per_expert <= _FEW_ROWS or (fp8 and gated):
        return Tiles(64, 128, block_k, num_warps=8 if gated else 4, num_stages=num_stages)
    return Tiles(128, 128, block_k, num_warps=8, num_stages=num_stages)


def grad_tiles(dtype: torch.dtype) -> Tiles:
    """Tiles [block_k, block_n] of a weight's gradient, summed over block_m rows at a time."""
    if dtype == torch.float32:
        return Tiles(32, 32, 32, num_warps=4, num_stages=2)
    return Tiles(64, 128, 128, num_warps=8, num_stages=3)


@functools.cache
def num_programs(device: torch.device, others: int = 0, *, waits: bool = False) -> int:
    """Programs that take tiles in turn: as many as the GPU runs at once (few when interpreted).

    others: multiprocessors that something else holds.
    waits: it is what programs wait for. They are at most as many as the other multiprocessors then,
        so wherever they run, `others` of all have none of them.
    """
    if device.type != "cuda":
        return 3
    count = torch.cuda.get_device_properties(device).multi_processor_count - others
    return max(1, count) if waits else 2 * max(1, count)


@triton.jit
def _load(pointers, mask, EVEN: tl.constexpr):
    """Loads without a mask where tiles fill the matrix, which saves registers."""
    return tl.load(pointers) if EVEN else tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _add_product(a, b, total, a_scale, b_scale_ptr):
    """total + a @ b, the product times the scales of its blocks if there are any."""
    if b_scale_ptr is None:
        total = dot(a, b, total)
    else:
        product = dot_fp8(a, b)
        total += product * (a_scale * tl.load(b_scale_ptr))[:, None]
    return total


@triton.jit
def _count_rows(starts_ptr, counts_ptr, expert, mask, num_rows):
    """Rows of `expert` that x holds, int32: a dispatch over its capacity may have counted more.

    Example: with 8 rows, counts [2, 9] that start at rows 0 and 2 become 2 and 6.
    """
    start = tl.load(starts_ptr + expert, mask=mask, other=0).to(tl.int64)
    count = tl.load(counts_ptr + expert, mask=mask, other=0).to(tl.int64)
    return tl.maximum(tl.minimum(count, num_rows - start), 0).to(tl.int32)


# --- rows that are still arriving (moe_p2p/moe/ready.py) ---


@triton.jit
def _now(looks, CLOCK: tl.constexpr):
    """Nanoseconds; where there is no clock (interpreted), a look counts a millisecond."""
    return globaltimer() if CLOCK else looks.to(tl.int64) * 1000000


@triton.jit
def _note(late_ptr, counter, value):
    """Says which counter did not come in time, and where it stands."""
    tl.store(late_ptr, (counter.to(tl.int64) + 1 << 32) | value.to(tl.int64))


@triton.jit
def _await_counts(
    pointers, mask, want, PER_EXPERT: tl.constexpr, late_ptr, timeout_ns, CLOCK: tl.constexpr
):
    """Waits until all these counters are at `want`; returns 1 where they are late, else 0."""
    looks = tl.zeros((), tl.int32)
    end = _now(looks, CLOCK) + timeout_ns
    value = tl.load(pointers, mask=mask, other=want, volatile=True)
    late = tl.zeros((), tl.int32)
    while (tl.min(value, axis=0) < want) & (late == 0):
        looks += 1
        late = (_now(looks, CLOCK) >= end).to(tl.int32)
        value = tl.load(pointers, mask=mask, other=want, volatile=True)
    if late > 0:
        expert = tl.argmin(value, axis=0)
        _note(late_ptr, expert * PER_EXPERT, tl.min(value, axis=0))
    tl.atomic_add(pointers, 0, mask=mask, sem="acquire")  # pairs with the release of dispatch
    tl.debug_barrier()  # all threads read behind it
    return late


@triton.jit
def _counters_of(
    tiles,
    experts,
    ends,
    counts,
    BLOCK_M: tl.constexpr,
    PER_EXPERT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Which counter the rows of each of these tiles have."""
    before = ends[None, :] <= tiles[:, None]
    expert = tl.sum(before.to(tl.int32), axis=1)
    in_expert = tiles - tl.max(tl.where(before, ends[None, :], 0), axis=1)
    own = experts[None, :] == expert[:, None]
    num_row_tiles = tl.maximum(
        tl.cdiv(tl.max(tl.where(own, counts[None, :], 0), axis=1), BLOCK_M), 1
    )
    return expert * PER_EXPERT + (in_expert % num_row_tiles) * BLOCK_M // ROWS


@triton.jit
def _next_place(arrived_ptr, counter, left, want, late, late_ptr, timeout_ns, CLOCK: tl.constexpr):
    """Waits until a counter of those that are left is at `want`; returns its place, and whether it
    is late: then, and where something was late before, the first place that is left."""
    places = tl.arange(0, WINDOW)
    pointers = arrived_ptr + counter
    looks = tl.zeros((), tl.int32)
    end = _now(looks, CLOCK) + timeout_ns
    value = tl.load(pointers, mask=left, other=0, volatile=True)
    place = tl.min(tl.where(left & (value >= want), places, WINDOW), axis=0)
    while (place == WINDOW) & (late == 0):
        looks += 1
        value = tl.load(pointers, mask=left, other=0, volatile=True)
        place = tl.min(tl.where(left & (value >= want), places, WINDOW), axis=0)
        if (place == WINDOW) & (_now(looks, CLOCK) >= end):
            late += 1
            first = tl.min(tl.where(left, places, WINDOW), axis=0)
            this = places == first
            _note(late_ptr, tl.sum(tl.where(this, counter, 0)), tl.sum(tl.where(this, value, 0)))
    if late > 0:
        place = tl.min(tl.where(left, places, WINDOW), axis=0)
    tl.atomic_add(
        pointers, 0, mask=places == place, sem="acquire"
    )  # pairs with the release of dispatch
    tl.debug_barrier()  # all threads read behind it
    return place, late


@triton.jit(do_not_specialize=["num_rows", "timeout_ns"])
def grouped_gemm_kernel(
    a_ptr,
    a_scales_ptr,
    b_ptr,
    b_scales_ptr,
    up_ptr,
    up_scales_ptr,
    c_ptr,
    c_scales_ptr,
    ready_ptr,
    arrived_ptr,
    late_ptr,
    timeout_ns,
    starts_ptr,
    counts_ptr,
    num_rows,
    num_experts,
    n,
    k,
    stride_be,
    stride_bk,
    stride_bn,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    PER_EXPERT: tl.constexpr,
    ARRIVED_PER_EXPERT: tl.constexpr,
    ARRIVED_ROWS: tl.constexpr,
    ARRIVED_WANT: tl.constexpr,
    CLOCK: tl.constexpr,
):
    """C = A @ B[e], or silu(A @ B[e]) * (A @ up[e]) with `up`, for the rows of each expert e.

    Scales (fp8): one per 128 values of a row of A, one per 128 x 128 of B; with c_scales C is
    written as fp8 with scales too. With `ready`, [E, PER_EXPERT], a tile adds 1 to the counter of
    its rows once it is stored (moe_p2p/moe/ready.py). A tile of C belongs to one expert; tiles of
    an expert with the same columns of B are consecutive, so that B is read once.

    With `arrived`, [E, ARRIVED_PER_EXPERT], rows of A are still arriving, in any order: a program
    takes next, of WINDOW of its tiles, the first whose rows are here. What is not here in time is
    noted in `late`, and C is NaN from there on.

    Example: counts [3, 0, 70], BLOCK_M 64, N two tiles wide: tiles 0..1 are expert 0, tiles 2..5
    expert 2: its rows 0..63 and 64..69 by the first block of columns, then by the second.
    """
    experts = tl.arange(0, EXPERTS)
    here = experts < num_experts
    if arrived_ptr is not None:
        # Counts are written once the first counter of each expert is above its rows.
        late = _await_counts(
            arrived_ptr + experts * ARRIVED_PER_EXPERT,
            here,
            ARRIVED_ROWS + 1,
            ARRIVED_PER_EXPERT,
            late_ptr,
            timeout_ns,
            CLOCK,
        )
        taken = tl.zeros((WINDOW,), tl.int32)
    counts = _count_rows(starts_ptr, counts_ptr, experts, here, num_rows)
    if arrived_ptr is not None:
        capacity = (num_rows // num_experts).to(tl.int32)
        counts = tl.where(here, tl.where(late > 0, capacity, tl.minimum(counts, capacity)), 0)
    tiles = tl.cdiv(counts, BLOCK_M) * tl.cdiv(n, BLOCK_N)
    ends = tl.cumsum(tiles, axis=0)
    num_tiles = tl.sum(tiles, axis=0)
    for turn in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        # --- which tile
        tile = turn
        if arrived_ptr is not None:
            at = (turn // tl.num_programs(0)) % WINDOW
            places = tl.arange(0, WINDOW)
            window = turn + (places - at) * tl.num_programs(0)
            taken = tl.where(at == 0, 0, taken)
            counter = _counters_of(
                window, experts, ends, counts, BLOCK_M, ARRIVED_PER_EXPERT, ARRIVED_ROWS
            )
            open_tiles = (taken == 0) & (window < num_tiles)
            place, late = _next_place(
                arrived_ptr, counter, open_tiles, ARRIVED_WANT, late, late_ptr, timeout_ns, CLOCK
            )
            taken = tl.where(places == place, 1, taken)
            tile = turn + (place - at) * tl.num_programs(0)
        expert = tl.sum((ends <= tile).to(tl.int32), axis=0)
        in_expert = tile - tl.max(tl.where(ends <= tile, ends, 0), axis=0)
        count = tl.max(tl.where(experts == expert, counts, 0), axis=0)
        num_row_tiles = tl.cdiv(count, BLOCK_M)
        column_tile = in_expert // num_row_tiles
        first = (in_expert % num_row_tiles) * BLOCK_M
        # 64-bit offsets only for the start of a matrix: within a tile 32 bits suffice and take half
        # the registers.
        first_row = tl.load(starts_ptr + expert).to(tl.int64) + first
        expert = expert.to(tl.int64)
        stored = tl.arange(0, BLOCK_M) < count - first
        # Rows past the last one read the last row again; they are not stored.
        row = tl.minimum(tl.arange(0, BLOCK_M), count - first - 1)
        column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)

        # --- sums over K
        inner = tl.arange(0, BLOCK_K)
        num_blocks = tl.cdiv(k, BLOCK_K)
        num_columns = tl.cdiv(n, BLOCK_N)
        a_tile_ptr = a_ptr + first_row * k
        b_tile_ptr = b_ptr + expert * stride_be
        a_at = row[:, None] * k + inner[None, :]
        b_at = inner[:, None] * stride_bk + column[None, :] * stride_bn
        scale_at = expert * num_blocks * num_columns + column_tile
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        total_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        steps = num_blocks
        if arrived_ptr is not None:
            steps = tl.where(late > 0, 0, num_blocks)
        for block in range(steps):
            left = k - block * BLOCK_K
            b_mask = (inner < left)[:, None] & (column < n)[None, :]
            a = _load(a_tile_ptr + a_at, (inner < left)[None, :], EVEN)
            a_scale = None
            b_scale_ptr = None
            up_scale_ptr = None
            if b_scales_ptr is not None:
                a_scale = tl.load(a_scales_ptr + first_row * num_blocks + row * num_blocks + block)
                b_scale_ptr = b_scales_ptr + scale_at + block * num_columns
            total = _add_product(
                a, _load(b_tile_ptr + b_at, b_mask, EVEN), total, a_scale, b_scale_ptr
            )
            if up_ptr is not None:
                if b_scales_ptr is not None:
                    up_scale_ptr = up_scales_ptr + scale_at + block * num_columns
                up = _load(up_ptr + expert * stride_be + b_at, b_mask, EVEN)
                total_up = _add_product(a, up, total_up, a_scale, up_scale_ptr)
            a_at += BLOCK_K
            b_at += BLOCK_K * stride_bk

        # --- out
        if up_ptr is not None:
            total = total * tl.sigmoid(total) * total_up
        if arrived_ptr is not None:
            total = tl.where(late > 0, float("nan"), total)
        if c_scales_ptr is not None:
            total, scale = quantize_block(total)  # BLOCK_N is 128: a row of the tile is a block
            c_scale_at = first_row * num_columns + row * num_columns + column_tile
            tl.store(c_scales_ptr + c_scale_at, scale, mask=stored)
        else:
            total = to_nearest(total, c_ptr.dtype.element_ty)
        c_at = first_row * n + row[:, None] * n + column[None, :]
        c_mask = stored[:, None] & (column < n)[None, :]
        tl.store(c_ptr + c_at, total, mask=c_mask)
        if ready_ptr is not None:
            tl.debug_barrier()  # all threads have stored; one of them releases
            counter = expert * PER_EXPERT + first // BLOCK_M
            tl.atomic_add(ready_ptr + counter, 1, sem="release")


@triton.jit(do_not_specialize=["num_rows"])
def weight_grad_kernel(
    a_ptr,
    grad_ptr,
    out_ptr,
    starts_ptr,
    counts_ptr,
    num_rows,
    n,
    k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[e] = A[rows of e].T @ grad[rows of e], one tile [BLOCK_K, BLOCK_N] of one expert.

    Example: an expert without rows gets a gradient of zeros; with one, the outer product.
    """
    expert = tl.program_id(1)
    num_columns = tl.cdiv(n, BLOCK_N)
    inner = (tl.program_id(0) // num_columns) * BLOCK_K + tl.arange(0, BLOCK_K)
    column = (tl.program_id(0) % num_columns) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.load(starts_ptr + expert).to(tl.int64)
    count = _count_rows(starts_ptr, counts_ptr, expert, True, num_rows)
    total = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for first in range(0, count, BLOCK_M):
        nth = first + tl.arange(0, BLOCK_M)
        row = start + nth
        mask = (nth < count)[:, None]
        a = tl.load(
            a_ptr + row[:, None] * k + inner[None, :], mask=mask & (inner < k)[None, :], other=0.0
        )
        grad = tl.load(
            grad_ptr + row[:, None] * n + column[None, :],
            mask=mask & (column < n)[None, :],
            other=0.0,
        )
        total = dot(tl.trans(a), grad, total)
    at = expert.to(tl.int64) * k * n + inner.to(tl.int64)[:, None] * n + column[None, :]
    mask = (inner < k)[:, None] & (column < n)[None, :]
    tl.store(out_ptr + at, to_nearest(total, out_ptr.dtype.element_ty), mask=mask)
