"""An AllToAll whose dispatches need no combine: a call that needs a step releases its old dispatch.

DeepEP's callers dispatch without combining (a backward pass, a benchmark) and combine one dispatch
several times. Here a paired dispatch holds one of `steps_in_flight` steps until its combine. So the
oldest dispatch is released when its step is needed again; a later combine of it opens a new step.
All ranks make the same calls, so all release the same dispatches at the same call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_p2p.all_to_all import AllToAll
from moe_p2p.dispatched import Dispatched, PendingCombine, PendingDispatch
from moe_p2p.ops import call
from moe_p2p.options import DispatchForm

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
        self._next_step = 0
        # id(handle): (handle, step), oldest first. The handle is kept, so that its id stays unique.
        self._open: dict[int, tuple[Tensor, int]] = {}

    def dispatch_with(self, form: DispatchForm, *given: Any) -> tuple[Any, ...]:
        num_steps = self._make_room(form.max_tokens)
        received = AllToAll.dispatch_with(self, form, *given)
        self._opened(received[-1].handle, num_steps, form.options.solo)
        return received

    def dispatch_send_with(self, form: DispatchForm, *given: Any) -> PendingDispatch:
        num_steps = self._make_room(form.max_tokens)
        pending = AllToAll.dispatch_send_with(self, form, *given)
        self._opened(pending.call.handle, num_steps, form.options.solo)
        return pending

    def make_outputs(self, pending: PendingDispatch) -> Dispatched:
        """Returns dispatch_recv's output tensors before they are filled."""
        return self._make_outputs(pending)

    def combine_with(self, y: Tensor, dispatched: Dispatched, *given: Any, **options: Any) -> Any:
        num_steps = self._steps_of_combine(dispatched)
        result = AllToAll.combine_with(self, y, dispatched, *given, **options)
        self._combined(dispatched, num_steps)
        return result

    def combine_send(self, y: Tensor, dispatched: Dispatched, **options: Any) -> PendingCombine:
        num_steps = self._steps_of_combine(dispatched)
        pending = AllToAll.combine_send(self, y, dispatched, **options)
        self._combined(dispatched, num_steps)
        return pending

    def release(self, given: Dispatched | PendingDispatch) -> None:
        super().release(given)
        self._open.pop(id(given.call.handle), None)

    def _make_room(self, max_tokens: int) -> int:
        """Releases dispatches whose steps a call of max_tokens needs; returns how many it needs."""
        num_steps = -(-max_tokens // self._shape.chunk_tokens) or 1
        if self._open:
            reused = self._next_step + num_steps - self.config.steps_in_flight  # steps below this
            for key, (handle, step) in tuple(self._open.items()):
                if step >= reused:
                    break
                call(_ops.release.default, self._comm, handle)
                del self._open[key]
        return num_steps

    def _opened(self, handle: Tensor, num_steps: int, solo: bool) -> None:
        if num_steps == 1 and not solo:
            self._open[id(handle)] = (handle, self._next_step)
        self._next_step += num_steps

    def _steps_of_combine(self, dispatched: Dispatched) -> int:
        """Number of steps that a combine opens: 0 while its dispatch holds one."""
        if id(dispatched.call.handle) in self._open:
            return 0
        return self._make_room(dispatched.call.max_tokens)

    def _combined(self, dispatched: Dispatched, num_steps: int) -> None:
        self._open.pop(id(dispatched.call.handle), None)
        self._next_step += num_steps
