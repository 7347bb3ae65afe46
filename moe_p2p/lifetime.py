"""Closes engines and communicators once, and forbids copies of them.

Both hold one process's end of connections: threads, shared memory and locks, which neither a forked
child nor a copy can share.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, NoReturn


def _unless_forked(pid: int, close: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if os.getpid() == pid:
        close(*args)


class Closing:
    """Calls close(*args) once: when called, when `owner` is collected, or at interpreter exit.

    Does nothing in a forked child: the resources belong to its parent.
    """

    def __init__(self, owner: object, close: Callable[..., Any], *args: Any) -> None:
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(owner, _unless_forked, self._pid, close, args)

    def __call__(self) -> None:
        self._finalizer()

    @property
    def why_closed(self) -> str:
        """Returns why `owner` cannot be used here; empty while it can."""
        if os.getpid() != self._pid:
            return f"of process {self._pid}, from which this one was forked"
        return "" if self._finalizer.alive else "closed"


class NotCopied:
    """Base of objects that refuse copy, deepcopy, pickle and torch.save."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        name = type(self).__name__
        raise TypeError(
            f"{name} cannot be copied, pickled or saved: it is this process's end of connections. "
            f"Make one in each process; save the state_dict() of a module that holds one; let a "
            f"copy of such a module share it: copy.deepcopy(module, {{id(x): x}}) with x the {name}"
        )
