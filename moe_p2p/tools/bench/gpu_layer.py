"""The experts of a full layer on a GPU: SwiGLU by the grouped matrix products of kernels/triton.

Shapes: R rows of this rank's experts, E_local of them, H hidden size, F width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_p2p.tools.bench.cases import Job
from moe_p2p.tools.bench.options import Options

# (x, scales, counts) from dispatch -> the experts' answers, shaped like x
Experts = Callable[[Tensor, Tensor | None, Tensor], Tensor]

# Two systems sum a token's rows in different orders, in steps of 2^-8 of bf16; more is an error.
MAX_DIFFERENCE = 0.02


def make_experts(options: Options, job: Job, rank: int) -> Experts:
    """Makes random weights of this rank's experts: fp8 with block scales if dispatch quantizes."""
    from moe_p2p.kernels.triton.grouped_ops import Fp8, grouped_gemm, grouped_swiglu
    from moe_p2p.kernels.triton.quantize import quantize_weights  # importing needs Triton

    torch.manual_seed(rank)
    count, hidden, width = len(job.topology.local_experts(rank)), job.hidden_dim, options.ffn

    def weight(k: int, n: int) -> Tensor | Fp8:
        plain = torch.randn(count, k, n, dtype=options.x_dtype, device="cuda").mul_(k**-0.5)
        return Fp8(*quantize_weights(plain)) if options.quantize else plain

    gate, up, down = weight(hidden, width), weight(hidden, width), weight(width, hidden)

    def experts(x: Tensor, scales: Tensor | None, counts: Tensor) -> Tensor:
        rows = x if scales is None else Fp8(x, scales.contiguous())
        return grouped_gemm(grouped_swiglu(rows, gate, up, counts), down, counts)

    return experts


def difference(got: Tensor, want: Tensor) -> float:
    """Returns the distance of two results, relative to the second one's length."""
    wide = want.double()
    return float((got.double() - wide).norm() / wide.norm().clamp_min(1e-30))
