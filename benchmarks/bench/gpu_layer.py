"""The experts of a full layer: SwiGLU of grouped matrix products, by libraries side by side.

The products are moe_p2p/layer/products.py's, or another library's (--gemm MODULE:FUNCTION):

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moe_p2p import errors
from moe_p2p.bench.cases import Job
from moe_p2p.bench.options import AUTO, Options
from moe_p2p.layer import products
from moe_p2p.layer.products import Products

# (x, scales, counts) from dispatch -> the experts' answers, shaped like x
Experts = Callable[[Tensor, Tensor | None, Tensor], Tensor]

# Two runs, or libraries that round alike, sum in other orders, in steps of 2^-8 of bf16. Values of
# two roundings to fp8 lie between two libraries' matrices, each 2.6% away; more is an error.
MAX_DIFFERENCE = 0.02
MAX_DIFFERENCE_FP8 = 0.05

# MegaMoE's figures, us of a whole layer on 8 H200 by tokens of a rank: DeepGEMM pull request 383,
# fp8. It names the hidden sizes alone, neither the width of the first layer nor the top-k of the
# second: these are the models that it is for. DeepSeek-V3's: DeepGEMM issue 352.
PUBLISHED_US: dict[str, dict[int, float]] = {
    "deepseek-v3": {8: 404.0, 128: 490.0, 4096: 3866.0},
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


class Whole(Products):
    """Experts that are one call: another library's, or plain_experts."""

    overlaps = False

    def __init__(self, experts: Experts) -> None:
        self._experts = experts

    def hidden(self, x: Tensor, scales: Tensor | None, counts: Tensor, mean: int) -> Any:
        return self._experts(x, scales, counts)

    def down(self, hidden: Any, counts: Tensor, mean: int) -> Tensor:
        answer: Tensor = hidden
        return answer


@dataclass(frozen=True, kw_only=True)
class LayerParts:
    """What the layers of a run are made of."""

    products: Mapping[str, Products]  # by name, as --gemm has it
    reference: Products
    mean: float  # rows that an expert can expect of a token of each rank
    weight_bytes: int  # of all experts of this rank, once

    def rows(self, tokens: int) -> int:
        return max(1, round(tokens * self.mean))


def make_parts(options: Options, job: Job, rank: int, notes: list[str]) -> LayerParts:
    """Makes random weights of this rank's experts: fp8 with block scales if dispatch quantizes.

    notes: gets the names of libraries that "auto" leaves out, with the reason.
    """
    torch.manual_seed(rank)
    count, hidden, width = len(job.topology.local_experts(rank)), job.hidden_dim, options.ffn

    def weight(k: int, n: int) -> Any:
        plain = torch.randn(count, k, n, dtype=options.x_dtype, device=options.device)
        plain.mul_(k**-0.5)
        if not options.quantize or options.device == "cpu":  # where torch multiplies in bf16
            return plain
        from moe_p2p.kernels.triton.grouped_ops import Fp8
        from moe_p2p.kernels.triton.quantize import quantize_weights  # importing needs Triton

        return Fp8(*quantize_weights(plain))

    weights = weight(hidden, width), weight(hidden, width), weight(width, hidden)
    made: dict[str, Products] = {}
    known = products.MADE_OF if options.device == "cuda" else ("torch",)
    for name in known if options.gemm == AUTO else options.gemm:
        try:
            made[name] = products_of(name, *weights)
        except errors.InvalidArgumentError as error:
            if options.gemm != AUTO:
                raise
            notes.append(f"layer without {error}")
    parts = (each for weight in weights for each in _parts(weight))
    return LayerParts(
        products=made,
        reference=Whole(plain_experts(*weights)),
        mean=options.ranks * job.topk / job.topology.num_experts,
        weight_bytes=sum(each.nbytes for each in parts),
    )


def products_of(name: str, gate: Any, up: Any, down: Any) -> Products:
    """name: of moe_p2p/layer/products.py, or MODULE:FUNCTION."""
    module, _, function = name.partition(":")
    if not function:
        return products.make(name, gate, up, down)
    make: Any = getattr(importlib.import_module(module), function)
    return Whole(make(gate, up, down))


def plain_experts(gate: Any, up: Any, down: Any) -> Experts:
    """What the others are compared with: an expert at a time, in fp32. Its host waits."""

    def plain(weight: Any, expert: int) -> Tensor:
        values, *scales = _parts(weight)
        if not scales:
            return values[expert].float()
        spread = scales[0][expert].repeat_interleave(128, 0).repeat_interleave(128, 1)
        return values[expert].float() * spread[: values.shape[1], : values.shape[2]]

    def experts(x: Tensor, scales: Tensor | None, counts: Tensor) -> Tensor:
        dtype = torch.bfloat16 if scales is not None else x.dtype
        y, end = torch.zeros(x.shape, dtype=dtype, device=x.device), 0
        for expert, count in enumerate(counts.tolist()):
            begin, end = end, end + count
            at: Any = (expert, slice(count)) if x.dim() == 3 else slice(begin, end)
            rows = x[at].float()
            if scales is not None:
                rows *= scales[at].repeat_interleave(128, 1)[:, : x.shape[-1]]
            both = rows @ plain(gate, expert), rows @ plain(up, expert)
            y[at] = ((functional.silu(both[0]) * both[1]) @ plain(down, expert)).to(dtype)
        return y

    return experts


def _parts(weight: Any) -> tuple[Tensor, ...]:
    return (weight,) if isinstance(weight, Tensor) else tuple(weight)


def difference(got: Tensor, want: Tensor) -> float:
    """Returns the distance of two results, relative to the second one's length."""
    wide = want.double()
    return float((got.double() - wide).norm() / wide.norm().clamp_min(1e-30))
