"""Who is called to an epoch of a world, and how it is decided (docs/elastic.md), by a store alone.

tests/cpp/simulation_elastic.cpp has the same rules in the C++ simulation.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

import moe_p2p
from moe_p2p.fleet import world as worlds
from moe_p2p.fleet.client import Deadline, StoreError
from moe_p2p.fleet.member import ReplacedError
from moe_p2p.fleet.neighbours import _start_of, own_identity
from moe_p2p.fleet.store_keys import StoreKeys
from moe_p2p.fleet.world import YES, Called, World
from tests.support.blocking_store import Blocking

LONG_S = 60.0  # nobody waits so long


class Processes:
    """Worlds of one store, as one process each would have them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = dist.HashStore()
        self._made: list[World] = []
        self._children: list[subprocess.Popen[bytes]] = []
        self._monkeypatch = monkeypatch

    def world(self, seat: int, *, timeout_s: float = 60.0, **options: Any) -> World:
        made = World(StoreKeys(self.store, "w", alone=True), seat, timeout_s=timeout_s, **options)
        self._made.append(made)
        return made

    def mortal(self, seat: int, **options: Any) -> tuple[World, Callable[[], None]]:
        """A world of another process, as far as others can see, and what kills that."""
        code = "import time; print(flush=True); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        self._children.append(child)
        space, _, _ = own_identity().rsplit(" ", 2)
        identity = f"{space} {child.pid} {_start_of(child.pid)}"
        with self._monkeypatch.context() as patched:
            patched.setattr(worlds, "own_identity", lambda: identity)
            made = self.world(seat, **options)

        def kill() -> None:
            child.kill()
            child.wait()

        return made, kill

    def close(self) -> None:
        for each in self._made:
            each.close()
        for child in self._children:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    processes = Processes(monkeypatch)
    yield processes
    processes.close()


@contextmanager
def beside(call: Callable[..., Any], *arguments: Any, **named: Any) -> Iterator[Any]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(call, *arguments, **named)


def enter_all(members: list[World], called: Called) -> None:
    for each in members:
        each.stage(called)
    for each in members:
        assert each.settle(called, Deadline(LONG_S)) == YES
        each.enter(called)


def begin(made: Processes, *seats: int, **options: Any) -> list[World]:
    members = [made.world(seat, **options) for seat in seats]
    called = members[0].found(seats)
    assert called.ids == {each.seat: each.id for each in members}
    enter_all(members, called)
    return members


def test_all_follow_the_first_call(made: Processes) -> None:
    first, second = begin(made, 0, 1)
    newcomer = made.world(2)
    called = first.call(add=[2])
    assert (called.epoch, called.seats, called.staying) == (2, [0, 1, 2], (0, 1))
    assert second.call(remove=[0]) == called  # the first word stays
    assert newcomer.await_call(Deadline(LONG_S)) == called
    enter_all([first, second, newcomer], called)
    assert second.call(remove=[2]).seats == [0, 1]


def test_a_call_waits_for_the_new_process(made: Processes) -> None:
    first, second = begin(made, 0, 1)
    with beside(first.call, add=[1]) as call:
        assert not call.done()
        again = made.world(1)
        called = call.result()
    assert called.ids[1] == again.id != second.id
    assert called.staying == (0,)
    assert again.await_call(Deadline(LONG_S)) == called


def test_nobody_claims_an_added_seat(made: Processes) -> None:
    (first,) = begin(made, 0, timeout_s=0.5)
    with pytest.raises(moe_p2p.TimeoutError, match=r"nobody has claimed seats 2, 3 within 0.5 s"):
        first.call(add=[2, 3])
    assert first.call().epoch == 2  # nothing was decided


def test_nobody_calls_a_newcomer(made: Processes) -> None:
    begin(made, 0)
    with pytest.raises(moe_p2p.TimeoutError, match=r"no epoch has called.*update_members\(add=\[2"):
        made.world(2).await_call(Deadline(0.3))


def test_of_two_processes_of_one_seat_the_last_is_called(made: Processes) -> None:
    (first,) = begin(made, 0)
    old = made.world(1)
    while 1 not in first._there():
        pass
    new = made.world(1)
    while first._there().get(1, ("",))[0] != new.id:  # between two leases there is none
        pass
    called = first.call(add=[1])
    assert new.is_in(called)
    assert not old.is_in(called)
    old.stage(called)  # it does not look
    first.stage(called)
    with beside(first.settle, called, Deadline(LONG_S)) as verdict:
        assert not verdict.done()
        new.stage(called)
        assert verdict.result() == YES

    def goes_on() -> None:
        while True:
            old.member.wake()
            old.await_call(Deadline(LONG_S))

    with pytest.raises(ReplacedError, match="seat 1 was replaced"):
        goes_on()


def test_a_world_that_is_there_is_not_made_again(made: Processes) -> None:
    begin(made, 0, 1)
    with pytest.raises(moe_p2p.InvalidArgumentError, match=r"at epoch 1; .* passes join=True"):
        made.world(0).found([0, 1])


# --- lost ---


def test_a_killed_process_is_not_called(made: Processes) -> None:
    other, kill = made.mortal(1)
    first = made.world(0)
    called = first.found([0, 1])
    enter_all([first, other], called)
    kill()
    assert first.call().seats == [0]  # though its lease is there


def test_a_killed_process_that_has_not_staged_ends_the_attempt(made: Processes) -> None:
    (first,) = begin(made, 0)
    newcomer, kill = made.mortal(1)
    called = first.call(add=[1])
    first.stage(called)
    with beside(first.settle, called, Deadline(LONG_S)) as verdict:
        kill()
        assert verdict.result() == "seat 0: the process of seat 1 has ended"
    newcomer.stage(called)  # late: the word stays
    assert newcomer.settle(called, Deadline(LONG_S)) == verdict.result()
    assert first.call().epoch == 3


def test_a_killed_process_that_has_staged_is_in(made: Processes) -> None:
    """It is masked in its first step, as one that is lost later."""
    (first,) = begin(made, 0)
    newcomer, kill = made.mortal(1)
    called = first.call(add=[1])
    newcomer.stage(called)
    kill()
    first.stage(called)
    assert first.settle(called, Deadline(LONG_S)) == YES


def test_a_process_that_stages_and_is_killed_behind_a_look_is_in(
    made: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a look for its word and the one for its process."""
    (first,) = begin(made, 0)
    newcomer, kill = made.mortal(1)
    called, has_ended = first.call(add=[1]), worlds.has_ended
    first.stage(called)

    def staged_just_now(process: str) -> bool:
        newcomer.stage(called)
        kill()
        return has_ended(process)

    monkeypatch.setattr(worlds, "has_ended", staged_just_now)
    assert first.settle(called, Deadline(LONG_S)) == YES


def test_who_is_stopped_in_an_attempt_is_not_called_to_the_next_one(made: Processes) -> None:
    """Its last renewal came behind the look of the call: it is not new at the next one's."""
    first, second = begin(made, 0, 1)
    called = first.call()
    second.member._beat.renew()
    second.member._beat.renew = lambda: None  # type: ignore[method-assign]
    first._notice()  # its thread does that at each beat
    clock = time.monotonic
    first.member._leases._clock = lambda: clock() + 20
    first.member._beat.renew()
    first.refuse(called, "seat 1 did not stage")
    assert first.call().seats == [0]


def test_who_has_given_a_word_is_lost(made: Processes) -> None:
    """The call, and what would be the decision: both are there for the others."""
    giver, kill = made.mortal(0)
    second = made.world(1)
    enter_all([giver, second], giver.found([0, 1]))
    newcomer = made.world(2)
    called = giver.call(add=[2])
    giver.stage(called)
    kill()
    assert second.call(add=[2]) == called == newcomer.await_call(Deadline(LONG_S))
    second.stage(called)
    newcomer.stage(called)
    assert (
        newcomer.settle(called, Deadline(LONG_S)) == YES == second.settle(called, Deadline(LONG_S))
    )


def test_the_deadline_decides_and_late_words_change_nothing(made: Processes) -> None:
    first, second = begin(made, 0, 1)
    called = first.call()
    first.stage(called)
    text = "seat 0: seat 1 did not stage within 0.2 s"
    assert first.settle(called, Deadline(0.2)) == text
    second.stage(called)
    assert second.settle(called, Deadline(LONG_S)) == text == second.refuse(called, "mine")
    with pytest.raises(moe_p2p.InvalidArgumentError, match="is in epoch 1, and cannot enter 1"):
        first.enter(first.look())
    assert second.call().epoch == 3  # the next attempt has another number


# --- out ---


def test_who_is_not_called_stops(made: Processes) -> None:
    first, second = begin(made, 0, 1, lease_s=0.4)
    called = first.call(remove=[1])
    first.stage(called)
    second.check()  # not decided
    assert first.settle(called, Deadline(LONG_S)) == YES == second.settle(called, Deadline(LONG_S))
    first.enter(called)
    first.sweep(called)

    def goes_on() -> None:
        while True:
            second.check()

    with pytest.raises(moe_p2p.AbortedError, match="epoch 2 of the world goes on without seat 1"):
        goes_on()
    first.check()
    with pytest.raises(moe_p2p.InvalidArgumentError, match="does not call it"):
        second.enter(called)
    with beside(first.call, add=[1]) as call:  # not second, although it has its lease still
        again = made.world(1)
        called = call.result()
    assert called.ids[1] == again.id
    enter_all([first, again], called)


def test_who_is_removed_may_come_late(made: Processes) -> None:
    """It called an epoch of its own then, which nobody staged."""
    first, second, third = begin(made, 0, 1, 2)
    removing = first.call(remove=[1, 2])
    assert third.call(remove=[1, 2]) == removing
    enter_all([first], removing)
    assert second.call(remove=[1, 2]) == removing
    enter_all([first], first.call())
    first.sweep(first.look())
    for late in (second, third):
        assert late.settle(removing, Deadline(LONG_S)) == YES
        assert late.id in removing.removed
        assert late.id in late.call(remove=[1, 2]).removed


def test_whole_nodes_only(made: Processes) -> None:
    """Who is left of a node is out, and comes back when the node is whole."""
    first, second, third, fourth = begin(made, 0, 1, 2, 3, ranks_per_node=2)
    fourth.close()
    while 3 in first._there():
        pass
    called = first.call()
    assert called.seats == [0, 1]
    enter_all([first, second], called)
    again = made.world(3, ranks_per_node=2)
    called = first.call(add=[2, 3])
    assert called.ids == {each.seat: each.id for each in (first, second, third, again)}


def test_words_do_not_grow(made: Processes) -> None:
    """And who wakes long after finds an epoch that does not call it."""
    members = begin(made, 0, 1)
    late = made.world(2)
    enter_all([*members, late], members[0].call(add=[2]))
    numbers = []
    for _ in range(12):
        called = members[0].call(remove=[2])
        enter_all(members, called)
        for each in members:
            each.sweep(called)
        numbers.append(made.store.num_keys())
    assert numbers[-1] == numbers[1]
    assert late.look().epoch == called.epoch

    def goes_on() -> None:
        while True:
            late.member.wake()
            late.check()

    with pytest.raises(moe_p2p.AbortedError, match="goes on without seat 2"):
        goes_on()


@pytest.mark.parametrize("wait", ["call", "await_call", "settle"])
def test_a_store_that_does_not_answer(made: Processes, wait: str) -> None:
    first, _ = begin(made, 0, 1)
    called = first.call()
    blocking = Blocking(made.store)
    newcomer = World(StoreKeys(blocking, "w", alone=True), 2, timeout_s=0.3)  # type: ignore[arg-type]
    blocking.block()
    calls = {
        "call": newcomer.call,
        "await_call": lambda: newcomer.await_call(Deadline(0.3)),
        "settle": lambda: newcomer.settle(called, Deadline(0.3)),
    }
    with pytest.raises(StoreError, match="gives no answer within"):
        calls[wait]()
    blocking.go_on()
    newcomer.close()
