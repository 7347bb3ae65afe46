"""A store whose every call blocks, and what an engine's steps cost beside it. Used by tests of
weight updates and of each engine's adapters."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

STEPS, STEP_CPU_S = 1000, 0.001
LONG_S = 60.0


class Blocking:
    """A client of a store, of which every call blocks from `block` on."""

    def __init__(self, store: Any) -> None:
        self._store, self._free = store, threading.Event()
        self._free.set()
        self.blocked = 0

    def block(self) -> None:
        self._free.clear()

    def go_on(self) -> None:
        self._free.set()

    @property
    def is_free(self) -> bool:
        return self._free.is_set()

    def __getattr__(self, name: str) -> Any:
        if name == "clone":
            raise AttributeError(name)
        call = getattr(self._store, name)

        def blocking(*arguments: Any) -> Any:
            self.blocked += not self._free.is_set()
            self._free.wait()
            return call(*arguments)

        return blocking


class Cost:
    """calls, cpu_s: of methods, and CPU of their threads."""

    def __init__(self) -> None:
        self.calls, self.cpu_s, self._inside = 0, 0.0, threading.local()

    def wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*given: Any, **named: Any) -> Any:
            if getattr(self._inside, "calls", False):  # of another method
                return call(*given, **named)
            self._inside.calls, began = True, time.thread_time()
            try:
                return call(*given, **named)
            finally:
                self._inside.calls = False
                self.calls, self.cpu_s = self.calls + 1, self.cpu_s + time.thread_time() - began

        return counted

    def of(self, step: Callable[[], object], count: int = STEPS) -> float:
        """CPU seconds of the methods in a step. None may wait for the store: ten seconds each."""
        calls, cpu_s, began = self.calls, self.cpu_s, time.monotonic()
        for _ in range(count):
            step()
            assert time.monotonic() - began < LONG_S
        assert self.calls >= calls + count, "a step calls what is counted"
        return (self.cpu_s - cpu_s) / count


@contextmanager
def counted(*kinds: type) -> Iterator[Cost]:
    """Of all methods that classes of ours define themselves."""
    cost = Cost()
    saved = [
        (kind, name, each)
        for kind in kinds
        for name, each in vars(kind).items()
        if callable(each) and not name.startswith("__") and not isinstance(each, type)
    ]
    for kind, name, each in saved:
        setattr(kind, name, cost.wrapped(each))
    try:
        yield cost
    finally:
        for kind, name, each in saved:
            setattr(kind, name, each)


def check_steps(cost: Cost, store: Blocking, step: Callable[[], object]) -> None:
    """Steps beside a store that blocks cost at most a millisecond more; it is left so."""
    free = cost.of(step, STEPS // 5)
    store.block()
    until = time.monotonic() + LONG_S
    while not store.blocked:  # a thread of ours asks
        assert time.monotonic() < until
        step()
    blocked = cost.of(step)
    assert blocked < free + STEP_CPU_S, (blocked, free)
