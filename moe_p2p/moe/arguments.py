"""Arguments of a communicator's calls, checked and turned into what the ops take.

Shapes: as in all_to_all.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_p2p import errors
from moe_p2p.library import refuse_lazy, watched
from moe_p2p.moe.config import AllToAllConfig
from moe_p2p.moe.dispatched import Dispatched
from moe_p2p.moe.layouts import LAYOUTS
from moe_p2p.moe.ops import NO_SCALAR_GRADIENT
from moe_p2p.moe.options import (
    DEFAULT,
    LAYOUT_MASK,
    MERGE_DUPLICATES,
    DispatchOptions,
    refuse_moved,
    shorthand,
    sum_order_of,
)
from moe_p2p.moe.shape import CommunicatorShape

_increment_version = torch._C._increment_version
ALL_ROWS = -1  # in place of a number of tokens
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
OUT_HAS_GRADIENT = (
    "out requires grad, and combine would overwrite it without autograd's knowledge; leave out "
    "`out`, pass out.detach(), or use torch.no_grad()"
)
NO_TANGENT = (
    "{} is a dual tensor, and dispatch and combine have no forward-mode derivative "
    "(torch.func.jvp, torch.autograd.forward_ad); use reverse mode, or pass the primal alone"
)
NO_PARTIALS_GRADIENT = (
    "an input of combine requires grad, but with partials it is not differentiable; leave out "
    "partials, or use torch.no_grad()"
)
NO_LATE_GRADIENT = (
    "{} requires grad, but a combine that is given topk_weights is not differentiable; give them "
    "to dispatch, or use torch.no_grad()"
)


def count_versions(*written: Tensor | None) -> None:
    """Called after an op has written to tensors of the caller: autograd then refuses a backward
    pass that has saved what they held before. torch's dispatcher does so for its own ops alone;
    a compiler counts by the op's schema."""
    if not torch.compiler.is_dynamo_compiling():
        counted = [each for each in written if each is not None and not each.is_inference()]
        _increment_version(counted)


def refuse_tangents(**given: Tensor | Sequence[Tensor] | None) -> None:
    """Raises for the first tensor that carries a tangent. Called where a level of forward mode is
    open: the calls have no formula for it, and results would have no tangent."""
    for name, value in given.items():
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if not isinstance(tensor, Tensor):
                continue
            if forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
                raise errors.make(errors.InvalidArgumentError, NO_TANGENT.format(name))


def refuse_lazy_rows(out: Dispatched) -> None:
    """Of a Dispatched to receive into."""
    errors.require_type("out", out, Dispatched, "an earlier result of a dispatch")
    for name, value in zip(out._fields, out, strict=True):
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, Tensor):
                refuse_lazy(**{f"out.{name}": each})


def check_received_sums(out: Tensor) -> None:
    """Of combine_recv."""
    errors.require_type("out", out, Tensor)
    refuse_lazy(out=out)
    if torch.is_grad_enabled():
        refuse_gradient(OUT_HAS_GRADIENT, out=out)


def split_count(num_tokens: int | Tensor | None) -> tuple[Tensor | None, int]:
    """Returns the count as a tensor, and as the number that is used without a tensor."""
    if num_tokens is None:
        return None, ALL_ROWS
    if isinstance(num_tokens, Tensor):
        return num_tokens, ALL_ROWS
    errors.require_type("num_tokens", num_tokens, int, "an int, or a torch.Tensor of one")
    errors.require(num_tokens >= 0, f"num_tokens is {num_tokens}, must be at least 0")
    return None, num_tokens


def dispatch_options(
    options: DispatchOptions | None,
    layout: str | None,
    quantize: bool | None,
    moved: Mapping[str, object],
) -> DispatchOptions:
    """Of a dispatch's named arguments. moved: names that it does not have."""
    if moved:
        refuse_moved(moved)
    if layout is not None or quantize is not None:
        return shorthand(options, layout, quantize)
    if options is None:
        return DEFAULT
    if not isinstance(options, DispatchOptions):
        raise errors.wrong_type("options", options, "a DispatchOptions")
    return options


def dispatch_form(
    config: AllToAllConfig,
    shape: CommunicatorShape,
    options: DispatchOptions,
    max_tokens: int | None,
    capacity: int | None,
) -> tuple[DispatchOptions, int, int]:
    """Fields of a DispatchForm."""
    if max_tokens is None:
        max_tokens = config.max_tokens
    try:
        if max_tokens < 0:
            text = f"max_tokens is {max_tokens}, must be at least 0"
            raise errors.make(errors.InvalidArgumentError, text)
    except TypeError:
        raise errors.wrong_type("max_tokens", max_tokens, "an int") from None
    if capacity is None:
        capacity = most_rows(shape, max_tokens, options)
    return options, max_tokens, capacity


def most_rows(shape: CommunicatorShape, max_tokens: int, options: DispatchOptions) -> int:
    """Returns a capacity that is enough for any routing."""
    rows, layout = shape.world_size * max_tokens, LAYOUTS[options.number & LAYOUT_MASK]
    if not (layout.apart or layout.per_token):  # a row for each (token, expert), in one room
        experts = shape.num_local_experts
        rows = rows * min(shape.topk, experts) + (options.alignment - 1) * experts
    return rows


def bytes_of_rows(x: Tensor) -> int:
    """Row size in bytes if x is raw uint8, else 0."""
    return x.shape[1] if x.dtype == torch.uint8 and x.dim() == 2 else 0


def checked_first(others: list[int] | None) -> list[int]:
    """Which communicators an op checks first: none where somebody watches."""
    return [] if others is None or watched() else others


def refuse_tensor(extras: object) -> None:
    """One tensor in place of several would be taken apart."""
    if isinstance(extras, Tensor):
        text = "extras is a tensor, must be a list or tuple of tensors [T, n]: extras=[tensor]"
        raise errors.make(errors.InvalidArgumentError, text)


def row_weights_of(
    dispatched: Dispatched, weighted: bool | None, topk_weights: Tensor | None
) -> Tensor | None:
    """What combine multiplies rows with; None: nothing that dispatch has brought."""
    if not isinstance(dispatched, Dispatched):
        raise errors.wrong_type("dispatched", dispatched, "the result of a dispatch")
    if LAYOUTS[dispatched.call.options & LAYOUT_MASK].per_token:
        errors.require(
            not weighted and topk_weights is None,
            "rows by rank are sums over experts already, combine adds them as they are; "
            "pass neither weighted=True nor topk_weights",
        )
        return None
    return dispatched.row_weights if weighted is not False and topk_weights is None else None


def bias_list(bias: Tensor | tuple[Tensor, Tensor]) -> list[Tensor]:
    if isinstance(bias, Tensor):
        return [bias]
    errors.require_type("bias", bias, (tuple, list), "a torch.Tensor, two of them or None")
    return list(bias)


def check_out(
    out: Tensor, out_dtype: torch.dtype | None, num_rows: int, grad: bool, options: int
) -> None:
    """Raises unless a combine of num_rows tokens may write into `out`."""
    errors.require_type("out", out, Tensor)
    if grad:
        text = NO_OUT_GRADIENT
    elif out.requires_grad and torch.is_grad_enabled():
        text = OUT_HAS_GRADIENT
    elif out.dim() != 2:
        text = f"out is of {out.dim()} dimensions, must be of 2"
    elif out.shape[0] != num_rows:
        text = f"out has {out.shape[0]} rows, must have {num_rows}, as the dispatched x"
    elif out_dtype not in (None, out.dtype):
        text = f"out_dtype is {out_dtype}, but out is of {out.dtype}"
    elif sum_order_of(options):
        text = "out is given, which takes sums in order='ranks' only"
    else:
        refuse_lazy(out=out)
        return
    raise errors.make(errors.InvalidArgumentError, text)


def grad_of_combine(
    y: Tensor,
    row_weights: Tensor | None,
    row_scalars: Tensor | None,
    topk_weights: Tensor | None,
    terms: Sequence[Tensor],
) -> bool:
    """Whether autograd records a combine of these. Raises where it would need what has none."""
    if topk_weights is not None:
        refuse_gradient(NO_LATE_GRADIENT, y=y, topk_weights=topk_weights)
    refuse_gradient(NO_SCALAR_GRADIENT, row_scalars=row_scalars)
    return require_grad(y, row_weights, *terms)


def require_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd, where it is on, records what is done with one of these.

    The op refuses arguments that are no tensors, by name, when it is called.
    """
    return any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors)


def refuse_gradient(text: str, **tensors: Tensor | None) -> None:
    """Called by calls without a gradient: raises where autograd would need one."""
    for name, tensor in tensors.items():
        errors.require(not require_grad(tensor), text.format(name))


def merged(topk_idx: Tensor, topk_weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Leaves of each token's equal experts the first, with the sum of their weights, rounded once.

    [[3, 1, 3]] with [[0.5, 1.0, 0.25]]: [[3, 1, -1]] with [[0.75, 1.0, 0.0]]. No weights are 1.
    What is no routing is returned as it is: the op refuses it by name. Shapes do not depend on
    values, so calls are captured and traced; the gradient of a sum goes to each of its weights.
    """
    given = (topk_idx,) if topk_weights is None else (topk_idx, topk_weights)
    for each, types in zip(given, ((torch.int32, torch.int64), (torch.float32,)), strict=False):
        if not isinstance(each, Tensor) or each.is_nested or each.layout != torch.strided:
            return topk_idx, topk_weights
        if each.dtype not in types or each.dim() != 2 or each.device != topk_idx.device:
            return topk_idx, topk_weights
        if each.shape != topk_idx.shape:
            return topk_idx, topk_weights
    same = topk_idx[:, :, None] == topk_idx[:, None, :]  # [T, K, K]
    repeats = same.tril(-1).any(2)  # an earlier one is equal
    if topk_weights is None:
        sums = same.sum(2, dtype=torch.float32)
    else:
        # float64 holds sums of K float32 numbers, in any order.
        sums = topk_weights.double()[:, None, :].where(same, 0.0).sum(2).float()
    return topk_idx.masked_fill(repeats, -1), sums.masked_fill(repeats | (topk_idx < 0), 0.0)


def refuse_late_weights(options: int, topk_weights: Tensor | None) -> None:
    """Raises where a combine would give weights to experts that its dispatch has merged."""
    errors.require(
        topk_weights is None or not options & MERGE_DUPLICATES,
        "topk_weights of combine do not go with merge_duplicates: give them to dispatch, which "
        "adds those of equal experts",
    )
