"""A rank of a weight update is killed at each stage, in both modes; what is left tells the truth.
It begins anew, and is replaced (weights_replaced.py).

    python -m tests.support.weights_killed                           a fifth of the runs
    MOE_P2P_WEIGHTS_KILLS=all python -m tests.support.weights_killed

`few` of that fifth have every stage, kind, mode and side: make test; `rest` are its others.

Each run forks its ranks from this one process, which has imported everything and makes no engine.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from moe_p2p.errors import MoeP2pError
from moe_p2p.weights import WeightEngineRank, WeightTrainer
from moe_p2p.weights.joining import PeerReader
from tests.support.weights_fleet import (
    ENGINE_RANKS,
    MODELS,
    TRAINERS,
    Model,
    engine_of,
    tell_stages,
)
from tests.support.weights_replaced import KINDS, Supervisor

TRAINER_STAGES = ("begin", "maxima", "ready", "one write", "converted", "submitted", "written",
                  "sent", "decided")  # fmt: skip
ENGINE_RANK_STAGES = ("begin", "arrived", "decided", "copied")
JOINING_STAGES = ("lent", "one read", "joined")
LONG_S, SHORT_S = 60.0, 1.5  # leases: nobody is lost within an update; or before it ends
TOGETHER = 3  # runs at a time: they wait most of the time
UPDATE_S = 3.0  # of the update in which a rank is killed. Too short: it is over before its stage
SLACK_S = 6.0  # for busy machines; who waits for MOST_S or a lease takes longer
MOST_S = 30.0


class Run(NamedTuple):
    """kind: "alone": nobody else holds what a trainer has, and leases outlast the update.
    "replicas": others have it, and leases are short: the update goes on without the victim.
    "joining": a third engine rank joins before the update, and is killed. Others: of
    weights_replaced.py."""

    mode: Any
    side: str
    rank: int
    stage: str
    kind: str = "alone"

    @property
    def model(self) -> Model:
        return MODELS["replicas" if self.kind == "replicas" else "fp8"]

    @property
    def lease_s(self) -> float:
        return LONG_S if self.kind == "alone" else SHORT_S

    @property
    def victim(self) -> str:
        return f"{self.side} {self.rank}"

    @property
    def committed(self) -> bool | None:
        """Whether survivors go to version 2. None: its bytes are all there, so either is true."""
        if self.kind != "alone":
            return True
        if self.stage in ("decided", "copied"):
            return True
        if self.stage == "arrived" or (self.stage == "sent" and self.rank > 0):
            return None
        return False


def runs() -> list[Run]:
    sides = (("trainer", TRAINERS, TRAINER_STAGES), ("generator", ENGINE_RANKS, ENGINE_RANK_STAGES))
    found = [
        Run(mode, side, rank, stage, kind)
        for kind in ("alone", "replicas")
        for mode in ("shadow", "in_place")
        for side, count, stages in sides
        for rank in range(count)
        for stage in stages
    ]
    joining = [Run(mode, "generator", ENGINE_RANKS, stage, "joining")
               for mode in ("shadow", "in_place") for stage in JOINING_STAGES]  # fmt: skip
    replaced = [run._replace(kind=kind) for kind in ("restart", "stopped", "alive")
                for run in found if run.kind == "alone"]  # fmt: skip
    replaced += [Run(mode, side, rank, "", "founders") for mode in ("shadow", "in_place")
                 for side, count, _ in sides for rank in range(count)]  # fmt: skip
    return found + joining + replaced


def chosen(kills: str) -> list[Run]:
    """Returns the runs of a value of MOE_P2P_WEIGHTS_KILLS."""
    everything = runs()
    fifth = everything[2::5]  # with every stage
    few, seen = [], set[tuple[str, ...]]()
    for run in fifth:
        has = {(run.side, run.stage), (run.kind, run.mode, run.side)}
        if run.kind in KINDS:
            has = {(run.kind, run.side), (run.mode, run.side)}
        few += [run] if has - seen else []
        seen |= has
    rest = [run for run in fifth if run not in few]
    return {"all": everything, "few": few, "rest": rest}.get(kills, fifth)


class Killing:
    """Mixed into an end: ends the process at a stage, from the second update on."""

    stage = ""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "stages":
            tell_stages(value, self.reach)
        super().__setattr__(name, value)

    def reach(self, stage: str) -> None:
        if stage == self.stage:
            os.kill(os.getpid(), signal.SIGKILL)


class Trainer(Killing, WeightTrainer): ...


class EngineRank(Killing, WeightEngineRank):
    def _join(self, deadline: Any) -> None:
        self.reach("lent")
        super()._join(deadline)
        self.reach("joined")


class LateEngineRank(EngineRank):
    """Joins, and is killed."""


def train(run: Run, rank: int, store: Any) -> dict[str, Any]:
    engine, model = engine_of(f"trainer {rank}", rank), run.model
    tensors = model.trainer_tensors(rank, model.values(0))
    trainer = Trainer(engine, store, model.layouts[0], rank, tensors, timeout_s=MOST_S,
                      lease_s=run.lease_s)  # fmt: skip
    trainer.update(1, model.trainer_tensors(rank, model.values(1)))
    if run.kind == "joining":
        store.wait(["it is dead"])
    trainer.stage = run.stage if run.victim == f"trainer {rank}" else ""
    write = trainer._buffers.writer.write

    def killing(*args: Any) -> None:
        write(*args)
        trainer.reach("one write")

    trainer._buffers.writer.write = killing  # type: ignore[method-assign]
    began, error = time.monotonic(), ""
    try:
        limit = MOST_S if run.committed else UPDATE_S
        trainer.update(2, model.trainer_tensors(rank, model.values(2)), timeout_s=limit)
    except MoeP2pError as failed:
        error = str(failed)
    return {"error": error, "seconds": time.monotonic() - began}


def generate(run: Run, rank: int, store: Any) -> dict[str, Any]:
    if rank >= ENGINE_RANKS:
        return join(run, store)
    engine, live = engine_of(f"generator {rank}", rank), run.model.empty(rank)
    engine_rank = EngineRank(engine, store, run.model.layouts[1], rank, live, mode=run.mode,
                          poison=True, timeout_s=MOST_S, lease_s=run.lease_s)  # fmt: skip
    _update(engine_rank)
    if run.kind == "joining":
        store.add("updated", 1)
        store.wait(["it is dead"])
    engine_rank.stage = run.stage if run.victim == f"generator {rank}" else ""
    engine_rank.timeout_s = MOST_S if run.committed else UPDATE_S
    began, error = time.monotonic(), ""
    try:
        _update(engine_rank)
    except MoeP2pError as failed:
        error = str(failed)
    seconds, refused = time.monotonic() - began, False
    try:
        engine_rank.step()
    except MoeP2pError:
        refused = True
    holds = [version for version in (1, 2) if run.model.holds(rank, live, version)]
    return {"error": error, "seconds": seconds, "version": engine_rank.version, "holds": holds,
            "dirty": engine_rank.dirty, "refused": refused}  # fmt: skip


def join(run: Run, store: Any) -> dict[str, Any]:
    """Another process writes what is killed: this one, which is the victim, forks and waits."""
    while store.add("updated", 0) < ENGINE_RANKS:
        time.sleep(0.005)
    child = os.fork()
    if child == 0:
        read = PeerReader._word

        def killing(self: PeerReader, *args: Any) -> list[int]:
            found = read(self, *args)
            if run.stage == "one read":
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        PeerReader._word = killing  # type: ignore[method-assign]
        LateEngineRank.stage = run.stage
        engine = engine_of("late", 7)
        LateEngineRank(engine, store, run.model.layouts[1], 0, run.model.empty(0), mode=run.mode,
                      replica="late", timeout_s=MOST_S, lease_s=run.lease_s)  # fmt: skip
        os._exit(1)
    _, status = os.waitpid(child, 0)
    store.set("it is dead", "1")
    return {"killed": os.WIFSIGNALED(status)}


def _update(engine_rank: WeightEngineRank) -> None:
    if engine_rank.mode == "in_place":
        engine_rank.begin()
    engine_rank.wait(MOST_S)


def _fork(work: Callable[[], Any], into: Path) -> int:
    child = os.fork()
    if child:
        return child
    try:
        into.write_bytes(pickle.dumps(work()))
    except BaseException as error:
        into.write_bytes(pickle.dumps({"broken": repr(error)}))
    finally:
        os._exit(0)  # engines of ranks that are left alone are not closed in order


class Started:
    """A run that goes on in children."""

    def __init__(self, run: Run) -> None:
        self.run, self._folder = run, tempfile.TemporaryDirectory()
        at, late = Path(self._folder.name), run.kind == "joining"
        size = TRAINERS + ENGINE_RANKS + late
        self._children = {}
        for side, count, work in (
            ("trainer", TRAINERS, train),
            ("generator", ENGINE_RANKS + late, generate),
        ):
            for rank in range(count):

                def begin(work: Any = work, rank: int = rank) -> dict[str, Any]:
                    return dict(work(run, rank, FileStore(str(at / "store"), size)))

                name = f"{side} {rank}"
                self._children[name] = _fork(begin, at / name)

    def faults(self) -> list[str]:
        return faults(self.run, self._reports())

    def _reports(self) -> dict[str, dict[str, Any]]:
        """Of each rank that is left, once all have ended."""
        _join(self._children)
        files = {name: Path(self._folder.name) / name for name in self._children}
        found = {name: pickle.loads(file.read_bytes())
                 for name, file in files.items() if file.exists()}  # fmt: skip
        self._folder.cleanup()
        return found


class Supervised:
    """A run of weights_replaced.py, whose supervisor is a child."""

    def __init__(self, run: Run) -> None:
        self.run, self._folder = run, tempfile.TemporaryDirectory()
        at = Path(self._folder.name)
        self._child = _fork(lambda: Supervisor(run, at).supervise(), at / "found")

    def faults(self) -> list[str]:
        os.waitpid(self._child, 0)
        found = pickle.loads((Path(self._folder.name) / "found").read_bytes())
        self._folder.cleanup()
        return [str(found)] if isinstance(found, dict) else list(found)


def begin(run: Run) -> Started | Supervised:
    return Supervised(run) if run.kind in KINDS else Started(run)


def _join(children: dict[str, int]) -> None:
    """A rank that hangs is killed, and leaves no report."""
    limit, left = time.monotonic() + 2 * MOST_S, dict(children)
    while left:
        for name, child in list(left.items()):
            if os.waitpid(child, os.WNOHANG)[0]:
                del left[name]
            elif time.monotonic() > limit:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.005)


def faults(run: Run, reports: dict[str, dict[str, Any]]) -> list[str]:
    """What is not as promised."""
    everybody = {f"trainer {i}" for i in range(TRAINERS)}
    everybody |= {f"generator {i}" for i in range(ENGINE_RANKS)}
    reports = dict(reports)
    found = [f"{name} did not report" for name in everybody - {run.victim} - reports.keys()]
    found += [f"{name}: {each['broken']}" for name, each in reports.items() if "broken" in each]
    if run.kind == "joining":
        victim = reports.pop(run.victim, {"killed": False})
        found += [] if victim.get("killed") else [f"the victim was not killed: {victim}"]
    if run.victim in reports:
        found.append("the victim was not killed")
    if found:
        return found
    committed = [not each["error"] for each in reports.values()]
    if len(set(committed)) != 1 or run.committed not in (None, committed[0]):
        found.append(f"committed: {committed}, expected {run.committed}")
    for name, each in reports.items():
        found += [f"{name}: {fault}" for fault in _faults_of(run, name, each, committed[0])]
    return found


def _faults_of(run: Run, name: str, each: dict[str, Any], committed: bool) -> list[str]:
    found = []
    if not committed and run.victim not in each["error"]:
        found.append(f"the error names no {run.victim}: {each['error']}")
    if not committed and each["seconds"] > UPDATE_S + SLACK_S:
        found.append(f"it took {each['seconds']:.1f} s")
    if name.startswith("generator"):
        state = (each["version"], each["holds"], each["dirty"], each["refused"])
        # In place and failed, all bytes of version 2 may be there: it is dirty all the same.
        in_place = (1, each["holds"] if each["holds"] != [1] else None, True, True)
        old = in_place if run.mode == "in_place" else (1, [1], False, False)
        wanted = (2, [2], False, False) if committed else old
        if state != wanted:
            found.append(f"version, bytes, dirty, refused are {state}, not {wanted}")
    return found


def main() -> int:
    wanted = chosen(os.environ.get("MOE_P2P_WEIGHTS_KILLS", ""))
    torch.set_num_threads(1)
    wrong, began = 0, time.monotonic()
    for at in range(0, len(wanted), TOGETHER):
        for started in [begin(run) for run in wanted[at : at + TOGETHER]]:
            found, run = started.faults(), started.run
            wrong += bool(found)
            print(f"{run.kind}, {run.mode}, {run.victim} at {run.stage}:", *found or ["ok"],
                  sep="\n  ", flush=True)  # fmt: skip
    seconds = time.monotonic() - began
    print(f"{len(wanted)} of {len(runs())} runs, {wrong} wrong, {seconds:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
