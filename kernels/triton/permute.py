"""Permutes rows by index in Triton: gather, and its inverse, a weighted sum.

For engines that sort tokens by expert themselves, and for baselines that move rows with a plain
all-to-all. No gradients. Importing this needs Triton; `import moe_p2p` does not.

Shapes: T tokens, K rows of each token, R rows, H values of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_p2p import errors
from moe_p2p.kernels.triton.precision import to_nearest

_BLOCK_COLUMNS = 1024  # 8 values for each of 128 threads: a 16-byte load of bf16


@triton.jit
def _permute_kernel(
    x_ptr, index_ptr, weights_ptr, out_ptr, num_source_rows, hidden_dim, COLUMNS: tl.constexpr
):
    """out[i] = weights[i] * x[index[i]], one row and COLUMNS values of it.

    Example: index [2, -1] copies row 2 of x to row 0 and zeros row 1.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    source = tl.load(index_ptr + row).to(tl.int64)
    inside = (source >= 0) & (source < num_source_rows)
    width = tl.where(inside, hidden_dim, 0)  # values to read; 0: no such row
    x = tl.load(x_ptr + source * hidden_dim + column, mask=column < width, other=0)
    if weights_ptr is not None:
        x = x.to(tl.float32) * tl.load(weights_ptr + row)
        x = to_nearest(x, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * hidden_dim + column, x, mask=column < hidden_dim)


@triton.jit
def _unpermute_kernel(
    rows_ptr,
    index_ptr,
    weights_ptr,
    out_ptr,
    num_source_rows,
    hidden_dim,
    TOPK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out[t] = sum over k of weights[t, k] * rows[index[t, k]], COLUMNS values of one token.

    Example: index [[0, 3]] with weights [[0.25, 0.75]] is 0.25 * rows[0] + 0.75 * rows[3].
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for k in range(TOPK):
        source = tl.load(index_ptr + token * TOPK + k).to(tl.int64)
        inside = (source >= 0) & (source < num_source_rows)
        width = tl.where(inside, hidden_dim, 0)
        x = tl.load(rows_ptr + source * hidden_dim + column, mask=column < width, other=0)
        x = x.to(tl.float32)
        if weights_ptr is not None:
            x *= tl.load(weights_ptr + token * TOPK + k, mask=inside, other=0.0)
        total += x
    total = to_nearest(total, out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * hidden_dim + column, total, mask=column < hidden_dim)


def permute_rows(
    x: Tensor, index: Tensor, *, weights: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """out[i] = x[index[i]], [R, H], of any type of x [T, H].

    index: [R] int32 or int64 rows of x; -1 gives a row of zeros.
    weights: [R] fp32, multiplied in fp32; not for fp8. None: 1.
    out: [R, H], contiguous, is written. None: a new tensor of the type of x.

    Raises InvalidArgumentError when shapes or types do not fit. Example: with the order of a sort
    by expert, permute_rows(x, order // K) puts the rows of each expert side by side.
    """
    errors.require(x.dim() == 2, f"x is {tuple(x.shape)}, must be [T, H]")
    errors.require(index.dim() == 1, f"index is {tuple(index.shape)}, must be [R]")
    _check_weights(weights, index)
    raw = x.element_size() == 1
    errors.require(
        not raw or weights is None, "weights do not go with fp8 rows: their scales carry them"
    )
    out = _output(out, x, index.shape[0])
    errors.require(not raw or out.dtype == x.dtype, f"out is {out.dtype}, must be {x.dtype} like x")
    tensors = (x.view(torch.uint8), out.view(torch.uint8)) if raw else (x, out)
    _launch(_permute_kernel, tensors, index, weights, {})
    return out


def unpermute_sum(
    rows: Tensor, index: Tensor, weights: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """out[t] = sum over k of weights[t, k] * rows[index[t, k]], [T, H].

    rows: [R, H] bf16, fp16 or fp32. index: [T, K] int32 or int64; -1: nothing.
    weights: [T, K] fp32. None: 1. out: as for permute_rows.

    Summed in fp32 from zero, k ascending, each product rounded before it is added: deterministic,
    and bit for bit as combine within one rank. Raises InvalidArgumentError when shapes do not fit.
    """
    errors.require(rows.dim() == 2, f"rows is {tuple(rows.shape)}, must be [R, H]")
    errors.require(index.dim() == 2, f"index is {tuple(index.shape)}, must be [T, K]")
    _check_weights(weights, index)
    out = _output(out, rows, index.shape[0])
    _launch(_unpermute_kernel, (rows, out), index, weights, {"TOPK": index.shape[1]})
    return out


def _check_weights(weights: Tensor | None, index: Tensor) -> None:
    errors.require(
        weights is None or (weights.shape == index.shape and weights.dtype == torch.float32),
        "weights must be float32 and of the shape of index, "
        f"{tuple(index.shape)}; got {None if weights is None else (weights.dtype, weights.shape)}",
    )


def _output(out: Tensor | None, x: Tensor, num_rows: int) -> Tensor:
    want = (num_rows, x.shape[1])
    if out is None:
        return x.new_empty(want)
    errors.require(
        out.shape == want and out.is_contiguous(),
        f"out is {tuple(out.shape)}, must be {want} and contiguous",
    )
    return out


def _launch(
    kernel: triton.JITFunction,
    tensors: tuple[Tensor, Tensor],
    index: Tensor,
    weights: Tensor | None,
    constants: dict[str, int],
) -> None:
    """Runs a kernel from the first tensor to the second, a program per block of a row's columns."""
    x, out = tensors
    if out.numel() == 0:
        return
    block = min(_BLOCK_COLUMNS, triton.next_power_of_2(x.shape[1]))
    grid = (out.shape[0], triton.cdiv(x.shape[1], block))
    weights = None if weights is None else weights.contiguous()
    with torch.cuda.device_of(x):
        kernel[grid](
            x.contiguous(),
            index.contiguous(),
            weights,
            out,
            x.shape[0],
            x.shape[1],
            **constants,
            COLUMNS=block,
            num_warps=4,
            enable_fp_fusion=False,  # a fused multiply-add would skip the rounding of products
        )
