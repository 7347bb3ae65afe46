"""The experts of a full layer on a GPU: SwiGLU of grouped matrix products.

The products are kernels/triton's, torch's, or another library's (--gemm MODULE:FUNCTION):

    def make(gate, up, down):       # weights of this rank's experts, [E_local, K, N] each: tensors,
        ...                         # or, if dispatch quantizes, Fp8(values, scales), with a scale
        return experts              # per 128 x 128 values, values[e] column by column
    def experts(x, scales, counts): # rows as dispatch gives them, padded [E_local, capacity, H] or
        ...                         # grouped [R, H], consecutive; counts [E_local] on the device
        return y                    # bf16, shaped like x; rows of no expert may hold anything

It is called in CUDA graphs: it may not wait for the device.

Shapes: R rows of this rank's experts, E_local of them, H hidden size, F width of an expert.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from moe_p2p.bench.cases import Job
from moe_p2p.bench.options import Options

# (x, scales, counts) from dispatch -> the experts' answers, shaped like x
Experts = Callable[[Tensor, Tensor | None, Tensor], Tensor]
Make = Callable[[Any, Any, Any], Experts]

# Two systems sum a token's rows in different orders, in steps of 2^-8 of bf16; more is an error.
MAX_DIFFERENCE = 0.02
TRIALS = 5  # of each of the products that "auto" chooses from, at the first rows


# MegaMoE's figures, us of a whole layer on 8 H200 by tokens of a rank: DeepGEMM pull request 383,
# fp8. It names the hidden sizes alone, neither the width of the first layer nor the top-k of the
# second: these are the models that it is for.
PUBLISHED_US: dict[str, dict[int, float]] = {
    "deepseek-v4-flash": {8: 225.0, 128: 265.0},
    "deepseek-v4-pro": {8: 637.0, 8192: 7939.0},
}


def published(options: Options) -> list[str]:
    """Returns what others published of this layer, in sentences."""
    known = PUBLISHED_US.get(options.layer, {})
    return [
        f"MegaMoE on 8 H200, published, not measured here: layer {options.layer} at T {tokens} in "
        f"{known[tokens]:,.1f} us"
        for tokens in options.tokens
        if tokens in known
    ]


def make_experts(options: Options, job: Job, rank: int) -> Experts:
    """Makes random weights of this rank's experts: fp8 with block scales if dispatch quantizes."""
    from moe_p2p.kernels.triton.grouped_ops import Fp8
    from moe_p2p.kernels.triton.quantize import quantize_weights  # importing needs Triton

    torch.manual_seed(rank)
    count, hidden, width = len(job.topology.local_experts(rank)), job.hidden_dim, options.ffn

    def weight(k: int, n: int) -> Tensor | Fp8:
        plain = torch.randn(count, k, n, dtype=options.x_dtype, device=options.device)
        plain.mul_(k**-0.5)
        return Fp8(*quantize_weights(plain)) if options.quantize else plain

    weights = weight(hidden, width), weight(hidden, width), weight(width, hidden)
    return experts_of(options.gemm, *weights)


def experts_of(gemm: str, gate: Any, up: Any, down: Any) -> Experts:
    """gemm: "triton", "torch", "auto": the faster of these, or MODULE:FUNCTION."""
    if gemm == "auto":
        return Fastest([make(gate, up, down) for make in (of_triton, of_torch)])
    if gemm in MAKERS:
        return MAKERS[gemm](gate, up, down)
    module, _, function = gemm.partition(":")
    make: Make = getattr(importlib.import_module(module), function)
    return make(gate, up, down)


def of_triton(gate: Any, up: Any, down: Any) -> Experts:
    from moe_p2p.kernels.triton.grouped_ops import Fp8, grouped_gemm, grouped_swiglu

    def experts(x: Tensor, scales: Tensor | None, counts: Tensor) -> Tensor:
        rows = x if scales is None else Fp8(x, scales.contiguous())
        return grouped_gemm(grouped_swiglu(rows, gate, up, counts), down, counts)

    return experts


def of_torch(gate: Any, up: Any, down: Any) -> Experts:
    """In bf16 where rows are fp8: torch has no grouped product with scales of blocks."""
    from moe_p2p.kernels.triton.quantize import dequantize

    wide = [_in_bf16(weight) for weight in (gate, up, down)]

    def experts(x: Tensor, scales: Tensor | None, counts: Tensor) -> Tensor:
        rows = x
        if scales is not None:
            used = counts.sum().reshape(1).int() if x.dim() == 2 else None
            rows = dequantize(x, scales.contiguous(), num_rows=used, dtype=wide[0].dtype)
        ends = None if x.dim() == 3 else counts.cumsum(0, dtype=torch.int32)

        def multiply(a: Tensor, b: Tensor) -> Tensor:
            if ends is None:
                return torch.bmm(a, b)
            product: Tensor = functional.grouped_mm(a, b, offs=ends)
            return product

        hidden = functional.silu(multiply(rows, wide[0])) * multiply(rows, wide[1])
        return multiply(hidden, wide[2])

    return experts


MAKERS: dict[str, Make] = {"triton": of_triton, "torch": of_torch}


def _in_bf16(weight: Any) -> Tensor:
    """Returns weights [E_local, K, N] without scales, one expert at a time: they may be large."""
    if isinstance(weight, Tensor):
        return weight
    values, scales = weight
    out = torch.empty_like(values, dtype=torch.bfloat16)
    for e, (value, scale) in enumerate(zip(values, scales, strict=True)):
        spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        out[e] = value.float() * spread[: value.shape[0], : value.shape[1]]
    return out


class Fastest:
    """Experts that are measured at their first rows, then the fastest of them on all ranks.

    The first call of rows of each shape may not be captured.
    """

    def __init__(self, choices: list[Experts]) -> None:
        self._choices = choices
        self._chosen: dict[torch.Size, Experts] = {}

    def __call__(self, x: Tensor, scales: Tensor | None, counts: Tensor) -> Tensor:
        if x.shape not in self._chosen:
            spans = torch.tensor([_span_s(each, x, scales, counts) for each in self._choices])
            if dist.is_initialized():
                dist.all_reduce(spans, dist.ReduceOp.MAX)
            self._chosen[x.shape] = self._choices[int(spans.argmin())]
        return self._chosen[x.shape](x, scales, counts)


def _span_s(experts: Experts, x: Tensor, scales: Tensor | None, counts: Tensor) -> float:
    """Returns the shortest of some calls; endless where one fails."""
    try:
        experts(x, scales, counts)  # loads kernels
        spans = []
        for _ in range(TRIALS):
            if x.is_cuda:
                torch.cuda.synchronize()
            began = time.perf_counter()
            experts(x, scales, counts)
            if x.is_cuda:
                torch.cuda.synchronize()
            spans.append(time.perf_counter() - began)
        return min(spans)
    except (RuntimeError, NotImplementedError):  # torch refuses some types and devices
        return float("inf")


def difference(got: Tensor, want: Tensor) -> float:
    """Returns the distance of two results, relative to the second one's length."""
    wide = want.double()
    return float((got.double() - wide).norm() / wide.norm().clamp_min(1e-30))
