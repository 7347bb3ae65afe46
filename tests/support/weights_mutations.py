"""Faults of weight updates that tests must catch, each of which leaves out one part of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from moe_p2p.weights import attempt
from moe_p2p.weights.arrivals import Arrivals
from moe_p2p.weights.inbox import Inbox
from moe_p2p.weights.maxima import MaximaExchange


def _nothing(*_: object) -> None:
    """What a part does where it is left out."""


MUTATIONS: dict[str, Callable[[], Any]] = {
    "publish before count": lambda: mock.patch.object(Arrivals, "counted", return_value=True),
    "no epoch": lambda: mock.patch.object(attempt, "immediate", return_value=attempt.FIRST_IMM),
    "skip finalize": lambda: mock.patch.object(Inbox, "finish", _nothing),
    "no boundary maxima": lambda: mock.patch.object(MaximaExchange, "run", _nothing),
    "no fence": lambda: mock.patch.object(Inbox, "fence", _nothing),
}


@contextmanager
def mutated(name: str) -> Iterator[None]:
    with MUTATIONS[name]():
        yield
