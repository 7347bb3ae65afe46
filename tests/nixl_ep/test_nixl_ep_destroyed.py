"""A handler of a signal destroys the buffer in the midst of a call, as NIXL's driver does."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from tests.support import nixl_ep_cases as cases
from tests.support.ranks import DiedError, Rank, run_processes


def destroyed_in_a_wait(rank: Rank, options: dict[str, Any]) -> list[int]:
    store = rank.store
    buffer = cases.begin(store, rank.rank, 3, **options)
    buffer.connect_ranks([r for r in range(3) if r != rank.rank])
    for seed in range(3):
        cases.step(buffer, seed, None)
    if rank.rank == 2:

        def end(number: int, _: object) -> None:
            buffer.destroy()
            store.set("destroyed", "")
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

        signal.signal(signal.SIGTERM, end)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        cases.step(buffer, 3, cases.E * 3)  # the others come when it is over
        raise AssertionError("the handler did not run")
    store.wait(["destroyed"])
    for seed in range(3, 6):
        cases.step(buffer, seed, cases.E * 3)
    found = cases.masked(buffer)
    buffer.destroy()
    return found


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"disable_ll_nvlink": True}, marks=pytest.mark.more)],
    ids=["memory", "NICs"],
)
def test_a_signals_handler_destroys_it_in_a_wait(options: dict[str, Any]) -> None:
    results = run_processes(3, destroyed_in_a_wait, options, return_errors=True)
    assert isinstance(results.pop(), DiedError)
    assert results == [[2], [2]]


def interrupted(rank: Rank) -> str:
    """Processes 0 and 1 end by Ctrl-C, one in a wait for the other; 2 and 3 begin in their place,
    under the same names in the same store, which lives on."""
    store, seat = rank.store, rank.rank % 2
    if rank.rank > 1:
        store.wait(["ended 0", "ended 1"])
    buffer = cases.begin(store, seat, 2, timeout_ms=200_000)
    buffer.connect_ranks([1 - seat])
    for seed in range(3):
        cases.step(buffer, seed, None)
    if rank.rank > 1:
        buffer.destroy()
        return "done"

    def ends() -> None:
        if rank.rank == 1:
            store.wait(["ended 0"])  # it lives: 0 does not go on without it
            signal.raise_signal(signal.SIGINT)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        cases.step(buffer, 3, None)

    with pytest.raises(KeyboardInterrupt):
        ends()
    store.set(f"ended {rank.rank}", "")
    os._exit(1)  # as a program that does not destroy its buffer


def test_a_program_that_ctrl_c_ends_begins_again_under_the_same_names() -> None:
    results = run_processes(4, interrupted, return_errors=True)
    assert all(isinstance(each, DiedError) for each in results[:2]), results
    assert results[2:] == ["done", "done"]
