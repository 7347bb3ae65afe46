"""Which epoch of a world comes next, and who is in it: docs/elastic.md, rules E3 to E5, E8, E9.

A world has seats, 0 to W - 1; a process claims one. An epoch is called (`call`: which process has
which seat), staged by each process that is called, and decided, once, "yes" or not. Used by
moe/elastic.py; it knows nothing of communicators. Words, each kept as it is first given but for the
hint, which only says where to begin to read:

    world/{k}/calls         ids and processes by seat (Called)
    world/{k}/staged/{seat} id of the process that has mapped and connected all others
    world/{k}/is            "yes", or why not
    world/yes               the last epoch that was decided "yes", as far as its writer knew

All waits poll the store, have a deadline, and end early where a process of this host has ended.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple

from moe_p2p import errors
from moe_p2p.fleet.client import Deadline, StoreError
from moe_p2p.fleet.member import Member, name_of
from moe_p2p.fleet.neighbours import has_ended, own_identity
from moe_p2p.fleet.store_keys import StoreKeys

YES = "yes"
# Between two looks at the store: at first, and at most. Longer: a newcomer's first step is later.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.02
_MOST_SWEPT = 16  # epochs before, whose words a process drops that has dropped none


def _never(seat: int, late: bool) -> bool:
    return False


class Called(NamedTuple):
    """The processes that are called to an epoch, by seat: their ids, and who they are on a host."""

    epoch: int = 0  # 0: nobody has been called yet
    ids: dict[int, str] = {}  # noqa: RUF012
    processes: dict[int, str] = {}  # noqa: RUF012
    staying: tuple[int, ...] = ()  # seats whose process is in the epoch before
    removed: tuple[str, ...] = ()  # ids that no later epoch calls

    @property
    def seats(self) -> list[int]:
        return sorted(self.ids)

    def ended(self) -> list[int]:
        """Seats whose process has ended, as far as this host can know."""
        return [seat for seat, process in self.processes.items() if has_ended(process)]


class _Look:
    """What was read of the store last: it only ever grows."""

    def __init__(self, words: StoreKeys) -> None:
        self._words = words
        self.decided = 0  # the last epoch that was decided
        self.yes = Called()  # the last one that was decided "yes"

    def again(self) -> None:
        hint = self._words.get("world/yes") or 0
        if hint > self.decided:
            self._take(hint)
        while (verdict := self._words.get(f"world/{self.decided + 1}/is")) is not None:
            if verdict == YES:
                self._take(self.decided + 1)
            else:
                self.decided += 1

    def called(self, epoch: int) -> Called | None:
        found = self._words.get(f"world/{epoch}/calls")
        if found is None:
            return None
        ids, processes = ({int(s): v for s, v in each.items()} for each in found[:2])
        return Called(epoch, ids, processes, *map(tuple, found[2:]))

    def _take(self, epoch: int) -> None:
        called = self.called(epoch)
        if called is not None:  # else it was swept just now: a later epoch is decided
            self.yes = called
        self.decided = epoch


class World:
    """One process of a world: its seat, and the epochs that it is called to.

    words: of the world. seat: which one it claims; the last claim counts. ranks_per_node: seats are
    called by whole nodes of so many; 1: one by one. timeout_s: of each wait. lease_s: after it a
    process that has not renewed its lease is not called.

    Calls raise StoreError where the store does not answer, and ReplacedError once another process
    has claimed the seat.
    """

    def __init__(
        self,
        words: StoreKeys,
        seat: int,
        *,
        timeout_s: float,
        ranks_per_node: int = 1,
        lease_s: float = 5.0,
    ) -> None:
        self.seat, self.timeout_s, self.ranks_per_node = seat, timeout_s, ranks_per_node
        self._words, self._look = words, _Look(words)
        self.epoch = 0  # entered last
        self._called = 0  # the last epoch that this process called, or found called
        self._out = 0  # the last epoch that was found to go on without this process
        self._swept = 0
        here = weakref.WeakMethod(self._notice)  # the member's thread keeps no world

        def notice(_: Member) -> None:
            if (method := here()) is not None:
                method()

        record = {"process": own_identity()}
        self.member = Member(words, f"seat {seat}", record, lease_s, then=notice)
        self.id = self.member.id
        self.close = self.member.close  # withdraws the lease; idempotent

    # --- who is called ---

    def found(self, seats: Iterable[int], without: Callable[[int, bool], bool] = _never) -> Called:
        """Calls the first epoch, of these seats, or returns how it was called.

        without: whether a seat without a process is left out; (seat, the deadline is past).
        """
        self._look.again()
        if self._look.yes.epoch:
            raise errors.make(
                errors.InvalidArgumentError,
                f"this world is there already, at epoch {self._look.yes.epoch}; a process that "
                "comes later passes join=True",
            )
        return self.call(add=seats, without=without)

    def call(
        self,
        add: Iterable[int] = (),
        remove: Iterable[int] = (),
        without: Callable[[int, bool], bool] = _never,
    ) -> Called:
        """Calls the next epoch, or returns how another process has called it: where it has been
        decided meanwhile, too, and goes on without this process.

        Its seats are those of the epoch that is, with `add` and without `remove`. Waits until each
        seat of `add` has a process that is not in that epoch and was not removed. Raises
        TimeoutError naming seats that nobody claims.
        """
        add, remove = set(add), set(remove)
        deadline, pause = Deadline(self.timeout_s), _FIRST_PAUSE_S
        with self._words.within(deadline):
            while True:
                self.member.check()
                self._look.again()
                epoch, now = self._look.decided + 1, self._look.yes
                called, self._called = self._look.called(epoch), epoch
                if called is not None:
                    return called
                if 0 < self.epoch < now.epoch and not self.is_in(now):
                    return now
                there = self._there()
                old = {*now.ids.values(), *now.removed}
                late = not deadline.left
                missing = [s for s in add if s not in there or there[s][0] in old]
                missing = [seat for seat in missing if not without(seat, late)]
                if not missing:
                    return self._propose(epoch, now, there, add, remove)
                if late:
                    raise errors.make(
                        errors.TimeoutError,
                        f"seat {self.seat}: nobody has claimed {_named(missing)} within "
                        f"{self.timeout_s:g} s. See what its new process printed last",
                    )
                time.sleep(min(pause, deadline.left))
                pause = min(1.5 * pause, _LAST_PAUSE_S)

    def _propose(
        self,
        epoch: int,
        now: Called,
        there: dict[int, tuple[str, str]],
        add: set[int],
        remove: set[int],
    ) -> Called:
        wanted = (now.ids.keys() | add) - remove
        local = self.ranks_per_node
        seats = [
            seat
            for seat in sorted(wanted & there.keys())
            if all(
                each in there and each in wanted
                for each in range(seat // local * local, seat // local * local + local)
            )
        ]
        staying = [seat for seat in seats if there[seat][0] == now.ids.get(seat)]
        ids, processes = ({s: there[s][i] for s in seats} for i in range(2))
        going = {now.ids[seat] for seat in remove & now.ids.keys()}
        removed = sorted(going | (set(now.removed) & {who for who, _ in there.values()}))
        self._words.decide(f"world/{epoch}/calls", [ids, processes, staying, removed])
        called = self._look.called(epoch)
        assert called is not None
        return called

    def _there(self) -> dict[int, tuple[str, str]]:
        """Id and process by seat, of those who claimed theirs last and have a lease."""
        found = dict[int, tuple[str, str]]()
        for who, record in self.member.members().items():
            name, _, seat = name_of(who).partition(" ")
            if name == "seat" and not has_ended(record["process"]):
                found[int(seat)] = who, record["process"]
        return found

    def await_call(self, deadline: Deadline) -> Called:
        """Waits for an epoch that calls this process, and is not decided."""
        pause = _FIRST_PAUSE_S
        with self._words.within(deadline):
            while True:
                self.member.check()
                self._look.again()
                called = self._look.called(self._look.decided + 1)
                if called is not None and self.is_in(called):
                    return called
                if not deadline.left:
                    raise errors.make(
                        errors.TimeoutError,
                        f"seat {self.seat}: no epoch has called this process within "
                        f"{deadline.timeout_s:g} s; members call it by "
                        f"update_members(add=[{self.seat}])",
                    )
                time.sleep(min(pause, deadline.left))
                pause = min(1.5 * pause, _LAST_PAUSE_S)

    def is_in(self, called: Called) -> bool:
        return called.ids.get(self.seat) == self.id

    # --- staged, and decided ---

    def stage(self, called: Called) -> None:
        """Says that this process has mapped and connected all of `called`."""
        self._words.put(f"world/{called.epoch}/staged/{self.seat}", self.id)

    def refuse(self, called: Called, why: str) -> str:
        """Decides that the epoch is not, unless it is decided. Returns what it is."""
        return self._decide(called, f"seat {self.seat}: {why}")

    def settle(self, called: Called, deadline: Deadline) -> str:
        """Waits for the decision: returns YES, or why not. Gives it where all are staged, where a
        process has ended, and at the deadline."""
        pause = _FIRST_PAUSE_S
        found = set[int]()
        with self._words.within(deadline):
            while True:
                late = not deadline.left  # before the look: it may take the store's time
                verdict = self._words.get(f"world/{called.epoch}/is")
                if verdict is not None:
                    return str(verdict)
                if not self.is_in(called):  # nobody waits for it, so the word may be swept
                    self._look.again()
                    if self._look.yes.epoch >= called.epoch:
                        return YES
                found |= {s for s in called.ids.keys() - found if self._staged(called, s)}
                missing = called.ids.keys() - found
                if not missing:
                    return self._decide(called, YES)
                # One that staged behind that look, and ended then, has staged.
                ended = [s for s in called.ended() if s in missing and not self._staged(called, s)]
                if ended:
                    return self.refuse(called, f"the process of {_named(ended)} has ended")
                if late:
                    text = f"{_named(missing)} did not stage within {deadline.timeout_s:g} s"
                    return self.refuse(called, text)
                time.sleep(min(pause, deadline.left))
                pause = min(1.5 * pause, _LAST_PAUSE_S)

    def _staged(self, called: Called, seat: int) -> bool:
        who: str | None = self._words.get(f"world/{called.epoch}/staged/{seat}")
        return who == called.ids[seat]

    def _decide(self, called: Called, verdict: str) -> str:
        is_now = str(self._words.decide(f"world/{called.epoch}/is", verdict))
        if is_now == YES:
            self._words.say("world/yes", called.epoch)
        return is_now

    # --- entered, or out ---

    def enter(self, called: Called) -> None:
        """From here on this process is in that epoch, which was decided "yes"."""
        if called.epoch <= self.epoch or not self.is_in(called):
            raise errors.make(
                errors.InvalidArgumentError,
                f"seat {self.seat} is in epoch {self.epoch}, and cannot enter {called.epoch}"
                + ("" if self.is_in(called) else ", which does not call it"),
            )
        self.epoch = called.epoch

    def sweep(self, called: Called) -> None:
        """Drops words of epochs before one that was entered, which nobody reads again: the hint is
        above them. Any thread; asks the store for nothing that a step waits for."""
        self._words.say("world/yes", called.epoch)
        first = max(self._swept, called.epoch - _MOST_SWEPT) + 1
        if self.seat != called.seats[0]:  # of its own words its client keeps copies
            for epoch in range(first, called.epoch):
                self._words.drop(f"world/{epoch}/staged/{self.seat}")
            first = called.epoch
        for epoch in range(first, called.epoch):
            before = self._look.called(epoch)
            for seat in before.ids if before else ():
                self._words.drop(f"world/{epoch}/staged/{seat}")
            for word in ("calls", "is"):
                self._words.drop(f"world/{epoch}/{word}")
        self._swept = called.epoch - 1

    def look(self) -> Called:
        """The epoch that is, read from the store now."""
        self._look.again()
        return self._look.yes

    def _notice(self) -> None:
        if not self.epoch:
            return
        look = _Look(self._words)  # of its own: this is the member's thread
        look.again()
        if look.decided < self._called:  # whose lease ends meanwhile is not called to the next one
            self.member.members()
        if look.yes.epoch > self.epoch and not self.is_in(look.yes):
            self._out = look.yes.epoch

    def check(self) -> None:
        """Raises AbortedError where the last look found this process out; asks no store."""
        self.member.check()
        if self._out > self.epoch:
            raise errors.make(
                errors.AbortedError,
                f"epoch {self._out} of the world goes on without seat {self.seat}: it was removed, "
                "or lost, or another process has its seat",
            )


def _named(seats: Iterable[int]) -> str:
    listed = sorted(seats)
    return f"seat{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"


__all__ = ["YES", "Called", "StoreError", "World"]
