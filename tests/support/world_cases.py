"""Worlds that change, on CPUs: bodies of one rank, as threads or processes, and their oracle.

`step` (mask_cases.py) compares what a rank receives and its sums with the reference without the
seats that are absent, bit for bit.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from moe_p2p import AllToAll, AllToAllConfig
from tests.support.cases import SMALL
from tests.support.mask_cases import masks_of, step

SEATS = 4


def config_of(**overrides: Any) -> AllToAllConfig:
    """Of SEATS seats with equal experts, which lose ranks to masks unless overridden."""
    fields = {"num_experts": 3 * SEATS, "mask_lost_ranks": True, "timeout_s": 30.0}
    return AllToAllConfig(**(SMALL | fields | overrides))


def begin(store: Store, seat: int, members: Iterable[int], **overrides: Any) -> AllToAll:
    """One of `members`, which make the world, or another one, which joins it."""
    founds = seat in set(members)
    who: dict[str, Any] = {"members": members} if founds else {"join": True}
    return AllToAll(store, config_of(**overrides), rank=seat, world_size=SEATS, **who)


def absent(present: Iterable[int]) -> list[int]:
    return [seat for seat in range(SEATS) if seat not in set(present)]


def steps(comm: AllToAll, present: Iterable[int], first: int = 0, count: int = 4) -> None:
    gone = absent(present)
    for seed in range(first, first + count):
        step(comm, seed, gone)
    assert masks_of(comm) == gone


def steps_until_staged(comm: AllToAll, store: Store, name: str, present: list[int]) -> int:
    """Steps run on while members stage; all leave behind the same one. Returns how many. Of few
    seeds: what each has to give is kept (mask_cases.py), and would look like a leak."""
    for number in range(100_000):
        ready = f"{name} is staged before {number}"
        if comm.members_staged():
            store.add(ready, 1)
        steps(comm, present, number % 16, 1)  # all others have begun it, so what they add is there
        if int(store.add(ready, 0)) == len(present):
            return number + 1
    raise AssertionError("never staged")


def together(store: Store, name: str, count: int) -> None:
    if store.add(f"came to {name}", 1) == count:
        store.set(name, "")
    store.wait([name], timedelta(seconds=60))


def seat_given(store: Store, name: str) -> int:
    """For a spare process: waits until somebody `gives` it a seat; -1: it is not needed."""
    store.wait([name], timedelta(seconds=150))
    return int(store.get(name))


def end(pid_key: str, store: Store, number: int = signal.SIGKILL) -> int:
    """Signals the process that has put its id there; returns the id."""
    pid = int(store.get(pid_key))
    os.kill(pid, number)
    return pid
