"""What the calls of a communicator are given, checked and turned into what the ops take.

Shapes: as in all_to_all.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_p2p import errors
from moe_p2p.dispatched import (
    BY_RANK,
    GROUPED,
    LAYOUTS,
    PADDED,
    SCALE_FORMATS,
    Dispatched,
    Layout,
)
from moe_p2p.ops import CommunicatorShape

NO_FP8_GRADIENT = (
    "x requires grad, but what is dispatched as float8_e4m3fn has no gradient; dispatch x.detach() "
    "or do not quantize"
)
PADDING_IS_NOT_ZERO = (
    "y requires grad, but rows without a token were not zeroed, and gradients of expert weights "
    "multiply them (0 * NaN is NaN); pass zero_padding=True to dispatch, "
    "or run under torch.no_grad() if nothing trains"
)
NO_HALF_GRADIENT = (
    "{} requires grad, but halves are not differentiable; use the whole call, or torch.no_grad()"
)
NO_OUT_GRADIENT = (
    "an input of combine requires grad, but with `out` it is not differentiable; leave out `out`, "
    "or use torch.no_grad()"
)
NO_LATE_GRADIENT = (
    "{} requires grad, but a combine that is given topk_weights is not differentiable; give them "
    "to dispatch, or use torch.no_grad()"
)


def split_count(num_tokens: int | Tensor | None) -> tuple[Tensor | None, int]:
    """The count as a tensor, and as a number that is used without the tensor (-1: all rows)."""
    if isinstance(num_tokens, Tensor):
        return num_tokens, -1
    if num_tokens is None:
        return None, -1
    errors.require(num_tokens >= 0, f"num_tokens is {num_tokens}, must be at least 0")
    return None, num_tokens


def number_of(value: str, name: str, among: tuple[str, ...]) -> int:
    """The position of a named choice, which is its number in the ops."""
    if value in among:
        return among.index(value)
    text = f"{name} is {value!r}, must be one of {among}"
    raise errors.make(errors.InvalidArgumentError, text)


def scale_format_number(scale_format: str) -> int:
    return number_of(scale_format, "scale_format", SCALE_FORMATS)


def make_layout(
    shape: CommunicatorShape, layout: str, capacity: int | None, alignment: int, max_tokens: int
) -> Layout:
    """`capacity` None: enough for any routing."""
    rows = number_of(layout, "layout", LAYOUTS)
    if capacity is None:
        capacity = shape.world_size * max_tokens
        if rows == GROUPED:
            experts = shape.num_local_experts
            capacity = capacity * min(shape.topk, experts) + (alignment - 1) * experts
    return Layout(rows, capacity, alignment)


def check_ranges(layout: Layout, with_ranges: bool) -> None:
    errors.require(
        not with_ranges or layout.rows == PADDED,
        "with_ranges tells rows within an expert's own, it needs layout='padded'",
    )


def row_weights_of(
    dispatched: Dispatched, weighted: bool | None, topk_weights: Tensor | None
) -> Tensor | None:
    """What combine multiplies rows with; None: nothing that dispatch has brought."""
    by_rank = dispatched.layout.rows == BY_RANK
    errors.require(
        not by_rank or (not weighted and topk_weights is None),
        "rows by rank are sums over experts already, combine adds them as they are; "
        "pass neither weighted=True nor topk_weights",
    )
    if by_rank or weighted is False or topk_weights is not None:
        return None
    return dispatched.row_weights


def bias_list(bias: Tensor | tuple[Tensor, Tensor] | None) -> list[Tensor]:
    if bias is None:
        return []
    return [bias] if isinstance(bias, Tensor) else list(bias)


def check_out(out: Tensor, out_dtype: torch.dtype | None, num_rows: int, grad: bool) -> None:
    """Whether a combine of num_rows tokens may write into `out`."""
    errors.require(not grad, NO_OUT_GRADIENT)
    text = ""
    if out.shape[0] != num_rows:
        text = f"out has {out.shape[0]} rows, the dispatch had {num_rows}"
    elif out_dtype not in (None, out.dtype):
        text = f"out_dtype is {out_dtype}, but out is of {out.dtype}"
    errors.require(not text, text)


def records(*tensors: Tensor | None) -> bool:
    """Whether autograd records what is done with one of these."""
    if not torch.is_grad_enabled():
        return False
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def refuse_gradient(text: str, **tensors: Tensor | None) -> None:
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        errors.require(not records(tensor), text.format(name))
