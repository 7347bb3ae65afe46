"""On which stream a call of DeepEP's API runs, and which stream waits for which.

A synchronous call runs on the current stream, an asynchronous one on the communication stream.
Calls of one buffer run one after the other, on any streams, because an AllToAll needs its calls in
one order. Without a GPU all of this does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_p2p import errors
from moe_p2p.deep_ep.event import EventHandle, EventOverlap
from moe_p2p.library import is_dynamo_compiling, is_set, num_modes, switched_off

if TYPE_CHECKING:
    from typing_extensions import Self


_NO_OWNER = (
    "allocate_on_comm_stream needs previous_event and async_finish: what is allocated on the "
    "communication stream can only be used after an event"
)


_records = torch.is_grad_enabled
new_event = EventOverlap.__new__  # one without fields of its own, which takes less time


class Streams:
    """The communication stream of one buffer, and the stream of its latest call."""

    def __init__(self) -> None:
        self._comm: torch.cuda.Stream | None = None
        self._latest: torch.cuda.Stream | None = None
        self._latest_raw = -1  # its CUstream; -1: none

    @property
    def comm(self) -> torch.cuda.Stream:
        if self._comm is None:
            if not torch.cuda.is_available():
                text = "there is no GPU, so there is no communication stream: calls on CPU tensors "
                raise errors.make(errors.UnavailableError, text + "are done when they return")
            self._comm = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        return self._comm

    def bare_on(self, like: object) -> int | None:
        """The device of a synchronous call for which turn() has nothing to do if it is bare
        (moe_p2p/moe/bare.py). -1: host memory; None: it has."""
        if type(like) is not Tensor or is_dynamo_compiling():
            return None
        ordinal = like.get_device()
        return ordinal if ordinal < 0 or self._latest_raw == _current_raw(ordinal) else None

    def turn(
        self,
        like: Tensor,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Turn:
        """Returns a context whose work runs after previous_event, by default the current stream.

        like: a tensor of the call, for its device.
        """
        if allocate_on_comm_stream and (previous_event is None or not async_finish):
            raise errors.make(errors.InvalidArgumentError, _NO_OWNER)
        unaffected = switched_off() if num_modes() and is_set() else None
        try:
            if unaffected is None:
                ordinal = like.get_device()  # -1: host memory
            else:
                with unaffected:
                    ordinal = like.get_device()
        except AttributeError:
            raise errors.wrong_type("the first argument", like) from None
        event = previous_event.event if isinstance(previous_event, EventOverlap) else previous_event
        # Fast path of most calls, without a stream object: on the stream of the latest call.
        on_latest = ordinal < 0 or self._latest_raw == _current_raw(ordinal)
        if on_latest and event is None and not async_finish:
            return _BARE if unaffected is None and not _records() else Turn(False, unaffected)
        if ordinal < 0:
            wait_for(event, like)
            return Turn(async_finish, unaffected)
        return CudaTurn(self, event, async_finish, unaffected)

    def follow(self, stream: torch.cuda.Stream) -> None:
        """Orders the next call, on `stream` (the current one), after the latest call."""
        latest, self._latest = self._latest, stream
        self._latest_raw = stream.cuda_stream
        # A capture cannot wait for work outside its graph; the user orders whole graphs.
        if latest not in (None, stream) and _is_capturing(latest) == _is_capturing(stream):
            stream.wait_stream(latest)


def wait_for(event: EventOverlap | EventHandle | None, like: Tensor) -> None:
    """Orders later work on the device of `like` after the event."""
    handle = event.event if isinstance(event, EventOverlap) else event
    if handle is None:
        return
    if like.is_cuda:
        handle.current_stream_wait()
    else:
        handle.synchronize()  # a GPU may be writing to them


def current(like: Tensor) -> int:
    """Returns a number of the caller's current stream; 0 for host memory."""
    return _current_raw(like.get_device()) if like.is_cuda else 0


def use_here(like: Tensor, tensors: Iterable[Tensor | None], since: int) -> None:
    """Records that tensors of the stream `since` are used on the current stream, so that their
    memory is not reused before that use is over."""
    if current(like) == since:
        return
    stream = torch.cuda.current_stream()
    for tensor in tensors:
        if tensor is not None:
            tensor.record_stream(stream)


def _current_raw(ordinal: int) -> int:
    return torch._C._cuda_getCurrentRawStream(ordinal)


def _is_capturing(stream: torch.cuda.Stream | None) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


class Turn:
    """One call, as a context manager. `event`, after its end, is the event that the call returns.

    Within a call there is neither autograd (for training, wrap calls in autograd functions) nor a
    default device (moe_p2p/library.py).
    """

    def __init__(self, async_finish: bool, unaffected: Any = None) -> None:
        """unaffected: a context without a default device; None: there is none."""
        self._async_finish = async_finish
        self._records = _records()
        self._unaffected = unaffected
        self._end: EventHandle | None = None

    def __enter__(self) -> Self:
        if self._unaffected is not None:
            self._unaffected.__enter__()
        if self._records:
            torch._C._set_grad_enabled(False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if self._records:
            torch._C._set_grad_enabled(True)
        if self._async_finish:
            self._end = EventHandle()
        if self._unaffected is not None:
            self._unaffected.__exit__(None, None, None)

    @property
    def event(self) -> EventOverlap:
        return EventOverlap(self._end)

    def uses(self, given: Iterable[Tensor | None], made: Iterable[Tensor | None]) -> None:
        """Registers arguments and results that two streams use. Called before the block ends."""


class _Bare(Turn):
    """A call with nothing to do before and after it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing."""

    @property
    def event(self) -> EventOverlap:
        return new_event(EventOverlap)


_BARE = _Bare(False)  # shared by all of them


class CudaTurn(Turn):
    """One call on a GPU."""

    def __init__(
        self, streams: Streams, after: EventHandle | None, async_finish: bool, unaffected: Any
    ) -> None:
        super().__init__(async_finish, unaffected)
        self._callers = torch.cuda.current_stream()
        self._stream = streams.comm if async_finish else self._callers
        self._scope = torch.cuda.stream(self._stream) if async_finish else None
        self._streams = streams
        self._after = after

    def __enter__(self) -> Self:
        if self._scope is not None:
            self._scope.__enter__()  # type: ignore[no-untyped-call]
        if self._after is not None:
            self._after.current_stream_wait()
        elif self._scope is not None:
            self._stream.wait_stream(self._callers)
        self._streams.follow(self._stream)
        return super().__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        if self._scope is not None:
            self._scope.__exit__(kind, error, trace)

    def uses(self, given: Iterable[Tensor | None], made: Iterable[Tensor | None]) -> None:
        # Arguments were allocated elsewhere and are used here; results the other way round.
        for tensors, stream in ((given, self._stream), (made, self._callers)):
            for tensor in tensors:
                if tensor is not None:
                    tensor.record_stream(stream)
