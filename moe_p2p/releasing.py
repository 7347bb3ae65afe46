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

from moe_p2p.all_to_all import AllToAll
from moe_p2p.dispatched import Dispatched, PendingDispatch
from moe_p2p.ops import call

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
