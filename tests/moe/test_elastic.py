"""AllToAll in a world that changes, on CPUs: every step is that of a world of its members."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moe_p2p
from moe_p2p import AllToAll
from moe_p2p.engine import communicators
from moe_p2p.fleet.client import Deadline
from moe_p2p.fleet.world import Called, World
from moe_p2p.moe import epoch
from moe_p2p.moe.elastic import Changes, Joining
from moe_p2p.moe.rendezvous import agreement
from tests.support import world_cases as cases
from tests.support.mask_cases import given_by, masks_of, step
from tests.support.programs import until
from tests.support.ranks import DiedError, Rank, run_processes, run_threads

NODES = [{}, {"ranks_per_node": 1}, {"ranks_per_node": 2, "mask_lost_ranks": False}]
TCP = {"transport": "libfabric", "transport_settings": "provider=tcp,interfaces=lo"}
NETWORK = TCP | {"ranks_per_node": 1}


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


@pytest.mark.parametrize("overrides", [*NODES, NETWORK, TCP | NODES[2]], ids=str)
def test_grows_and_shrinks(overrides: dict[str, Any]) -> None:
    run_threads(4, grow_and_shrink, overrides)


def lost_at_the_change(rank: Rank) -> list[int]:
    """Rank 1 is gone: its last combine has come to rank 0 and not to rank 2. So ranks 0 and 3 wait
    in the next epoch for both, and rank 2, which begins later, in the one before for rank 1."""
    store, seat, members = rank.store, rank.rank, [0, 1, 2]
    comm = cases.begin(store, seat, members, ranks_per_node=1, timeout_s=6.0)
    if seat != 3:
        cases.steps(comm, members)
        comm.stage_members(add=[3])
        until(comm.members_staged, "never staged")
        got = comm.dispatch(**given_by(comm, 1))
        cases.together(store, "dispatched", len(members))
        if seat == 0:
            comm.mask_ranks([1])  # as if it had that one's sums: it does not wait for them
        if seat != 1:
            pending = comm.combine_send(got.x, got)
            if seat == 2:
                store.wait(["entered"], timedelta(seconds=60))
            comm.combine_recv(pending)
            comm.commit_members()
    if seat == 0:
        store.set("entered", "")
    if seat != 1:
        step(comm, 1, [1])
    found = masks_of(comm)
    cases.together(store, "done", cases.SEATS)
    comm.close()
    return found


@pytest.mark.more
def test_a_rank_that_is_lost_at_the_change_costs_no_other() -> None:
    masks = run_threads(4, lost_at_the_change)
    assert [masks[seat] for seat in (0, 2, 3)] == [[1]] * 3


# --- numbers in immediates ---


def few_numbers(most: int) -> None:
    """Communicators of this process have so few; of the test's process: with monkeypatch."""
    communicators.MOST = agreement.MOST = most  # type: ignore[attr-defined]


def epochs(rank: Rank, count: int, overrides: dict[str, Any]) -> set[int]:
    """Returns which numbers they had."""
    comm = cases.begin(rank.store, rank.rank, [0, 1], **overrides)
    had, numbers = set(), comm._communicator.engine.communicators
    for number in range(count):
        comm.update_members()
        cases.steps(comm, [0, 1], number % 16, 1)
        had.add((numbers.next - 1) % communicators.MOST)
    comm.close()
    return had


@pytest.mark.parametrize("overrides", NODES[:2], ids=str)
def test_numbers_return(overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (communicators, agreement):
        monkeypatch.setattr(module, "MOST", 8)
    assert run_threads(2, epochs, 40, overrides) == [set(range(8))] * 2


@pytest.mark.more
def test_more_epochs_than_numbers() -> None:
    every = set(range(communicators.MOST))
    got = run_threads(2, epochs, communicators.MOST + 88, NODES[1], deadline_s=600.0)
    assert got == [every] * 2


def test_no_number_returns_without_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (communicators, agreement):
        monkeypatch.setattr(module, "MOST", 4)

    def body(rank: Rank) -> None:
        comm = cases.begin(rank.store, rank.rank, [0, 1], **NETWORK)
        for _ in range(3):
            comm.update_members()
        with pytest.raises(moe_p2p.ResourceExhaustedError, match="4 of 4 are taken on that of"):
            comm.update_members()
        cases.steps(comm, [0, 1])
        comm.close()

    run_threads(2, body)


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
        cases.together(store, "first steps", 4)  # else others' last one may lack what it sends
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


@pytest.mark.parametrize("overrides", [*NODES, NETWORK, TCP | NODES[2]], ids=str)
def test_the_new_process_of_a_killed_rank(overrides: dict[str, Any]) -> None:
    given = overrides | {"lost": "drop"}
    results = run_processes(5, replaced, given, return_errors=True)
    assert isinstance(results.pop(2), DiedError)
    assert results == ["done"] * 4


def without_a_node(rank: Rank, overrides: dict[str, Any]) -> str:
    """4 -> 2 -> 4: the node of a killed rank is left out, and its other rank waits for the new
    process of that one."""
    store, seat = rank.store, 2 if rank.rank == 4 else rank.rank
    if rank.rank == 4:
        store.wait(["come"])
        comm = AllToAll(
            store, cases.config_of(**overrides), rank=2, world_size=cases.SEATS, join=True
        )
    else:
        comm = cases.begin(store, seat, range(4), **overrides)
        cases.steps(comm, range(4))
        cases.together(store, "first steps", 4)
        if seat == 2:
            die()
        with pytest.raises(moe_p2p.MoeP2pError):
            cases.steps(comm, range(4))
        if seat == 3:
            with pytest.raises(moe_p2p.AbortedError, match="without rank 3: its node is not whole"):
                comm.update_members()
            with pytest.raises(moe_p2p.MoeP2pError):
                cases.steps(comm, range(4))
        else:
            comm.update_members()
            cases.steps(comm, [0, 1])
        cases.together(store, "come", 3)  # else rank 3 may be late, and called to the next epoch
        comm.update_members(add=[2, 3])
    cases.steps(comm, range(4), 1, 8)
    comm.check()
    comm.close()
    return "done"


@pytest.mark.parametrize("overrides", [NODES[2], TCP | NODES[2]], ids=str)
def test_a_node_that_is_not_whole_waits(overrides: dict[str, Any]) -> None:
    results = run_processes(5, without_a_node, overrides, return_errors=True)
    assert isinstance(results.pop(2), DiedError)
    assert results == ["done"] * 4


def step_for_ever(comm: AllToAll) -> None:
    """In its own epoch, in which the others have masked it."""
    while True:
        comm.check()
        received = comm.dispatch(**given_by(comm, 0))
        comm.combine(received.x, received)


def stopped(rank: Rank, overrides: dict[str, Any]) -> str:
    """Seat 2 is stopped, replaced, and goes on: nothing that it does reaches the others, also in an
    epoch that has the number of its own."""
    store = rank.store
    few_numbers(4)
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
                step_for_ever(comm)
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
    for _ in range(7):  # the ninth epoch has the number of the stopped one's
        comm.update_members()
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


def starved(rank: Rank, overrides: dict[str, Any]) -> str:
    """Seat 2 does not run for longer than its lease: the others go on without it, and it ends."""
    store, others = rank.store, [0, 1, 3]
    World.__init__.__kwdefaults__["lease_s"] = 1.0  # in this process only
    comm = cases.begin(store, rank.rank, range(4), **overrides)
    cases.steps(comm, range(4))
    cases.together(store, "first steps", 4)
    if rank.rank == 2:
        store.set("pid", str(os.getpid()))
        store.wait(["goes on"])
        why = "goes on without rank 2: it had not renewed its lease"
        with pytest.raises(moe_p2p.AbortedError, match=why):
            comm.update_members()
        assert comm.closed
        with pytest.raises(moe_p2p.ClosedError):
            comm.dispatch(**given_by(comm, 0))
        store.set("is out", "")
        return "out"
    if rank.rank == 0:
        cases.end("pid", store, signal.SIGSTOP)
        store.set("stopped", "")
    store.wait(["stopped"])
    comm.mask_ranks([2])
    while True:  # until its lease is over it is called, and does not stage
        try:
            comm.update_members()
            break
        except moe_p2p.MoeP2pError:
            cases.steps(comm, others)
    cases.steps(comm, others)
    if rank.rank == 0:
        cases.end("pid", store, signal.SIGCONT)
        store.set("goes on", "")
    store.wait(["is out"])
    cases.steps(comm, others)
    comm.close()
    return "done"


@pytest.mark.parametrize("overrides", NODES[:2], ids=str)
def test_a_member_that_is_starved_for_longer_than_its_lease(overrides: dict[str, Any]) -> None:
    given = overrides | {"lost": "drop", "timeout_s": 6.0}
    assert run_processes(4, starved, given) == ["done", "done", "out", "done"]


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


def test_a_newcomer_waits_anew_once_an_epoch_was_not_made() -> None:
    """A member that was stopped in it costs its whole deadline; the next call comes behind that."""
    deadlines: list[Deadline] = []

    def not_made(*_: object) -> Any:
        raise moe_p2p.TimeoutError("rank 1 did not come")

    def body(rank: Rank) -> None:
        changes = Changes(rank.store, 3, cases.SEATS, cases.config_of())

        def call(deadline: Deadline) -> Called:
            deadlines.append(deadline)
            if len(deadlines) > 2:
                raise moe_p2p.TimeoutError("no epoch has called this process")
            return Called(len(deadlines))

        changes.world.await_call, changes._try = call, not_made  # type: ignore[method-assign]
        with pytest.raises(moe_p2p.TimeoutError, match="rank 1 did not come"):  # it says more
            changes.begin(Joining(None), not_made, lambda _: False)
        changes.close()

    run_threads(1, body)
    first, second, third = (each.at for each in deadlines)
    assert first < second < third


def founder_dies(rank: Rank, overrides: dict[str, Any]) -> str:
    """A member, while the first epoch is made: the others make it without that one."""
    if rank.rank == 2:
        epoch.Epoch.connect = die  # type: ignore[method-assign]  # in this process only
    comm = cases.begin(rank.store, rank.rank, [0, 1, 2], **overrides)
    cases.steps(comm, [0, 1])
    comm.close()
    return "done"


@pytest.mark.parametrize("masks", [True, False])
def test_a_member_that_dies_before_the_first_epoch(masks: bool) -> None:
    given = {"mask_lost_ranks": masks, "lost": "drop"}
    first, second, lost = run_processes(3, founder_dies, given, return_errors=True)
    assert isinstance(lost, DiedError)
    if masks:
        assert first == second == "done"
    else:
        assert "the process of rank 2 has ended" in str(first)
        assert "the process of rank 2 has ended" in str(second)


def held(store: Any) -> dict[str, int]:
    """What this process has of the system, and how many words the fleet has in the store."""
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "moe_p2p" in line]
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": len(maps),
        "MiB": int(status["RssAnon"].split()[0]) // 1024,
        "words": sum("moe_p2p/" in key for key in store.list_keys()),
    }


# What closes does so a while later, and a killed rank's connections are found one by one. One thing
# that stays in every round would be above these after a few rounds.
SLACK = {"descriptors": 4, "threads": 3, "mappings": 10, "MiB": 8, "words": 40}


def guest(store: dist.TCPStore, number: int, overrides: dict[str, Any]) -> None:
    """A process of one round, which is killed between two steps."""
    own = dist.TCPStore(store.host, store.port, is_master=False)
    comm = cases.begin(own, 2, [0, 1], **overrides)
    cases.steps(comm, [0, 1, 2])
    cases.together(own, f"steps of {number}", 3)
    os.kill(os.getpid(), signal.SIGKILL)


def rounds(rank: Rank, count: int, overrides: dict[str, Any]) -> list[dict[str, int]]:
    store: Any = rank.store
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if rank.rank == 2:
        for number in range(count):
            pid = os.fork()
            if pid == 0:
                guest(store, number, overrides)
            os.waitpid(pid, 0)
        return []
    comm = cases.begin(store, rank.rank, [0, 1], **overrides)
    found = []
    for number in range(count):
        comm.stage_members(add=[2])
        cases.steps_until_staged(comm, store, f"round {number}", [0, 1])
        comm.commit_members()
        cases.steps(comm, [0, 1, 2])
        cases.together(store, f"steps of {number}", 3)
        cases.steps(comm, [0, 1])
        if number % 5 == 4:
            comm.update_members(remove=[2])
            for each in comm._communicator._changes._draining:  # type: ignore[union-attr]
                each.join()
            found.append(held(store))
        cases.together(store, f"end of {number}", 2)
    comm.close()
    return found


@pytest.mark.parametrize(
    ("count", "overrides"),
    [
        *((30, each) for each in NODES[:2]),
        *(pytest.param(200, each, marks=pytest.mark.more) for each in NODES[:2]),
        pytest.param(30, NETWORK, marks=pytest.mark.more),  # 2.4 s a round
    ],
    ids=str,
)
def test_rounds_leave_nothing_behind(count: int, overrides: dict[str, Any]) -> None:
    given = overrides | {"lost": "drop"}
    for found in run_processes(3, rounds, count, given, deadline_s=count + 60.0)[:2]:
        assert len(found) == count // 5
        half = len(found) // 2
        for what, slack in SLACK.items():
            before, after = (
                max(each[what] for each in part) for part in (found[:half], found[half:])
            )
            assert after <= before + slack, found


def test_a_store_that_is_gone() -> None:
    """Who cannot know what was decided is closed; who can goes on."""
    code = (
        "import torch.distributed as d, time\n"
        "s = d.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "print(s.port, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            staged = threading.Barrier(2)

            def body(rank: Rank) -> None:
                store = dist.TCPStore("127.0.0.1", port, is_master=False)
                comm = cases.begin(store, rank.rank, [0, 1], timeout_s=2.0)
                cases.steps(comm, [0, 1])
                staged.wait()
                if rank.rank == 0:
                    server.send_signal(signal.SIGSTOP)
                staged.wait()
                comm.stage_members()
                with pytest.raises(moe_p2p.TransportError, match="store"):
                    comm.commit_members()
                assert not comm.closed  # no epoch can have been decided
                cases.steps(comm, [0, 1])
                settle = comm._communicator._changes.world.settle  # type: ignore[union-attr]
                comm._communicator._changes._try = lambda *_: (  # type: ignore
                    setattr(comm._communicator._changes, "in_doubt", True),
                    settle(Called(9, {0: "", 1: ""}), Deadline(0.5)),
                )
                comm._communicator._changes.world.call = lambda *_: None  # type: ignore
                comm.stage_members()
                with pytest.raises(moe_p2p.TransportError, match="gives no answer"):
                    comm.commit_members()
                assert comm.closed

            run_threads(2, body)
        finally:
            server.kill()


def test_what_is_refused() -> None:
    def body(rank: Rank) -> None:
        def made(**given: Any) -> AllToAll:
            overrides = given.pop("config", {})
            return AllToAll(
                rank.store, cases.config_of(**overrides), rank=0, world_size=cases.SEATS, **given
            )

        bad = moe_p2p.InvalidArgumentError
        with pytest.raises(bad, match="members is given with join=True"):
            made(members=[0], join=True)
        with pytest.raises(bad, match=r"members is \[1\], must have rank 0"):
            made(members=[1])
        with pytest.raises(bad, match=r"members is .*, must be ranks, as"):
            made(members=0)
        with pytest.raises(bad, match=r"a rank of members is .*, must be an int"):
            made(members="ab")
        with pytest.raises(bad, match="lost ranks are masked in one node"):
            made(members=[0], config={"ranks_per_node": 2})
        with pytest.raises(bad, match="masked is given, and a world that changes"):
            made(members=[0], masked=torch.zeros(4, dtype=torch.int32))
        with made(members=[0]) as comm:
            assert comm.closed is False
            with pytest.raises(bad, match="seat 4 cannot be added or removed"):
                comm.update_members(add=[4])
            for odd in (4, ["x"], [[1]]):
                for change in (comm.stage_members, comm.update_members):
                    for name in ("add", "remove"):
                        with pytest.raises(bad, match=rf"{name} is .*must be (ranks|an int)"):
                            change(**{name: odd})
            with pytest.raises(bad, match=r"seats \[1\] are both added and removed"):
                comm.update_members(add=[1], remove=[1])
            with pytest.raises(bad, match="nothing is staged; call stage_members"):
                comm.commit_members()
            comm.stage_members()
            with pytest.raises(bad, match="members are staged already"):
                comm.stage_members()
            handle = comm.dispatch(**given_by(comm, 2))
            comm.commit_members()
            with pytest.raises(bad, match="handle belongs to communicator"):
                comm.combine(handle.x, handle)
            cases.steps(comm, [0])
        with (
            AllToAll(rank.store, cases.config_of(), rank=0, world_size=1) as fixed,
            pytest.raises(bad, match="this world is fixed; make it with members="),
        ):
            fixed.update_members()

    run_threads(1, body)
