"""A world of three members is joined by a fourth process, and one of these has a fault on the way.

One driver: a cell is data (`Case`), and what happens is the same in all. Members make steps, stage
the joiner, make steps beside that, commit, and make steps with whoever is there. What a lost one
leaves is mended by a spare process, which takes its seat. Each step is compared bit for bit with
the reference, without the seats that this rank has masked by then. Where a point could pass before
the fault, the others wait there for it.

    seats 0, 1, 2: members; 3: the joiner. The member that has a fault is 0 in one node, for which
    the others wait in meetings, and 1 where each rank is a node.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed import Store, TCPStore

from moe_p2p import AllToAll, AllToAllConfig, Engine, EngineConfig, MoeP2pError, library
from moe_p2p.fleet.bootstrap import Bootstrap
from moe_p2p.fleet.member import _Beat
from moe_p2p.fleet.world import YES, World
from moe_p2p.moe import communicator, epoch
from tests.faults import causes
from tests.faults.calls import LONG_S, SLACK_S, step
from tests.support.cases import SMALL
from tests.support.hosts import Hosts, Place
from tests.support.mask_cases import masks_of
from tests.support.ranks import DiedError, Rank
from tests.support.world_cases import SEATS

MEMBERS, JOINER, SPARE = (0, 1, 2), 3, 4  # numbers of processes; but for the spare's also of seats
CLAIMS, WAITS, MAKES, GIVES, MAPS, STAGED, DECIDES, ENTERS, FIRST, DRAINS = POINTS = (
    *("claims its seat", "waits for a call", "makes memory", "gives its address"),
    *("maps and connects", "is staged", "decides", "enters", "first step", "the old one drains"),
)
ON_THE_THREAD = POINTS[: POINTS.index(ENTERS)]  # of members, beside their steps
BEFORE, BESIDE, AFTER, LATER = 2, 1, 2, 3  # steps: before staging, beside, after the fault; later
SHORT_S, OF_GPUS_S = 8.0, 12.0  # timeout_s where it is what ends a wait; processes load kernels too
WRITES = 2  # of a step, to each partner: one a phase
ENDS = ("kill", "stop", "NIC error")  # a spare process comes
JOINS, MENDS = "joins", "mends"  # what it comes for: the epoch of the joiner, or a later one


class Case(NamedTuple):
    """ranks_per_node: 1, or SEATS. victim: joiner or member."""

    fault: str
    point: str
    over: str
    victim: str
    ranks_per_node: int = 1

    def __str__(self) -> str:
        nodes = f"{SEATS // self.ranks_per_node} nodes"
        return f"{self.fault}, {self.victim} {self.point}, {self.over}, {nodes}".replace(" ", "_")

    @property
    def seat(self) -> int:
        """Of the victim."""
        return JOINER if self.victim == "joiner" else int(self.ranks_per_node == 1)

    @property
    def timeout_s(self) -> float:
        if self.over == "gpu":
            return OF_GPUS_S
        return SHORT_S if self.waits else LONG_S

    @property
    def waits(self) -> bool:
        """As of calls.Case. Kernels know a rank that was killed by their deadline alone."""
        return self.fault in ("stop", "NIC error") or self.refused or self.over == "gpu"

    @property
    def needs_links(self) -> bool:
        return self.over == "tcp" and self.fault in causes.LINK

    @property
    def of_one_write(self) -> bool:
        """A NIC that fails once, and is well again."""
        its_first = self.victim == "joiner" and self.point == MAKES  # it has none
        return (self.fault, self.over) == ("NIC error", "loopback") and not its_first

    @property
    def refused(self) -> bool:
        """The joiner cannot be one: another version, no NIC."""
        return (
            self.over == "loopback"
            and self.fault in ("wrong handshake", "NIC error")
            and (not self.of_one_write)
        )

    @property
    def is_lost(self) -> bool:
        return (self.fault in ENDS and not self.of_one_write) or self.refused

    @property
    def spare_is_called_first(self) -> bool:
        """Nobody calls the joiner that is lost. One that is stopped may have a lease."""
        at = {"kill": (CLAIMS, WAITS), "stop": (CLAIMS,)}.get(self.fault, ())
        return self.victim == "joiner" and self.point in at

    @property
    def num_processes(self) -> int:
        return SEATS + self.is_lost

    def failing_write(self) -> int:
        """Which of the victim's NIC: the first one of the step that its point goes with."""
        of_j = (len(MEMBERS) - 1) * WRITES
        joins = self.victim == "joiner"
        before = 0 if joins else (BEFORE + BESIDE + AFTER) * of_j
        if self.point == FIRST:
            return before + 1
        if self.point == DRAINS:
            return before + (SEATS - 1) * WRITES + 1
        assert not joins, "its NIC writes nothing before its first step"
        return BEFORE * of_j + 1

    def config(self, engine: Engine | None) -> AllToAllConfig:
        fields: dict[str, Any] = {
            "num_experts": 3 * SEATS,
            "mask_lost_ranks": True,
            "lost": "drop",
            "ranks_per_node": self.ranks_per_node,
            "timeout_s": self.timeout_s,
        }
        if self.over == "gpu":
            fields["device"] = "cuda"
        elif engine is None:
            interface = "eth0" if self.needs_links else "lo"
            fields |= causes.settings_of(self.over, self.fault, interface) | {"nics_per_rank": 1}
        return AllToAllConfig(**SMALL | fields)


def engine_of(case: Case, *, of_victim: bool) -> Engine | None:
    """Where a NIC is the fault from the begin; settings must not differ, so all have one."""
    if not case.of_one_write and (case.fault, case.refused) != ("NIC error", True):
        return None
    settings: dict[str, Any] = dict(causes.settings_of(case.over, ""))
    if of_victim and case.of_one_write:
        settings["transport_settings"] = f"fail_nth={case.failing_write()}"
    engine = Engine(EngineConfig(**settings, nics_per_rank=1))
    if of_victim and case.refused:
        engine.close()
    return engine


class Fault:
    """Happens in one process, at one point; others wait for it where they would be through first.

    Points are functions of the package, which call `reach` in this process from `watch` on.
    """

    def __init__(self, rank: Rank, case: Case) -> None:
        self.store, self.case = rank.store, case
        self.is_mine = rank.rank == case.seat and case.fault not in causes.CONDITIONS
        self.joins = rank.rank >= JOINER
        self.has_happened = not self.is_mine
        self._armed, self._lock = rank.rank != SPARE, threading.Lock()
        self.raced, self.stepped = threading.Event(), threading.Event()
        rank.store.set(f"pid {rank.rank}", str(os.getpid()))

    def watch(self) -> None:
        """Of a member: once the first epoch is entered."""
        if self.joins:
            _before(_Beat, "claim", lambda *_: self.reach(CLAIMS))
            _before(World, "await_call", self._waits)
            _before(World, "enter", lambda *_: self.reach(ENTERS))
        else:
            _before(World, "call", lambda *_: self.reach(CLAIMS))
            _before(World, "_there", lambda *_: self.reach(WAITS))
            _before(epoch.Epoch, "close", lambda *_: self._drains())
        _before(epoch.Epoch, "connect", lambda *_: self.reach(GIVES))
        _before(World, "_decide", lambda _, __, word: self.reach(DECIDES) if word == YES else None)
        stage = World.stage

        def staged(world: World, called: Any) -> None:
            stage(world, called)
            self.reach(STAGED)

        World.stage = staged  # type: ignore[method-assign]
        ops = torch.ops.moe_p2p
        points = {
            ops.all_to_all_create.default: MAKES,
            ops.all_to_all_connect.default: MAPS,
            ops.all_to_all_enter.default: ENTERS,
        }

        def call(op: Any, *arguments: Any) -> Any:
            if op in points:
                self.reach(points[op])
            return library.call(op, *arguments)

        epoch.call = communicator.call = call  # type: ignore[attr-defined]

    def reach(self, point: str) -> None:
        if point != self.case.point or not self._armed:
            return
        if self.is_mine:
            with self._lock:
                if not self.has_happened:
                    self._happen()
        elif point == DECIDES or (point in (WAITS, DRAINS) and not self.joins):
            self.await_it()

    def _happen(self) -> None:
        if self.case.of_one_write:
            self._write_fails()
        elif not self.case.refused:
            causes.cause(self.case.fault, "eth0" if self.case.needs_links else "lo")
        self.happened()

    def happened(self) -> None:
        self.has_happened = True
        self.store.set("caused", "")

    def _write_fails(self) -> None:
        """It is one of a step; meanwhile this process stays where it is."""
        if self.case.point in ON_THE_THREAD:
            assert self.raced.wait(60)

    def _waits(self, world: World, *_: Any) -> None:
        """It waits for a call once it has claimed its seat and has a lease."""
        while self.case.point == WAITS and world.id not in world.member.members():
            time.sleep(0.005)
        self.reach(WAITS)

    def _drains(self) -> None:
        if threading.current_thread().name.startswith("drain"):
            if self.case.of_one_write and self.is_mine:  # its farewells come behind the first step
                assert self.stepped.wait(60)
            self.reach(DRAINS)

    def await_it(self) -> None:
        """Until the fault has happened."""
        if self.case.fault in causes.CONDITIONS:
            return
        until, pid = time.monotonic() + 90, f"pid {self.case.seat}"
        while not self.store.check(["caused"]):
            if self.store.check([pid]) and causes.is_over(int(self.store.get(pid))):
                return
            assert time.monotonic() < until, "the fault did not happen"
            time.sleep(0.005)


def _before(owner: Any, name: str, then: Callable[..., Any]) -> None:
    """In this process, from here on."""
    was = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        then(*arguments)
        return was(*arguments, **named)

    setattr(owner, name, call)


# --- one process ---------------------------------------------------------------------------------


class Process:
    """One of a case, and what it reports: steps that were right, why epochs were not made, seats
    that were masked by themselves, seconds of the longest call."""

    def __init__(self, rank: Rank, case: Case, store: Store) -> None:
        self.rank, self.case, self.words, self.store = rank, case, rank.store, store
        self.number = rank.rank
        self.seat = case.seat if self.number == SPARE else self.number
        self.is_victim = self.number == case.seat
        self.fault = Fault(rank, case)
        self.comm: AllToAll
        self.steps, self.longest, self.noes, self.masked = 0, 0.0, list[str](), set[int]()
        survivors = [p for p in MEMBERS if not (case.is_lost and p == case.seat)]
        self.members, self.leads = survivors, self.number == survivors[0]

    def begin(self, **how: Any) -> None:
        engine = engine_of(self.case, of_victim=self.is_victim)
        config = self.case.config(engine)
        seconds = self._timed(
            lambda: setattr(
                self,
                "comm",
                AllToAll(
                    self.store,
                    config,
                    rank=self.seat,
                    world_size=SEATS,
                    engine=engine,
                    **how,
                ),
            )
        )
        if self.number != JOINER:  # it waits for the others' steps, and for the fault
            self.longest = max(self.longest, seconds)
        self._count()

    def _count(self) -> None:
        changes = self.comm._communicator._changes
        assert changes is not None
        self.at, self.absent = 8 * changes.world.epoch, set(masks_of(self.comm))

    def make_steps(self, count: int, reach: Callable[[str], None] = lambda _: None) -> None:
        for _ in range(count):
            seconds = self._timed(lambda: step(self.comm, self.at, reach))
            self.longest = max(self.longest, seconds)
            self.at, self.steps = self.at + 1, self.steps + 1
            self.masked |= set(masks_of(self.comm)) - self.absent

    @staticmethod
    def _timed(run: Callable[[], object]) -> float:
        began = time.monotonic()
        run()
        return time.monotonic() - began

    def commit(self) -> bool:
        """Whether the epoch that was staged is."""
        try:
            self.longest = max(self.longest, self._timed(self.comm.commit_members))
        except MoeP2pError as error:
            if self.comm.closed or (self.is_victim and self.case.is_lost):
                raise
            self.noes.append(f"{type(error).__name__}: {error}")
            self.make_steps(1)
            return False
        self._count()
        return True

    def report(self, error: str = "") -> dict[str, Any]:
        return {
            "steps": self.steps,
            "noes": self.noes,
            "masked": sorted(self.masked),
            "seconds": self.longest,
            "happened": self.fault.has_happened,
            "left": [] if error else masks_of(self.comm),
            "error": error,
        }


def run_process(rank: Rank, case: Case, places: list[Place]) -> dict[str, Any]:
    if case.fault == "no locked memory":
        causes.forbid_locking()
    if case.over == "gpu":
        torch.cuda.set_device(rank.rank % torch.cuda.device_count())
    made = Process(rank, case, _store_of(rank, places))
    try:
        if rank.rank == JOINER:
            _join(made)
        elif rank.rank == SPARE:
            rank.store.wait(["spare"], timedelta(seconds=150))
            _before(_Beat, "renew", lambda *_: rank.store.set("spare claimed", ""))
            made.begin(join=True)
            if rank.store.get("spare") == JOINS.encode():
                rank.store.wait(["entered"], timedelta(seconds=120))
                made.make_steps(LATER)
        else:
            _members_road(made)
        _mend(made)
        _end(made)
    except MoeP2pError as error:
        if not made.is_victim:
            raise
        return _gone(made, error)
    report = made.report()
    made.comm.close()
    return report


def _gone(made: Process, error: MoeP2pError) -> dict[str, Any]:
    """Of a victim that goes on, and finds that the world does so without it."""
    made.fault.happened()
    made.words.set("woke", "")
    report = made.report(f"{type(error).__name__}: {error}")
    if hasattr(made, "comm"):
        made.comm.close()
    return report


def _store_of(rank: Rank, places: list[Place]) -> Store:
    """The store of the world: where links go down, over another one that stays."""
    if not places:
        return rank.store
    causes.enter(places[rank.rank])
    if rank.rank == 2:  # no victim
        server = TCPStore(Hosts.address(2, 1), 0, is_master=True, wait_for_workers=False)
        rank.store.set("port", str(server.port))
        return server
    rank.store.wait(["port"], timedelta(seconds=60))
    return TCPStore(Hosts.address(2, 1), int(rank.store.get("port")), is_master=False)


def _members_road(made: Process) -> None:
    case, fault = made.case, made.fault
    meet(made, "is there", len(MEMBERS))
    made.begin(members=MEMBERS)
    made.make_steps(BEFORE)
    fault.watch()
    meet(made, "begin", len(MEMBERS))
    made.words.set("joiner", "")
    made.comm.stage_members(add=[JOINER])
    made.make_steps(BESIDE)
    fault.raced.set()
    if case.point in ON_THE_THREAD:
        fault.await_it()
    if made.leads and case.spare_is_called_first:
        made.words.set("spare", JOINS)
    made.make_steps(AFTER)
    while not made.commit():
        assert len(made.noes) < 3, made.noes
        _call_spare(made)
        made.comm.stage_members(add=[JOINER])
    if made.leads:  # before that newcomers make no step: members may wait for a stopped one first
        made.words.set("entered", "")
    _first_steps(made)


def _call_spare(made: Process) -> None:
    """The joiner is lost: its seat has another process before it is called again."""
    if made.case.is_lost and made.case.victim == "joiner":
        if made.leads:
            made.words.set("spare", JOINS)
        made.words.wait(["spare claimed"], timedelta(seconds=60))


def _join(made: Process) -> None:
    made.fault.watch()
    if made.is_victim and made.case.refused and made.case.fault == "wrong handshake":
        of_another_version()
    made.words.wait(["joiner"], timedelta(seconds=90))
    if made.case.point == CLAIMS and not made.is_victim:
        made.fault.await_it()
    while not _begun(made):
        pass
    made.words.wait(["entered"], timedelta(seconds=120))
    _first_steps(made)


def _begun(made: Process) -> bool:
    """False: nobody called it again in time, as whoever calls waited for a stopped one first. It
    comes anew, as one that is started again."""
    try:
        made.begin(join=True)
    except MoeP2pError:
        if made.is_victim or not made.case.waits:
            raise
        return False
    return True


def of_another_version() -> None:
    begin = Bootstrap.__init__

    def init(self: Bootstrap, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        self._version = "moe_p2p 0.0.0, letter 0123456789abcdef"

    Bootstrap.__init__ = init  # type: ignore[method-assign]


def _first_steps(made: Process) -> None:
    """Of the epoch with the joiner; its victim is lost here at the latest."""
    fault, case = made.fault, made.case
    made.make_steps(1, lambda half: fault.reach(FIRST) if half == "dispatch_recv" else None)
    if case.of_one_write and case.point == FIRST:
        fault.happened()
    fault.stepped.set()
    if made.is_victim and case.point == DRAINS:
        if case.victim == "joiner":
            fault.reach(DRAINS)
        elif case.fault not in causes.CONDITIONS:  # its thread drains
            fault.await_it()
    made.make_steps(LATER - 1)


def _mend(made: Process) -> None:
    """Whoever was lost, or is masked, is in the next epoch: by a new process, or itself."""
    case = made.case
    if case.is_lost and made.number != SPARE and masks_of(made.comm):
        if made.leads:
            made.words.set("spare", MENDS)
        made.words.wait(["spare claimed"], timedelta(seconds=60))
        made.comm.update_members(add=[case.seat])
        made._count()
    elif case.of_one_write:
        meet(made, "mends", SEATS)  # whoever waited for one of the two is behind
        made.comm.update_members()
        made._count()


def _end(made: Process) -> None:
    """The whole world makes steps, also while a stopped victim goes on."""
    case = made.case
    made.make_steps(LATER)
    meet(made, "is whole", SEATS)
    if case.fault == "stop" and made.leads:
        # One that has not claimed its seat would claim it now, and have it: the last claim counts.
        never = case.victim == "joiner" and case.point == CLAIMS
        wake = signal.SIGKILL if never else signal.SIGCONT
        os.kill(int(made.words.get(f"pid {case.seat}")), wake)
        if never:
            made.words.set("woke", "")
    made.make_steps(LATER)
    if case.fault == "stop":
        made.words.wait(["woke"], timedelta(seconds=90))
        made.make_steps(1)
    meet(made, "ends", SEATS)


def meet(made: Process, what: str, count: int) -> None:
    """Driver's own; no rank closes while another makes a step."""
    if made.words.add(what, 1) == count:
        made.words.set(f"all: {what}", "")
    made.words.wait([f"all: {what}"], timedelta(seconds=120))


# --- what came out -------------------------------------------------------------------------------


def deadline_s(case: Case) -> float:
    """Of one call, commit_members included: a meeting's waits, the decision, or a step's."""
    return 3 * case.timeout_s if case.waits else 10.0


def wrong_in(case: Case, outcome: str, results: list[Any]) -> list[str]:
    """What is not as the outcome promises."""
    ends = [p for p in range(case.num_processes) if not (case.is_lost and p == case.seat)]
    reports = {p: results[p] for p in ends if isinstance(results[p], dict)}
    found = [f"process {p} did not report: {results[p]!r}" for p in ends if p not in reports]
    found += _wrong_victim(case, results[case.seat])
    if found:
        return found
    for process, each in reports.items():
        if not each["happened"]:
            found.append(f"nothing happened to process {process}: {each}")
        if each["seconds"] > deadline_s(case) + SLACK_S:
            found.append(f"process {process} took {each['seconds']:.1f} s")
        if each["error"] or each["left"]:
            found.append(f"process {process} is not whole at the end: {each}")
        if not case.of_one_write and set(each["masked"]) - {case.seat}:
            found.append(f"process {process} masked others: {each}")
    others = [reports[p] for p in MEMBERS if p in reports and p != case.seat]
    return found + _wrong_outcome(case, outcome, others)


def _wrong_outcome(case: Case, outcome: str, others: list[dict[str, Any]]) -> list[str]:
    """others: members that are not the victim."""
    noes, masked = [each["noes"] for each in others], [each["masked"] for each in others]
    named = re.compile(rf"(rank|seat)s? [\d, ]*\b{case.seat}\b")
    found = [f"nobody is named: {no}" for of in noes for no in of if not named.search(no)]
    if len({len(of) for of in noes}) > 1:
        found.append(f"members disagree: {noes}")
    # The end of a lease or of a link is seen a while later: by one attempt more, or less.
    fewest, more = int(outcome == "tried again"), case.fault in ("stop", "NIC error")
    if not fewest <= len(noes[0]) <= fewest + more:
        found.append(f"{len(noes[0])} attempts failed: {noes}")
    if outcome == "unharmed" and any(masked):
        found.append(f"masked: {masked}")
    if outcome == "masked" and not any(masked) and not noes[0]:
        found.append(f"nobody was masked: {others}")
    return found


def _wrong_victim(case: Case, result: Any) -> list[str]:
    never = case.fault == "stop" and case.victim == "joiner" and case.point == CLAIMS
    if case.fault == "kill" or never:
        return [] if isinstance(result, DiedError) else [f"it was not killed: {result}"]
    if not isinstance(result, dict):
        return [f"the victim did not report: {result!r}"]
    if case.is_lost and not result["error"]:
        return [f"the victim has no error: {result}"]
    return []
