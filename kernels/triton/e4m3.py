"""fp8 in blocks, the arithmetic of Triton kernels: bit for bit moe_p2p/machine/fp8.py.

A block's scale is amax / 448, its values are e4m3(x * (448 / amax)), and amax is at least 1e-4; it
is inf where the block holds an inf or a NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_p2p.kernels.triton.precision import to_nearest


@triton.jit
def magnitudes(x):
    """Bits of fp32 |x|, which compare like magnitudes, NaN above inf. Example: 2 ** 30 of -2.0."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def largest(bits):
    """The bits of a block's amax, from its largest magnitude: inf for a NaN."""
    return tl.minimum(bits, 0x7F800000)


@triton.jit
def at_least(largest):
    """amax of blocks by their largest magnitudes, from 1e-4 on."""
    return tl.maximum(largest, 1e-4)


# div_rn rounds to nearest; Triton's `/` does not, and bits must equal torch's.
@triton.jit
def scale_of(amax):
    """Example: 2.0 has the scale 0.004464."""
    return tl.div_rn(amax, 448.0)


@triton.jit
def multiplier_of(amax):
    """What values of a block are multiplied by, of a tensor. Example: 224.0 for 2.0."""
    return tl.div_rn(tl.full([1], 448.0, tl.float32), amax)


@triton.jit
def to_e4m3(scaled):
    """Rounds fp32 to nearest even, saturating; a NaN is 0x7f. Example: 500.0 becomes 448."""
    scaled = tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return to_nearest(scaled, tl.float8e4nv)
