"""How trainers of one job meet, and how generators find the job that counts.

A job replaces the one before under the same name: trainers that restart from a checkpoint are a new
job beside generators that run. Used by both ends. Their words: docs/weights.md, "Words in the
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
from moe_p2p.fleet.board import Board, newer
from moe_p2p.fleet.client import Deadline, StoreError
from moe_p2p.fleet.letter import check_letter, letter
from moe_p2p.fleet.member import Member, Record, ReplacedError, name_of
from moe_p2p.weights.layout import WeightLayout
from moe_p2p.weights.plan import WeightPlan, weight_plan

NOW = "now"
FOUNDED = "founded"  # the first job has met its generators
# Why the last set-up failed. job: the one that it ended, as all of it wait for each other; None:
# none, a job that runs goes on.
REFUSED = "refused"
_LOOK_S = 0.002
_SAY_S = 2.0  # who refuses waits so long for a store that is gone
_LEAVE_S = 1.0  # and who leaves


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


def publish(board: Board, layout: WeightLayout) -> None:
    board.put(layout_key(layout.digest), layout.to_bytes().hex())


def layout_of(board: Board, digest: str, who: str, deadline: Deadline) -> WeightLayout:
    key = layout_key(digest)
    return WeightLayout.from_bytes(bytes.fromhex(board.wait({key: who}, deadline)[key]))


def source_of(board: Board, deadline: Deadline) -> WeightLayout:
    """Layout of the trainers, also while they meet."""
    now = board.wait({NOW: "trainer 0"}, deadline)[NOW]
    return layout_of(board, now["source"], "trainer 0", deadline)


# --- set-up ---


class SetUpError(AbortedError):
    """Another rank has refused the set-up."""


class SetUp:
    """What a rank's set-up hears of others, and what others hear of it. Made before its arguments
    are checked: what was refused by then is of a set-up that is over.

    heard: by all that wait; others wait for no generator that joins as a replica.
    """

    def __init__(self, board: Board, who: str, *, heard: bool = True) -> None:
        self._board, self._who, self._heard, self._before = board, who, heard, None
        self.job: Job | None = None  # of a trainer that has met the others
        with suppress(StoreError), board.within(Deadline(_SAY_S)):
            self._before = board.get(REFUSED)

    @contextmanager
    def heard(self, clean_up: Callable[[], None]) -> Iterator[None]:
        """Who fails in it says why."""
        try:
            yield
        except BaseException as error:
            # The process that has the name now goes on; what was heard was said.
            if self._heard and not isinstance(error, (ReplacedError, SetUpError)):
                with suppress(Exception), self._board.within(Deadline(_SAY_S)):
                    self.say(str(error) or type(error).__name__)
            clean_up()
            raise

    def say(self, why: str) -> None:
        """Who began before hears it."""
        now = self._board.get(NOW)
        ends = now is not None and self._board.get(FOUNDED) is None
        word = {"why": why if self._who in why else f"{self._who}: {why}",
                "id": secrets.token_hex(4), "job": now["job"] if ends else None}  # fmt: skip
        self._board.put(REFUSED, word)

    def listen(self, missing: list[str] | None = None) -> None:
        """Raises what somebody has refused the set-up for. missing: as of `Board.wait`."""
        found = self._board.get(REFUSED)
        if found is not None and found != self._before:
            text = str(make(AbortedError, f"the set-up failed: {found['why']}"))
            raise SetUpError(text)
        if self.job is not None:
            counting(self._board, self.job.number, self._who)


def counting(board: Board, number: int, who: str) -> dict[str, Any] | None:
    """The word that says which job counts. Raises where it is another one than this trainer's."""
    now: dict[str, Any] | None = board.get(NOW)
    if now is not None and now["job"] != number:
        text = f"{who} was replaced: another job of trainers has taken the name"
        raise ReplacedError(str(make(AbortedError, text)))
    return now


def open_job(board: Board, layout: WeightLayout) -> None:
    """By trainer 0: from here on it counts, and no job before."""
    publish(board, layout)
    while True:
        before = board.get(NOW)
        number = newer(before["job"] if before else 0)
        now = {"job": number, "attempt": 0, "source": layout.digest, "letter": letter()}
        if board.swap(NOW, before, now):
            break
    if before:  # nobody reads what is of an earlier job any more
        board.sweep(lambda key: _job_of(key) < number)


def _job_of(key: str) -> float:
    first = key.partition("/")[0]
    return int(first) if first.isdigit() else math.inf


def withdraw(board: Board) -> None:
    """By who leaves: all that it has said, but what others go on to read. NOW without its roll is
    of a trainer 0 that has begun: the next trainers would look at its layout and letter."""
    with suppress(MoeP2pError), board.within(Deadline(_LEAVE_S)):
        board.withdraw(
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
    board: Board,
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
        now = board.get(NOW)
        roll = None if now is None else board.get(f"{now['job']}/roll")
        if roll is not None and roll["ids"][rank : rank + 1] == [member.id]:
            return Job(number=now["job"], **roll)
        if now is not None and roll is None:
            check_letter("trainer 0", now.get("letter"))
            if answered != now["job"]:
                if layout.digest != now["source"]:  # trainer 0 refuses it, and says what differs
                    publish(board, layout)
                mine = {"id": member.id, "nics": nics, "source": layout.digest}
                board.put(f"{now['job']}/trainer {rank}", mine)
                answered = now["job"]
            if rank == 0:
                _call_the_roll(board, member, set_up, now, layout, deadline)
        set_up.listen()
        member.check()
        if not deadline.left:
            why = "" if roll is None else "; the job that runs has another process in this place"
            text = f"within {deadline.timeout_s:g} s no word from trainer 0{why}"
            raise make(TimeoutError, text)
        time.sleep(_LOOK_S)


def _call_the_roll(
    board: Board,
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
        counting(board, number, member.name)

    keys = {f"{number}/trainer {i}": f"trainer {i}" for i in range(layout.world_size)}
    found = board.wait(keys, deadline, listen)
    all_of = [found[key] for key in keys]
    for i, each in enumerate(all_of):
        if each["source"] != layout.digest:
            theirs = layout_of(board, each["source"], f"trainer {i}", deadline)
            text = f"trainer {i} has another layout than trainer 0: {theirs.difference(layout)}"
            hint = "put one together by layout_of, or WeightLayout.merged"
            raise make(InvalidArgumentError, f"{text}; {hint}")
    roll = {"ids": [each["id"] for each in all_of], "nics": [each["nics"] for each in all_of],
            "source": layout.digest, "founded": board.get(FOUNDED) is not None}  # fmt: skip
    board.decide(f"{number}/roll", roll)  # of two trainers 0 one is in the job


def current(board: Board) -> Job | None:
    """The job that counts; None where its trainers have not met yet."""
    now = board.get(NOW)
    roll = None if now is None else board.get(f"{now['job']}/roll")
    return None if roll is None else Job(number=now["job"], **roll)


def find(board: Board, set_up: SetUp, deadline: Deadline) -> Job:
    """By generators at set-up."""
    while True:
        refused = board.get(REFUSED)
        found = current(board)
        if found is not None and (refused is None or refused["job"] != found.number):
            check_letter("trainer 0", board.get(NOW).get("letter"))
            return found
        set_up.listen()
        if not deadline.left:
            now = board.get(NOW)
            why = f"; the last set-up failed: {refused['why']}" if refused else ""
            late = "trainer 0" if now is None else _late(board, now)
            raise make(TimeoutError, f"within {deadline.timeout_s:g} s no word from {late}{why}")
        time.sleep(_LOOK_S)


def _late(board: Board, now: Mapping[str, Any]) -> str:
    data = board.get(layout_key(now["source"]))
    count = WeightLayout.from_bytes(bytes.fromhex(data)).world_size if data else 1
    late = [i for i in range(count) if board.get(f"{now['job']}/trainer {i}") is None]
    return ", ".join(f"trainer {i}" for i in late) or "trainer 0"


def say_layout(board: Board, job: Job, layout: WeightLayout, who: str) -> Any:
    """By founders that have found the job: returns what the first of them said."""
    return board.decide(job.key("layout"), {"digest": layout.digest, "of": who})


def generators_layout(
    board: Board, member: Member, set_up: SetUp, job: Job, deadline: Deadline
) -> WeightLayout:
    """By trainers: of founders that have found this very job, or of generators that run, which have
    renewed their lease meanwhile; after a lease replicas are enough."""
    key, began = job.key("layout"), time.monotonic()
    while (found := board.get(key)) is None:
        there = dict[str, Record]()
        if job.founded:
            late = time.monotonic() - began > member.lease_s
            there = {who: each for who, each in member.renewed().items()
                     if who.startswith("generator") and not each["joining"]
                     and (late or not each["replica"])}  # fmt: skip
        if there:
            first = min(there, key=lambda who: (there[who]["replica"], who))
            board.decide(key, {"digest": there[first]["digest"], "of": name_of(first)})
            continue
        set_up.listen()
        member.check()
        if not deadline.left:
            text = f"within {deadline.timeout_s:g} s no word from generator 0"
            raise make(TimeoutError, text)
        time.sleep(min(0.05, member.lease_s / 8) if job.founded else _LOOK_S)
    return layout_of(board, found["digest"], found["of"], deadline)


def plan_of(board: Board, job: Job, layout: WeightLayout, deadline: Deadline) -> WeightPlan:
    """Of a generator."""
    return weight_plan(layout_of(board, job.source, "trainer 0", deadline), layout)


def await_founders(
    board: Board, member: Member, set_up: SetUp, job: Job, names: list[str], deadline: Deadline
) -> dict[str, str]:
    """By trainers: returns ids of founders by name. A job that follows another one takes those
    that are there; after a lease, it goes on when any generator is."""
    if not job.founded:
        keys = {job.key(f"there/{name}"): name for name in names}
        found = board.wait(keys, deadline, set_up.listen)
        board.put(FOUNDED, True)
        return {name: found[job.key(f"there/{name}")] for name in names}
    began = time.monotonic()
    while True:
        generators = {who: each for who, each in member.members().items()
                      if who.startswith("generator") and not each["joining"]}  # fmt: skip
        for who, each in generators.items():
            check_letter(name_of(who), each.get("letter"))
        there = {name_of(who): who for who in generators}
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
