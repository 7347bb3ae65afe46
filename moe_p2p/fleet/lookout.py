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
    """What the thread has."""

    def __init__(self, look: Callable[[], None], name: str, device: torch.device) -> None:
        self._look, self._name, self._device = weakref.WeakMethod(look), name, device
        self._changed, self._over = threading.Condition(), threading.Event()
        self._asked = self._looked = 0
        self._error: Exception | None = None
        self.trouble: StoreError | None = None

    def ask(self) -> None:
        with self._changed:
            self._asked += 1
            self._changed.notify_all()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def settle(self, timeout_s: float) -> None:
        with self._changed:
            wanted = self._asked
            self._changed.wait_for(lambda: self._looked >= wanted, timeout_s)

    def stop(self, thread: threading.Thread, timeout_s: float = _LEAVE_S) -> None:
        self._over.set()
        with self._changed:
            self._changed.notify_all()
        if thread is not threading.current_thread():
            thread.join(timeout_s)

    def run(self) -> None:
        # The engine may capture graphs meanwhile, and the stream brings its device along.
        with relaxed_captures(), torch.no_grad(), _own_stream(self._device):
            while True:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._asked > self._looked or self._over.is_set()
                    )
                    asked = self._asked
                look = self._look()
                if look is None or self._over.is_set():
                    return
                self._once(look)
                del look
                if self.trouble is not None:
                    self._over.wait(_AGAIN_S)
                    continue
                with self._changed:
                    self._looked = asked
                    self._changed.notify_all()

    def _once(self, look: Callable[[], None]) -> None:
        try:
            look()
            self.trouble = None
        except StoreError as error:
            if self.trouble is None:
                log.warning(f"{self._name}: generation goes on without updates: {error}")
            self.trouble = error
        except ClosedError:
            self._over.set()
        except Exception as error:
            self._error, self.trouble = error, None


class Lookout:
    """look: a method, called once for all calls of `ask` that come while it is in a look. device:
    of what it computes, without gradients, and on a GPU on a stream of its own."""

    def __init__(self, look: Callable[[], None], name: str, device: torch.device) -> None:
        self._looks = _Looks(look, name, device)
        self._thread = threading.Thread(target=self._looks.run, name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._looks.stop, self._thread)

    def ask(self) -> None:
        """Raises what an earlier look has raised."""
        self._looks.ask()

    def settle(self, timeout_s: float) -> None:
        """Returns when what was asked for has been looked at; not for the engine's loop."""
        self._looks.settle(timeout_s)

    @property
    def trouble(self) -> StoreError | None:
        """Why the last look saw nothing."""
        return self._looks.trouble

    def stop(self, timeout_s: float) -> None:
        """Looks no more; waits for the look that is under way."""
        self._end.detach()
        self._looks.stop(self._thread, timeout_s)


def _own_stream(device: torch.device) -> contextlib.AbstractContextManager[None]:
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
