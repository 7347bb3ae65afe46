"""How trainers of one job meet, and how engine ranks find the job that counts.

A job replaces the one before under the same name: trainers that restart from a checkpoint are a new
job beside engine ranks that run. Used by both ends. Their words: docs/weights.md, "Words in the
store".
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from moe_p2p import log
from moe_p2p.errors import AbortedError, InvalidArgumentError, MoeP2pError, TimeoutError, make
from moe_p2p.fleet.client import Deadline, StoreError
from moe_p2p.fleet.letter import check_letter, letter
from moe_p2p.fleet.member import LEAVE_S, Member, Record, ReplacedError, name_of
from moe_p2p.fleet.store_keys import StoreKeys, newer
from moe_p2p.weights.attempt import Keys, refusal
from moe_p2p.weights.layout import WeightLayout
from moe_p2p.weights.plan import WeightPlan, weight_plan

NOW = "now"
FOUNDED = "founded"  # the first job has met its engine ranks
# Why the last set-up failed. job: the one that it ended, as all of it wait for each other; None:
# none, a job that runs goes on.
REFUSED = "refused"
_LOOK_S = 0.002
_SAY_S = 2.0  # who refuses waits so long for a store that is gone


def prefix_of(name: str) -> str:
    return f"moe_p2p weights/{name}"


class Job(NamedTuple):
    """ids, nics: of its trainers, by rank. source: digest of their layout. founded: there was a job
    before it, so that it waits for no founder that is gone."""

    number: int
    ids: list[str]
    nics: list[int]
    source: str
    founded: bool

    def key(self, of: str) -> str:
        return f"{self.number}/{of}"


def layout_key(digest: str) -> str:
    return f"layout {digest}"


def publish(words: StoreKeys, layout: WeightLayout) -> None:
    words.put(layout_key(layout.digest), layout.to_bytes().hex())


def layout_of(words: StoreKeys, digest: str, who: str, deadline: Deadline) -> WeightLayout:
    key = layout_key(digest)
    return WeightLayout.from_bytes(bytes.fromhex(words.wait({key: who}, deadline)[key]))


def source_of(words: StoreKeys, deadline: Deadline) -> WeightLayout:
    """Layout of the trainers, also while they meet."""
    now = words.wait({NOW: "trainer 0"}, deadline)[NOW]
    return layout_of(words, now["source"], "trainer 0", deadline)


# --- set-up ---


class SetUpError(AbortedError):
    """Another rank has refused the set-up."""


class SetUp:
    """What a rank's set-up hears of others, and what others hear of it. Made before its arguments
    are checked: what was refused by then is of a set-up that is over.

    heard: by all that wait; others wait for no engine rank that joins as a replica.
    """

    def __init__(self, words: StoreKeys, who: str, *, heard: bool = True) -> None:
        self._words, self._who, self._heard, self._before = words, who, heard, None
        self._job: Job | None = None  # of a trainer that has met the others
        with suppress(StoreError), words.within(Deadline(_SAY_S)):
            self._before = words.get(REFUSED)

    def met(self, job: Job) -> Job:
        """By a trainer: from here on another job ends the set-up."""
        self._job = job
        return job

    @contextmanager
    def heard(self, clean_up: Callable[[], None]) -> Iterator[None]:
        """Who fails in it says why; who waited in vain raises why the last set-up failed, too."""
        why = ""
        try:
            yield
        except BaseException as error:
            if isinstance(error, TimeoutError):
                why = self._last_refusal()
            # The process that has the name now goes on; what was heard was said.
            if self._heard and not isinstance(error, (ReplacedError, SetUpError)):
                with suppress(Exception), self._words.within(Deadline(_SAY_S)):
                    self.say(str(error) or type(error).__name__)
            clean_up()
            if why:
                raise TimeoutError(f"{error}; the last set-up failed: {why}") from None
            raise

    def _last_refusal(self) -> str:
        """Of who refused before this rank began: others may be its successors, so this waited."""
        with suppress(StoreError), self._words.within(Deadline(_SAY_S)):
            found = self._words.get(REFUSED)
            return found["why"] if found else ""
        return ""

    def over(self) -> None:
        """By trainer 0, when all have met: no set-up has failed since."""
        self._words.drop(REFUSED)

    def say(self, why: str) -> None:
        """Who began before hears it."""
        now = self._words.get(NOW)
        ends = now is not None and self._words.get(FOUNDED) is None
        word = {"why": why if self._who in why else f"{self._who}: {why}",
                "id": secrets.token_hex(4), "job": now["job"] if ends else None}  # fmt: skip
        self._words.put(REFUSED, word)

    def listen(self, missing: list[str] | None = None) -> None:
        """Raises what somebody has refused the set-up for. missing: as of `StoreKeys.wait`."""
        found = self._words.get(REFUSED)
        if found is not None and found != self._before:
            text = str(make(AbortedError, f"the set-up failed: {found['why']}"))
            raise SetUpError(text)
        if self._job is not None:
            counting(self._words, self._job.number, self._who)


def counting(words: StoreKeys, number: int, who: str) -> dict[str, Any] | None:
    """The word that says which job counts. Raises where it is another one than this trainer's."""
    now: dict[str, Any] | None = words.get(NOW)
    if now is not None and now["job"] != number:
        text = f"{who} was replaced: another job of trainers has taken the name"
        raise ReplacedError(str(make(AbortedError, text)))
    return now


def refuse_update(
    words: StoreKeys, who: str, error: object, *, instead_of: int | None = None
) -> None:
    """By what failed before its part of an update began: the one under way, or the next one, fails
    on all ranks. who: it, or what has failed. instead_of: the trainer whose `update` is not called
    for it; its next call is of the update after that."""
    with suppress(MoeP2pError), words.within(Deadline(LEAVE_S)):
        now = words.get(NOW)
        if now is None:
            return
        mine = refusal(f"{who}: {str(error) or repr(error)}", id=secrets.token_hex(4))
        if instead_of is not None:
            mine["instead_of"] = instead_of
        number = max(now["attempt"], 1)
        while words.decide(Keys(now["job"], number).decision, mine) != mine:
            number += 1
        if words.swap(NOW, now, {**now, "attempt": number}):
            words.drop(Keys(now["job"], number).before.decision)


def open_job(words: StoreKeys, layout: WeightLayout) -> None:
    """By trainer 0: from here on it counts, and no job before."""
    publish(words, layout)
    while True:
        before = words.get(NOW)
        number = newer(before["job"] if before else 0)
        now = {"job": number, "attempt": 0, "source": layout.digest, "letter": letter()}
        if words.swap(NOW, before, now):
            break
    if before:  # nobody reads what is of an earlier job any more
        words.sweep(lambda key: _job_of(key) < number)


def _job_of(key: str) -> float:
    first = key.partition("/")[0]
    return int(first) if first.isdigit() else math.inf


def withdraw(words: StoreKeys) -> None:
    """By who leaves: all that it has said, but what others go on to read. NOW without its roll is
    of a trainer 0 that has begun: the next trainers would look at its layout and letter."""
    with suppress(MoeP2pError), words.within(Deadline(LEAVE_S)):
        words.withdraw(
            lambda key: (
                not (
                    key in (NOW, FOUNDED, REFUSED)
                    or key.startswith(layout_key(""))
                    or key.endswith("/roll")
                )
            ),
            leaves=True,
        )


def meet(
    words: StoreKeys,
    member: Member,
    set_up: SetUp,
    rank: int,
    layout: WeightLayout,
    nics: int,
    deadline: Deadline,
) -> Job:
    """By each trainer, after `open_job` of trainer 0; returns the job of all."""
    answered = None
    while True:
        now = words.get(NOW)
        roll = None if now is None else words.get(f"{now['job']}/roll")
        if roll is not None and roll["ids"][rank : rank + 1] == [member.id]:
            return Job(number=now["job"], **roll)
        if now is not None and roll is None:
            check_letter("trainer 0", now.get("letter"))
            if answered != now["job"]:
                if layout.digest != now["source"]:  # trainer 0 refuses it, and says what differs
                    publish(words, layout)
                mine = {"id": member.id, "nics": nics, "source": layout.digest}
                words.put(f"{now['job']}/trainer {rank}", mine)
                answered = now["job"]
            if rank == 0:
                _call_the_roll(words, member, set_up, now, layout, deadline)
        set_up.listen()
        member.check()
        if not deadline.left:
            why = "" if roll is None else "; the job that runs has another process in this place"
            text = f"within {deadline.timeout_s:g} s no word from trainer 0{why}"
            raise make(TimeoutError, text)
        time.sleep(_LOOK_S)


def _call_the_roll(
    words: StoreKeys,
    member: Member,
    set_up: SetUp,
    now: Mapping[str, Any],
    layout: WeightLayout,
    deadline: Deadline,
) -> None:
    number = now["job"]

    def listen(missing: list[str]) -> None:
        set_up.listen()
        member.check()
        counting(words, number, member.name)

    keys = {f"{number}/trainer {i}": f"trainer {i}" for i in range(layout.world_size)}
    found = words.wait(keys, deadline, listen)
    all_of = [found[key] for key in keys]
    for i, each in enumerate(all_of):
        if each["source"] != layout.digest:
            theirs = layout_of(words, each["source"], f"trainer {i}", deadline)
            text = f"trainer {i} has another layout than trainer 0: {theirs.difference(layout)}"
            hint = "put one together by layout_of, or WeightLayout.merged"
            raise make(InvalidArgumentError, f"{text}; {hint}")
    roll = {"ids": [each["id"] for each in all_of], "nics": [each["nics"] for each in all_of],
            "source": layout.digest, "founded": words.get(FOUNDED) is not None}  # fmt: skip
    words.decide(f"{number}/roll", roll)  # of two trainers 0 one is in the job


def current(words: StoreKeys) -> Job | None:
    """The job that counts; None where its trainers have not met yet."""
    now = words.get(NOW)
    roll = None if now is None else words.get(f"{now['job']}/roll")
    return None if roll is None else Job(number=now["job"], **roll)


def find(words: StoreKeys, set_up: SetUp, deadline: Deadline) -> Job:
    """By engine ranks at set-up."""
    while True:
        refused = words.get(REFUSED)
        found = current(words)
        if found is not None and (refused is None or refused["job"] != found.number):
            check_letter("trainer 0", words.get(NOW).get("letter"))
            return found
        set_up.listen()
        if not deadline.left:
            now = words.get(NOW)
            late = "trainer 0" if now is None else _late(words, now)
            raise make(TimeoutError, f"within {deadline.timeout_s:g} s no word from {late}")
        time.sleep(_LOOK_S)


def _late(words: StoreKeys, now: Mapping[str, Any]) -> str:
    data = words.get(layout_key(now["source"]))
    count = WeightLayout.from_bytes(bytes.fromhex(data)).world_size if data else 1
    late = [i for i in range(count) if words.get(f"{now['job']}/trainer {i}") is None]
    return ", ".join(f"trainer {i}" for i in late) or "trainer 0"


def say_layout(words: StoreKeys, job: Job, layout: WeightLayout, who: str) -> Any:
    """By founders that have found the job: returns what the first of them said."""
    return words.decide(job.key("layout"), {"digest": layout.digest, "of": who})


def engine_ranks_layout(
    words: StoreKeys, member: Member, set_up: SetUp, job: Job, deadline: Deadline
) -> WeightLayout:
    """By trainers: of founders that have found this very job, or of engine ranks that run, which
    have renewed their lease meanwhile; after a lease replicas are enough."""
    key, began = job.key("layout"), time.monotonic()
    while (found := words.get(key)) is None:
        there = dict[str, Record]()
        if job.founded:
            late = time.monotonic() - began > member.lease_s
            there = {who: each for who, each in member.renewed().items()
                     if who.startswith("generator") and not each["joining"]
                     and (late or not each["replica"])}  # fmt: skip
        if there:
            first = min(there, key=lambda who: (there[who]["replica"], who))
            words.decide(key, {"digest": there[first]["digest"], "of": name_of(first)})
            continue
        set_up.listen()
        member.check()
        if not deadline.left:
            text = f"within {deadline.timeout_s:g} s no word from generator 0"
            raise make(TimeoutError, text)
        time.sleep(min(0.05, member.lease_s / 8) if job.founded else _LOOK_S)
    return layout_of(words, found["digest"], found["of"], deadline)


def plan_of(words: StoreKeys, job: Job, layout: WeightLayout, deadline: Deadline) -> WeightPlan:
    """Of an engine rank."""
    return weight_plan(layout_of(words, job.source, "trainer 0", deadline), layout)


def await_founders(
    words: StoreKeys, member: Member, set_up: SetUp, job: Job, names: list[str], deadline: Deadline
) -> dict[str, str]:
    """By trainers: returns ids of founders by name. A job that follows another one takes those
    that are there; after a lease, it goes on when any engine rank is."""
    if not job.founded:
        keys = {job.key(f"there/{name}"): name for name in names}
        found = words.wait(keys, deadline, set_up.listen)
        words.put(FOUNDED, True)
        return {name: found[job.key(f"there/{name}")] for name in names}
    began = time.monotonic()
    while True:
        engine_ranks = {who: each for who, each in member.members().items()
                      if who.startswith("generator") and not each["joining"]}  # fmt: skip
        for who, each in engine_ranks.items():
            check_letter(name_of(who), each.get("letter"))
        there = {name_of(who): who for who in engine_ranks}
        missing = [name for name in names if name not in there]
        if not missing or (there and time.monotonic() - began > member.lease_s):
            if missing:
                log.warning(f"{member.name}: without {', '.join(missing)}, which are not there")
            return {}
        if not deadline.left:
            text = f"within {deadline.timeout_s:g} s no word from {', '.join(missing)}"
            raise make(TimeoutError, text)
        if not there:
            set_up.listen()
        time.sleep(min(0.05, member.lease_s / 4))
