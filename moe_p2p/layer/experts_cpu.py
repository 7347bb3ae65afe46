"""Matrix products of rows grouped by expert, on a CPU (on GPUs: kernels/triton/grouped_ops.py).

Custom operators, because the rows per expert are data: torch.compile does not trace into them, so
its graph has no break there and serves any counts.

Shapes: R rows, expert by expert, E experts, weights [E, K, N], counts [E] of int32 or int64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def _rows_of_experts(counts: Tensor) -> Iterator[slice]:
    start = 0
    for count in counts.tolist():
        yield slice(start, start + count)
        start += count


@torch.library.custom_op("moe_p2p::cpu_grouped_gemm", mutates_args=(), device_types="cpu")
def grouped_gemm(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x @ weight[e] for the rows of each expert e, [R, N]; rows of no expert become zero.

    x: [R, K] of the type of weight. Differentiable in both.
    """
    out = x.new_zeros((x.shape[0], weight.shape[2]))
    for expert, rows in enumerate(_rows_of_experts(counts)):
        out[rows] = x[rows] @ weight[expert]
    return out


@torch.library.custom_op("moe_p2p::cpu_grouped_weight_grad", mutates_args=(), device_types="cpu")
def _weight_grad(x: Tensor, grad: Tensor, counts: Tensor) -> Tensor:
    out = x.new_empty((counts.shape[0], x.shape[1], grad.shape[1]))
    for expert, rows in enumerate(_rows_of_experts(counts)):
        out[expert] = x[rows].t() @ grad[rows]
    return out


@grouped_gemm.register_fake
def _grouped_gemm_like(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[2]))


@_weight_grad.register_fake
def _weight_grad_like(x: Tensor, grad: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty((counts.shape[0], x.shape[1], grad.shape[1]))


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, counts = ctx.saved_tensors
    need_x, need_weight, _ = ctx.needs_input_grad
    grad_x = grouped_gemm(grad, weight.transpose(1, 2), counts) if need_x else None
    return grad_x, _weight_grad(x, grad, counts) if need_weight else None, None


grouped_gemm.register_autograd(_backward, setup_context=_save)
