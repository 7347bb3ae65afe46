"""Masked ranks that are taken back on the same memory (AllToAll.clean_masks), on CPUs and GPUs.

Each case is the body of one rank. `together(name)` returns when all ranks have come there.
"""

from __future__ import annotations

from collections.abc import Callable

from moe_p2p import AllToAll
from tests.support.cases import finish
from tests.support.mask_cases import given_by, last_step, masks_of, step

Together = Callable[[str], None]


def clean(comm: AllToAll) -> None:
    comm.clean_masks()
    finish(comm)
    assert masks_of(comm) == []


def all_back(comm: AllToAll, first_seed: int) -> None:
    """All ranks are there again: nobody waits for a deadline or masks another one."""
    for seed in range(first_seed, first_seed + 8):
        step(comm, seed, [])
    assert masks_of(comm) == []


def apart(comm: AllToAll, together: Together) -> None:
    """Ranks that make different numbers of calls, each alone, agree again behind every clean."""
    others = [rank for rank in range(comm.world_size) if rank != comm.rank]
    for time in range(3):
        for seed in range(3):
            step(comm, seed, [])
        together(f"all have combined {time}")
        comm.mask_ranks(others)
        for seed in range((comm.rank + time) % comm.world_size * 5):
            step(comm, seed, others)
        for _ in range(1 + time % 2):  # twice, too
            clean(comm)
        if time < 2:  # the last time as it comes
            together(f"cleaned {time}")
        all_back(comm, time)
        together(f"next {time}")


def halves(comm: AllToAll, together: Together) -> None:
    """What was dispatched and not combined is void; its slots and its memory are used again."""
    for time in range(comm.config.steps_in_flight + 1):
        held = [comm.dispatch(**given_by(comm, 2 + seed)) for seed in range(time)]
        finish(comm)
        together(f"held {time}")
        clean(comm)
        together(f"cleaned {time}")
        all_back(comm, time)
        del held
        together(f"next {time}")


def slow(comm: AllToAll, together: Together) -> None:
    """Rank 1 is late in a step. With a deadline of seconds: it and the others mask each other."""
    others = [rank for rank in range(comm.world_size) if rank != 1]
    gone = others if comm.rank == 1 else [1]
    for time in range(2):
        for seed in range(4):
            step(comm, seed, [])
        together(f"all have combined {time}")
        if comm.rank != 1:
            step(comm, 4, [1])
        together(f"masked {time}")
        if comm.rank == 1:
            last_step(comm, 4, [], others)
            step(comm, 5, others)
        assert masks_of(comm) == gone
        together(f"all know {time}")
        clean(comm)
        together(f"cleaned {time}")
        all_back(comm, time)


def not_cleaned(comm: AllToAll, together: Together) -> None:
    """Rank 1 cleans later than others call, or is itself in a call when they have cleaned."""
    others = [rank for rank in range(comm.world_size) if rank != 1]
    gone = others if comm.rank == 1 else [1]
    for calls_before in (False, True):
        for seed in range(5):
            step(comm, seed, [])
        together(f"all have combined {calls_before}")
        if comm.rank != 1:
            clean(comm)
        together(f"others have cleaned {calls_before}")
        if comm.rank != 1:
            for seed in range(3):  # the first one waits for rank 1, and then masks it
                step(comm, seed, gone)
        elif calls_before:
            for seed in range(3):  # a step of the round before: nobody else is in it
                step(comm, seed, gone)
            assert masks_of(comm) == gone
        together(f"others have called {calls_before}")
        if comm.rank == 1:
            clean(comm)
            step(comm, 3, gone)  # they have masked it
        assert masks_of(comm) == gone
        together(f"masked {calls_before}")
        clean(comm)
        together(f"cleaned {calls_before}")
        all_back(comm, 1)
