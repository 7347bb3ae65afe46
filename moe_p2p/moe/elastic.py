"""A world that changes, as one of its processes sees it: epochs are staged beside steps, and
entered between two steps (docs/elastic.md). A communicator of such a world owns one Changes;
fleet/world.py has the words in the store.

An attempt runs on a thread of its own: who is called, a meeting of these, an epoch made and
connected, "staged", the decision. The thread that makes the calls takes its outcome and enters, by
one swap in C++ (on a GPU also a kernel); the epoch before drains and closes on a thread again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import NamedTuple

from torch._C._distributed_c10d import PrefixStore, Store

from moe_p2p import errors, log
from moe_p2p.fleet.bootstrap import Bootstrap
from moe_p2p.fleet.client import Client, Deadline, StoreError
from moe_p2p.fleet.store_keys import StoreKeys
from moe_p2p.fleet.world import YES, Called, World
from moe_p2p.moe.config import AllToAllConfig
from moe_p2p.moe.epoch import Epoch

_PREFIX = "moe_p2p/elastic"
MakeEpoch = Callable[[Bootstrap, int], Epoch]
# Makes the calls those of the epoch; returns what closes the one before, which may wait.
EnterEpoch = Callable[[Epoch], Callable[[], None]]


class Joining(NamedTuple):
    """members: seats that make the first epoch. None: this process comes later."""

    members: tuple[int, ...] | None

    @staticmethod
    def of(members: Iterable[int] | None, join: bool) -> Joining | None:
        """None: a fixed world."""
        if members is None:
            return Joining(None) if join else None
        errors.require(
            not join, "members is given with join=True; members make the world, others join it"
        )
        return Joining(tuple(sorted(set(errors.ranks_of("members", members)))))


class _Outcome(NamedTuple):
    called: Called
    epoch: Epoch | None  # None: this process is not called
    verdict: str


class Changes:
    """store: of torch; it is cloned. seat: the rank of this process, of world_size."""

    def __init__(self, store: Store, seat: int, world_size: int, config: AllToAllConfig) -> None:
        self.seat, self.world_size, self.timeout_s = seat, world_size, float(config.timeout_s)
        self._store = store.clone() if hasattr(store, "clone") else store
        self._client = Client(self._store)
        local = config.ranks_per_node or 1
        self._by_node = by_node = 1 < local < world_size
        self._masks = config.mask_lost_ranks
        errors.require(
            not config.mask_lost_ranks or not by_node,
            f"ranks_per_node is {local} of world_size {world_size}, and mask_lost_ranks=True: lost "
            "ranks are masked in one node, or with one rank a node; pass mask_lost_ranks=False",
        )
        self.world = World(
            StoreKeys(self._client, _PREFIX),
            seat,
            timeout_s=self.timeout_s,
            ranks_per_node=local if by_node else 1,
        )
        self._attempt: Future[_Outcome] | None = None
        self.in_doubt = False  # the attempt may be decided "yes" without a further word from here
        self.is_out = False  # the world goes on without this process, which was not removed
        self._draining: list[threading.Thread] = []

    # --- the first epoch of this process ---

    def begin(self, joining: Joining, make: MakeEpoch, gone: Callable[[int], bool]) -> Epoch:
        """Returns the first epoch, entered.

        With masks the members that come make it, also where another one is killed meanwhile. A
        newcomer waits until an epoch calls it, and once that was not made for the next one:
        whoever is lost in it costs it no more than members. gone: members that will not come.
        """
        failed: errors.MoeP2pError | None = None
        while True:
            try:
                called = self._first_call(joining, gone)
            except errors.TimeoutError as error:
                raise failed or error from None  # nobody called again: that one says why
            try:
                return self._enter_first(self._try(called, make))
            except (errors.TimeoutError, errors.PeerDeadError, errors.AbortedError) as error:
                if joining.members is not None and not (self._masks and called.ended()):
                    raise
                failed = error
                log.warning(f"rank {self.seat}: epoch {called.epoch} was not made: {error}")

    def _first_call(self, joining: Joining, gone: Callable[[int], bool]) -> Called:
        members = joining.members
        if members is None:
            return self.world.await_call(Deadline(self.timeout_s))
        errors.require(
            self.seat in members and all(0 <= s < self.world_size for s in members),
            f"members is {list(members)}, must have rank {self.seat} and be from 0 to "
            f"{self.world_size - 1}; a process that comes later passes join=True",
        )
        called = self.world.found(members, lambda seat, late: self._masks and (late or gone(seat)))
        if not self.world.is_in(called):
            text = f"the first epoch was called for seats {called.seats}, without this process"
            raise errors.make(errors.AbortedError, text)
        return called

    def _enter_first(self, outcome: _Outcome) -> Epoch:
        called, epoch, _ = self._accepted(outcome)
        assert epoch is not None
        self.world.enter(called)
        self._in_background(lambda: self.world.sweep(called))
        return epoch

    # --- one attempt ---

    def _try(self, called: Called, make: MakeEpoch) -> _Outcome:
        """Stages the epoch and waits for the decision."""
        if not self.world.is_in(called):
            self.in_doubt = True
            return _Outcome(called, None, self.world.settle(called, Deadline(self.timeout_s)))
        meeting = Bootstrap(
            PrefixStore(f"{_PREFIX}/meets/{called.epoch}", self._store),
            rank=self.seat,
            world_size=self.world_size,
            timeout_s=self.timeout_s,
            present=called.seats,
        )
        lead = (called.staying or called.seats)[0]
        epoch = None
        try:
            with meeting:
                if len(called.seats) > 1:
                    processes = [called.processes.get(s, "") for s in range(self.world_size)]
                    meeting.neighbours.add(processes)
                epoch = make(meeting, lead)
            self.in_doubt = True
            self.world.stage(called)
            return _Outcome(called, epoch, self.world.settle(called, Deadline(self.timeout_s)))
        except BaseException as error:
            if epoch is not None:
                epoch.close()
            with suppress(StoreError):
                self.world.refuse(called, str(error))
            raise

    def _accepted(self, outcome: _Outcome) -> _Outcome:
        """Raises where the epoch was decided not to be."""
        if outcome.verdict != YES:
            if outcome.epoch is not None:
                outcome.epoch.close()
            text = f"rank {self.seat}: epoch {outcome.called.epoch} is not: {outcome.verdict}"
            raise errors.make(errors.AbortedError, text)
        return outcome

    # --- later ones: staged beside steps, entered between two ---

    def stage(self, add: Iterable[int], remove: Iterable[int], make: MakeEpoch) -> None:
        added, removed = (
            sorted(set(errors.ranks_of(name, given)))
            for name, given in (("add", add), ("remove", remove))
        )
        for seat in (*added, *removed):
            errors.require(
                0 <= seat < self.world_size,
                f"seat {seat} cannot be added or removed, must be from 0 to {self.world_size - 1}",
            )
        both = sorted(set(added) & set(removed))
        errors.require(not both, f"seats {both} are both added and removed")
        attempt: Future[_Outcome] = Future()
        text = "members are staged already; call commit_members() on all ranks first"
        errors.require(self._attempt is None, text)
        self._attempt, self.in_doubt = attempt, False

        def run() -> None:
            try:
                if self.is_out:  # members say who is called
                    called = self.world.await_call(Deadline(self.timeout_s))
                else:
                    called = self.world.call(added, removed)
                attempt.set_result(self._try(called, make))
            except BaseException as error:
                attempt.set_exception(error)

        threading.Thread(target=run, name=f"stage {self.seat}", daemon=True).start()

    def staged(self) -> bool:
        """Whether commit would wait for nobody; asks no store."""
        return self._attempt is not None and self._attempt.done()

    def commit(self, enter: EnterEpoch) -> Epoch | None:
        """Enters what was staged, once it is decided. None: this process was removed."""
        attempt, self._attempt = self._attempt, None
        errors.require(attempt is not None, "nothing is staged; call stage_members() first")
        assert attempt is not None
        called, epoch, _ = self._accepted(attempt.result())
        if epoch is None:
            if self.world.id in called.removed:
                return None
            self.is_out = True
            raise errors.make(errors.AbortedError, self._why_out(called))
        try:
            close_before = enter(epoch)
        except BaseException:
            epoch.close()
            raise
        self.world.enter(called)
        self.is_out = False

        def drain() -> None:
            close_before()
            self.world.sweep(called)

        self._in_background(drain)
        return epoch

    def _why_out(self, called: Called) -> str:
        if self.seat in called.ids:
            why = "another process has its seat"
        elif self._by_node:
            why = (
                "its node is not whole. Once each seat of the node has a process, all ranks, this "
            )
            why += "one too, add the node"
        else:
            why = "it had not renewed its lease"
        return f"epoch {called.epoch} of the world goes on without rank {self.seat}: {why}"

    @property
    def may_return(self) -> bool:
        """Whether it can do nothing wrong until an epoch calls it: its node can make no call."""
        return self._by_node and not self.world.member.replaced

    # --- its end ---

    def _in_background(self, run: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                run()
            except Exception as error:
                log.warning(f"rank {self.seat}: after a change of members: {error}")

        self._draining = [thread for thread in self._draining if thread.is_alive()]
        thread = threading.Thread(target=guarded, name=f"drain {self.seat}", daemon=True)
        self._draining.append(thread)
        thread.start()

    def close(self) -> None:
        """Before the engine is closed. Waits for epochs that drain, and for an attempt that runs,
        at most their deadlines."""
        if self._attempt is not None:
            with suppress(Exception):
                outcome = self._attempt.result(3 * self.timeout_s)
                if outcome.epoch is not None:
                    outcome.epoch.close()
        for thread in self._draining:
            thread.join(2 * self.timeout_s)
        self.world.close()
        self._client.close()
