"""torch.ops.moe_p2p: adds fake kernels and autograd to the ops of dispatch and combine.

The schemas are in csrc/ops/schema.cpp. `dispatch` and `combine` are each other's derivative:

    dispatch: gradients of the rows go back to their tokens, which is a combine without weights; the
        gradient of a row's weight returns to its (token, k) as a scalar beside it.
    combine: the gradient of a token goes to the rows of its experts, which is a dispatch without
        weights. Rows are in the order of the first dispatch, because that order follows from the
        routing alone.

Shapes: T tokens, K top-k, H hidden size, R rows (padded: E_local * capacity), C chunks of M tokens,
W ranks, L ranks per node, N nodes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from moe_p2p import errors
from moe_p2p.library import call, register_fake
from moe_p2p.moe import options as bits
from moe_p2p.moe.dispatched import Call, PendingDispatch, new_outputs
from moe_p2p.moe.row_dots import row_dots
from moe_p2p.moe.shape import HANDLE_NUM_TOKENS, shape_of

_ops = torch.ops.moe_p2p
_Dispatched = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]


# --- fake kernels ---


# What calls leave out at the end: fake kernels are not given it.
_DISPATCH_DEFAULTS = (None, None, (), None, None, -1)
_COMBINE_DEFAULTS = (None, None, None, None, None, 0, False)


def _filled(given: tuple[Any, ...], defaults: tuple[Any, ...]) -> tuple[Any, ...]:
    """given: arguments from the first that has a default on."""
    return (*given, *defaults[len(given) :])


def _fake_dispatch(
    comm: int,
    options: int,
    max_tokens: int,
    capacity: int,
    x: Tensor,
    topk_idx: Tensor,
    *given: Any,
) -> _Dispatched:
    _, scales, _, extras, *_ = _filled(given, _DISPATCH_DEFAULTS)
    shape, quantize = shape_of(comm), options & bits.QUANTIZE
    has_scales = scales is not None or quantize
    handle = x.new_empty((shape.handle_words(x.shape[0], max_tokens),), dtype=torch.int32)
    pending = PendingDispatch(
        Call(handle, options, max_tokens, capacity),
        topk_idx,
        x.dtype,
        x.shape[1] if x.dtype == torch.uint8 else shape.hidden_dim,
        shape.scales_of(scales, options) if has_scales else None,
        tuple((extra.shape[1], extra.dtype) for extra in extras or ()),
    )
    made = new_outputs(x, shape, pending)
    copied = topk_idx.new_empty(topk_idx.shape) if options & bits.COPY_TOPK else None
    more = (made.source, made.ranges, made.wait_ticks, copied, made.row_topk)
    return (
        made.x,
        x.new_empty((0,), dtype=torch.float32) if made.scales is None else made.scales,
        made.row_weights,
        made.counts,
        made.offsets,
        handle,
        [tensor for tensor in more if tensor is not None] + list(made.extras),
    )


def _fake_combine(
    comm: int,
    options: int,
    max_tokens: int,
    handle: Tensor,
    y: Tensor,
    topk_idx: Tensor,
    *given: Any,
) -> tuple[Tensor, list[Tensor]]:
    _, _, row_scalars, _, out_dtype, _, with_wait_ticks = _filled(given, _COMBINE_DEFAULTS)
    shape = shape_of(comm)
    num_rows = topk_idx.shape[0]
    more = []
    if row_scalars is not None:
        more.append(y.new_empty((num_rows, shape.topk), dtype=torch.float32))
    if with_wait_ticks:
        more.append(y.new_empty((shape.world_size,), dtype=torch.int64))
    return y.new_empty((num_rows, shape.hidden_dim), dtype=out_dtype or y.dtype), more


def _fake_gather_counts(comm: int, values: Tensor) -> Tensor:
    return values.new_empty((shape_of(comm).world_size, values.numel()))


def _fake_nothing(*args: object) -> None:
    """For ops that only write into what they are given."""


for _name in ("dispatch", "dispatch_inference"):
    register_fake(_name, _fake_dispatch)
for _name in ("combine", "combine_inference"):
    register_fake(_name, _fake_combine)
for _name in (
    *("dispatch_send", "dispatch_recv", "combine_send", "combine_recv", "release", "combine_out"),
    *("all_to_all_check", "all_to_all_check_again", "signal", "copy_rows"),
):
    register_fake(_name, _fake_nothing)
register_fake("all_to_all_connect", _fake_nothing)
register_fake("all_to_all_gather_counts", _fake_gather_counts)


# --- autograd ---

NO_FP8_GRADIENT = (
    "x requires grad, but what is dispatched as float8_e4m3fn has no gradient; dispatch x.detach() "
    "or do not quantize"
)
NO_EXTRA_GRADIENT = "{} requires grad, but extras travel as bytes and have no gradient; detach it"
NO_SCALAR_GRADIENT = (
    "{} requires grad, but scalars that combine returns have no gradient (nor has a gradient of "
    "dispatch a second one); detach it"
)


def _dispatch_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    comm, options, max_tokens, capacity, x, topk_idx, topk_weights, _, others, extras, *_ = inputs
    _, row_scales, _, _, _, handle, more = output
    if x.requires_grad and (options & bits.QUANTIZE or x.dtype == torch.float8_e4m3fn):
        raise errors.make(errors.InvalidArgumentError, NO_FP8_GRADIENT)
    if any(extra.requires_grad for extra in extras):
        raise errors.make(errors.InvalidArgumentError, NO_EXTRA_GRADIENT.format("an extra"))
    # Entries of row_weights, K for each token, that stand for no expert here are constants.
    per_token = bits.rows_of(options).per_token
    row_topk = more[len(more) - len(extras) - 1] if per_token else None
    ctx.save_for_backward(handle, topk_idx, row_topk)
    ctx.mark_non_differentiable(row_scales, *more)
    ctx.set_materialize_grads(False)
    ctx.comm = comm
    ctx.options = options
    ctx.max_tokens = max_tokens
    ctx.capacity = capacity
    ctx.x_dtype = x.dtype
    ctx.rows_shape = output[0].shape
    ctx.row_weights_shape = output[2].shape
    ctx.num_others, ctx.num_extras = len(others), len(extras)
    # Every rank must return scalars or none, whatever its own rows need.
    ctx.with_weights = topk_weights is not None and topk_weights.requires_grad


def _dispatch_backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    handle, topk_idx, row_topk = ctx.saved_tensors
    grad_rows, _, grad_row_weights = grads[:3]
    if grad_rows is None:
        grad_rows = torch.zeros(ctx.rows_shape, dtype=ctx.x_dtype, device=topk_idx.device)
    if not ctx.with_weights:
        grad_row_weights = None
    elif grad_row_weights is None:
        grad_row_weights = torch.zeros(
            ctx.row_weights_shape, dtype=torch.float32, device=topk_idx.device
        )
    else:
        if (
            torch.is_grad_enabled() and grad_row_weights.requires_grad
        ):  # on all ranks, before a call
            raise errors.make(
                errors.InvalidArgumentError,
                "the gradient of topk_weights has no gradient of its own (create_graph=True); "
                "detach the weights, or what they are multiplied with",
            )
        if row_topk is not None:
            grad_row_weights = grad_row_weights.where(row_topk >= 0, 0.0)
        grad_row_weights = grad_row_weights.contiguous()
    grad_x, scalars = call(
        _ops.combine.default,
        ctx.comm,
        ctx.options,
        ctx.max_tokens,
        handle,
        grad_rows.contiguous(),
        topk_idx,
        None,
        None,
        grad_row_weights,
        [],
        ctx.x_dtype,
        ctx.capacity,
        False,
    )
    if shape_of(ctx.comm).poisons:
        call(_ops.all_to_all_check.default, [ctx.comm])
    weights = scalars[0] if ctx.with_weights else None  # [T, K]
    no_extras = [None] * ctx.num_extras
    no_others = [None] * ctx.num_others
    return (*(None,) * 4, grad_x, None, weights, None, no_others, no_extras, None, None)


def _combine_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    comm, options, max_tokens, handle, y, topk_idx, row_weights, topk_weights, *more = inputs
    if shape_of(comm).poisons:
        call(_ops.all_to_all_check.default, [comm])
    row_scalars, bias, _, capacity, _ = more
    if row_scalars is not None and row_scalars.requires_grad:
        raise errors.make(errors.InvalidArgumentError, NO_SCALAR_GRADIENT.format("row_scalars"))
    if topk_weights is not None:
        raise errors.make(
            errors.InvalidArgumentError,
            "a combine that is given topk_weights has no gradient; give them to dispatch",
        )
    ctx.weights_need_grad = row_weights is not None and row_weights.requires_grad
    ctx.save_for_backward(y if ctx.weights_need_grad else None, row_weights, handle, topk_idx)
    ctx.mark_non_differentiable(*output[1])
    ctx.set_materialize_grads(False)
    ctx.comm = comm
    ctx.max_tokens = max_tokens
    ctx.options = bits.gradient_of(options)
    ctx.capacity = capacity
    ctx.bias_needs_grad = [term.requires_grad for term in bias]
    ctx.y_shape = y.shape
    ctx.y_dtype = y.dtype
    ctx.y_needs_grad = y.requires_grad


def _combine_backward(ctx: Any, grad_out: Tensor | None, _: Any) -> tuple[Any, ...]:
    if shape_of(ctx.comm).poisons:  # on GPUs the sums were not there when combine returned
        call(_ops.all_to_all_check.default, [ctx.comm])
    y, row_weights, handle, topk_idx = ctx.saved_tensors
    assert grad_out is not None  # the scalars have no gradient
    g, _, present, _, _, again, _ = call(
        _ops.dispatch.default,
        ctx.comm,
        ctx.options,
        ctx.max_tokens,
        ctx.capacity,
        # In the type of y, which slots are sized for; the gradient of y has no other.
        grad_out.to(ctx.y_dtype).contiguous(),  # [T, H]
        topk_idx,
        None,  # the rows' weights are 1 then, and 0 where there is no token
        None,
        [],
        [],
        handle.narrow(0, HANDLE_NUM_TOKENS, 1),
        -1,
    )
    shape = shape_of(ctx.comm)
    if shape.masks:  # of a rank that was lost meanwhile no rows come, and the others move up
        call(_ops.all_to_all_check_again.default, ctx.comm, handle, again)
        first, second = (shape.slot_counts(each, ctx.max_tokens) for each in (handle, again))
        g = g.where((first == second).all(), torch.nan)  # on GPUs, which do not wait to raise
    g = g.view(-1, g.shape[-1])  # [R, H]
    has_token = present > 0  # [R]; by rank there are no row_weights
    grad_y = grad_weights = None
    if ctx.weights_need_grad:
        grad_weights = row_dots(g, y.reshape(g.shape)).where(has_token, 0.0)
    if ctx.y_needs_grad:
        # Weights of rows without a token may be anything, also NaN.
        if row_weights is not None:
            factors = row_weights.where(has_token, 0.0).unsqueeze(-1)
            # Products are fp32 and rounded once. In place, as only a graph uses g otherwise.
            g = (g * factors).to(ctx.y_dtype) if torch.is_grad_enabled() else g.mul_(factors)
        grad_y = g.view(ctx.y_shape)
    grad_bias = [grad_out if needed else None for needed in ctx.bias_needs_grad]
    return (*(None,) * 4, grad_y, None, grad_weights, None, None, grad_bias, *(None,) * 3)


torch.library.register_autograd(
    "moe_p2p::dispatch", _dispatch_backward, setup_context=_dispatch_context
)
torch.library.register_autograd(
    "moe_p2p::combine", _combine_backward, setup_context=_combine_context
)

# --- side effects ---


def _mark_effect(name: str) -> None:
    """Keeps a compiler from dropping a call whose result is unused, or from swapping two calls.

    The other ranks wait for every call, in order. Where torch cannot order ops of a graph by
    effect, at least none is dropped.
    """
    register = getattr(torch.library, "_register_effectful_op", None)
    if register is None:
        has_side_effect(getattr(_ops, name).default)
    else:
        ordered = torch.library.EffectType.ORDERED  # type: ignore[attr-defined]
        register(f"moe_p2p::{name}", ordered)


_mark_effect("all_to_all_gather_counts")
_mark_effect("all_to_all_check")
_mark_effect("all_to_all_check_again")
for _name in (
    *("dispatch", "dispatch_inference"),
    *("combine", "combine_inference"),
):
    _mark_effect(_name)
