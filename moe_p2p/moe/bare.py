"""A dispatch or a combine that is one direct call (moe_p2p/moe/direct.py): nobody watches it, and
autograd does not record it.

AllToAll and DeepEP's calls try these first. Where a call is more than that they return None and
have done nothing: it is made the longer way then, through its op. C++ looks (csrc/ops/direct/), but
for what only Python knows: a compiler that traces, a level of forward mode, duplicates to merge.

Shapes: as in all_to_all.py. comm: the number of the communicator. Arguments are passed one by one:
a starred call takes 700 instructions more, a hundredth of a pair.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_p2p.library import raise_typed
from moe_p2p.moe import arguments, direct
from moe_p2p.moe.dispatched import OBJECTS, WHOLE, Dispatched
from moe_p2p.moe.options import (
    DEFAULT_COMBINE,
    MERGE_DUPLICATES,
    CombineOptions,
    DispatchForm,
    DispatchOptions,
)

is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_DISPATCH, _COMBINE = direct.call_of("dispatch", *OBJECTS), direct.call_of("combine", *OBJECTS)


def dispatch(
    comm: int,
    form: DispatchForm | tuple[DispatchOptions, int | None, int | None],
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None = None,
    scales: Tensor | None = None,
    others: list[int] | None = None,
    parts: int = WHOLE,
) -> Any:
    """form: None in it as AllToAll.dispatch takes it. others: numbers of communicators to check
    first. parts: what is returned (dispatched.py)."""
    options, max_tokens, capacity = form
    number = options.number
    if is_dynamo_compiling() or forward_ad._current_level >= 0 or number >= MERGE_DUPLICATES:
        return None
    try:
        return _DISPATCH(
            comm, number, max_tokens, capacity, x, topk_idx, topk_weights, scales, others, parts
        )
    except RuntimeError as error:
        raise_typed(error)


def combine(
    comm: int,
    y: Tensor,
    dispatched: Dispatched,
    options: CombineOptions = DEFAULT_COMBINE,
    weighted: bool | None = False,
    topk_weights: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | None:
    """weighted: in place of that of the options."""
    if is_dynamo_compiling() or forward_ad._current_level >= 0:
        return None
    if options.out_dtype is not None or options.with_wait_ticks:
        return None
    try:
        made: Tensor | None = _COMBINE(
            comm, y, dispatched, options.number, weighted, topk_weights, out
        )
    except RuntimeError as error:
        raise_typed(error)
    if out is not None and made is out:
        arguments.count_versions(out)
    return made
