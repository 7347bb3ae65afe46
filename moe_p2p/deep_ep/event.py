"""EventHandle and EventOverlap: returned by DeepEP's calls, to wait until their work is done.

With CPU tensors a call is done when it returns, and waits do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self


class EventHandle:
    """A point in the stream that is current at construction."""

    def __init__(self) -> None:
        self.tensors_to_record: Sequence[Tensor] = ()  # kept alive by this object
        self._event: torch.cuda.Event | None = None
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def current_stream_wait(self) -> None:
        """Orders later work of the current stream after that point."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def synchronize(self) -> None:
        """Blocks the host until the work before that point is done."""
        if self._event is not None:
            self._event.synchronize()


class EventOverlap:
    """The event of a call, to wait for later.

        with event:  # or event(release_handle=True)
            work_that_needs_no_result()

    event: None when the call was synchronous.
    extra_tensors: kept alive by this object, so that their memory is not reused earlier.
    """

    event: EventHandle | None = None
    extra_tensors: Sequence[Tensor] | None = None
    hook_after_wait: Callable[[], Any] | None = None
    _releases = False

    def __init__(
        self, event: EventHandle | None = None, extra_tensors: Sequence[Tensor] | None = None
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """Waits on the current stream, then calls the hook, once, and returns the hook's result.

        After a synchronous call there is nothing to wait for. release_handle: drops the event and
        its tensors.
        """
        if self.event is not None:
            self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        result = None if hook is None else hook()
        if release_handle:
            self.event = None
        return result

    def wait(self) -> Any:
        """current_stream_wait(), which keeps the event."""
        return self.current_stream_wait()

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        """Registers a hook, called at the end of the next wait. One at a time."""
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
