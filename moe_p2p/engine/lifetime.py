"""Closes engines and communicators once, and forbids copies of them.

Both hold one process's end of connections: threads, shared memory and locks, which neither a forked
child nor a copy can share.
"""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, Protocol

# Seconds until close() goes on without threads that wait. Too short: the end of a busy program may
# call std::terminate. Reached where a signal's handler closes an engine that its thread waits for.
COME_BACK_S = 1.0


def _unless_forked(pid: int, close: Callable[..., object], args: tuple[object, ...]) -> None:
    if os.getpid() == pid:
        close(*args)


def close_and_await(close: Callable[[int], object], number: int, waiting: list[None]) -> None:
    """Calls close(number), then lets the threads that it wakes come back, one of `waiting` each.

    At the end of a program: a thread that comes back from C++ when the interpreter has ended calls
    std::terminate.
    """
    close(number)
    ends = time.monotonic() + COME_BACK_S
    while waiting and time.monotonic() < ends:
        time.sleep(0.001)


class Watcher(Protocol):
    """Of engines and communicators of this process, while it is among `watchers`."""

    def opened(self, owner: Any) -> None: ...

    def closes(self, owner: Any) -> None:
        """Called before it closes, where it is not collected."""


watchers: list[Watcher] = []
owners: weakref.WeakSet[Any] = weakref.WeakSet()  # that are open


class Closing:
    """Calls close(*args) once: when called, when `owner` is collected, or at interpreter exit.

    Does nothing in a forked child: the resources belong to its parent.
    """

    def __init__(self, owner: object, close: Callable[..., object], *args: object) -> None:
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(owner, _unless_forked, self._pid, close, args)
        owners.add(owner)
        for watcher in watchers:
            watcher.opened(owner)

    def __call__(self) -> None:
        if os.getpid() == self._pid and (held := self._finalizer.peek()):
            owners.discard(held[0])
            for watcher in watchers:
                watcher.closes(held[0])
        self._finalizer()

    @property
    def why_closed(self) -> str:
        """Returns why `owner` cannot be used here; empty while it can."""
        if os.getpid() != self._pid:
            return f"of process {self._pid}, from which this one was forked"
        return "" if self._finalizer.alive else "closed"


class Owner:
    """Base of objects that end with a `with` block, and refuse copy, deepcopy, pickle and
    torch.save."""

    def close(self) -> None:
        raise NotImplementedError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failed:
            if error is None:
                raise
            # An ExitStack on the way has cut off `error`, the first failure.
            warnings.warn(f"closing {self} failed too: {failed}", RuntimeWarning, stacklevel=2)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        name = type(self).__name__
        raise TypeError(
            f"{name} cannot be copied, pickled or saved: it is this process's end of connections. "
            f"Make one in each process; save the state_dict() of a module that holds one; let a "
            f"copy of such a module share it: copy.deepcopy(module, {{id(x): x}}) with x the {name}"
        )
