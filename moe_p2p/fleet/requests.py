"""Requests to a torch.distributed Store that end at a deadline, and which Ctrl-C interrupts.

torch waits for the answer of a TCPStore's server in C++, without a deadline and without looking at
signals (`check`, `set`, `add` and others of torch 2.13). So requests of the main thread run on a
thread of their own. When the server does not answer, that thread stays behind with the request; it
does not keep the process from ending.

Other threads wait in torch: signals do not reach them, and where a thousand ranks are threads,
handing over doubles the time of set-up (benchmarks/bench_setup.py).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_Queue = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
# How long a request waits for the one before it, whose wait has ended. Too short: after Ctrl-C a
# rank does not report it to the others, although the server is only slow.
_GRACE_S = 1.0


class Requests:
    """One after the other, in order. close() ends the thread, as does the garbage collector."""

    def __init__(self) -> None:
        self._queue: _Queue = SimpleQueue()
        self._last: Future[Any] | None = None  # None: there is no thread yet
        self.close = weakref.finalize(self, self._queue.put, None)

    def run(self, access: Callable[[], T], timeout_s: float) -> T:
        """Returns or raises what `access` does; TimeoutError when it does not end in time."""
        if threading.current_thread() is not threading.main_thread():
            return access()
        if self._last is None:
            threading.Thread(target=_serve, args=(self._queue,), daemon=True).start()
        else:
            with suppress(Exception):  # of the request before
                self._last.exception(_GRACE_S)
            if not self._last.done():
                raise TimeoutError(f"no answer to the request before within {_GRACE_S} s more")
        answer: Future[T] = Future()
        self._last = answer
        self._queue.put((answer, access))
        try:
            return answer.result(timeout_s)
        except NoAnswer:
            if answer.done():
                raise  # of `access`
            raise TimeoutError(f"no answer within {timeout_s} s") from None


def _serve(queue: _Queue) -> None:
    while (request := queue.get()) is not None:
        answer, access = request
        try:
            answer.set_result(access())
        except BaseException as error:
            answer.set_exception(error)
        del request, answer, access  # so that results do not live until the next request
