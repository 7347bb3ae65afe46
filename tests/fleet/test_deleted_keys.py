"""Members delete keys while others read them: no reader waits for one that is gone."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore

from moe_p2p.fleet.board import Board
from moe_p2p.fleet.leases import TorchLeases


class Sweeps:
    """A key is deleted as soon as somebody has asked whether it is there."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.store.set_timeout(timedelta(seconds=0.5))  # of a `get` that waits
        self.waited = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def clone(self) -> Sweeps:
        return self

    def get(self, key: str) -> bytes:
        self.waited |= not self.store.check([key])
        return bytes(self.store.get(key))

    def check(self, keys: list[str]) -> bool:
        found = self.store.check(keys)
        for key in keys:
            self.store.delete_key(key)
        return bool(found)


def reads_a_word(store: Any) -> None:
    words = Board(store, "fleet")
    words.put("word", 1)
    assert words.get("word") in (1, None)
    assert words.get("another") is None
    words.client.close()


def leaves(store: Any) -> None:
    words = Board(store, "fleet")
    words.put("word", 1)
    words.withdraw(lambda _: True)
    assert words.get("word") is None
    words.client.close()


def reads_leases(store: Any) -> None:
    leases = TorchLeases(store, 60)
    leases.renew("worker", b"record")
    assert set(leases.members()) <= {"worker"}


@pytest.mark.parametrize("does", [reads_a_word, leaves, reads_leases])
def test_a_key_that_is_deleted_meanwhile_is_not_waited_for(does: Callable[[Any], None]) -> None:
    store = Sweeps()
    does(store)
    assert not store.waited
