"""Faults of weight updates that tests must catch, each of which leaves out one part of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from moe_p2p.fleet import member
from moe_p2p.weights import WeightEngineRank, attempt
from moe_p2p.weights.engine_buffers import Arrivals, EngineBuffers
from moe_p2p.weights.joining import State
from moe_p2p.weights.maxima import MaximaExchange


def _nothing(*_: object) -> None:
    """What a part does where it is left out."""


def _clean_before_copied(
    self: WeightEngineRank, state: State, names: set[str] | None, *, received: bool = False
) -> None:
    self._stamp, self.version = state
    self.dirty, self.failure = False, ""
    self._lent.open(*state)
    self._buffers.commit(names, state.stamp if received else None)


_ONE_OF_ALL = SimpleNamespace(token_hex=lambda count: "0" * 2 * count)


def _seems_arrived(self: WeightEngineRank) -> bool:
    return bool(self.__dict__["_arrived"] or self._words.get(self._keys.decision) == attempt.COMMIT)


def _arrives(self: WeightEngineRank, value: bool) -> None:
    self.__dict__["_arrived"] = value


_ARRIVED = property(_seems_arrived, _arrives)

MUTATIONS: dict[str, Callable[[], Any]] = {
    "publish before count": lambda: mock.patch.object(Arrivals, "counted", return_value=True),
    "no epoch": lambda: mock.patch.object(attempt, "immediate", return_value=attempt.FIRST_IMM),
    "skip finalize": lambda: mock.patch.object(EngineBuffers, "finish", _nothing),
    "no boundary maxima": lambda: mock.patch.object(MaximaExchange, "run", _nothing),
    "no incarnation in the record": lambda: mock.patch.object(member, "secrets", _ONE_OF_ALL),
    "commit without arrival": lambda: mock.patch.object(
        WeightEngineRank, "_arrived", _ARRIVED, create=True
    ),
    "clean before copied": lambda: mock.patch.object(
        WeightEngineRank, "_take", _clean_before_copied
    ),
    "no fence": lambda: mock.patch.object(EngineBuffers, "fence", _nothing),
}


@contextmanager
def mutated(name: str) -> Iterator[None]:
    with MUTATIONS[name]():
        yield
