"""Dispatch and combine by halves while one of three ranks has a fault, on CPUs and GPUs.

Each step is compared bit for bit with the reference, without the ranks that this rank has masked
by then. At a point that receives, rank 0 holds back its own part until the fault has happened, so
the victim cannot be through with it.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from moe_p2p import AllToAll, Engine, EngineConfig, MoeP2pError, library
from moe_p2p.moe import epoch
from tests.faults import causes
from tests.support import cases
from tests.support.hosts import Place
from tests.support.mask_cases import HOLDING, expect_without, given_by, masks_of
from tests.support.ranks import DiedError, Rank

WORLD, VICTIM, AT, AWAKE, STEPS = 3, 1, 3, 7, 12  # steps: of the fault, of SIGCONT with masks, all
HALVES = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")
HELD = {"dispatch_send": "dispatch_recv", "combine_send": "combine_recv"}
LONG_S, SHORT_S = 60.0, 12.0  # timeout_s: nobody waits for it; or it is what ends a wait
SLACK_S = 30.0  # for busy machines
PARTNERS = WORLD - 1


class Case(NamedTuple):
    fault: str
    point: str
    over: str
    masks: bool = False
    ranks_per_node: int = 1

    def __str__(self) -> str:
        mode = "masks" if self.masks else "raises"
        nodes = f"{WORLD // self.ranks_per_node} nodes"
        return f"{self.fault}, {self.point}, {self.over}, {mode}, {nodes}".replace(" ", "_")

    @property
    def timeout_s(self) -> float:
        # Over tcp writes to a link that is down wait in the kernel, so the deadline ends them.
        of_nic = self.fault == "NIC error" and (self.masks or self.over == "tcp")
        waits = self.fault == "stop" or of_nic
        waits |= self.masks and (self.fault, self.point) == ("kill", "set-up")  # the roll call
        return SHORT_S if waits or self.over == "gpu" else LONG_S

    @property
    def waits(self) -> bool:
        """Nearly all of its time is a wait for a deadline."""
        return self.timeout_s == SHORT_S

    @property
    def needs_links(self) -> bool:
        return self.over == "tcp" and self.fault in causes.LINK

    @property
    def survivors(self) -> list[int]:
        gone = self.fault in ("kill", "stop")
        return [rank for rank in range(WORLD) if not (gone and rank == VICTIM)]

    def settings(self, rank: int) -> dict[str, Any]:
        """Arguments of cases.make."""
        if self.over == "gpu":
            return {}
        interface = "eth0" if self.needs_links else "lo"
        found: dict[str, Any] = dict(causes.settings_of(self.over, self.fault, interface))
        if (self.over, self.fault) != ("loopback", "NIC error"):
            return {**found, "nics_per_rank": 1}
        if rank == VICTIM:  # one write for each partner and phase: the first of this one
            writes = PARTNERS * (2 * AT + (self.point == "combine_send"))
            found["transport_settings"] = f"fail_nth={writes + 1}"
        return {"engine": Engine(EngineConfig(**found, nics_per_rank=1))}


class Fault:
    """Happens in one rank, at one point."""

    def __init__(self, rank: Rank, case: Case) -> None:
        self.rank, self.case, self.thread = rank, case, threading.Thread(target=self._happen)
        self.is_mine = rank.rank == VICTIM and case.fault not in causes.CONDITIONS
        self.is_mine &= (case.over, case.fault) != ("loopback", "NIC error")
        self.has_happened = not self.is_mine
        rank.store.set(f"pid {rank.rank}", str(os.getpid()))

    def reach(self, point: str) -> None:
        if self.is_mine and point == self.case.point:
            within = point.endswith("recv") and self.case.fault != "slow"
            self.thread.start() if within else self._happen()
        elif self.rank.rank == 0 and HELD.get(point) == self.case.point:
            self._hold()

    def _happen(self) -> None:
        causes.cause(self.case.fault, "eth0" if self.case.needs_links else "lo")
        self.has_happened = True
        self.rank.store.set("caused", "")

    def _hold(self) -> None:
        if self.case.fault in causes.CONDITIONS or self.case.fault in ("slow",):
            return
        victim, until = int(self.rank.store.get(f"pid {VICTIM}")), time.monotonic() + 60
        while not self.rank.store.check(["caused"]) and not causes.is_over(victim):
            assert time.monotonic() < until, "the fault did not happen"
            time.sleep(0.01)

    def wake(self) -> None:
        """Rank 0 lets a stopped victim go on."""
        if self.case.fault == "stop" and self.rank.rank == 0:
            os.kill(int(self.rank.store.get(f"pid {VICTIM}")), signal.SIGCONT)


def right(comm: AllToAll, before: set[int], check: Callable[[tuple[int, ...]], None]) -> Any:
    """Returns the ranks without which a result is right: masked before the call, or within it."""
    after = set(masks_of(comm)) if comm.config.mask_lost_ranks else set()
    new, errors = sorted(after - before), []
    for count in range(len(new) + 1):
        for more in itertools.combinations(new, count):
            gone = tuple(sorted({*before, *more}))
            try:
                check(gone)
            except AssertionError as error:
                errors.append(f"{gone}: {error}")
            else:
                return gone
    raise AssertionError(f"right for no masks of {before} to {after}: {errors}")


def step(comm: AllToAll, seed: int, reach: Callable[[str], None]) -> None:
    before = set(masks_of(comm)) if comm.config.mask_lost_ranks else set()
    options: Any = HOLDING[seed % 3]
    me = comm.rank

    def wanted(gone: tuple[int, ...]) -> cases.Wanted:
        return expect_without(comm, seed, gone, **options)

    reach("dispatch_send")
    sent = comm.dispatch_send(**given_by(comm, seed, **options))
    reach("dispatch_recv")
    live = comm.dispatch_recv(sent)
    cases.finish(comm)
    got = cases.on_cpu(live)
    gone = right(comm, before, lambda gone: cases.assert_received(got, wanted(gone).received[me]))
    reach("combine_send")
    summed = comm.combine_send(dispatched=live, **cases.combine_arguments(comm, wanted(gone)))
    reach("combine_recv")
    out = comm.combine_recv(summed)
    cases.finish(comm)
    out = out.cpu()
    right(comm, before, lambda gone: cases.assert_combined(out, wanted(gone).out[me]))


@contextmanager
def before_connecting(reach: Callable[[], None]) -> Iterator[None]:
    """All ranks have exchanged addresses then. In this process only."""
    connect = torch.ops.moe_p2p.all_to_all_connect.default

    def call(op: Any, *arguments: Any) -> Any:
        if op is connect:
            reach()
        return library.call(op, *arguments)

    epoch.call = call  # type: ignore[attr-defined]
    try:
        yield
    finally:
        epoch.call = library.call  # type: ignore[attr-defined]


def open_rank(rank: Rank, case: Case, fault: Fault) -> AllToAll:
    fields: dict[str, Any] = {"num_experts": 3 * WORLD, "ranks_per_node": case.ranks_per_node}
    fields |= {"mask_lost_ranks": case.masks, "timeout_s": case.timeout_s}
    if case.over == "gpu":
        fields["device"] = "cuda"
    if case.masks and case.point == "set-up":  # it does not come to the roll call, or late
        fault.reach("set-up")
        return cases.make(rank, **fields | case.settings(rank.rank))
    with before_connecting(lambda: fault.reach("set-up")):
        return cases.make(rank, **fields | case.settings(rank.rank))


def run_rank(rank: Rank, case: Case, places: list[Place]) -> dict[str, Any]:
    """Returns: steps that were right, seconds of the longest, masks, what was raised, and whether
    the fault of this rank has happened."""
    if places:
        causes.enter(places[rank.rank])
    if case.fault == "no locked memory":
        causes.forbid_locking()
    if case.over == "gpu":
        torch.cuda.set_device(rank.rank % torch.cuda.device_count())
    fault, seconds, num_steps, masks, text = Fault(rank, case), [], 0, list[int](), ""
    _meet(rank, "have begun", WORLD)  # of set-up with masks, who is late is left out
    began = time.monotonic()
    try:
        comm = open_rank(rank, case, fault)
    except MoeP2pError as error:
        fault.wake()
        return _report(fault, 0, time.monotonic() - began, [], _text(error))
    if case.point == "set-up":
        seconds.append(time.monotonic() - began)
    try:
        for seed in range(STEPS):
            if seed == AWAKE:
                fault.wake()
            seconds.append(time.monotonic())
            step(comm, seed, fault.reach if seed == AT else lambda point: None)
            seconds[-1] = time.monotonic() - seconds[-1]
            num_steps += 1
        masks = masks_of(comm) if case.masks else []
        if rank.rank in case.survivors:
            _meet(rank, "have ended", len(case.survivors))
    except MoeP2pError as error:
        text, seconds[-1] = _text(error), time.monotonic() - seconds[-1]
        fault.wake()
    if fault.thread.ident is not None:
        fault.thread.join()
    comm.close()
    return _report(fault, num_steps, max(seconds), masks, text)


def _report(
    fault: Fault, steps: int, seconds: float, masks: list[int], error: str
) -> dict[str, Any]:
    report = {"steps": steps, "seconds": seconds, "masks": masks, "error": error}
    return report | {"happened": fault.has_happened}


def _text(error: MoeP2pError) -> str:
    return f"{type(error).__name__}: {error}"


def _meet(rank: Rank, what: str, count: int) -> None:
    if rank.store.add(what, 1) == count:
        rank.store.set(f"all {what}", "")
    rank.store.wait([f"all {what}"], timedelta(seconds=90))


def deadline_s(case: Case) -> float:
    """What docs/failure.md promises for a step, or for set-up."""
    if case.point == "set-up":
        return 4 * (case.timeout_s + 10)
    if case.masks and case.fault == "NIC error":  # both sides of the pair, and who waits for them
        return 3 * case.timeout_s
    if case.waits:
        return case.timeout_s * (5 / 3 if case.masks else 1)
    return 10.0  # probes; writes that fail


def wrong_in(case: Case, outcome: str, results: list[Any]) -> list[str]:
    """What is not as the outcome promises."""
    found = []
    if case.fault == "kill" and not isinstance(results[VICTIM], DiedError):
        found.append(f"the victim was not killed: {results[VICTIM]}")
    reports = {r: each for r, each in enumerate(results) if isinstance(each, dict)}
    found += [
        f"rank {r} did not report: {results[r]!r}" for r in case.survivors if r not in reports
    ]
    if found:
        return found
    gone = [VICTIM] if outcome == "masked" else []
    for rank in case.survivors:
        each = reports[rank]
        if not each["happened"]:
            found.append(f"nothing happened to rank {rank}: {each}")
        if each["seconds"] > deadline_s(case) + SLACK_S:
            found.append(f"rank {rank} took {each['seconds']:.1f} s")
        if outcome == "named":
            named = f"rank {VICTIM}" in each["error"] or "gave up" in each["error"]
            found += [] if named or rank == VICTIM else [f"rank {rank} names nobody: {each}"]
            found += [] if each["error"] else [f"rank {rank} has no error: {each}"]
            # One step earlier: sums may die with the victim. Later: it had sent all of this one.
            of_step = case.point == "set-up" or AT - 1 <= each["steps"] <= AT + 1
            found += [] if of_step else [f"rank {rank}, of another step: {each}"]
        elif each["error"] or each["steps"] != STEPS:
            found.append(f"rank {rank} did not go on: {each}")
        elif case.fault != "NIC error" and each["masks"] != gone:
            found.append(f"rank {rank} has masked {each['masks']}")
    others = [reports[r] for r in case.survivors if r != VICTIM]
    if outcome == "named" and not any(f"rank {VICTIM}" in each["error"] for each in others):
        found.append(f"nobody names rank {VICTIM}: {others}")
    if outcome == "masked" and not any(each["masks"] for each in reports.values()):
        found.append(f"nobody was masked: {reports}")
    if case.fault == "stop" and not case.masks and not reports[VICTIM]["error"]:
        found.append(f"the stopped rank has no error: {reports[VICTIM]}")
    return found
