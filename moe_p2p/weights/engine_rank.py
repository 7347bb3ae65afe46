"""The engine ranks' end of weight updates: counts what arrives, switches with its fleet.

    engine_rank = WeightEngineRank(engine, store, layout, rank, tensors)  once, with all trainers
    engine_rank.step()                                                   between forward passes

An engine's ranks switch to a version after the same step, so that no forward pass sees two. A
version that failed anywhere is nobody's: a shadow keeps the old one, in place the target is dirty.
docs/weights.md explains it.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, Store

from moe_p2p import log
from moe_p2p.engine.engine import Engine
from moe_p2p.engine.metrics import Family, note
from moe_p2p.errors import (
    AbortedError,
    ClosedError,
    MoeP2pError,
    ProtocolError,
    TimeoutError,
    make,
    require,
)
from moe_p2p.fleet.client import Deadline, StoreError
from moe_p2p.fleet.late import Late, Wait
from moe_p2p.fleet.letter import letter
from moe_p2p.fleet.lookout import Lookout
from moe_p2p.fleet.member import LEAVE_S, Member, name_of
from moe_p2p.fleet.store_keys import StoreKeys
from moe_p2p.library import unaffected
from moe_p2p.machine.ranges import span
from moe_p2p.weights import attempt, checks, counts, job, joining
from moe_p2p.weights.attempt import COMMIT, Keys, refusal
from moe_p2p.weights.engine_buffers import Arrivals, EngineBuffers, Finalize
from moe_p2p.weights.job import Job
from moe_p2p.weights.joining import Lent, State
from moe_p2p.weights.layout import WeightLayout
from moe_p2p.weights.maxima import settle
from moe_p2p.weights.stages import OF_ENGINE_RANK, Stages

Mode = Literal["shadow", "in_place"]

# Smallest of what an engine's ranks give it, on each of them; called once a step.
Agree = Callable[[int], int]


def agree_in(group: ProcessGroup) -> Agree:
    """Over a CPU process group of the engine's ranks."""

    def smallest(number: int) -> int:
        value = torch.tensor([number], device="cpu")
        torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MIN, group=group)
        return int(value)

    return smallest


class WeightEngineRank:
    """One engine rank.

    engine, store, name, timeout_s, lease_s: as of `WeightTrainer`. layout: of all engine ranks of
        the set-up, or of a replica. tensors: what this rank's kernels read, by the layout's names,
        and derived ones; contiguous.
    replica: "": of the set-up, which waits for all ranks. Any other name: of engine ranks that join
        when they like, by a layout of their own ranks; where one with the same tensors has a
        version, they have it when this returns, else the next update brings it.
    mode: "shadow": updates land in a second buffer while the engine generates. "in_place": they
        land in the tensors; the engine pauses for `begin` until `wait` has returned.
    engine_ranks: ranks of the inference engine that this rank is of; (): alone. agree: takes the
        smallest of their numbers, over the engine's own control path.
    finalize: makes derived tensors, and the tensors of parameters that arrive in checkpoint layout.
    padding: tensors of which a part belongs to no parameter, and stays as it is; a warning names
        others of which no parameter is written to all.
    poison: what an update will write is NaN until it is written.
    watermark: most bytes that the second buffer may take.
    """

    @torch.inference_mode(mode=False)  # the second buffer is written in any mode
    @unaffected
    def __init__(
        self,
        engine: Engine,
        store: Store,
        layout: WeightLayout,
        rank: int,
        tensors: Mapping[str, Tensor],
        *,
        replica: str = "",
        mode: Mode = "shadow",
        engine_ranks: Sequence[int] = (),
        agree: Agree | None = None,
        finalize: Finalize | None = None,
        padding: Collection[str] = (),
        poison: bool = False,
        watermark: int | None = None,
        name: str = "weights",
        timeout_s: float = 30.0,
        lease_s: float = 5.0,
    ) -> None:
        who = f"generator {rank}"
        checks.check_store(who, store)
        self._words = StoreKeys(store, job.prefix_of(name))
        set_up = job.SetUp(self._words, who, heard=not replica)
        with set_up.heard(self._words.client.close):
            seconds = {"timeout_s": timeout_s, "lease_s": lease_s}
            checks.check_rank(who, engine, layout, rank, tensors, seconds)
            self._shared = checks.check_engine(who, mode, engine_ranks, agree, replica)
            self._tensors = checks.of_engine_rank(rank, layout, tensors, padding)
        self.engine, self.rank, self.mode, self.timeout_s = engine, rank, mode, timeout_s
        self.version: int | None = None  # what the tensors hold
        self.dirty = False
        self.name = attempt.engine_rank_name(replica, rank)
        self.stages = Stages(self.name, engine.number, OF_ENGINE_RANK)  # of the last update
        self.under_way = self.stages.under_way  # for a trace
        self._agree: Agree = agree or (lambda number: number)
        self._poison, self._layout = poison, layout
        self.failure = ""  # of the last attempt
        self._attempt, self._ended = 1, 0  # the next attempt; how many are over, but for retries
        self._stamp = 0  # of what the tensors hold
        self._committed = 0  # stamp of the last attempt that the fleet is known to have decided for
        self._taken = 0  # stamp of the last attempt that the tensors were brought to
        # In shadow mode a thread looks at the store. It takes no step while an attempt is decided
        # and not taken, and `step` does nothing else. `_hand` is held by either for no call of the
        # store: by `step` while ranks agree and copy, by the thread to go over to another job.
        self._hand, self._looking = threading.Lock(), threading.Lock()
        self._update: dict[str, Any] | None = None
        self._deadline: Deadline | None = None
        self._open = self._arrived = self._again = False
        self._usable, self._unfenced = True, False  # reports a version; a fence is tried again
        self._lookout: Lookout | None = None
        self._signature = joining.signature(layout, rank, self._tensors)
        deadline, made = Deadline(timeout_s), ExitStack()  # undone where the rest fails
        made.callback(self._words.client.close)
        with set_up.heard(made.close):
            job.publish(self._words, layout)
            self._job = job.find(self._words, set_up, deadline)
            self.plan = job.plan_of(self._words, self._job, layout, deadline)
            if not replica:
                self._check_layout(deadline)
            self.stages.reached("planned")
            self._buffers = EngineBuffers(
                engine,
                self.plan,
                rank,
                self._tensors,
                shadow=mode == "shadow",
                finalize=finalize,
                watermark=watermark,
            )
            made.callback(self._buffers.close)
            self._lent = Lent(engine, self._tensors)
            made.callback(self._lent.close)
            record = self._record(replica, engine_ranks)
            self._member = Member(self._words, self.name, record, lease_s)
        self.totals = {"updates": 0, "failed": 0, "joins": 0, "join_ms": 0.0, "pause_ms": 0.0,
                       "buffer_bytes": len(self._buffers.buffer)}  # fmt: skip
        self._returns, self.late = self._words.client.returns, Late(self.name)
        with set_up.heard(self.close):
            self._come(deadline)

    def _record(self, replica: str, engine_ranks: Sequence[int]) -> dict[str, Any]:
        """What others know of it."""
        names = [attempt.engine_rank_name(replica, each) for each in engine_ranks]
        return {"replica": replica, "rank": self.rank, "digest": self._layout.digest,
                "joining": True, "engine": names, "signature": self._signature}  # fmt: skip

    def _come(self, deadline: Deadline) -> None:
        """The end of the set-up: others see this rank, and it has the version that they have."""
        self._member.sweep()
        self._words.put(f"live/{self._member.id}", self._lent.address())
        self._serve(self._job, 1)
        self.stages.reached("registered")
        self._join(deadline)
        note(self)
        if self.mode == "shadow":
            device = next((each.device for each in self._tensors.values()), torch.device("cpu"))
            self._lookout = Lookout(self._progress, self.name, device)
        if self.version is not None:
            self.totals["joins"], self.totals["join_ms"] = 1, 1e3 * max(self.stages.values())

    def _check_layout(self, deadline: Deadline) -> None:
        """Founders of a job have one layout; once it has met, `update` compares who is there."""
        found = job.say_layout(self._words, self._job, self._layout, self.name)
        if found["digest"] != self._layout.digest and self._words.get(job.FOUNDED) is None:
            first = job.layout_of(self._words, found["digest"], found["of"], deadline)
            text = f"another layout than {found['of']}: {self._layout.difference(first)}"
            raise make(ProtocolError, f"{self.name} has {text}")

    def _serve(self, found: Job, number: int) -> None:
        """From here on trainers of this job, and no others, may write, from attempt `number` on."""
        self._lend(found)
        self._arrivals = Arrivals(
            self.engine, self._words, self._buffers, self._member.id, found.nics
        )
        self._job, self._attempt = found, number  # last: else `_follow` would not come here again

    def _lend(self, to: Job) -> None:
        generation = secrets.token_hex(8)
        lent = self._buffers.lend(self.plan.writers_to(self.rank))
        lent["generation"] = generation
        self._words.say(to.key(f"lends/{self._member.id}"), lent)
        self._generation = generation

    @property
    def _keys(self) -> Keys:
        return Keys(self._job.number, self._attempt)

    def _offer(self) -> None:
        """Trainers may write from here on."""
        self._update, self._deadline, self._arrived = None, None, False
        if self._poison:
            self._buffers.poison()
        settle([self._buffers.buffer, *self._tensors.values()])
        self._words.say(self._keys.ready(self._member.id), self._generation)
        self._open = True

    def _join(self, deadline: Deadline) -> None:
        """Enters at the attempt under way, or the next one, with what peers have."""
        self._attempt = self._current(self._job)
        if self._attempt > 1 or self._job.founded:
            while not self._catch_up(deadline):
                require(deadline.left > 0, f"{self.name}: peers' versions changed all the time")
        self._member.look()
        self._member.announce(joining=False)
        self._words.count("changes", 1)
        if self.mode == "shadow":
            self._offer()
        self._words.put(self._job.key(f"there/{self.name}"), self._member.id)
        self.stages.reached("offered")
        self.stages.over()

    def _current(self, found: Job) -> int:
        """The attempt of a job that is under way, or the next one."""
        now = self._words.get(job.NOW)
        number = 1 if found is not self._job else self._attempt
        if now is not None and now["job"] == found.number:
            number = max(number, now["attempt"])
        while self._words.get(Keys(found.number, number).decision) is not None:
            number += 1
        return number

    def _catch_up(self, deadline: Deadline) -> bool:
        """Reads what peers have; True when all ranks of the engine have the same, or nothing."""
        found = self._read_from_peers(deadline)
        self.stages.reached("read")
        number = -1 if found is None else found.stamp
        if self._agree(number) != number or -self._agree(-number) != number:
            return False
        if found is not None:
            self._take(found, None)
            self._report()
        return True

    def _read_from_peers(self, deadline: Deadline) -> State | None:
        """The newest version of a rank with the same tensors, read into this rank's targets."""
        places = {name: (*self._buffers.place(name), tensor.numel() * tensor.element_size())
                  for name, tensor in self._tensors.items() if tensor.numel()}  # fmt: skip
        peers = []
        if not self._buffers.is_a_part:
            peers = joining.newest(self._words, self._member, self._signature)
        if peers:
            self._buffers.soil()
        self.dirty = self.mode == "in_place" and (self.dirty or bool(peers))
        return joining.read_one(self.engine, self._words, peers, places, deadline)

    @span("moe_p2p.weights_copy")
    def _take(self, state: State, names: set[str] | None, *, received: bool = False) -> None:
        """The pause: the tensors become the version's. received: by this rank, in an update."""
        began = time.monotonic()
        self._lent.shut()
        self.dirty, self.failure = True, f"the copy of version {state.version} failed"
        self._buffers.commit(names, state.stamp if received else None)
        settle(list(self._tensors.values())[:1])
        self._lent.open(*state)
        self.stages.reached("copied")
        self.totals["pause_ms"] = 1e3 * (time.monotonic() - began)
        self._stamp, self.version = state
        self.dirty, self.failure = False, ""

    def _report(self) -> None:
        """Of what the tensors hold. Not waited for: the engine may be in `commit`."""
        runs = [self._stamp, self.version] if self._usable else None
        self._words.put(f"runs/{self._member.id}", runs, wait=False)

    def set_usable(self, usable: bool) -> None:
        """False: the engine's own loader has not ended with this version. This rank counts as one
        without a version, until it is True again."""
        self._usable = usable
        self._report()

    def close(self) -> None:
        """Leaves: withdraws the lease; nobody waits for this rank any more. Idempotent. Raises
        TimeoutError while a peer may still write to the tensors: to be called again then."""
        if self._member.close.alive:
            self._member.close()
            with suppress(MoeP2pError), self._words.within(Deadline(LEAVE_S)):
                self._words.count("changes", 1)
        self._give_back()

    def _give_back(self) -> None:
        """The tensors are the caller's: who still reads them finds that they are no version."""
        job.withdraw(self._words)
        self._words.client.close()  # a look that is under way ends at its next word
        if self._lookout is not None:
            self._lookout.stop(self.timeout_s)
        late: TimeoutError | None = None
        for each in (self._lent, self._buffers):
            try:
                each.close()
            except TimeoutError as error:
                late = error
            except RuntimeError:  # the engine is closed
                pass
        if late is not None:
            raise late

    def _check_open(self) -> None:
        if self._member.replaced:
            with suppress(TimeoutError):  # tried again by the next call
                self._give_back()
            self._member.check()
        if not self._member.close.alive:
            raise make(ClosedError, f"{self.name} is closed")

    def __enter__(self) -> WeightEngineRank:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def retrying(self) -> bool:
        """The last attempt failed, and trainers go on with another one."""
        return self._again

    # --- the engine's side ---

    @unaffected
    def step(self) -> int | None:
        """Between forward passes: returns the version of the next one.

        It asks no store, and waits for nothing but `agree`, which all ranks of the engine call in
        the same step: a thread looks meanwhile, and what it finds counts at the next step. In
        place it refuses to go on, with ProtocolError, while the tensors are dirty.
        """
        self._check_open()
        if self._lookout is None:
            self.require_not_dirty()
            return self.version
        with self._hand:
            committed = self._committed  # while it is not taken, the thread changes nothing
            if self._agree(committed) == committed > self._taken:
                self._commit()
        self._lookout.ask()  # not before: the pause would share Python's lock with its thread
        return self.version

    def require_clean(self) -> None:
        """Before an engine takes requests: raises where its tensors are no version of the fleet."""
        self.require_not_dirty()
        if self.version is None:
            raise make(ProtocolError, f"{self.name} has no version yet, only its first tensors")

    def require_not_dirty(self) -> None:
        """Before an engine continues, also with what it was made with."""
        if self.dirty:
            why = self.failure or f"update {self._attempt} is not complete"
            text = f"its tensors are dirty, a mix of versions, until an update is complete: {why}"
            raise make(ProtocolError, f"{self.name}: {text}")

    @unaffected
    def begin(self) -> None:
        """In place: the engine is paused, and its tensors may be overwritten. Then `wait`."""
        self._check_open()
        require(self.mode == "in_place", "begin: a shadow is always open; call step, or wait")
        require(not self._open, "begin: the update before is not over; call wait")
        with self._words.within(Deadline(self.timeout_s)):
            self._member.look()
            self._follow()
            self._attempt = self._current(self._job)  # this rank may have taken no part in some
            self._words.put(f"runs/{self._member.id}", None)
            self.dirty, self.failure = True, ""
            self._lent.shut()
            self._offer()

    @unaffected
    def wait(self, timeout_s: float | None = None) -> int | None:
        """Until the update under way, or the next one, is over; returns the version.

        Raises AbortedError with why it failed, and TimeoutError when nothing began.
        """
        require(
            self.mode == "in_place" or not self._shared,
            "wait: ranks of an engine go to a version in the same step; call step on all of them",
        )
        self._check_open()
        limit = self.timeout_s if timeout_s is None else timeout_s
        checks.check_seconds(f"{self.name}: wait: timeout_s", limit)
        deadline = Deadline(limit)
        if self._lookout is not None:
            self._lookout.settle(limit)  # an update that is over already is none to wait for
        ended = self._ended
        with self._words.within(deadline):
            while self._ended == ended:
                trouble = self._go_on()
                if not deadline.left and self._ended == ended:
                    why = f"no update was over within {deadline.timeout_s:g} s"
                    self._give_up(f"{why}: {trouble}" if trouble else why)
                    raise make(TimeoutError, f"{self.name}: {self.failure}")
                time.sleep(0.001)
        if self._lookout is not None:  # others know of it then, where the store answers
            self._lookout.settle(LEAVE_S)
        if self.failure:
            raise make(AbortedError, f"{self.name}: the update failed: {self.failure}")
        return self.version

    def _go_on(self) -> StoreError | None:
        """Returns why the store does not answer."""
        if self._lookout is not None:
            self.step()
            return self._lookout.trouble
        try:
            self._progress()
        except StoreError as error:
            return error
        if self._committed == self._keys.stamp:
            self._commit()
            self._end_taken()
        return None

    def _give_up(self, why: str) -> None:
        """In place an open target would be written to later, when the caller does not expect it."""
        self.failure = why
        if self.mode == "in_place":
            decision: Any = self._refusal(why)
            with suppress(StoreError):  # whatever others decide, nothing is written any more
                decision = self._words.decide(self._keys.decision, decision)
            if decision == COMMIT and self._arrived:
                self._commit()
                self._end_taken()
            elif decision != COMMIT:
                self._fail({**decision, "again": False})

    # --- an attempt ---

    def _follow(self) -> dict[str, Any] | None:
        """The word of which job counts; goes over to that job where it is another one."""
        now: dict[str, Any] | None = self._words.get(job.NOW)
        if now is None or now["job"] == self._job.number:
            return now
        found = job.current(self._words)
        if found is None:  # its trainers have not met yet; the old job is over
            return None
        if now.get("letter") != letter():  # they refuse this rank by name, in their set-up
            return None
        if not self._unfenced:
            log.warning(f"{self.name}: trainers have begun anew")
        with self._hand:
            self._committed = 0  # what the old job has decided and no rank has taken is given up
        if self._taken == self._keys.stamp:
            self._report()
        if not self._fenced():
            return None
        with suppress(RuntimeError):
            self.engine.free_imm(attempt.immediate(self._keys))
        if found.source != self._job.source:
            plan = job.plan_of(self._words, found, self._layout, Deadline(self.timeout_s))
            self._buffers.replan(plan)
            self.plan = plan
        over = self._job.key("")
        self._words.withdraw(lambda key: key.startswith(over))
        if not found.founded:  # this rank is a founder of that one, too
            job.say_layout(self._words, found, self._layout, self.name)
        self._serve(found, self._current(found))
        self._words.say(found.key(f"there/{self.name}"), self._member.id)
        if self._open:
            self._open = False  # until it is offered to the new ones: `_look`
            self._offer()
        again: dict[str, Any] | None = self._words.get(job.NOW)  # None: the store was lost
        return again

    @unaffected
    def _progress(self) -> None:
        """By the lookout's thread; in place by `wait`. May be called again after a StoreError."""
        with self._looking:
            self._look()

    def _look(self) -> None:
        if self._taken == self._keys.stamp:
            self._end_taken()
        if self._returns != self._words.client.returns:  # trainers look again who is there
            self._words.count("changes", 1)
            self._returns = self._words.client.returns
        now = self._follow()
        if now is not None and not self._open and self.mode == "shadow":
            self._offer()  # an error has cut it short
        if now is None or not self._open or self._committed == self._keys.stamp:
            return
        keys = self._keys
        decision = self._words.get(keys.decision)
        if self._update is None:
            self._see(keys)
        if self._update is not None and self._member.id not in self._update["members"]:
            self._left_out(decision)
        elif decision == COMMIT and self._arrived:
            self._decided(keys)
        elif decision == COMMIT:
            self._fail(self._refusal("the fleet has decided without this rank's report"))
        elif decision is not None:
            self._fail(decision)
        elif now["attempt"] > keys.attempt + 1:
            self._missed()
        elif self._update is not None:
            try:
                self._receive(keys)
            except (StoreError, ClosedError):
                raise
            except Exception as error:  # of finalize, too: the engine goes on with what it has
                self._words.decide(keys.decision, self._refusal(str(error)))

    def _see(self, keys: Keys) -> None:
        update = self._words.get(keys.update)
        if update is None:
            return
        ids = {name_of(who): who for who in update["members"]}
        if ids.get(self.name, self._member.id) != self._member.id:
            self._member.look()  # it, or the process before it, was named: the claim says which
        self._deadline = Deadline(self.timeout_s)
        self.stages.begin(update["version"], attempt.immediate(keys))
        self.stages.reached("begin")
        if self._member.id in update["members"]:
            self._expect(keys, update)
        self._update = update  # last: where the store fails, it is looked at again

    def _expect(self, keys: Keys, update: dict[str, Any]) -> None:
        names, lost = attempt.only(update), frozenset(update["lost"])
        writes = self.plan.without(lost).writes_to(self.rank) if lost else self._buffers.writes
        self._arrivals.begin([e for e in writes if names is None or e.name in names])
        why = ""
        if names is not None and update["base"] != self._stamp:
            why = f"it is at version {self.version}, and not what they are a part of"
        elif names is not None:
            why = self._buffers.keep_others(names, self._stamp)
        if why:
            text = f"{self.name}: some parameters alone make no version here, {why}; all are sent"
            self._words.decide(keys.decision, refusal(text, again=True, whole=True))

    def _receive(self, keys: Keys) -> None:
        assert self._update is not None
        wait = Wait(self.stages.began, self.timeout_s, lambda: self._arrivals.missing(keys))
        self.late.look(time.monotonic(), {} if self._arrived else {"bytes": wait})
        if self._arrived:
            if self._deadline is not None and not self._deadline.left:
                text = f"no decision of the trainers within {self._deadline.timeout_s:g} s"
                raise make(TimeoutError, text)
        elif self._arrivals.counted(keys) and (
            not self._update["verify"] or self._arrivals.checked(keys)
        ):
            self._buffers.finish()
            settle([self._buffers.buffer])
            self._words.put(keys.arrived(self._member.id), self._update["version"])
            self._arrived, self._deadline = True, Deadline(2 * self.timeout_s)  # after trainer 0's
            self.stages.reached("arrived")
        elif self._deadline is not None and not self._deadline.left:
            text = f"within {self.timeout_s:g} s {self._arrivals.missing(keys)}"
            raise make(TimeoutError, text)

    def _refusal(self, why: str) -> dict[str, Any]:
        return refusal(f"{self.name}: {why}")

    def _left_out(self, decision: Any) -> None:
        """Of an update whose trainers did not know this rank, or took it for lost."""
        assert self._update is not None
        if decision is None:
            return
        self._words.count("changes", 1)  # trainers look again who is there
        if decision == COMMIT and self._update["stamp"] != self._stamp:
            state = self._read_newest()
            if state is not None and state.stamp == self._update["stamp"]:
                self._decided(self._keys)
                return
            version = self._update["version"]
            log.warning(f"{self.name}: left out of version {version}; it is at {self.version}")
        self._next(again=True)
        self._offer()

    def _missed(self) -> None:
        """The fleet is more than one attempt ahead: this rank was away."""
        self._words.count("changes", 1)
        state = self._read_newest()
        if state is not None and state.stamp > self._stamp:
            self._update = {"stamp": state.stamp, "version": state.version, "members": {}}
            self._decided(self._keys)  # the tensors change in `step` alone
            return
        number = self._current(self._job)
        self._next(again=True)
        self._attempt = max(self._attempt, number)
        self._offer()

    def _read_newest(self) -> State | None:
        """Ranks of one engine, which must be at one version, wait for the next update."""
        if self.mode == "in_place" or self._shared:
            return None
        return self._read_from_peers(Deadline(self.timeout_s))

    def _decided(self, keys: Keys) -> None:
        self._committed = keys.stamp

    def _commit(self) -> None:
        assert self._update is not None
        self.stages.reached("decided")  # by all ranks of the engine
        took_part = self._member.id in self._update["members"]
        state = State(self._update["stamp"], self._update["version"])
        self._take(state, attempt.only(self._update) if took_part else None, received=took_part)
        self.totals["updates"] += 1
        self._ended += 1
        self._taken = self._committed

    def _end_taken(self) -> None:
        """The attempt is over: others may know, and the next one may begin."""
        self._report()
        self._next()
        if self.mode == "shadow":
            self._offer()
            self.stages.reached("offered")
        self.stages.over()

    def _fenced(self) -> bool:
        """False: a trainer that is stopped may still finish a write, until it goes on or ends."""
        try:
            self._buffers.fence()
        except TimeoutError as error:
            if not self._unfenced:
                log.warning(f"{self.name}: the next update waits: {error}")
            self._unfenced = True
            return False
        self._unfenced = False
        return True

    def _fail(self, decision: Mapping[str, Any]) -> None:
        """Keys of this attempt are void before the next one may write."""
        why, again = str(decision["why"]), bool(decision.get("again"))
        self._again, self.failure = again, why
        if not self._fenced():
            return  # looked at again
        self._lend(self._job)
        log.warning(f"{self.name}: the weight update failed: {why}")
        self.totals["failed"] += 1
        self.stages.over(why)
        self._next(again=again)
        self._ended += not again
        if self.mode == "shadow" or again:
            self._offer()

    def _next(self, *, again: bool = False) -> None:
        """again: trainers, and `wait`, go on with the next attempt."""
        with suppress(RuntimeError):
            self.engine.free_imm(attempt.immediate(self._keys))
        before = Keys(self._job.number, self._attempt - 1)
        self.late.look(time.monotonic(), {})
        self._attempt, self._open, self._again = self._attempt + 1, False, again
        self._words.drop(before.ready(self._member.id))
        self._words.drop(before.arrived(self._member.id))

    # --- truth ---

    def metrics(self) -> list[Family]:
        """For moe_p2p.prometheus_text."""
        given = self.totals, self.stages, self.version, self.late.count
        return counts.of_engine_rank(self.name, *given) if self._member.close.alive else []

    def checksums(self) -> dict[str, int]:
        """64 bits for each tensor as it is now."""
        return {name: attempt.whole_sum(tensor) for name, tensor in self._tensors.items()}

    def check_equal(self, reference: Mapping[str, Tensor]) -> None:
        """Compares every byte with what the receiver's own conversion made, by checksums.

        Raises ProtocolError with the tensors that differ. `poison=True` makes sure that nothing is
        equal because an earlier update wrote it.
        """
        self.require_clean()
        checks.check_tensors("check_equal: reference", reference)
        wrong = attempt.differing(self._tensors, reference)
        if wrong:
            text = f"{self.name} at version {self.version}: {', '.join(wrong)} differ"
            raise make(ProtocolError, text)
