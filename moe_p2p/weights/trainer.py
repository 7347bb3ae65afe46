"""The trainers' end of weight updates: converts, writes straight into engine ranks, and commits.

    trainer = WeightTrainer(engine, store, layout, rank, tensors)      once, with all engine ranks
    trainer.update(version)                                            on all trainers, each time

`update` returns when every engine rank of the fleet has all bytes of the version and the fleet has
decided for it; else it raises, by name, and no engine rank switches. The lowest trainer that is
there leads: it says who takes part, and decides. Trainers that restart are a new job beside the
engine ranks that run. docs/weights.md explains it.
"""

from __future__ import annotations

import functools
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from moe_p2p import log
from moe_p2p.engine.engine import Engine
from moe_p2p.engine.metrics import Family, note
from moe_p2p.errors import (
    AbortedError,
    ClosedError,
    MoeP2pError,
    ProtocolError,
    make,
    require,
)
from moe_p2p.fleet.client import Deadline, StoreError
from moe_p2p.fleet.late import Late, Wait
from moe_p2p.fleet.letter import letter
from moe_p2p.fleet.member import Member, Record, ReplacedError, name_of
from moe_p2p.fleet.store_keys import StoreKeys
from moe_p2p.library import unaffected
from moe_p2p.machine.phases import Phase
from moe_p2p.machine.ranges import span
from moe_p2p.weights import attempt, checks, counts, job
from moe_p2p.weights.attempt import COMMIT, Keys, refusal
from moe_p2p.weights.layout import WeightLayout
from moe_p2p.weights.plan import weight_plan
from moe_p2p.weights.sending import UnwrittenError
from moe_p2p.weights.stages import OF_TRAINER, Stages
from moe_p2p.weights.trainer_buffers import GRACE, TrainerBuffers

_Update = dict[str, Any]


class _BehindError(AbortedError):
    """Others are at a later version: the attempt is theirs, and waits for this rank's next call."""


class WeightTrainer:
    """One trainer rank.

    engine: of this rank. store: a torch store that all trainers and engine ranks reach.
    layout: of all trainers. tensors: this rank's, by the layout's names; registered here, once.
    name: of the fleet. timeout_s: of the set-up, which waits for all ranks, and of each attempt.
    lease_s: a rank that does not renew its lease so long is lost.
    watermark: most bytes that conversions may take beside the tensors; None: all at once.
    device: where conversions run, for tensors in host memory; None: the device of the tensors.
    """

    @torch.inference_mode(mode=False)  # its buffers are written in any mode
    @unaffected
    def __init__(
        self,
        engine: Engine,
        store: Store,
        layout: WeightLayout,
        rank: int,
        tensors: Mapping[str, Tensor],
        *,
        name: str = "weights",
        timeout_s: float = 30.0,
        lease_s: float = 5.0,
        watermark: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        who = f"trainer {rank}"
        checks.check_store(who, store)
        self._words = StoreKeys(store, job.prefix_of(name))
        set_up = job.SetUp(self._words, who)
        with set_up.heard(self._words.client.close):
            seconds = {"timeout_s": timeout_s, "lease_s": lease_s}
            checks.check_rank(who, engine, layout, rank, tensors, seconds)
            self._tensors = checks.of_trainer(rank, layout, tensors)
            self._given = {name: checks.plain(each) for name, each in tensors.items()}  # as updates
            self.engine, self.rank, self.timeout_s = engine, rank, timeout_s
            self.version: int | None = None  # what the fleet is at
            self.stages = Stages(who, engine.number, OF_TRAINER)  # of the last attempt
            deadline = Deadline(timeout_s)
            if rank == 0:
                job.open_job(self._words, layout)
            self._member = Member(self._words, who, {}, lease_s)
        with set_up.heard(self._leave):
            among = (self._words, self._member, set_up)
            met = job.meet(*among, rank, layout, engine.num_nics, deadline)
            self._job = set_up.met(met)
            self.plan = weight_plan(layout, job.engine_ranks_layout(*among, self._job, deadline))
            first = next(iter(self._tensors.values()), None)
            where = device or (first.device if first is not None else "cpu")
            self._buffers = TrainerBuffers(
                engine, rank, self.plan, self._tensors, torch.device(where), watermark
            )
        self._attempt = self._changes = self._returns = 0
        self._decided_on = 0  # version of the attempt under way
        # Version of the last call, if that found its attempt decided: a trainer that is late takes
        # part in the next one. Where it finds that decided too, it is behind.
        self._late: int | None = None
        self._behind = False  # it missed attempts, and has made none with others since
        self._undecided: Keys | None = None  # of an attempt that failed while the store was away
        self._stamp = 0  # of the last update
        self._members: dict[str, Record] | None = None  # the leader's; None: look
        self._updated: Collection[str] = ()  # members of the last update
        self._lost: frozenset[int] = frozenset()
        # Of the exchange of maxima: the attempt that it began with, which is its era; what it is
        # for; the last attempt that succeeded; and words about this trainer's inbox.
        self._era, self._succeeded = -1, 0
        self._era_of: tuple[list[int], list[str]] = [], []
        self._said = list[str]()
        self._under_way = threading.Lock()
        self.attempts_failed = 0
        self.late = Late(who)
        with set_up.heard(self.close):
            self._meet(set_up, deadline)
        self.stages.over()
        note(self)

    def _meet(self, set_up: job.SetUp, deadline: Deadline) -> None:
        founders = {attempt.engine_rank_name("", i): i for i in range(self.plan.target.world_size)}
        among = (self._member, set_up, self._job, list(founders))
        there = job.await_founders(self._words, *among, deadline)
        for name, who in there.items():
            if founders[name] in self._buffers.targets(""):
                lent = self._words.get(self._job.key(f"lends/{who}"))
                try:
                    if lent is not None:
                        self._buffers.writer.connect(who, lent)
                except MoeP2pError:
                    if who in self._member.members():
                        raise
                    # It left since, as an engine that is set up anew; `update` finds who is there.
        self._era_of = self._shared([self.plan.target.digest])
        self._meet_for_maxima(0, deadline, set_up.listen)
        if self.rank == 0:
            set_up.over()

    def _there(self) -> list[int]:
        return [i for i in range(self.plan.source.world_size) if i not in self._lost]

    def _shared(self, digests: Iterable[str]) -> tuple[list[int], list[str]]:
        """What an exchange of maxima is for: who is lost, and the layouts of engine ranks."""
        return sorted(self._lost), sorted(set(digests))

    def _meet_for_maxima(
        self, era: int, deadline: Deadline, meanwhile: Callable[[list[str]], None]
    ) -> None:
        """Trainers that share blocks write into each other's inboxes."""
        if era == self._era:
            return
        exchange = self._buffers.exchange(self._era_of[1])

        def key(rank: int) -> str:
            return self._job.key(f"maxima of {rank} {era}")

        before = list(self._said)
        if exchange.peers:
            self._said.append(key(self.rank))
            self._words.put(key(self.rank), exchange.address())
        keys = {key(i): f"trainer {i}" for i in exchange.peers}
        found = self._words.wait(keys, deadline, meanwhile)
        for i in exchange.peers:
            exchange.connect(i, found[key(i)])
        self._era = era
        for each in before:  # who is in this era reads no word of earlier ones
            self._words.drop(each)
            self._said.remove(each)

    # --- updates ---

    @unaffected
    def update(
        self,
        version: int,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        verify: bool = False,
        only: Collection[str] | None = None,
        changed: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Brings every engine rank to `version`. All trainers call it, with the same arguments.

        tensors: new values, copied into the registered ones; None: these are as they should be.
        They must be left alone until it returns. verify: 64-bit checksums of all that is written.
        only: names of parameters; the others are as in the version before. If an engine rank has
        another one, all parameters are sent to all engine ranks. changed: for one release; all are
        sent, as without it.

        Raises AbortedError, with the name of the rank where it failed, and TimeoutError with the
        ranks that are missing. No engine rank switches to the version then; it may be called again.
        Engine ranks that are lost are left out; for a lost trainer others send, if they hold what
        it held: each begins anew, with its own timeout.
        """
        if changed:
            text = "update(changed=True) sends all parameters now: say which ones, only=[...]"
            warnings.warn(text, DeprecationWarning, stacklevel=3)
        checks.check_update(version, only, changed, self.plan.names)
        wish = {"version": version, "verify": verify,
                "only": None if only is None else sorted(only), "newcomers": False}  # fmt: skip
        self._update(wish, tensors, timeout_s)

    @unaffected
    def admit(self, *, timeout_s: float | None = None) -> None:
        """Brings engine ranks that joined, and found no peer to read from, to the fleet's version.

        All trainers call it, while their tensors hold the values of the last update.
        """
        require(self.version is not None, "admit: there was no update yet")
        wish = {"version": self.version, "verify": False, "only": None, "newcomers": True}
        self._update(wish, None, timeout_s)

    @unaffected
    def abort(self, why: str) -> None:
        """In place of this rank's next `update`, which fails on every rank, with this reason."""
        self._check_open()
        with checks.alone(self._under_way, f"trainer {self.rank}: abort"):
            self._attempt += 1
            self.attempts_failed += 1
            self._forget()
            with self._words.within(Deadline(self.timeout_s)):
                self._decide_against(self._keys, self._refusal(why))

    def _check_open(self) -> None:
        if not self._member.close.alive:
            raise make(ClosedError, f"trainer {self.rank} is closed")

    @property
    def _keys(self) -> Keys:
        return Keys(self._job.number, self._attempt)

    @span("moe_p2p.weights_update")
    @torch.inference_mode(mode=False)
    def _update(
        self, wish: _Update, tensors: Mapping[str, Tensor] | None, timeout_s: float | None
    ) -> None:
        self._check_open()
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        checks.check_seconds("update: timeout_s", timeout_s)
        checks.check_tensors("update: tensors", tensors or {})
        with checks.alone(self._under_way, f"trainer {self.rank}: update"):
            self._whole = False  # an engine rank has no use for some parameters alone
            while not self._begin(wish, tensors, timeout_s):
                tensors = None  # they have been taken

    def _begin(self, wish: _Update, tensors: Mapping[str, Tensor] | None, timeout_s: float) -> bool:
        """One attempt. False: begin again, without a rank that is lost."""
        deadline = Deadline(timeout_s)
        with self._words.within(deadline):
            self._attempt = self._next(wish)
            self.stages.begin(wish["version"])
            why = "others begin again"
            try:
                done = self._try(wish, tensors, deadline)
                why = "" if done else why
            except BaseException as error:
                why = str(error) or type(error).__name__
                raise
            finally:
                self.stages.over(why, self._buffers.marks)
            return done

    def _try(self, wish: _Update, tensors: Mapping[str, Tensor] | None, deadline: Deadline) -> bool:
        keys = self._keys
        self._decided_on = wish["version"]
        taken, update = False, dict[str, Any]()
        try:
            checks.take(tensors or {}, self._given)
            taken = True
            update = self._agree(keys, wish, deadline)
            try:
                self._send(keys, update, deadline)
            except UnwrittenError as failed:
                self._explain(keys, failed, deadline)
                raise failed.named(self.stages) from failed
            self._commit(keys, update, deadline)
        except _BehindError:
            self._attempt -= 1  # others wait in it
            self.attempts_failed += 1
            raise
        except BaseException as error:
            mine = self._refusal(str(error) or type(error).__name__, version=self._decided_on)
            try:
                if isinstance(error, StoreError):
                    self._undecided, self._members = keys, None
                    self.attempts_failed += 1
                    raise
                decision = self._decide_against(keys, mine)
            finally:  # also where the store is gone
                self._buffers.cancel(max(deadline.left, 1.0))
            if not isinstance(error, Exception):
                raise
            if decision != COMMIT:
                self.attempts_failed += 1
                if taken and self._goes_on(decision, wish):
                    return False
                if decision == mine:
                    raise
                raise attempt.failed(wish["version"], decision["why"]) from error
            if not update or isinstance(error, ReplacedError):
                raise  # it was decided for another update than this call's, or for nobody
        self.version, self._succeeded = wish["version"], keys.attempt
        self._stamp, self._updated = update["stamp"], {*self._updated, *update["members"]}
        if not wish["newcomers"]:
            self._updated = update["members"].keys()
        return True

    def _decide_against(self, keys: Keys, why: _Update) -> Any:
        self._undecided = keys
        found = self._words.decide(keys.decision, why)
        self._undecided = None
        return found

    def _next(self, wish: _Update) -> int:
        """Number of this call's attempt: the next one, unless this rank missed some."""
        now = self._now()
        self._member.check()  # else others take it for lost: its lease is another process's
        if self._undecided is not None:
            why = "the store did not answer; this trainer gave the attempt up"
            self._decide_against(self._undecided, self._refusal(why))
        mine = found = self._attempt + 1
        if now["attempt"] > mine:
            found = now["attempt"]
            update = self._words.get(Keys(self._job.number, found).update) or {"lost": ()}
            if self.rank in update["lost"]:
                text = f"trainer {self.rank} was taken for lost, and others went on without it"
                raise make(AbortedError, text)
            found += self._words.get(Keys(self._job.number, found).decision) is not None
        late: int | None = None
        while (decided := self._words.get(Keys(self._job.number, found).decision)) is not None:
            if decided != COMMIT and decided.get("instead_of") == self.rank:
                mine, found = mine + 1, found + 1  # of a call that was not made
                continue
            update = self._words.get(Keys(self._job.number, found).update) or decided
            version = None if decided == COMMIT else update.get("version")
            if version is None or (version == wish["version"] != self._late):
                late = version
                break  # of this very call, for which this rank is late
            found += 1
        self._late = late  # not before all words were read: the store may fail
        if found > mine:
            self._behind, behind = True, found - mine
            log.warning(f"trainer {self.rank} was {behind} updates behind, and goes on with others")
        return found

    def _now(self) -> _Update:
        """The word that says which job counts. Raises where it is another one than this rank's."""
        now = job.counting(self._words, self._job.number, f"trainer {self.rank}")
        if now is None:  # a store that was lost, and is served anew
            now = {"job": self._job.number, "attempt": self._attempt, "source": self._job.source,
                   "letter": letter()}  # fmt: skip
            self._words.swap(job.NOW, None, now)
        return now

    def _refusal(self, why: str, **how: Any) -> dict[str, Any]:
        return refusal(f"trainer {self.rank}: {why}", **how)

    def _forget(self) -> None:
        """What this rank put for the attempt before the last one is read by nobody any more."""
        before = self._keys.before
        for key in (before.requests(self.rank), before.sent(self.rank)):
            self._words.drop(key)
        if self.rank == self._there()[0]:
            self._words.drop(before.update)
            self._words.drop(before.decision)

    # --- who takes part ---

    def _agree(self, keys: Keys, wish: _Update, deadline: Deadline) -> _Update:
        """The leader says what the attempt is; others find that they mean the same."""
        self._forget()
        leader = self._there()[0]
        if self.rank == leader:
            now = self._now()
            if not self._words.swap(job.NOW, now, {**now, "attempt": keys.attempt}):
                self._now()
            update = self._words.decide(keys.update, self._proposal(keys, wish, deadline))
        else:
            wanted = {keys.update: f"trainer {leader}"}
            update = self._wait(keys, wanted, deadline)[keys.update]
        # A trainer that begins later finds the decision under the version that it has in mind.
        self._decided_on = update["version"]
        theirs = {name: update["wish"][name] for name in wish}
        if theirs != wish:
            text = f"this trainer updates to {wish}, another one to {theirs}"
            if self._behind and wish["version"] < theirs["version"]:  # its caller counts up to it
                raise _BehindError(str(make(AbortedError, f"it is behind: {text}")))
            raise make(ProtocolError, text)
        self._behind = False
        # One decision for all trainers: who is lost, and whose maxima they share. What they have
        # known before may differ, as of a replica whose copies do not fit on some of them.
        self._lost = self._lost | frozenset(update["lost"])
        self._era_of = self._shared(each[2] for each in update["members"].values())
        self.stages.reached("begin")
        return dict(update)

    def _proposal(self, keys: Keys, wish: _Update, deadline: Deadline) -> _Update:
        members = self._look()
        _check_alike(members)
        runs = {who: self._words.get(f"runs/{who}") for who in members}
        # A member of the last update is at it before it looks at another one.
        others = [who for who in members
                  if who not in self._updated and (runs[who] or [0])[0] != self._stamp]  # fmt: skip
        if wish["newcomers"]:
            members = {who: members[who] for who in others}
        only = wish["only"]
        others = others if self._stamp else list(members)
        if only is not None and (others or self._whole):
            if others:
                log.warning(attempt.not_partial(others[0], runs[others[0]], self.version))
            only = None
        # After a success all trainers have met in its era; after a failure some may not have.
        shares = self._shared(each["digest"] for each in members.values())
        goes_on = shares == self._era_of and self._succeeded == keys.attempt - 1
        return {"version": wish["version"], "verify": wish["verify"], "base": self._stamp,
                "era": self._era if goes_on else keys.attempt,
                "stamp": self._stamp if wish["newcomers"] else keys.stamp,
                "only": only, "lost": sorted(self._lost), "wish": wish,
                "members": {who: [each["replica"], each["rank"], each["digest"]]
                            for who, each in members.items()}}  # fmt: skip

    def _look(self) -> dict[str, Record]:
        """Engine ranks that take part: they have leases, and so has all of their engine."""
        changes = self._words.count("changes")
        if (changes, self._words.client.returns) != (self._changes, self._returns):
            self._members, self._returns = None, self._words.client.returns
        if self._members is None:
            found = {who: each for who, each in self._member.members().items()
                     if who.startswith("generator")}  # fmt: skip
            there = {name_of(who) for who, each in found.items() if not each["joining"]}
            self._members = {
                who: each for who, each in found.items()
                if name_of(who) in there and there.issuperset(each["engine"])
            }  # fmt: skip
            self._changes = changes
        return self._members

    # --- bytes ---

    def _send(self, keys: Keys, update: _Update, deadline: Deadline) -> None:
        members = {who: (replica, rank) for who, (replica, rank, _) in update["members"].items()}
        if members:
            self._learn(keys, update, deadline)
        names = None if update["only"] is None else set(update["only"])
        sending = self._buffers.sending(members, names)
        with self._buffers.bounded(lambda missing: self._stop(keys, missing), deadline):
            if members:
                self._buffers.merge_maxima(keys.attempt, names)
            self.stages.reached("maxima")
            wanted = {keys.ready(who): who for who in members}
            found = self._wait(keys, wanted, deadline)
            for engine_rank in sending:
                generation = found[keys.ready(engine_rank)]
                if generation != self._buffers.writer.generation(engine_rank):
                    self._connect(keys, engine_rank, generation)
            self.stages.reached("ready")
            groups = self._buffers.groups(sending, names)
            counts = Counter(group.engine_rank for _, each in groups for group in each.groups)
            self._words.put(keys.requests(self.rank), counts)
            imm = attempt.immediate(keys)
            sums = self._buffers.send(groups, imm, update["verify"], self.stages.reached)
        self._words.put(keys.sent(self.rank), sums)
        self.stages.reached("sent")

    def _connect(self, keys: Keys, engine_rank: str, generation: str) -> None:
        """generation: of what it lends for this attempt; it lends anew after one that failed."""
        lent = self._words.get(self._job.key(f"lends/{engine_rank}"))
        if lent is None or lent["generation"] != generation:
            self._stop(keys, [])
            text = f"{name_of(engine_rank)} has begun anew: it lends {generation} no more"
            raise make(AbortedError, text)
        self._buffers.writer.connect(engine_rank, lent)

    def _learn(self, keys: Keys, update: _Update, deadline: Deadline) -> None:
        """Replicas that are new, and who stands in for trainers that are lost."""
        for who, (replica, _, digest) in update["members"].items():
            if self._buffers.digest(replica) != digest:
                key = job.layout_key(digest)
                data = self._wait(keys, {key: who}, deadline)[key]
                self._buffers.add(replica, WeightLayout.from_bytes(bytes.fromhex(data)))
        self._buffers.without(self._lost)
        self._meet_for_maxima(update["era"], deadline, lambda missing: self._stop(keys, missing))

    def _commit(self, keys: Keys, update: _Update, deadline: Deadline) -> None:
        """The leader decides, once every rank has reported; others can only decide not to."""
        leader = self._there()[0]
        if self.rank == leader:
            wanted = {keys.sent(i): f"trainer {i}" for i in self._there()}
            wanted |= {keys.arrived(who): who for who in update["members"]}
            self._wait(keys, wanted, deadline.later(GRACE * deadline.timeout_s))
            self.stages.reached("arrived")
            decision = self._words.decide(keys.decision, COMMIT)
        else:
            later = deadline.later(2 * GRACE * deadline.timeout_s)
            wanted = {keys.decision: f"trainer {leader}"}
            decision = self._wait(keys, wanted, later)[keys.decision]
        self.stages.reached("decided")
        if decision != COMMIT:
            raise attempt.failed(update["version"], decision["why"])
        self._now()  # engine ranks have followed another job: they do not look at this decision

    # --- who is lost ---

    def _wait(self, keys: Keys, wanted: dict[str, str], deadline: Deadline) -> dict[str, Any]:
        began = time.monotonic()

        def look(missing: list[str]) -> None:
            waits: dict[str, Wait] = {}
            for who in missing:
                text = functools.partial("a word from {} for the update".format, name_of(who))
                waits[who] = Wait(began, deadline.timeout_s, text)
            self.late.look(time.monotonic(), waits)
            self._stop(keys, missing, since=began)

        try:
            return self._words.wait(wanted, deadline, look)
        finally:
            self.late.look(time.monotonic(), {})

    def _stop(self, keys: Keys, missing: list[str], *, since: float | None = None) -> None:
        """Raises where somebody decided against the attempt, or one that is waited for is lost."""
        decision = self._words.get(keys.decision)
        if decision not in (None, COMMIT):
            raise make(AbortedError, decision["why"])
        began = self.stages.began if since is None else since
        lost = self._member.lost(map(self._id, missing), began)
        if lost:
            found = attempt.lost_ranks(self.plan, self._lost, lost, self._member.lease_s)
            self._words.decide(keys.decision, found)
            self._stop(keys, [])

    def _id(self, who: str) -> str:
        """Trainers are named by what they are in the job, engine ranks by their ids."""
        return self._job.ids[int(who.split()[1])] if who.startswith("trainer") else who

    def _explain(self, keys: Keys, error: UnwrittenError, deadline: Deadline) -> None:
        """A write failed: returns when that was not because its rank is lost."""
        began = time.monotonic()
        until = began + min(deadline.left, 2 * self._member.lease_s)
        self._stop(keys, [])  # also where no time is left
        while time.monotonic() < until:
            self._stop(keys, [error.who], since=began)
            time.sleep(0.01)

    def _goes_on(self, decision: _Update, wish: _Update) -> bool:
        self._members = None
        if not decision.get("again"):
            return False
        if self.rank in decision.get("lost", ()):
            raise make(AbortedError, f"trainer {self.rank} was taken for lost: {decision['why']}")
        log.warning(f"trainer {self.rank}: the weight update begins again: {decision['why']}")
        self._whole = self._whole or decision.get("whole", False)
        self._lost = self._lost | frozenset(decision.get("lost", ()))
        return True

    # --- truth ---

    def live(self) -> Counter[int | None]:
        """How many engine ranks run which version; None: not updated yet, or dirty."""
        self._check_open()
        there = [who for who in self._member.members() if who.startswith("generator")]
        runs = (self._words.get(f"runs/{who}") for who in there)
        return Counter(None if each is None else each[1] for each in runs)

    @property
    def seconds(self) -> dict[str, float]:
        """Of the last update, while bytes moved: converting, submitting requests, waiting for
        writes. They move from stage "ready" to stage "written"."""
        return self._buffers.seconds

    @property
    def totals(self) -> dict[str, int]:
        """bytes_written, requests; staging_bytes: most that conversions took beside the tensors at
        any time; attempts, and those that failed."""
        return {**self._buffers.totals, "attempts": self._attempt, "failed": self.attempts_failed}

    def metrics(self) -> list[Family]:
        """For moe_p2p.prometheus_text."""
        given = self.totals, self.seconds, self.stages, self.version, self.late.count
        return counts.of_trainer(self.rank, *given) if self._member.close.alive else []

    def under_way(self) -> list[Phase]:
        """For a trace: the attempt."""
        return self.stages.under_way(self._buffers.marks)

    def close(self) -> None:
        """Withdraws the lease, unregisters the tensors. The engine stays open. Idempotent."""
        self._leave()
        self._buffers.close()

    def _leave(self) -> None:
        self._member.close()
        job.withdraw(self._words)
        self._words.client.close()

    def __enter__(self) -> WeightTrainer:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_alike(members: Mapping[str, Record]) -> None:
    """Ranks of a replica are written to by one plan; one may have begun anew by another layout."""
    first: dict[str, str] = {}
    for who, each in members.items():
        other = first.setdefault(each["replica"], who)
        if each["digest"] != members[other]["digest"]:
            text = f"{name_of(who)} has another layout than {name_of(other)}"
            raise make(ProtocolError, f"{text}; start all ranks of an engine with one")
