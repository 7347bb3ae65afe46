"""Requests that one thread polls by the thousand. Those of asyncio: moe_p2p/awaiting.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from moe_p2p.ops import call
from moe_p2p.transfers import Request, checked

if TYPE_CHECKING:
    from moe_p2p.engine import Engine

_ops = torch.ops.moe_p2p


class Polling:
    """A part of `Engine`."""

    number: int

    def __init__(self) -> None:
        self._polled: dict[int, Request] = {}
        self._poll_queue: int | None = None

    def watch(self, *requests: Request) -> None:
        """Makes `poll` return these requests once they have ended, also when they have by now.

        A request is watched or awaited (`await request`), in one event loop, not both.
        """
        for request in requests:
            number = checked("request", request, Request).number
            self._polled[number] = request
            try:
                call(_ops.engine_watch.default, self.number, self._queue(), number)
            except RuntimeError:
                self._polled.pop(number, None)
                raise

    def poll(self, timeout_s: float = 0.0) -> list[Request]:
        """Returns watched requests that have ended since the last call, well or not.

        Waits up to timeout_s until there is one; `wait` of each returns at once, or raises what it
        ended with. For one thread, and any number of requests.
        """
        ended = call(_ops.engine_take.default, self.number, self._queue(), timeout_s).tolist()
        return [self._polled.pop(number) for number in ended]

    def fileno(self) -> int:
        """A descriptor that is readable when `poll` has something, for `select` and the like.

        Of the engine: do not read or close it.
        """
        return int(call(_ops.engine_queue_fd.default, self.number, self._queue()))

    def _queue(self) -> int:
        if self._poll_queue is None:
            self._poll_queue = int(call(_ops.engine_queue.default, self.number))
        return self._poll_queue

    def _forget(self, request: int) -> None:
        engine = cast("Engine", self)
        try:
            if not engine.closed:
                _ops.engine_forget.default(self.number, request)
        except RuntimeError:
            return  # closed between this check and the call
