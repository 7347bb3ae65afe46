"""Faults of the KV protocol that tests must catch, each of which leaves out one of its parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from moe_p2p.fleet import member
from moe_p2p.kv import footer, source_transfer, worker
from moe_p2p.kv.memory import KVCache
from moe_p2p.kv.pair import Pair, PairMemory
from moe_p2p.kv.receiver import KVReservation
from moe_p2p.kv.source_transfer import SourceTransfer
from moe_p2p.kv.stats import TransferState
from moe_p2p.kv.unpacking import Unpacking
from tests.support.kv_fakes import FakeCopy, FakeEngine


def _nothing(self: worker.KVWorker, pair: Pair) -> None:
    """Pages come back although the sender's key is still good."""


def _same_nonce(bits: int) -> int:
    return 1


def _no_epoch(slot: int, epoch: int) -> int:
    return 1 << 30 | slot << 18


_fail = KVReservation.fail


def _reuse_before_drain(self: KVReservation, error: Any) -> None:
    _fail(self, error)
    for transfer in self.transfers:
        transfer.state = TransferState.SETTLED
    self.free_if_settled()


_advance = Unpacking.advance


def _reuse_before_scatter(self: Unpacking) -> int:
    """A part is granted again once its scatter has begun."""
    with mock.patch.object(FakeCopy, "done", return_value=True):
        return _advance(self)


def _no_loop_back(self: PairMemory, tag: int) -> None:
    self.engine.sever(tag, [], timeout_s=1)


def _loop_back_alone(self: PairMemory, tag: int) -> None:
    self.engine.sever(0, self._registered, timeout_s=1)


def _polls_alone(self: Pair) -> None:
    """Believes that nothing comes any more where nothing has come for a while."""
    for _ in range(64):
        time.sleep(0.0001)


_try_to_fence = worker.KVWorker._try_to_fence


def _free_before_fenced(self: worker.KVWorker, pair: Pair) -> bool:
    with self.lock:
        self.on_fenced(pair)
    return _try_to_fence(self, pair)


def _first_arrival_alone(self: SourceTransfer, counted: int, now: float) -> None:
    """As where tail_s is for all that follows the first byte."""
    self.counted = max(self.counted, counted)
    self.moved_at = self.moved_at or (now if counted else None)


def _as_given(self: KVCache, who: str, pages: Any) -> dict[str, Any]:
    return dict(pages)


_ONE_OF_ALL = SimpleNamespace(token_hex=lambda count: "0" * 2 * count)


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
    "no nonce": lambda: mock.patch.object(source_transfer.secrets, "randbits", _same_nonce),
    "no epoch": lambda: mock.patch.object(footer, "immediate", _no_epoch),
    "reuse before drain": lambda: mock.patch.object(KVReservation, "fail", _reuse_before_drain),
    "fence that only polls": lambda: mock.patch.object(Pair, "fence", _polls_alone),
    "free before fenced": lambda: mock.patch.object(
        worker.KVWorker, "_try_to_fence", _free_before_fenced
    ),
    "deadline of the whole": lambda: mock.patch.object(SourceTransfer, "saw", _first_arrival_alone),
    "lists not copied": lambda: mock.patch.object(KVCache, "page_lists", _as_given),
    "no incarnation in the record": lambda: mock.patch.object(member, "secrets", _ONE_OF_ALL),
    "reuse before scatter": lambda: mock.patch.object(Unpacking, "advance", _reuse_before_scatter),
}


@contextmanager
def mutated(name: str, *, fence: str = "key") -> Iterator[None]:
    # What a fence has left is given back at some time after it.
    late = mock.patch.object(worker.KVWorker, "close_pair", _nothing)
    with late, (MUTATIONS if fence == "key" else QUEUE_PAIR_MUTATIONS)[name]():
        yield
