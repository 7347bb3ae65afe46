"""The permutations that Megatron takes from Transformer Engine, with gradients.

`fused_permute` and the other four of FUSED have the signatures that Megatron calls. On GPUs they
are Triton kernels (kernels/triton/expert_rows.py), elsewhere torch (expert_rows_cpu.py). Results
and gradients are those of Megatron's own `permute`, `unpermute` and `sort_chunks_by_idxs` of
moe_utils.py, but that sums are taken in fp32 (fp64 where an operand is) and rounded once. Nothing
waits for the host, as long as `num_out_tokens` is no tensor of a GPU.

Symbols: T tokens, E experts (all of them, or a rank's), R rows, H hidden size, C chunks of rows.
`places`, which Megatron keeps between permute and unpermute, is in kernels/triton/expert_rows.py.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from moe_p2p import errors
from moe_p2p.integrations.moe import expert_rows_cpu


def functions_for(x: Tensor) -> ModuleType:
    if not x.is_cuda:
        return expert_rows_cpu
    from moe_p2p.kernels.triton import expert_rows

    return expert_rows


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probs: Tensor | None, routing_map: Tensor, num_rows: int
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        through = functions_for(x)
        places = through.list_places(routing_map)
        rows, row_probs = through.to_rows(x, places, num_rows, probs=probs)
        ctx.save_for_backward(places)
        ctx.mark_non_differentiable(places)
        ctx.has_probs = probs is not None
        return rows, row_probs, places

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_probs: Tensor | None, _: Any) -> Any:
        (places,) = ctx.saved_tensors
        given = grad_probs if ctx.has_probs else None
        return (*functions_for(grad).sum_rows(grad, places, row_probs=given), None, None)


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, probs: Tensor | None) -> Tensor:
        ctx.num_rows = len(rows)
        ctx.save_for_backward(places, probs, rows if ctx.needs_input_grad[2] else None)
        out, _ = functions_for(rows).sum_rows(rows, places, weights=probs)
        return cast(Tensor, out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        places, probs, rows = ctx.saved_tensors
        through = functions_for(grad)
        grad_rows, _ = through.to_rows(grad, places, ctx.num_rows, weights=probs)
        if rows is None:
            return grad_rows, None, None
        return grad_rows, None, through.dots(grad, rows, places, probs.dtype)


class _SortChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probs: Tensor | None, sizes: Tensor, order: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        through = functions_for(x)
        index, inverse = through.chunk_index(sizes, order, len(x))
        ctx.save_for_backward(inverse)
        ctx.has_probs = probs is not None
        return through.take_rows(x, index), None if probs is None else through.take_rows(
            probs, index
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_probs: Tensor | None) -> Any:
        (inverse,) = ctx.saved_tensors
        through = functions_for(grad)
        of_probs = through.take_rows(grad_probs, inverse) if ctx.has_probs else None
        return through.take_rows(grad, inverse), of_probs, None, None


def fused_permute(
    inp: Tensor, routing_map: Tensor, num_out_tokens: int | Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns rows [R, H] grouped by expert, and places for fused_unpermute.

    inp: [T, H] of a floating type. routing_map: [T, E], what is not 0 or False is a row.
    num_out_tokens: R; None or negative: counted, which waits for the host. Rows past the map's
    are zeros, rows past R are left out. Raises InvalidArgumentError when shapes do not fit.
    """
    rows, _, places = _permuted(inp, None, routing_map, num_out_tokens)
    return rows, places


def fused_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int | Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """As fused_permute; returns rows, the probabilities [R] of probs [T, E], and places."""
    rows, row_probs, places = _permuted(inp, probs, routing_map, num_out_tokens)
    assert row_probs is not None
    return rows, row_probs, places


def _permuted(
    x: Tensor, probs: Tensor | None, routing_map: Tensor, num_out_tokens: int | Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    errors.require(
        x.dim() == 2 and routing_map.dim() == 2 and len(x) == len(routing_map),
        f"inp is {tuple(x.shape)}, routing_map {tuple(routing_map.shape)}: "
        "must be [T, H] and [T, E]",
    )
    _check_probs(probs, tuple(routing_map.shape))
    routing_map = routing_map.bool()
    num_rows = -1 if num_out_tokens is None else int(num_out_tokens)
    if num_rows < 0:
        num_rows = int(routing_map.sum())
    given = _Permute.apply(x, probs, routing_map, num_rows)  # type: ignore[no-untyped-call]
    return cast("tuple[Tensor, Tensor | None, Tensor]", given)


def fused_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | None = None,
) -> Tensor:
    """Returns [T, H], each token the sum of its rows: each times its probability, if there are.

    inp: [R, H]. row_id_map: places that fused_permute returned. merging_probs: [T, E].
    restore_shape: of the result, checked. Raises InvalidArgumentError when shapes do not fit.
    """
    num_tokens, width = len(row_id_map), row_id_map.shape[-1]
    errors.require(
        row_id_map.dim() == 2 and row_id_map.dtype == torch.int32 and width % 2 == 0,
        f"row_id_map is {row_id_map.dtype} {tuple(row_id_map.shape)}, not what fused_permute of "
        "moe_p2p returned: permute and unpermute must both be fused",
    )
    want = (num_tokens, inp.shape[-1])
    errors.require(
        inp.dim() == 2 and (restore_shape is None or tuple(restore_shape) == want),
        f"inp is {tuple(inp.shape)} of {num_tokens} tokens: must be [R, H], and restore_shape "
        f"{want}, got {restore_shape}",
    )
    _check_probs(merging_probs, (num_tokens, (width - 2) // 2))
    out = _Unpermute.apply(inp, row_id_map, merging_probs)  # type: ignore[no-untyped-call]
    return cast(Tensor, out)


def _check_probs(probs: Tensor | None, want: tuple[int, ...]) -> None:
    errors.require(
        probs is None or tuple(probs.shape) == want,
        f"probs are {None if probs is None else tuple(probs.shape)}, must be {want} like the map",
    )


def fused_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """Returns the chunks of inp [R, H], of split_sizes [C] rows, in the order of sorted_index [C].

    Raises InvalidArgumentError when shapes do not fit, and on CPUs when sizes do not sum up to R.
    GPUs are not waited for: there rows past the sum stay where they are.
    """
    return _sorted(inp, None, split_sizes, sorted_index)[0]


def fused_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """As fused_sort_chunks_by_index; returns rows, and their probabilities of probs [R]."""
    rows, row_probs = _sorted(inp, probs, split_sizes, sorted_index)
    assert row_probs is not None
    return rows, row_probs


def _sorted(
    x: Tensor, probs: Tensor | None, sizes: Tensor, order: Tensor
) -> tuple[Tensor, Tensor | None]:
    errors.require(
        x.dim() == 2 and sizes.dim() == 1 and sizes.shape == order.shape,
        f"inp is {tuple(x.shape)}, split_sizes {tuple(sizes.shape)}, sorted_index "
        f"{tuple(order.shape)}: must be [R, H], [C] and [C]",
    )
    errors.require(
        probs is None or (probs.dim() == 1 and len(probs) == len(x)),
        f"probs are {None if probs is None else tuple(probs.shape)}, must be {(len(x),)}",
    )
    given = _SortChunks.apply(x, probs, sizes.to(x.device), order.to(x.device))  # type: ignore[no-untyped-call]
    return cast("tuple[Tensor, Tensor | None]", given)


# Megatron's names in moe_utils.py; None there without Transformer Engine.
FUSED = {
    each.__name__: each
    for each in (
        fused_permute,
        fused_permute_with_probs,
        fused_unpermute,
        fused_sort_chunks_by_index,
        fused_sort_chunks_by_index_with_probs,
    )
}
