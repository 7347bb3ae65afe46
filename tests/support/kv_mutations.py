"""Faults of the KV protocol that tests must catch, each of which leaves out one of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from moe_p2p.kv import receiver, tail, worker
from moe_p2p.kv.legs import LegState
from moe_p2p.kv.pair import Pair
from moe_p2p.kv.unpacking import Unpacker
from tests.support.kv_fakes import FakeCopy


def _no_fence(self: worker.KVWorker, pair: Pair) -> None:
    """Pages come back although the sender's key is still good."""


def _same_nonce(bits: int) -> int:
    return 1


def _no_epoch(slot: int, epoch: int) -> int:
    return 1 << 30 | slot << 18


_fail = receiver.KVReceiver._fail


def _reuse_before_drain(self: Any, reservation: Any, error: Any) -> None:
    _fail(self, reservation, error)
    for leg in reservation.legs:
        leg.state = LegState.SETTLED
    self._free_if_settled(reservation)


_advance = Unpacker.advance


def _reuse_before_scatter(self: Unpacker, reservation: Any, leg: Any) -> int:
    """A part is granted again once its scatter has begun."""
    with mock.patch.object(FakeCopy, "done", return_value=True):
        return _advance(self, reservation, leg)


MUTATIONS: dict[str, Callable[[], Any]] = {
    "no fence": lambda: mock.patch.object(worker.KVWorker, "fence", _no_fence),
    "no nonce": lambda: mock.patch.object(receiver.secrets, "randbits", _same_nonce),
    "no epoch": lambda: mock.patch.object(tail, "immediate", _no_epoch),
    "reuse before drain": lambda: mock.patch.object(
        receiver.KVReceiver, "_fail", _reuse_before_drain
    ),
    "reuse before scatter": lambda: mock.patch.object(Unpacker, "advance", _reuse_before_scatter),
}


@contextmanager
def mutated(name: str) -> Iterator[None]:
    with MUTATIONS[name]():
        yield
