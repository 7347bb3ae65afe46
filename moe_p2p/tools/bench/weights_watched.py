"""When requests of an engine were under way, and what posting took; for `bench --api weights`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from moe_p2p import Engine
from moe_p2p.transfers import Request

_LIMIT_S = 120.0


@dataclass
class Posted:
    """Requests of one update. busy_s: while at least one of them was under way."""

    requests: int = 0
    submit_s: float = 0.0
    busy_s: float = 0.0


class Watched:
    """Keeps when each request of an engine was posted and ended, and what posting took."""

    def __init__(self, engine: Engine) -> None:
        self._write, self._posted = engine.write_all, Posted()
        self._spans: list[tuple[float, float]] = []
        engine.write_all = self._timed  # type: ignore[method-assign]

    def clear(self) -> None:
        self._spans, self._posted = [], Posted()

    def posted(self) -> Posted:
        """Returns the figures of the update that has just ended."""
        end = 0.0
        for begin, ended in sorted(self._spans):
            self._posted.busy_s += max(ended - max(begin, end), 0.0)
            end = max(end, ended)
        return self._posted

    def _timed(self, *args: Any, **how: Any) -> Any:
        began = time.perf_counter()
        requests = self._write(*args, **how)
        self._posted.submit_s += time.perf_counter() - began
        self._posted.requests += len(requests)
        return [_Request(each, self._spans) for each in requests]


class _Request:
    """A request that notes its begin and end when it is waited for: later they are not known."""

    def __init__(self, request: Request, seen: list[tuple[float, float]]) -> None:
        self._request, self._seen = request, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    def wait(self, timeout_s: float | None = None) -> None:
        until = time.monotonic() + (_LIMIT_S if timeout_s is None else timeout_s)
        while not self._request.done() and time.monotonic() < until:
            time.sleep(2e-5)
        if self._request.done():
            report = self._request.report()
            self._seen.append((report.first_post_at or report.ended_at, report.ended_at))
        self._request.wait(max(until - time.monotonic(), 0.001))
