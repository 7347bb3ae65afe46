"""fp8 with block scales in Triton: rows in dispatch's format and back; weights in square blocks.

For users who quantize outside of dispatch, for the example layer and for baselines. Bit for bit
like moe_p2p/machine/fp8.py. Importing this needs Triton; `import moe_p2p` does not.

Shapes: [..., H] rows of H values; E experts, K and N the sizes of a weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_p2p import errors
from moe_p2p.kernels.triton.e4m3 import (
    at_least,
    largest,
    magnitudes,
    multiplier_of,
    scale_of,
    to_e4m3,
)
from moe_p2p.kernels.triton.precision import to_nearest, widen
from moe_p2p.machine import fp8
from moe_p2p.moe.shape import SCALE_BLOCK, num_scales  # a block of weights is square

_FP8 = torch.float8_e4m3fn
_BLOCK_ROWS = 16  # 16 x 128 values keep one warp group busy with 16-byte loads
_PROGRAMS = 8192  # about so many of _swiglu_kernel: rooms are larger than the rows in them


@triton.jit
def quantize_block(x):
    """fp32 [rows, 128] -> (e4m3 [rows, 128], fp32 scales [rows]).

    Example: a row whose largest value is 2.0 has scale 0.004464, and 1.0 becomes 224.
    """
    amax = at_least(largest(tl.max(magnitudes(x), axis=1)).to(tl.float32, bitcast=True))
    return to_e4m3(x * multiplier_of(amax)[:, None]), scale_of(amax)


@triton.jit
def _quantize_kernel(x_ptr, q_ptr, scales_ptr, count_ptr, num_rows, hidden_dim, ROWS: tl.constexpr):
    """One tile [ROWS, 128]. Example: H = 200 has tiles of columns 0..127 and 128..199."""
    if count_ptr is not None:
        num_rows = tl.minimum(tl.load(count_ptr).to(tl.int32), num_rows)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    mask = (row < num_rows)[:, None] & (column < hidden_dim)[None, :]
    at = row.to(tl.int64)[:, None] * hidden_dim + column[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    q, scale = quantize_block(x)
    tl.store(q_ptr + at, q, mask=mask)
    scale_at = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(scales_ptr + scale_at, scale, mask=row < num_rows)


@triton.jit
def _dequantize_kernel(
    q_ptr, scales_ptr, x_ptr, count_ptr, num_rows, hidden_dim, ROWS: tl.constexpr
):
    """One tile [ROWS, 128]. Example: q = 224 with scale 0.004464 becomes 1.0."""
    if count_ptr is not None:
        num_rows = tl.minimum(tl.load(count_ptr).to(tl.int32), num_rows)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    mask = (row < num_rows)[:, None] & (column < hidden_dim)[None, :]
    at = row.to(tl.int64)[:, None] * hidden_dim + column[None, :]
    scale_at = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    scale = tl.load(scales_ptr + scale_at, mask=row < num_rows, other=0.0)
    x = widen(tl.load(q_ptr + at, mask=mask, other=0.0)) * scale[:, None]
    tl.store(x_ptr + at, to_nearest(x, x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    scales_ptr,
    counts_ptr,
    stride,
    capacity,
    width,
    scale_rows,
    ROWS: tl.constexpr,
):
    """Rows of one expert in 128 columns: silu(gate) * up, as fp8 where there are scales.

    Programs of an expert take ROWS rows in turn. Example: with counts [20, 0], ROWS 16 and two
    programs an expert, the first takes rows 0 to 15 of expert 0, the second rows 16 to 19.
    """
    expert = tl.program_id(0).to(tl.int64)
    count = tl.minimum(tl.load(counts_ptr + expert).to(tl.int32), capacity)
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    for first in range(tl.program_id(2) * ROWS, count, tl.num_programs(2) * ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < count)[:, None] & (column < width)[None, :]
        at = (expert * capacity + row)[:, None] * width + column[None, :]
        from_at = (expert * capacity + row)[:, None] * stride + column[None, :]
        gate = tl.load(gate_ptr + from_at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + from_at, mask=mask, other=0.0).to(tl.float32)
        value = gate * tl.sigmoid(gate) * up
        if scales_ptr is None:
            tl.store(out_ptr + at, to_nearest(value, out_ptr.dtype.element_ty), mask=mask)
        else:
            q, scale = quantize_block(value)
            tl.store(out_ptr + at, q, mask=mask)
            scale_at = (expert * tl.num_programs(1) + tl.program_id(1)) * scale_rows + row
            tl.store(scales_ptr + scale_at, scale, mask=row < count)


def swiglu(
    gate: Tensor, up: Tensor, counts: Tensor, *, quantize: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """silu(gate) * up [E, C, F] for counts[e] rows of expert e; halves of [E, C, 2 F] too.

    Returns [E, C, F] of gate's type, or with quantize e4m3 and fp32 scales [E, C, ceil(F / 128)]
    that lie column by column, in columns of a multiple of 4 rows. Other rows are undefined. No
    gradient. Raises InvalidArgumentError when shapes, or places in memory, do not fit.
    """
    fits = gate.dim() == 3 and gate.shape == up.shape and gate.stride() == up.stride()
    errors.require(
        fits and gate.stride(2) == 1 and gate.stride(0) == gate.shape[1] * gate.stride(1),
        f"gate {tuple(gate.shape)} {gate.stride()} and up {tuple(up.shape)} {up.stride()} must be "
        "[E, C, F] and alike, with rows one behind the other",
    )
    num_experts, capacity, width = gate.shape
    errors.require(
        counts.shape == (num_experts,) and counts.dtype in (torch.int32, torch.int64),
        f"counts is {tuple(counts.shape)} of {counts.dtype}, must be [{num_experts}] of integers",
    )
    out = gate.new_empty((num_experts, capacity, width), dtype=_FP8 if quantize else gate.dtype)
    blocks, scale_rows = num_scales(width), -(-capacity // 4) * 4
    shape = num_experts, blocks, scale_rows
    scales = gate.new_empty(shape, dtype=torch.float32) if quantize else None
    if out.numel():
        most = max(1, _PROGRAMS // (num_experts * blocks))
        turns = min(triton.cdiv(capacity, _BLOCK_ROWS), most)
        sizes = gate.stride(1), capacity, width, scale_rows
        with torch.cuda.device_of(gate):
            _swiglu_kernel[(num_experts, blocks, turns)](
                gate, up, out, scales, counts, *sizes, ROWS=_BLOCK_ROWS
            )
    return out if scales is None else (out, scales.transpose(1, 2)[:, :capacity])


@torch.library.custom_op("moe_p2p::fp8_quantize", mutates_args=())
def _quantize(x: Tensor, num_rows: Tensor | None) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    q, scales = _quantized_like(x, num_rows)
    _launch(_quantize_kernel, x, (x, q, scales), num_rows)
    return q, scales


@_quantize.register_fake
def _quantized_like(x: Tensor, num_rows: Tensor | None) -> tuple[Tensor, Tensor]:
    scales = x.new_empty((*x.shape[:-1], num_scales(x.shape[-1])), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=_FP8), scales


def quantize(x: Tensor, *, num_rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """e4m3 [..., H] and fp32 scales [..., ceil(H / 128)] of bf16, fp16 or fp32 x [..., H].

    num_rows: one int on the device of x; later rows of the result are undefined. None: all rows.

    amax = max(|x|, 1e-4) of 128 values, scale = amax / 448, q = e4m3(x * (448 / amax)), to nearest
    even. A block with an inf or a NaN is NaN as a whole; reference.quantize() specifies the
    bits. No gradient. Example: quantize(torch.ones(1, 256)) gives q = 448 everywhere and scales
    [[1 / 448, 1 / 448]].
    """
    quantized: tuple[Tensor, Tensor] = _quantize(x.detach(), num_rows)
    return quantized


def dequantize(
    q: Tensor,
    scales: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    num_rows: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """q * scales, [..., H] of dtype, from e4m3 [..., H] and scales [..., ceil(H / 128)].

    num_rows: one int on the device of q; later rows are left unchanged. None: all rows.
    out: contiguous, is written; its type replaces `dtype`. None: a new tensor.

    Raises InvalidArgumentError when shapes do not fit.
    """
    want = (*q.shape[:-1], num_scales(q.shape[-1]))
    errors.require(
        scales.shape == want, f"scales is {tuple(scales.shape)}, must be {want} for this q"
    )
    if out is None:
        out = q.new_empty(q.shape, dtype=dtype)
    errors.require(
        out.shape == q.shape and out.is_contiguous(),
        f"out is {tuple(out.shape)}, must be {tuple(q.shape)} and contiguous",
    )
    _launch(_dequantize_kernel, q, (q.contiguous(), scales.contiguous(), out), num_rows)
    return out


def quantize_weights(weights: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 [E, K, N] and fp32 scales [E, ceil(K / 128), ceil(N / 128)], one per 128 x 128 block.

    Runs once per weight, so in plain torch. K is contiguous in the result (a view of [E, N, K]):
    tensor cores read fp8 only in that order.
    """
    num_experts, k, n = weights.shape
    padded = weights.new_zeros(
        num_experts, *(num_scales(side) * SCALE_BLOCK for side in (k, n)), dtype=torch.float32
    )
    padded[:, :k, :n] = weights.detach()
    blocks = padded.unflatten(2, (-1, SCALE_BLOCK)).unflatten(1, (-1, SCALE_BLOCK))
    scales, multiplier = fp8.factors(fp8.largest(blocks, (2, 4)))
    q = fp8.to_e4m3(blocks * multiplier).flatten(3).flatten(1, 2)
    q = q[:, :k, :n].transpose(1, 2).contiguous()
    return q.transpose(1, 2), scales[:, :, 0, :, 0].contiguous()


def _launch(
    kernel: triton.JITFunction, like: Tensor, tensors: tuple[Tensor, ...], num_rows: Tensor | None
) -> None:
    """Runs a kernel over tiles of `like` [..., H]."""
    if like.numel() == 0:
        return
    hidden_dim = like.shape[-1]
    rows = like.numel() // hidden_dim
    grid = (triton.cdiv(rows, _BLOCK_ROWS), num_scales(hidden_dim))
    with torch.cuda.device_of(like):
        kernel[grid](*tensors, num_rows, rows, hidden_dim, ROWS=_BLOCK_ROWS)
