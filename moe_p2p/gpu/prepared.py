"""Which kernels calls need before they run, and the error of a CUDA graph that lacks one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moe_p2p import errors
from moe_p2p.options import (
    BY_RANK,
    DEFAULT,
    QUANTIZE,
    SCALE_FORMATS,
    DispatchOptions,
    layout_of,
    scale_format_of,
)

if TYPE_CHECKING:
    from moe_p2p.config import AllToAllConfig

Dispatches = list[tuple[torch.dtype, int, int]]  # arguments of prepare_dispatch
Combines = list[tuple[torch.dtype, torch.dtype, bool]]  # arguments of prepare_combine


def usual_calls(config: AllToAllConfig) -> tuple[Dispatches, Combines]:
    """The calls of the configuration's types, and of their gradients, without options."""
    types = tuple(dict.fromkeys((config.dtype, config.widest_combine_dtype)))
    dispatches = [(dtype, DEFAULT.number, 0) for dtype in types]
    if config.dtype != torch.float8_e4m3fn and config.hidden_dim % 16 == 0:
        dispatches.append((config.dtype, DispatchOptions(quantize=True).number, 0))
    sums = [dtype for dtype in types if dtype != torch.float8_e4m3fn]
    return dispatches, [(dtype, dtype, False) for dtype in sums]


def refuse_capture(missing: str) -> None:
    """Raises UnavailableError while the current stream is captured into a CUDA graph.

    Compilers, loading and allocation are no part of a graph. missing: what is missing, and what
    makes it.
    """
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if started and torch.cuda.is_current_stream_capturing():
        text = f"this stream is captured into a CUDA graph, and {missing} before the capture"
        raise errors.make(errors.UnavailableError, text)


def missing_dispatch(x_dtype: torch.dtype, variant: int) -> str:
    """For refuse_capture."""
    scale_format = SCALE_FORMATS[scale_format_of(variant)]
    options = {
        "layout='by_rank'": layout_of(variant) == BY_RANK,
        "quantize=True": variant & QUANTIZE,
        f"scale_format={scale_format!r}": scale_format_of(variant),
    }
    chosen = ", ".join(option for option, given in options.items() if given)
    return (
        "a dispatch's kernel is not compiled: make such a call once, or call "
        f"prepare(DispatchOptions({chosen}), x_dtype={x_dtype}),"
    )


def missing_combine(y_dtype: torch.dtype, out_dtype: torch.dtype, by_topk: bool) -> str:
    """For refuse_capture."""
    order = ", order='topk'" if by_topk else ""
    return (
        "a combine's kernel is not compiled: make such a call once, or call "
        f"prepare(y_dtype={y_dtype}, out_dtype={out_dtype}{order})"
    )
