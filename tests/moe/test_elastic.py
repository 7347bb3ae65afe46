"""AllToAll in a world that changes, on CPUs: every step is that of a world of its members."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

import moe_p2p
from moe_p2p import AllToAll
from moe_p2p.moe import epoch
from tests.support import world_cases as cases
from tests.support.mask_cases import given_by
from tests.support.ranks import DiedError, Rank, run_processes, run_threads

NODES = [{}, {"ranks_per_node": 1}, {"ranks_per_node": 2, "mask_lost_ranks": False}]


def grow_and_shrink(rank: Rank, overrides: dict[str, Any]) -> None:
    """2 -> 4 -> 2 -> 4: the last two come twice."""
    store, seat = rank.store, rank.rank
    if seat < 2:
        comm = cases.begin(store, seat, [0, 1], **overrides)
        cases.steps(comm, [0, 1])
    for time in range(2):
        if seat < 2:
            comm.update_members(add=[2, 3])
        else:
            comm = cases.begin(store, seat, [0, 1], **overrides)
        cases.steps(comm, range(4), time, 8)
        comm.update_members(remove=[2, 3])
        assert comm.closed == (seat >= 2)
        if seat < 2:
            cases.steps(comm, [0, 1], time)
    if seat < 2:
        comm.close()


@pytest.mark.parametrize("overrides", NODES, ids=str)
def test_grows_and_shrinks(overrides: dict[str, Any]) -> None:
    run_threads(4, grow_and_shrink, overrides)


# --- processes ---


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def replaced(rank: Rank, overrides: dict[str, Any]) -> str:
    """4 -> 3 -> 4: seat 2 is killed; its new process comes while the others make steps."""
    store = rank.store
    others = [0, 1, 3]
    seat = 2 if rank.rank == 4 else rank.rank
    if rank.rank == 4:
        store.wait(["seat 2 is gone"])
        comm = AllToAll(
            store, cases.config_of(**overrides), rank=2, world_size=cases.SEATS, join=True
        )
    else:
        comm = cases.begin(store, seat, range(4), **overrides)
        cases.steps(comm, range(4))
        if seat == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        masks = comm.config.mask_lost_ranks
        if masks:
            cases.steps(comm, others)
        else:
            with pytest.raises(moe_p2p.MoeP2pError):
                cases.steps(comm, others)
        store.set("seat 2 is gone", "")
        comm.stage_members(add=[2])
        if masks:
            assert cases.steps_until_staged(comm, store, "new", others) > 1
        comm.commit_members()
    cases.steps(comm, range(4), 1, 8)
    comm.close()
    return "done"


@pytest.mark.parametrize("overrides", NODES, ids=str)
def test_the_new_process_of_a_killed_rank(overrides: dict[str, Any]) -> None:
    given = overrides | {"lost": "drop"}
    results = run_processes(5, replaced, given, return_errors=True)
    assert isinstance(results.pop(2), DiedError)
    assert results == ["done"] * 4


def stopped(rank: Rank, overrides: dict[str, Any]) -> str:
    """Seat 2 is stopped, replaced, and goes on: nothing that it does reaches the others."""
    store = rank.store
    if rank.rank == 4:
        store.wait(["stopped"])
        comm = AllToAll(
            store, cases.config_of(**overrides), rank=2, world_size=cases.SEATS, join=True
        )
    else:
        comm = cases.begin(store, rank.rank, range(4), **overrides)
        cases.steps(comm, range(4))
        if rank.rank == 2:
            store.set("pid", str(os.getpid()))
            with pytest.raises(moe_p2p.AbortedError, match="seat 2") as error:
                while True:  # in its own epoch, in which the others masked it
                    comm.check()
                    received = comm.dispatch(**given_by(comm, 0))
                    comm.combine(received.x, received)
            store.set("woke", "")
            comm.close()
            return str(error.value)
        if rank.rank == 0:
            cases.end("pid", store, signal.SIGSTOP)
            store.set("stopped", "")
        store.wait(["stopped"])
        comm.mask_ranks([2])
        cases.steps(comm, [0, 1, 3])
        comm.update_members(add=[2])
    cases.steps(comm, range(4))
    cases.together(store, "replaced", 4)
    if rank.rank == 0:
        cases.end("pid", store, signal.SIGCONT)
    for first in range(8):
        cases.steps(comm, range(4), first, 4)
    store.wait(["woke"])
    cases.steps(comm, range(4))
    comm.close()
    return "done"


@pytest.mark.parametrize("overrides", NODES[:2], ids=str)
def test_a_stopped_process_that_goes_on_after_its_replacement(overrides: dict[str, Any]) -> None:
    given = overrides | {"lost": "drop", "timeout_s": 8.0}
    results = run_processes(5, stopped, given)
    assert "seat 2" in results.pop(2)
    assert results == ["done"] * 4


def newcomer_dies(rank: Rank, overrides: dict[str, Any]) -> str:
    """While it stages: the attempt ends by name, the others' steps go on, the next one succeeds."""
    store, members = rank.store, [0, 1, 2]
    if rank.rank == 3:  # is killed when it has been called, before it connects
        epoch.Epoch.connect = die  # type: ignore[method-assign]  # in this process only
    if rank.rank == 4:
        store.wait(["again"])
    if rank.rank >= 3:
        comm = AllToAll(
            store, cases.config_of(**overrides), rank=3, world_size=cases.SEATS, join=True
        )
    else:
        comm = cases.begin(store, rank.rank, members, **overrides)
        cases.steps(comm, members)
        comm.stage_members(add=[3])
        cases.steps_until_staged(comm, store, "first", members)
        with pytest.raises(moe_p2p.MoeP2pError, match=r"the process of (rank|seat) 3 has ended"):
            comm.commit_members()
        cases.steps(comm, members)
        cases.together(store, "again", 3)
        comm.update_members(add=[3])
    cases.steps(comm, range(4))
    comm.close()
    return "done"


@pytest.mark.parametrize("overrides", NODES[:2], ids=str)
def test_a_newcomer_that_dies_while_it_stages(overrides: dict[str, Any]) -> None:
    results = run_processes(5, newcomer_dies, overrides, return_errors=True)
    assert isinstance(results.pop(3), DiedError)
    assert results == ["done"] * 4


def member_dies(rank: Rank, overrides: dict[str, Any]) -> str:
    """While others stage: it is masked in their steps, and the next attempt is without it."""
    store, members = rank.store, [0, 1, 2]
    if rank.rank == 3:
        comm = AllToAll(
            store, cases.config_of(**overrides), rank=3, world_size=cases.SEATS, join=True
        )
    else:
        comm = cases.begin(store, rank.rank, members, **overrides)
        cases.steps(comm, members)
        if rank.rank == 2:
            epoch.Epoch.connect = die  # type: ignore[method-assign]  # in this process only
        comm.stage_members(add=[3])
        if rank.rank == 2:
            comm.commit_members()
        with pytest.raises(moe_p2p.MoeP2pError, match=r"the process of (rank|seat) 2 has ended"):
            comm.commit_members()
        cases.steps(comm, [0, 1])
        comm.update_members(add=[3])
    cases.steps(comm, [0, 1, 3])
    comm.close()
    return "done"


@pytest.mark.parametrize("overrides", NODES[:2], ids=str)
def test_a_member_that_dies_while_others_stage(overrides: dict[str, Any]) -> None:
    given = overrides | {"lost": "drop"}
    results = run_processes(4, member_dies, given, return_errors=True)
    assert isinstance(results.pop(2), DiedError)
    assert results == ["done"] * 3
