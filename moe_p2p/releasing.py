"""An AllToAll whose dispatches need no combine: a call that needs a step releases its old dispatch.

DeepEP's callers dispatch without combining (a backward pass, a benchmark) and combine one dispatch
several times. Here a paired dispatch holds one of `steps_in_flight` steps until its combine, so the
oldest are released when their steps come up again (csrc/moe/ledger.h); a later combine of theirs
opens a step of its own. All ranks make the same calls, so all release the same ones at the same
call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_p2p import arguments, errors
from moe_p2p.all_to_all import AllToAll, fields_of
from moe_p2p.dispatched import Dispatched, PendingDispatch
from moe_p2p.ops import call
from moe_p2p.options import DispatchOptions
from moe_p2p.row_counts import Given

_ops = torch.ops.moe_p2p
# Replaces x and its scales in a handle, which would keep them alive.
_NO_ROWS = (torch.empty(0, dtype=torch.float32, device="cpu"), None)


def without_rows(received: tuple[Any, ...]) -> Dispatched:
    """Returns the fields of a Dispatched without x and scales (the first two), for a handle."""
    return Dispatched._make(_NO_ROWS + received[2:])


def tensors_of(received: tuple[Any, ...]) -> list[Tensor]:
    """Of a Dispatched's fields, of which the last is the Call."""
    return [received[-1].handle, *(part for part in received if isinstance(part, Tensor))]


class ReleasingAllToAll(AllToAll):
    """Arguments and results are AllToAll's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        call(_ops.all_to_all_release_oldest.default, self._comm)

    def make_outputs(self, pending: PendingDispatch) -> Dispatched:
        """Returns dispatch_recv's output tensors before they are filled."""
        return self._make_outputs(pending)

    def dispatch_counted(
        self,
        options: DispatchOptions,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor | None,
        scales: Tensor | None,
        given: Given,
        *,
        alignment: int,
        max_tokens: int = -1,
    ) -> tuple[tuple[Any, ...], Tensor, list[int]]:
        """Waits for the counts of all ranks, and makes exactly as many rows. Without gradients.

        given: this rank's counts. alignment: of the rows of an expert that are counted.
        max_tokens: bound on T of all ranks; -1: the largest, which the counts tell.

        Returns the fields of a Dispatched, the counts of all ranks and the sizes that follow from
        them (row_counts.extent_of).
        """
        self._prepare_dispatch(x.dtype, options.number, False, arguments.bytes_of_rows(x))
        *made, gathered, sizes = call(
            _ops.dispatch_counted.default,
            self._comm,
            options.number,
            x,
            scales,
            topk_idx,
            topk_weights,
            max_tokens,
            alignment,
            given.host,
            given.number,
        )
        bound = sizes[1] if max_tokens < 0 else max_tokens
        number, has_scales = options.number, scales is not None
        capacity = made[0].shape[0]
        return fields_of(made, number, topk_idx, has_scales, bound, capacity), gathered, sizes


def _fake_dispatch_counted(*_: object) -> None:
    text = "a dispatch whose host waits for the counts of all ranks cannot be traced: pass "
    text += "num_worst_tokens (V1) or do_cpu_sync=False (V2)"
    raise errors.make(errors.UnavailableError, text)


torch.library.register_fake("moe_p2p::dispatch_counted")(_fake_dispatch_counted)
