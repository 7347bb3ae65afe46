"""Calls in halves of `bench --check`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moe_p2p import AllToAll, Dispatched
from moe_p2p.bench.conformance_ranks import Call, Ranks, Wrong
from moe_p2p.moe.options import rows_of


class Halves:
    """Ways to make two calls out of halves: (first, second) -> what is wrong."""

    def __init__(self, ranks: Ranks, comm: AllToAll) -> None:
        self._ranks, self._comm = ranks, comm

    def ways(self) -> dict[str, Callable[[Call, Call], Wrong]]:
        return {
            "dispatch in halves": self._dispatch,
            "combine in halves": self._combine,
            "both in halves, two calls open": self._both,
            "dispatch alone": self._dispatch_alone,
            "combine alone, weights given late": self._combine_alone,
        }

    def steps(self, way: Callable[[Call, Call], Wrong], *, layout: str) -> Wrong:
        def step(number: int) -> Wrong:
            return way(*(self._ranks.call(2 * number + i, layout=layout) for i in (0, 1)))

        return self._ranks.each_step(step)

    def _received(self, call: Call) -> Dispatched:
        return self._comm.dispatch_recv(self._comm.dispatch_send(**call.given))

    def _dispatch(self, first: Call, second: Call) -> Wrong:
        found = []
        for call in (first, second):
            got = self._received(call)
            found += self._ranks.rows(call, got)
            found += self._ranks.sums(call, self._comm.combine(call.y, got))
        return found

    def _combine(self, first: Call, second: Call) -> Wrong:
        found = []
        for call in (first, second):
            sent = self._comm.combine_send(call.y, self._comm.dispatch(**call.given))
            found += self._ranks.sums(call, self._comm.combine_recv(sent))
        return found

    def _both(self, first: Call, second: Call) -> Wrong:
        comm, calls = self._comm, (first, second)
        pending = [comm.dispatch_send(**call.given) for call in calls]
        got = [comm.dispatch_recv(each) for each in pending]
        found = [
            t for call, rows in zip(calls, got, strict=True) for t in self._ranks.rows(call, rows)
        ]
        sent = [comm.combine_send(call.y, rows) for call, rows in zip(calls, got, strict=True)]
        out = [comm.combine_recv(each) for each in sent]
        return found + [
            t for call, y in zip(calls, out, strict=True) for t in self._ranks.sums(call, y)
        ]

    def _dispatch_alone(self, first: Call, second: Call) -> Wrong:
        """Dispatches without a combine: released, or solo."""
        got = self._comm.dispatch(**first.given)
        found = self._ranks.rows(first, got)
        self._comm.release(got)
        alone = second.given | {"options": replace(second.given["options"], solo=True)}
        return found + self._ranks.rows(second, self._comm.dispatch(**alone))

    def _combine_alone(self, first: Call, second: Call) -> Wrong:
        """Combines rows whose dispatch had no weights; by rank the experts have used them."""
        found = []
        for call in (first, second):
            summed = rows_of(call.given["options"].number).per_token
            late = None if summed else call.given["topk_weights"]
            given = call.given | ({} if late is None else {"topk_weights": None})
            got = self._comm.dispatch(**given)
            found += self._ranks.sums(call, self._comm.combine(call.y, got, topk_weights=late))
        return found
