"""Which kernels calls need before they run, and the error of a CUDA graph that lacks one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from moe_p2p import errors
from moe_p2p.library import settings_text
from moe_p2p.moe.config import AllToAllConfig
from moe_p2p.moe.gpu.kernel import Kernel
from moe_p2p.moe.options import (
    DEFAULT,
    INT10_NODES,
    PARTIALS,
    QUANTIZE,
    SCALE_FORMATS,
    CombineOptions,
    DispatchOptions,
    block_of,
    partials_from,
    rows_of,
    scale_format_of,
    sum_order_of,
)

_Function = TypeVar("_Function", bound=Callable[..., Any])
_ANY_SLOT = 1 << 30  # bytes
Dispatches = list[tuple[torch.dtype, int, int]]  # arguments of prepare_dispatch
Combines = list[tuple[torch.dtype, torch.dtype, bool, int]]  # arguments of prepare_combine


def when_traced(function: _Function) -> _Function:
    """Makes torch.compile run the function while it traces, and leave nothing of it in its graph.

    Does what torch.compiler.assume_constant_result does, without importing the compiler for it.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def usual_calls(config: AllToAllConfig) -> tuple[Dispatches, Combines]:
    """The calls of the configuration's types, and of their gradients, without options."""
    types = tuple(dict.fromkeys((config.dtype, config.widest_combine_dtype)))
    dispatches = [(dtype, DEFAULT.number, 0) for dtype in types]
    if config.dtype != torch.float8_e4m3fn and config.hidden_dim % 16 == 0:
        dispatches.append((config.dtype, DispatchOptions(quantize=True).number, 0))
    sums = [dtype for dtype in types if dtype != torch.float8_e4m3fn]
    return dispatches, [(dtype, dtype, False, 0) for dtype in sums]


def dispatches_of(
    config: AllToAllConfig,
    options: Iterable[DispatchOptions],
    x_dtype: torch.dtype | None,
    row_bytes: int,
) -> Dispatches:
    """What AllToAll.prepare is asked for."""
    errors.require(
        (row_bytes > 0) == (x_dtype == torch.uint8),
        f"row_bytes is {row_bytes} and x_dtype {x_dtype}: give row_bytes with torch.uint8, "
        "and only then",
    )
    x_dtype = config.dtype if x_dtype is None else x_dtype
    for each in options:
        errors.require_type("options", each, DispatchOptions, "DispatchOptions")
    return [(x_dtype, each.number, row_bytes) for each in options]


def combines_of(
    config: AllToAllConfig, y_dtype: torch.dtype | None, options: CombineOptions
) -> Combines:
    """Likewise."""
    y_dtype = config.widest_combine_dtype if y_dtype is None else y_dtype
    out_dtype = y_dtype if options.out_dtype is None else options.out_dtype
    by_topk = sum_order_of(options.number) > 0
    return [(y_dtype, out_dtype, by_topk, partials_from(options.number))]


def partials_among(shape: Mapping[str, int], by_topk: bool, partials: int) -> int:
    """What travels: nothing goes from node to node where there is one. Raises as the call does.

    shape: shape_macros().
    """
    if not partials:  # of most calls, each of which asks
        return 0
    hidden, name = shape["MOE_P2P_HIDDEN_DIM"], PARTIALS[partials - 1]
    errors.require(
        hidden % block_of(name) == 0 and not by_topk,
        f"partials is {name!r} with hidden_dim {hidden}"
        + (" and an order of top-k" if by_topk else "")
        + f"; hidden_dim must be a multiple of {block_of(name)}, and it takes order='ranks' only",
    )
    one_node = shape["MOE_P2P_WORLD_SIZE"] == shape["MOE_P2P_RANKS_PER_NODE"]
    return 0 if one_node and partials == INT10_NODES else partials


def is_captured() -> bool:
    """Whether the current stream is captured into a CUDA graph. Does not start CUDA."""
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return bool(started and torch.cuda.is_current_stream_capturing())


def refuse_capture(missing: str) -> None:
    """Raises UnavailableError while the current stream is captured into a CUDA graph.

    Compilers, loading and allocation are no part of a graph. missing: what is missing, and what
    makes it.
    """
    if is_captured():
        text = f"this stream is captured into a CUDA graph, and {missing} before the capture"
        raise errors.make(errors.UnavailableError, text)


def missing_dispatch(x_dtype: torch.dtype, variant: int) -> str:
    """For refuse_capture."""
    layout, scale_format = rows_of(variant), SCALE_FORMATS[scale_format_of(variant)]
    options = {
        f"layout={layout.name!r}": layout.kernel,
        "quantize=True": variant & QUANTIZE,
        f"scale_format={scale_format!r}": scale_format_of(variant),
    }
    chosen = ", ".join(option for option, given in options.items() if given)
    return (
        "a dispatch's kernel is not compiled: make such a call once, or call "
        f"prepare(DispatchOptions({chosen}), x_dtype={x_dtype}),"
    )


def missing_combine(
    y_dtype: torch.dtype, out_dtype: torch.dtype, by_topk: bool, partials: int = 0
) -> str:
    """For refuse_capture."""
    more = ", order='topk'" if by_topk else ""
    more += f", partials={PARTIALS[partials - 1]!r}" if partials else ""
    return (
        "a combine's kernel is not compiled: make such a call once, or call "
        f"prepare(y_dtype={y_dtype}, combine=CombineOptions(out_dtype={out_dtype}{more}))"
    )


def variants_of(kernel: Kernel) -> list[Kernel]:
    """Returns the kernel, which takes every call, and those that take some calls instead: plain
    ones, short ones, and those that are both.

    The op finds out which calls are plain: csrc/moe/device/plain.h. No call with x of bytes is, nor
    one whose y is still being written.
    """
    short = [] if kernel.short is None else variants_of(kernel.short)
    if kernel.macros.get("MOE_P2P_OPAQUE_X") or "MOE_P2P_READY" in kernel.macros:
        return [kernel, *short]
    return [kernel, kernel._replace(macros=kernel.macros | {"MOE_P2P_PLAIN": 1}), *short]


def fields_of(kernel: Kernel, function: int, resident_blocks: int) -> str:
    """Returns the fields of DeviceKernel (csrc/moe/device/grid.h) as settings."""
    macros = kernel.macros
    return settings_text(
        handle=function,
        num_threads=macros["MOE_P2P_BLOCK_THREADS"],
        shared_bytes=macros["MOE_P2P_SHARED_BYTES"],
        num_send_workers=macros["MOE_P2P_SEND_WORKERS"],
        num_recv_workers=macros["MOE_P2P_RECV_WORKERS"],
        max_send_blocks=kernel.max_send_blocks,
        max_recv_blocks=kernel.max_recv_blocks,
        max_copy_blocks=kernel.max_copy_blocks,
        max_away_blocks=kernel.max_away_blocks,
        max_resident_blocks=resident_blocks,
        max_slot_bytes=macros.get("MOE_P2P_IMAGE_BYTES", _ANY_SLOT),
        max_tokens=kernel.max_tokens,
    )


def is_plain(kernel: Kernel) -> bool:
    """Whether it takes plain calls only."""
    return bool(kernel.macros["MOE_P2P_PLAIN"])
