"""EventHandle and EventOverlap: what DeepEP's calls return to say when their work is done.

For tensors of the CPU a call is done when it returns, and waiting is nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self


class EventHandle:
    """A point of the stream that is current when this is made."""

    def __init__(self) -> None:
        self.tensors_to_record: Sequence[Tensor] = ()  # kept as long as this is
        self._event: torch.cuda.Event | None = None
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def current_stream_wait(self) -> None:
        """What the current stream does from now on comes after that point."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def synchronize(self) -> None:
        """Returns when what came before that point is done."""
        if self._event is not None:
            self._event.synchronize()


class EventOverlap:
    """The event of a call, to wait for later.

        with event:  # or event(release_handle=True)
            work_that_needs_no_result()

    event: None when the call was synchronous.
    extra_tensors: kept as long as this is, so that nobody reuses their memory before.
    """

    hook_after_wait: Callable[[], Any] | None = None
    _releases = False

    def __init__(
        self, event: EventHandle | None = None, extra_tensors: Sequence[Tensor] | None = None
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """Waits on the current stream, then calls the hook, once, and returns what it returned.

        A synchronous call leaves nothing to wait for. release_handle: forget the event and its
        tensors.
        """
        if self.event is not None:
            self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        result = None if hook is None else hook()
        if release_handle:
            self.event = None
        return result

    wait = current_stream_wait

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        """It is called at the end of the next wait. One at a time."""
        assert self.hook_after_wait is None, "this EventOverlap has a hook already"
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> Self:
        self._releases = release_handle
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.current_stream_wait(self._releases)
        self._releases = False
