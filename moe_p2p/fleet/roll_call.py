"""Which ranks come: all agree on one set, without ranks that are gone or do not come in time.

Control path only; for set-ups that may go on without a rank. Every rank notes that it is here. Who
first sees that nobody is missing, but for ranks that are gone, or finds the deadline past, proposes
the ranks that are here; the store takes one proposal, and everybody follows it. So it does not
matter which rank is lost, nor that ranks learn of a loss at different times. A rank that waits in a
meeting without a roll call counts as here: that meeting states how the ranks differ.

Keys, below moe_p2p/roll/: {rank} counts its roll calls, which all ranks make in one order;
{call}/{rank}: it is here; {call}/present: the set. They remain, for a rank that comes too late.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from moe_p2p import errors
from moe_p2p.fleet.bootstrap import meets
from moe_p2p.fleet.requests import Requests

T = TypeVar("T")
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.1  # between two looks; the last bounds how late a loss is
_PATIENCE_S = 10.0  # for an answer of the store, in addition to the deadline


def roll_call(
    store: Store,
    rank: int,
    world_size: int,
    *,
    what: str,
    timeout_s: float,
    gone: Callable[[int], bool],
) -> tuple[list[int], Store]:
    """Returns the ranks that are present, in order, and a store for their meeting. Collective.

    what: what they come for, for the error text. timeout_s: how long to wait for a rank that is not
    gone, in seconds. gone: whether a rank will not come.

    Raises AbortedError where the others have gone on without this rank.
    """
    requests = Requests()

    def ask(access: Callable[[], T]) -> T:
        try:
            return requests.run(access, timeout_s + _PATIENCE_S)
        except (RuntimeError, TimeoutError) as error:
            raise errors.make(
                errors.TransportError, f"rank {rank}: the store failed: {error}"
            ) from None

    try:
        number = int(ask(lambda: store.add(f"moe_p2p/roll/{rank}", 1)))
        own = PrefixStore(f"moe_p2p/roll/call{number}", store)
        ask(lambda: own.set(str(rank), "here"))
        keys = [str(each) for each in range(world_size)]
        deadline, pause = time.monotonic() + timeout_s, _FIRST_PAUSE_S
        while not ask(lambda: own.check(["present"])):
            late = time.monotonic() >= deadline  # before the look: it may take the store's time
            missing = [] if ask(lambda: own.check(keys)) else _missing(own, keys, ask)
            missing = [each for each in missing if not ask(lambda each=each: meets(store, each))]  # type: ignore[misc]
            if late or all(gone(each) for each in missing):
                here = [each for each in range(world_size) if each not in missing]
                ask(lambda here=here: own.compare_set("present", "", json.dumps(here)))  # type: ignore[misc]
                break
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_S)
        present: list[int] = json.loads(ask(lambda: own.get("present")))
    finally:
        requests.close()
    if rank not in present:
        raise errors.make(
            errors.AbortedError,
            f"rank {rank}: the others went on with {what} without this rank, which did not come "
            f"within {timeout_s} s; they have masked it. Make a new object on all ranks",
        )
    return present, own


def _missing(own: Store, keys: list[str], ask: Callable[[Callable[[], bool]], bool]) -> list[int]:
    return [
        rank
        for rank, key in enumerate(keys)
        if not ask(lambda key=key: own.check([key]))  # type: ignore[misc]
    ]
