"""When requests of an engine were under way, and what posting took; for `bench --api weights`."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from moe_p2p import Engine
from moe_p2p.engine.transfers import Request

_LIMIT_S = 120.0


@dataclass
class Posted:
    """Requests of one update. Seconds while at least one of them was under way: busy_s, of all;
    link_s, of those to other GPUs."""

    requests: int = 0
    submit_s: float = 0.0
    busy_s: float = 0.0
    link_s: float = 0.0


class Watched:
    """Keeps when each request of an engine was posted and ended, and what posting took.

    near: addresses of the engines that have this one's GPU.
    """

    def __init__(self, engine: Engine, near: Collection[bytes] = ()) -> None:
        self._write, self._connect, self._resolve = (
            engine.write_all,
            engine.connect,
            engine.resolve,
        )
        self._near, self._near_regions = set(near), set[int]()
        self._near_peers = list[Any]()
        self._posted = Posted()
        self._spans: dict[bool, list[tuple[float, float]]] = {}
        engine.write_all = self._timed  # type: ignore[method-assign]
        engine.connect = self._connected  # type: ignore[method-assign]
        engine.resolve = self._resolved  # type: ignore[method-assign]
        self.clear()

    def clear(self) -> None:
        self._spans, self._posted = {True: [], False: []}, Posted()  # by whether they are near

    def posted(self) -> Posted:
        """Returns the figures of the update that has just ended."""
        self._posted.busy_s = _covered([*self._spans[True], *self._spans[False]])
        self._posted.link_s = _covered(self._spans[False])
        return self._posted

    def _connected(self, address: bytes, **how: Any) -> Any:
        peer = self._connect(address, **how)
        if address in self._near:
            self._near_peers.append(peer)
        return peer

    def _resolved(self, descriptor: bytes, peer: Any = None, **how: Any) -> Any:
        region = self._resolve(descriptor, peer, **how)
        if any(peer is each for each in self._near_peers):
            self._near_regions.add(region.number)
        return region

    def _timed(self, table: Any, *args: Any, **how: Any) -> Any:
        began = time.perf_counter()
        requests = self._write(table, *args, **how)
        self._posted.submit_s += time.perf_counter() - began
        self._posted.requests += len(requests)
        near = [number in self._near_regions for number in table[:, 1].tolist()]
        return [_Request(r, self._spans[n]) for r, n in zip(requests, near, strict=True)]


def _covered(spans: list[tuple[float, float]]) -> float:
    """Seconds in at least one of them."""
    found = end = 0.0
    for begin, ended in sorted(spans):
        found += max(ended - max(begin, end), 0.0)
        end = max(end, ended)
    return found


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
