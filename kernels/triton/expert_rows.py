"""Rows grouped by expert and back, by a routing map, in Triton.

The kernels of moe_p2p/integrations/moe/megatron_permute.py, which has the same functions in torch.
Nothing here waits for the host. Importing this needs Triton; `import moe_p2p` does not.

Shapes: T tokens, E experts, R rows, H values of a row, C chunks of rows.

Rows of expert 0 come first, an expert's rows in the order of their tokens. `places` says which rows
a token has: int32 [T, 2 + 2 E], of each token

    [0] how many, n   [1] rows of all tokens   [2 : 2 + n] the rows   [2 + E : 2 + E + n] of experts

with experts ascending. What lies behind n is not set.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_p2p.kernels.triton.permute import permute_rows
from moe_p2p.kernels.triton.precision import to_nearest

_BLOCK_COLUMNS = 1024  # 8 values for each of 128 threads: a 16-byte load of bf16
_BLOCK_ROWS = 256  # of a chunk, written at once


@triton.jit(do_not_specialize=["num_tokens", "num_experts"])
def _places_kernel(
    routing_map_ptr, ends_ptr, places_ptr, num_tokens, num_experts, EXPERTS: tl.constexpr
):
    """The places of one token. ends: running count of the map's entries, expert by expert.

    Example: map [[1, 0], [1, 1]] has rows [token 0, token 1, token 1], ends [1, 2, 2, 3]: token 1
    has 2 of 3 rows: 1 of expert 0 and 2 of expert 1.
    """
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    at = routing_map_ptr + token * num_experts + expert
    chosen = tl.load(at, mask=expert < num_experts, other=0) != 0
    row = tl.load(ends_ptr + expert.to(tl.int64) * num_tokens + token, mask=chosen, other=0) - 1
    nth = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    list_ptr = places_ptr + token * (2 + 2 * num_experts)
    tl.store(list_ptr, tl.sum(chosen.to(tl.int32), axis=0))
    tl.store(list_ptr + 1, tl.load(ends_ptr + num_experts.to(tl.int64) * num_tokens - 1))
    tl.store(list_ptr + 2 + nth, row, mask=chosen)
    tl.store(list_ptr + 2 + num_experts + nth, expert, mask=chosen)


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """x, fp32 or fp64, as dtype: by way of fp32, as torch has it."""
    if dtype != tl.float64:
        x = to_nearest(x.to(tl.float32), dtype)
    return x.to(dtype)


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _to_rows_kernel(
    places_ptr,
    x_ptr,
    weights_ptr,
    probs_ptr,
    rows_ptr,
    row_probs_ptr,
    num_tokens,
    num_rows,
    num_experts,
    hidden_dim,
    ACC: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """rows[each row of t] = x[t], or weights[t, e] * x[t]; COLUMNS values of one token.

    row_probs[row] = probs[t, e]. Rows past those of all tokens are zeros: token t clears every
    T-th of them, from the t-th on. Example: 2 tokens with 3 rows, R 6: token 0 clears 3 and 5.
    """
    token = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < hidden_dim
    list_ptr = places_ptr + token.to(tl.int64) * (2 + 2 * num_experts)
    x = tl.load(x_ptr + token.to(tl.int64) * hidden_dim + column, mask=inside, other=0)
    for nth in range(tl.load(list_ptr)):
        row = tl.load(list_ptr + 2 + nth).to(tl.int64)
        pair = token.to(tl.int64) * num_experts + tl.load(list_ptr + 2 + num_experts + nth)
        y = x
        if weights_ptr is not None:
            y = _rounded(x.to(ACC) * tl.load(weights_ptr + pair).to(ACC), rows_ptr.dtype.element_ty)
        width = tl.where(row < num_rows, hidden_dim, 0)  # values to write; 0: no such row
        tl.store(rows_ptr + row * hidden_dim + column, y, mask=column < width)
        if probs_ptr is not None:
            mine = tl.program_id(1) < tl.where(row < num_rows, 1, 0)
            tl.store(row_probs_ptr + row, tl.load(probs_ptr + pair), mask=mine)
    nothing = tl.zeros((COLUMNS,), rows_ptr.dtype.element_ty)
    for row in range(tl.load(list_ptr + 1).to(tl.int64) + token, num_rows, num_tokens):
        tl.store(rows_ptr + row * hidden_dim + column, nothing, mask=inside)
        if probs_ptr is not None:
            tl.store(row_probs_ptr + row, 0.0, mask=tl.program_id(1) < 1)


@triton.jit(do_not_specialize=["num_rows"])
def _sum_kernel(
    places_ptr,
    rows_ptr,
    weights_ptr,
    row_probs_ptr,
    out_ptr,
    probs_ptr,
    num_rows,
    num_experts,
    hidden_dim,
    ACC: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out[t] = sum of t's rows, each times weights[t, e]; COLUMNS values of one token.

    Experts ascending, each product rounded before it is added. probs[t, e] = row_probs[row].
    Example: rows 1 and 2 of a token with weights 0.25, 0.75: 0.25 * rows[1] + 0.75 * rows[2].
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    list_ptr = places_ptr + token * (2 + 2 * num_experts)
    total = tl.zeros((COLUMNS,), ACC)
    for nth in range(tl.load(list_ptr)):
        row = tl.load(list_ptr + 2 + nth).to(tl.int64)
        pair = token * num_experts + tl.load(list_ptr + 2 + num_experts + nth)
        width = tl.where(row < num_rows, hidden_dim, 0)  # values to read; 0: a row that was cut off
        x = tl.load(rows_ptr + row * hidden_dim + column, mask=column < width, other=0).to(ACC)
        if weights_ptr is not None:
            x *= tl.load(weights_ptr + pair).to(ACC)
        total += x
        if row_probs_ptr is not None:
            mine = tl.program_id(1) < tl.where(row < num_rows, 1, 0)
            tl.store(probs_ptr + pair, tl.load(row_probs_ptr + row, mask=mine), mask=mine)
    total = _rounded(total, out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * hidden_dim + column, total, mask=column < hidden_dim)


@triton.jit(do_not_specialize=["num_rows"])
def _dots_kernel(
    places_ptr,
    x_ptr,
    rows_ptr,
    out_ptr,
    num_rows,
    num_experts,
    hidden_dim,
    ACC: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out[t, e] = the scalar product of x[t] and t's row of e, for one token.

    Example: a token [1, 2] with the row [3, 4] of expert 1: out[t, 1] = 11.
    """
    token = tl.program_id(0).to(tl.int64)
    list_ptr = places_ptr + token * (2 + 2 * num_experts)
    for nth in range(tl.load(list_ptr)):
        row = tl.load(list_ptr + 2 + nth).to(tl.int64)
        width = tl.where(row < num_rows, hidden_dim, 0)
        total = tl.zeros((COLUMNS,), ACC)
        for first in range(0, hidden_dim, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            x = tl.load(x_ptr + token * hidden_dim + column, mask=column < width, other=0)
            y = tl.load(rows_ptr + row * hidden_dim + column, mask=column < width, other=0)
            total += x.to(ACC) * y.to(ACC)
        dot = _rounded(tl.sum(total, axis=0), out_ptr.dtype.element_ty)
        expert = tl.load(list_ptr + 2 + num_experts + nth)
        tl.store(out_ptr + token * num_experts + expert, dot)


@triton.jit(do_not_specialize=["num_rows"])
def _chunks_kernel(
    sizes_ptr,
    order_ptr,
    index_ptr,
    inverse_ptr,
    num_rows,
    num_chunks,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The index of one chunk's rows, and its inverse; the last one's program adds what is left.

    Example: sizes [2, 1], order [1, 0]: index [2, 0, 1], inverse [1, 2, 0].
    """
    program = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS)
    order = tl.load(order_ptr + chunk, mask=chunk < program, other=0)
    target = tl.sum(tl.load(sizes_ptr + order, mask=chunk < program, other=0), axis=0)
    mine = tl.load(order_ptr + program)
    source = tl.sum(tl.load(sizes_ptr + chunk, mask=chunk < mine, other=0), axis=0)
    count = tl.load(sizes_ptr + mine)
    for first in range(0, count, ROWS):
        nth = first + tl.arange(0, ROWS)
        inside = nth < count
        tl.store(index_ptr + target + nth, source + nth, mask=inside & (target + nth < num_rows))
        tl.store(inverse_ptr + source + nth, target + nth, mask=inside & (source + nth < num_rows))
    if program == num_chunks - 1:
        for first in range(target + count, num_rows, ROWS):
            row = first + tl.arange(0, ROWS)
            tl.store(index_ptr + row, row, mask=row < num_rows)
            tl.store(inverse_ptr + row, row, mask=row < num_rows)


def list_places(routing_map: Tensor) -> Tensor:
    """places of a routing map [T, E] bool; see the top of this file."""
    num_tokens, num_experts = routing_map.shape
    places = routing_map.new_empty((num_tokens, 2 + 2 * num_experts), dtype=torch.int32)
    if num_tokens:
        with torch.cuda.device_of(routing_map):
            ends = routing_map.t().reshape(-1).cumsum(0, dtype=torch.int32)
            _places_kernel[(num_tokens,)](
                routing_map.contiguous().view(torch.uint8),
                ends,
                places,
                num_tokens,
                num_experts,
                EXPERTS=triton.next_power_of_2(num_experts),
                num_warps=1,
            )
    return places


def to_rows(
    x: Tensor,
    places: Tensor,
    num_rows: int,
    *,
    weights: Tensor | None = None,
    probs: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Returns rows [R, H], each x [T, H] of its token, and row_probs [R] of probs [T, E].

    Rows that are no token's are zeros. weights: [T, E], multiplied in fp32, or fp64 if one is it.
    """
    rows = x.new_empty((num_rows, x.shape[1]))
    row_probs = None if probs is None else probs.new_empty(num_rows)
    if not len(x):
        return rows.zero_(), row_probs if row_probs is None else row_probs.zero_()
    tensors = (x, weights, probs, rows, row_probs)
    scalars = (x.shape[0], num_rows, _num_experts(places), x.shape[1])
    _launch(_to_rows_kernel, places, tensors, scalars, wide=_is_wide(x, weights))
    return rows, row_probs


def sum_rows(
    rows: Tensor,
    places: Tensor,
    *,
    weights: Tensor | None = None,
    row_probs: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Returns out [T, H], each the sum of its rows [R, H], and probs [T, E] of row_probs [R].

    Summed in fp32, in fp64 if rows or weights [T, E] are, experts ascending, and rounded once.
    probs are 0 where the token has no row.
    """
    num_tokens, num_experts = places.shape[0], _num_experts(places)
    out = rows.new_empty((num_tokens, rows.shape[1]))
    probs = None if row_probs is None else row_probs.new_zeros((num_tokens, num_experts))
    tensors = (rows, weights, row_probs, out, probs)
    scalars = (rows.shape[0], num_experts, rows.shape[1])
    _launch(_sum_kernel, places, tensors, scalars, wide=_is_wide(rows, weights))
    return out, probs


def dots(x: Tensor, rows: Tensor, places: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, E] of dtype: x [T, H] times the token's row of the expert; 0 where it has none."""
    num_experts = _num_experts(places)
    out = x.new_zeros((x.shape[0], num_experts), dtype=dtype)
    scalars = (rows.shape[0], num_experts, x.shape[1])
    wide = _is_wide(x, rows, out)
    _launch(_dots_kernel, places, (x, rows, out), scalars, wide=wide, blocks=1)
    return out


def chunk_index(sizes: Tensor, order: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Returns for rows in chunks of sizes [C] the index that puts them in order [C], and its
    inverse: int32 [R]. Rows past the sum of sizes stay where they are."""
    index, inverse = sizes.new_empty((2, num_rows), dtype=torch.int32)
    if num_rows:
        with torch.cuda.device_of(sizes):
            _chunks_kernel[(len(sizes),)](
                sizes.contiguous(),
                order.contiguous(),
                index,
                inverse,
                num_rows,
                len(sizes),
                CHUNKS=triton.next_power_of_2(len(sizes)),
                ROWS=_BLOCK_ROWS,
                num_warps=4,
            )
    return index, inverse


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index], [R, ...], of x [T, ...]."""
    if x.dim() == 2:
        return permute_rows(x, index)
    return x.index_select(0, index)


def _num_experts(places: Tensor) -> int:
    return (places.shape[1] - 2) // 2


def _launch(
    kernel: triton.JITFunction,
    places: Tensor,
    tensors: tuple[Tensor | None, ...],
    scalars: tuple[int, ...],
    *,
    wide: bool,
    blocks: int | None = None,
) -> None:
    """A program for each token and block of columns; blocks: programs of a token instead.

    The last of scalars is H. wide: in fp64.
    """
    if not len(places):
        return
    columns = min(_BLOCK_COLUMNS, triton.next_power_of_2(scalars[-1]))
    with torch.cuda.device_of(places):
        kernel[(len(places), blocks or triton.cdiv(scalars[-1], columns))](
            places,
            *(None if t is None else t.contiguous() for t in tensors),
            *scalars,
            ACC=tl.float64 if wide else tl.float32,
            COLUMNS=columns,
            num_warps=4,
            enable_fp_fusion=False,  # a fused multiply-add would skip the rounding of products
        )


def _is_wide(*tensors: Tensor | None) -> bool:
    return any(t is not None and t.dtype == torch.float64 for t in tensors)
