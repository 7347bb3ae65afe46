"""A thread that looks at the store for an engine's loop, which never waits for it.

Used by weights' engine_rank.py: `step` asks it to look once more, and takes up what it has found.
It holds its rank weakly, and tries again by itself while the store does not answer.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable

import torch

from moe_p2p import log
from moe_p2p.errors import ClosedError
from moe_p2p.fleet.client import StoreError
from moe_p2p.machine.driver import relaxed_captures

_AGAIN_S = 0.25  # until the next try, where the store is gone
# When the interpreter ends, a look that is under way gets so long: a thread that came back from C++
# afterwards would end the process by std::terminate.
_LEAVE_S = 1.0


class _Looks:
    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device, self.changed = name, device, threading.Condition()
        self.asked = self.looked = 0
        self.over = threading.Event()
        self.error: Exception | None = None
        self.trouble: StoreError | None = None

    def ask(self) -> None:
        with self.changed:
            self.asked += 1
            self.changed.notify_all()

    def take_error(self) -> Exception | None:
        error, self.error = self.error, None
        return error

    def look(self, look: Callable[[], None]) -> None:
        try:
            look()
            self.trouble = None
        except StoreError as error:
            if self.trouble is None:
                log.warning(f"{self.name}: generation goes on without updates: {error}")
            self.trouble = error
        except ClosedError:
            self.over.set()
        except Exception as error:
            self.error, self.trouble = error, None

    def has_looked(self, asked: int) -> None:
        with self.changed:
            self.looked = asked
            self.changed.notify_all()


class Lookout:
    """look: a method, called once for all calls of `ask` that come while it is in a look. device:
    of what it computes, without gradients, and on a GPU on a stream of its own."""

    def __init__(self, look: Callable[[], None], name: str, device: torch.device) -> None:
        self._state = _Looks(name, device)
        self._thread = threading.Thread(
            target=_run, args=(self._state, weakref.WeakMethod(look)), name=name, daemon=True
        )
        self._thread.start()
        self._end = weakref.finalize(self, _stop, self._state, self._thread)

    def ask(self) -> None:
        """Raises what an earlier look has raised."""
        self._state.ask()
        error = self._state.take_error()
        if error is not None:
            raise error

    def settle(self, timeout_s: float) -> None:
        """Returns when what was asked for has been looked at; not for the engine's loop."""
        state = self._state
        with state.changed:
            wanted = state.asked
            state.changed.wait_for(lambda: state.looked >= wanted, timeout_s)

    @property
    def trouble(self) -> StoreError | None:
        """Why the last look saw nothing."""
        return self._state.trouble

    def stop(self, timeout_s: float) -> None:
        """Looks no more; waits for the look that is under way."""
        self._end.detach()
        _stop(self._state, self._thread, timeout_s)


def _stop(state: _Looks, thread: threading.Thread, timeout_s: float = _LEAVE_S) -> None:
    state.over.set()
    with state.changed:
        state.changed.notify_all()
    if thread is not threading.current_thread():
        thread.join(timeout_s)


def _run(state: _Looks, look: weakref.WeakMethod[Callable[[], None]]) -> None:
    # The engine may capture graphs meanwhile, and the stream brings its device along.
    with relaxed_captures(), torch.no_grad(), _own_stream(state.device):
        while True:
            with state.changed:
                state.changed.wait_for(lambda: state.asked > state.looked or state.over.is_set())
                asked = state.asked
            method = look()
            if method is None or state.over.is_set():
                return
            state.look(method)
            del method
            if state.trouble is not None:
                state.over.wait(_AGAIN_S)
                continue
            state.has_looked(asked)


def _own_stream(device: torch.device) -> contextlib.AbstractContextManager[None]:
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
