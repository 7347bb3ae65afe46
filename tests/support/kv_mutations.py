"""Faults of the KV protocol that tests must catch, each of which leaves out one of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from moe_p2p.kv import receiver, tail, worker
from moe_p2p.kv.legs import LegState
from moe_p2p.kv.pair import Pair, PairMemory
from moe_p2p.kv.unpacking import Unpacker
from tests.support.kv_fakes import FakeCopy, FakeEngine


def _nothing(self: worker.KVWorker, pair: Pair) -> None:
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


def _no_loop_back(self: PairMemory, tag: int) -> None:
    self.engine.sever(tag, [], timeout_s=1)


def _loop_back_alone(self: PairMemory, tag: int) -> None:
    self.engine.sever(0, self._registered, timeout_s=1)


_register = FakeEngine.register


def _any_order(self: FakeEngine, tensor: Any, *, in_order: bool = False) -> Any:
    return _register(self, tensor)


# Of the fence by queue pair.
QUEUE_PAIR_MUTATIONS: dict[str, Callable[[], Any]] = {
    "no fence": lambda: mock.patch.object(worker.KVWorker, "fence", _nothing),
    "no loop-back read": lambda: mock.patch.object(PairMemory, "sever", _no_loop_back),
    "no reset": lambda: mock.patch.object(PairMemory, "sever", _loop_back_alone),
    "relaxed order": lambda: mock.patch.object(FakeEngine, "register", _any_order),
}
MUTATIONS: dict[str, Callable[[], Any]] = {
    "no fence": lambda: mock.patch.object(worker.KVWorker, "fence", _nothing),
    "no nonce": lambda: mock.patch.object(receiver.secrets, "randbits", _same_nonce),
    "no epoch": lambda: mock.patch.object(tail, "immediate", _no_epoch),
    "reuse before drain": lambda: mock.patch.object(
        receiver.KVReceiver, "_fail", _reuse_before_drain
    ),
    "reuse before scatter": lambda: mock.patch.object(Unpacker, "advance", _reuse_before_scatter),
}


@contextmanager
def mutated(name: str, *, fence: str = "key") -> Iterator[None]:
    # What a fence has left is given back at some time after it.
    late = mock.patch.object(worker.KVWorker, "close_pair", _nothing)
    with late, (MUTATIONS if fence == "key" else QUEUE_PAIR_MUTATIONS)[name]():
        yield
