"""Rounding and products that are equal on the GPU and under Triton's interpreter.

On the GPU these are casts and dots. The interpreter (TRITON_INTERPRET=1, used by tests on the CPU)
truncates to bf16, loses carries into the exponent of e4m3, does not know e4m3's NaN and multiplies
the bits of bf16 as integers. Only there, values are prepared first so that its result is exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _drop_bits(x, DROPPED: tl.constexpr):
    """Rounds off DROPPED mantissa bits of fp32 x. Example: 22 bits: 1.75 to 2.0, 1.25 to 1.0."""
    bits = x.to(tl.uint32, bitcast=True)
    odd = (bits >> DROPPED) & 1
    bits = (bits + odd + ((1 << (DROPPED - 1)) - 1)) >> DROPPED << DROPPED
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _to_e4m3_values(x):
    """Rounds to values of e4m3. Example: 17 becomes 16, -0.001 becomes -0.0."""
    # Below 2**-6, e4m3 values are multiples of 2**-9, which is the last bit of fp32 near 24576.
    small = (tl.abs(x) + 24576.0) - 24576.0
    size = tl.where(tl.abs(x) < 0.015625, small, _drop_bits(tl.abs(x), 20))
    sign = x.to(tl.uint32, bitcast=True) & 0x80000000
    return (size.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def to_nearest(x, dtype: tl.constexpr):
    """Rounds fp32 x to dtype; e4m3 needs clamped x. Example: 1.01 becomes bf16 1.0078."""
    if _INTERPRETED:
        if dtype == tl.bfloat16:
            x = tl.where(x == x, _drop_bits(x, 16), x)
        elif dtype == tl.float8e4nv:
            code = _to_e4m3_values(x).to(dtype).to(tl.uint8, bitcast=True)
            return tl.where(x == x, code, 0x7F).to(tl.uint8).to(dtype, bitcast=True)
    return x.to(dtype)


@triton.jit
def widen(x):
    """x as fp32. Example: e4m3 0x7f is NaN."""
    wide = x.to(tl.float32)
    if _INTERPRETED and x.dtype == tl.float8e4nv:
        wide = tl.where((x.to(tl.uint8, bitcast=True) & 0x7F) == 0x7F, float("nan"), wide)
    return wide


@triton.jit
def dot_fp8(a, b):
    """a @ b in fp32, of e4m3 operands."""
    if _INTERPRETED:
        a = widen(a)
        b = widen(b)
    return tl.dot(a, b, out_dtype=tl.float32)


@triton.jit
def dot(a, b, total):
    """total + a @ b, in fp32; fp32 operands are not rounded to tf32."""
    if _INTERPRETED and a.dtype == tl.bfloat16:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")
