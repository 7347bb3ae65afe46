"""Processes of a weight fleet restart, and are replaced, at each stage of an update.

Runs of weights_killed.py. Whatever happens, no version is clean with other bytes, and RECOVERED_S
after the last fault all members that live are at a newer version.

restart: the victim is killed, and begins anew under its name; with a trainer all trainers begin
    anew, as a new job.
stopped, alive: a second process takes the victim's name, or a second job of trainers theirs, while
    the first is stopped by SIGSTOP, or waits while its lease is renewed. Then the first goes on.
founders: two processes found the same rank. A trainer's end ends its job, and all begin anew.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from moe_p2p.errors import MoeP2pError
from moe_p2p.weights import WeightEngineRank, WeightTrainer
from tests.support.weights_fleet import (
    ENGINE_RANKS,
    MODELS,
    TRAINERS,
    Model,
    engine_of,
    tell_stages,
)

KINDS = ("restart", "stopped", "alive", "founders")
RECOVERED_S = 10.0
STAGE_S = 30.0  # until the victim is at its stage: set-up, and one update
LEASE_S, UPDATE_S, SET_UP_S = 2.0, 2.0, 6.0
OF_A_JOB = 1000  # versions: each is of one job, so that its number says which bytes it has
PROCESSES, STORED = 16, 64
UP, VERSION, AT_STAGE, OVER = range(4)  # of a row of `Watch`
OVERS = ("was replaced: another process", "another job of trainers has taken the name",
         "the job that runs has another process in this place")  # fmt: skip


class Watch:
    """What the processes of a run know of each other, in shared memory."""

    def __init__(self, folder: Path) -> None:
        self.rows = torch.zeros(PROCESSES, 4, dtype=torch.int64).share_memory_()
        self.goes_on = torch.zeros(1, dtype=torch.int64).share_memory_()
        self.folder = folder

    def store(self) -> Any:
        return FileStore(str(self.folder / "store"), STORED)

    def wrong(self, text: str) -> None:
        with (self.folder / "wrong").open("a") as file:
            file.write(f"{text}\n")

    def wrongs(self) -> list[str]:
        file = self.folder / "wrong"
        return sorted(set(file.read_text().splitlines())) if file.exists() else []


class Place(NamedTuple):
    """What a process is in its run. victim: it meets its stage in the second update."""

    watch: Watch
    row: Tensor
    mode: Any
    model: Model
    rank: int
    job: int
    kind: str
    stage: str


class Reaching:
    """Mixed into an end: something happens to it at a stage, once."""

    place: Place | None = None
    stage = ""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "stages":
            tell_stages(value, self.reach)
        super().__setattr__(name, value)

    def reach(self, stage: str) -> None:
        if stage != self.stage or self.place is None:
            return
        self.stage, place = "", self.place
        place.row[AT_STAGE] = 1
        if place.kind != "alive":
            os.kill(os.getpid(), signal.SIGSTOP if place.kind == "stopped" else signal.SIGKILL)
        until = time.monotonic() + STAGE_S
        while place.kind == "alive" and not place.watch.goes_on and time.monotonic() < until:
            time.sleep(0.002)


class Trainer(Reaching, WeightTrainer): ...


class EngineRank(Reaching, WeightEngineRank): ...


def _is_over(error: MoeP2pError) -> bool:
    return any(each in str(error) for each in OVERS)


def train(place: Place) -> None:
    model, rank = place.model, place.rank
    trainer = Trainer(engine_of(f"trainer {rank}", rank), place.watch.store(), model.layouts[0],
                      rank, model.trainer_tensors(rank, model.values(0)), timeout_s=SET_UP_S,
                      lease_s=LEASE_S)  # fmt: skip
    write = trainer._buffers.writer.write

    def writes(*args: Any) -> None:
        write(*args)
        trainer.reach("one write")

    trainer._buffers.writer.write = writes  # type: ignore[method-assign]
    trainer.place = place
    place.row[UP] = 1
    version = place.job * OF_A_JOB + 1
    while True:
        trainer.stage = place.stage if version == 2 and not place.row[AT_STAGE] else ""
        values = model.trainer_tensors(rank, model.values(version))
        try:
            trainer.update(version, values, timeout_s=UPDATE_S)
            place.row[VERSION] = version
            version += 1
            time.sleep(0.1)
        except MoeP2pError as error:
            if _is_over(error):
                raise
            time.sleep(0.01)


def generate(place: Place) -> None:
    live, model = place.model.empty(place.rank), place.model
    engine_rank = EngineRank(engine_of(f"generator {place.rank}", place.rank), place.watch.store(),
                             model.layouts[1], place.rank, live, mode=place.mode, poison=True,
                             timeout_s=SET_UP_S, lease_s=LEASE_S)  # fmt: skip
    engine_rank.place = place
    place.row[UP] = 1
    try:
        while True:
            reaches = engine_rank.version == 1 and not place.row[AT_STAGE]
            engine_rank.stage = place.stage if reaches else ""
            _go_on(engine_rank)
            _is_true(place, engine_rank, live)
            time.sleep(0.004)
    except MoeP2pError as error:
        if not _is_over(error):
            raise
        _is_true(place, engine_rank, live)
        place.row[OVER] = 1
        while True:  # what others wrote late would land in it
            time.sleep(0.02)
            _is_true(place, engine_rank, live)


def _go_on(engine_rank: WeightEngineRank) -> None:
    try:
        if engine_rank.mode == "in_place":
            engine_rank.begin()
            engine_rank.wait(UPDATE_S)
        else:
            engine_rank.step()
    except MoeP2pError as error:
        if _is_over(error):
            raise


def _is_true(place: Place, engine_rank: WeightEngineRank, live: dict[str, Tensor]) -> None:
    version = engine_rank.version
    if engine_rank.dirty or version is None:
        place.row[VERSION] = 0
    elif place.model.holds(place.rank, live, version):
        place.row[VERSION] = version
    else:
        place.watch.wrong(f"generator {place.rank}: version {version} is clean with other bytes")


class Process(NamedTuple):
    name: str
    pid: int
    row: Tensor


class Supervisor:
    """Begins processes of a run, does to them what the run is about, and looks at what comes."""

    def __init__(self, run: Any, folder: Path) -> None:
        self.run, self.watch = run, Watch(folder)
        self.all: list[Process] = []
        self.ended: dict[int, int] = {}  # status by pid

    def begin(self, side: str, rank: int, job: int = 0, stage: str = "") -> Process:
        run, row = self.run, self.watch.rows[len(self.all)]
        model = MODELS["replicas" if run.kind in ("stopped", "alive") else "fp8"]
        place = Place(self.watch, row, run.mode, model, rank, job, run.kind, stage)
        name = f"{side} {rank}"
        child = os.fork()
        if child == 0:
            try:
                (train if side == "trainer" else generate)(place)
            except MoeP2pError as error:
                row[OVER] = 1
                if not _is_over(error):
                    self.watch.wrong(f"{name} of job {job}: {error}")
            except BaseException as error:
                self.watch.wrong(f"{name} of job {job}: {error!r}")
            finally:
                os._exit(0)
        found = Process(name, child, row)
        self.all.append(found)
        return found

    def look(self) -> None:
        """Children that ended, or were stopped."""
        for each in self.all:
            if each.pid not in self.ended:
                pid, status = os.waitpid(each.pid, os.WNOHANG | os.WUNTRACED)
                if pid and not os.WIFSTOPPED(status):
                    self.ended[pid] = status

    def wait(self, what: str, is_so: Callable[[], bool], limit_s: float) -> None:
        until = time.monotonic() + limit_s
        while not is_so():
            self.look()
            if time.monotonic() > until or self.watch.wrongs():
                rows = {f"{each.name} [{i}]": each.row.tolist() for i, each in enumerate(self.all)}
                raise AssertionError(f"{what}: {rows}")
            time.sleep(0.005)

    def newest(self) -> int:
        return int(self.watch.rows[:, VERSION].max())

    def recover(self, live: list[Process], gone: list[Process]) -> None:
        """live: are to be clean at a newer version. gone: are to find that they were replaced."""
        since, until = self.newest(), time.monotonic() + RECOVERED_S
        self.wait(f"not all at a version after {since}",
                  lambda: all(int(each.row[VERSION]) > since for each in live),
                  RECOVERED_S)  # fmt: skip
        self.wait("not all that were replaced know it", lambda: all(int(each.row[OVER])
                  for each in gone), until - time.monotonic())  # fmt: skip

    def supervise(self) -> list[str]:
        try:
            self._founders() if self.run.kind == "founders" else self._faults()
            time.sleep(0.05)  # what is wrong after that is seen, too
        except AssertionError as error:
            self.watch.wrong(str(error))
        finally:
            self.kill(self.all)
            while len(self.ended) < len(self.all):
                self.look()
                time.sleep(0.002)
        return self.watch.wrongs()

    def _fleet(self) -> list[Process]:
        run = self.run
        places = [("trainer", i) for i in range(TRAINERS)]
        places += [("generator", i) for i in range(ENGINE_RANKS)]
        victim = (run.side, run.rank)
        return [self.begin(*each, stage=run.stage if each == victim else "") for each in places]

    def _founders(self) -> None:
        run, first = self.run, self._fleet()
        twins = [each for each in first if each.name == run.victim]
        twins.append(self.begin(run.side, run.rank))
        trainers = [each for each in first[:TRAINERS] if each not in twins]
        engine_ranks = [each for each in first[TRAINERS:] if each not in twins]

        self.wait("neither was replaced",
                  lambda: any(int(each.row[OVER]) for each in [*twins, *trainers]),
                  RECOVERED_S)  # fmt: skip
        if run.side == "trainer":
            self.kill([*twins, *trainers])
            twins, trainers = [], [self.begin("trainer", i, job=1) for i in range(TRAINERS)]
        twins = [each for each in twins if not each.row[OVER]]
        self.recover([*trainers, *engine_ranks, *twins], [])

    def kill(self, among: list[Process]) -> None:
        self.look()
        for each in among:
            if each.pid not in self.ended:
                os.kill(each.pid, signal.SIGKILL)

    def _faults(self) -> None:
        run = self.run
        fleet = self._fleet()
        victim = next(each for each in fleet if each.name == run.victim)
        trainers, engine_ranks = fleet[:TRAINERS], fleet[TRAINERS:]
        self.wait("the victim did not come to its stage", lambda: bool(victim.row[AT_STAGE]),
                  STAGE_S)  # fmt: skip
        if run.kind == "restart":
            self.kill(trainers if run.side == "trainer" else [])
        if run.side == "trainer":
            gone, trainers = trainers, [self.begin("trainer", i, job=1) for i in range(TRAINERS)]
            new = trainers
        else:
            new = [self.begin("generator", run.rank)]
            gone = [victim]
            engine_ranks = [each for each in engine_ranks if each is not victim] + new
        if run.kind == "restart":
            gone = []
        elif run.kind == "stopped":
            self.recover([*trainers, *engine_ranks], [])
            os.kill(victim.pid, signal.SIGCONT)
        else:
            self.wait("the second did not begin", lambda: all(int(each.row[UP]) for each in new),
                      RECOVERED_S)  # fmt: skip
        self.watch.goes_on.fill_(1)
        self.recover([*trainers, *engine_ranks], gone)
