"""Faults of `bench --check`: each is provoked on purpose, and every rank must report it in time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from moe_p2p import AllToAll, env, errors
from moe_p2p.bench.conformance_ranks import LAYOUTS, SOON_S, Ranks, Wrong
from moe_p2p.bench.harness import finish, use_device
from moe_p2p.bench.options import Options
from moe_p2p.tools.gather import everyones

CALLS = 8  # calls until a fault must show
IN_TIME_S = 30.0  # latest error of any rank; well above SOON_S, for busy machines
STARTED_S = 150.0  # until processes have imported torch, loaded kernels, and reported


class Spare:
    """A process beside this rank that becomes a rank of another group, in which one is killed.

    Forked before the rank has a group, an engine or a GPU, or else, as where torchrun has started
    it, spawned: that imports torch anew. Ends with its rank.
    """

    def __init__(self, options: Options) -> None:
        late = dist.is_initialized() or torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        context: Any = multiprocessing.get_context("spawn" if late else "fork")
        self._pipe, there = context.Pipe()
        inherited = None if late else self._pipe
        self._process = context.Process(
            target=_until_killed, args=(options, there, inherited), daemon=True
        )
        self._process.start()
        there.close()

    def report(self, rank: int) -> tuple[str, float]:
        """Makes it that rank; returns its error, and how long that took. Empty: it was killed."""
        with contextlib.suppress(EOFError, ConnectionError):  # it ended without a report
            self._pipe.send(rank)
            if self._pipe.poll(STARTED_S):
                error, took_s = self._pipe.recv()
                return error, took_s
        return "", 0.0

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def __enter__(self) -> Spare:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def faults(ranks: Ranks, spare: Spare) -> None:
    if ranks.size == 1:
        ranks.skip("faults", "there is one rank")
        return
    ranks.line("configurations that differ are refused", _differing, ranks)
    with ranks.make() as comm:
        ranks.line("a wrong argument is refused", _refused, ranks, comm)
        ranks.line("calls after a refused one", ranks.steps, comm)
    last = f"rank {ranks.last}"
    for name, fault in {
        "a rank that stays away from dispatch is named": Fault(names=last, away="dispatch"),
        "a rank that stays away from combine is named": Fault(names=last, away="combine"),
        "a rank that closes is named": Fault(names=last, away="dispatch", closes=True),
        "calls that differ are reported": Fault(names="must make the same", differs=True),
    }.items():
        with ranks.make(timeout_s=SOON_S) as comm:
            ranks.line(name, _reported, ranks, comm, fault)
    ranks.line("a process that is killed is named", _killed, ranks, spare)
    name = "NICs that reorder or fail"
    if not ranks.is_software or ranks.nodes == 1:
        ranks.skip(name, "no software NIC is between these ranks")
        return
    settings: dict[str, Any] = {"transport": "loopback", "transport_settings": "seed=7"}
    with ranks.make(**settings) as comm:
        for layout in LAYOUTS:
            name = f"{layout}, NICs that reorder what they may"
            ranks.line(name, ranks.steps, comm, layout=layout)
    settings |= {"transport_settings": "fail_nth=3", "timeout_s": SOON_S}
    with ranks.make(**settings) as comm:
        ranks.line(
            "a NIC that fails is reported", _reported, ranks, comm, Fault(names="failed: transport")
        )


def _differing(ranks: Ranks) -> Wrong:
    try:
        ranks.make(max_tokens=ranks.options.tokens[0] + (ranks.rank == ranks.last)).close()
    except errors.InvalidArgumentError as error:
        return [] if "max_tokens" in str(error) else [f"the error names no field: {error}"]
    return ["nothing was refused"]


def _refused(ranks: Ranks, comm: AllToAll) -> Wrong:
    given = ranks.call(0).given
    try:
        comm.dispatch(**given | {"x": given["x"][:, :16].contiguous()})
    except errors.InvalidArgumentError:
        return []
    return ["rows that are too short were not refused"]


def _reported(ranks: Ranks, comm: AllToAll, fault: Fault) -> Wrong:
    began = time.monotonic()
    error = fault.provoke(ranks, comm)
    took = time.monotonic() - began
    every = everyones(error)  # no rank closes before all have their error
    if ranks.rank == ranks.last and fault.away:
        return []
    return _judged(fault.names, error, took, every)


def _judged(names: str, error: str, took: float, every: list[str]) -> Wrong:
    """every: the errors of all ranks, of which one has to contain `names`."""
    found = [] if error else ["no error came"]
    found += [f"the error came after {took:.1f} s"] if took > IN_TIME_S else []
    if not any(names in text for text in every):
        found.append(f"no error has {names!r}: {error}")
    return found


def _killed(ranks: Ranks, spare: Spare) -> Wrong:
    """The spare processes of all ranks are ranks of a group of their own, the last is killed."""
    error, took = spare.report(ranks.rank)
    every = everyones(error)  # no process ends before all have reported
    spare.end()
    torch.ops.moe_p2p.remove_stale_memory.default()
    if ranks.rank == ranks.last:
        return [f"the process was not killed: {error}"] if error else []
    return _judged(f"rank {ranks.last}", error, took, every)


def _until_killed(options: Options, pipe: Connection, inherited: Connection | None) -> None:
    """Makes calls as one rank. The last rank's process kills itself after the first pair.

    inherited: the other end of the pipe, which would keep it open when the rank has ended.
    """
    if inherited is not None:
        inherited.close()
    with contextlib.suppress(EOFError):
        _make_calls(options, pipe.recv(), pipe)
        pipe.recv()  # until this process is killed, too


def _make_calls(options: Options, rank: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    store = PrefixStore(
        f"killed, nodes of {options.ranks_per_node}",
        TCPStore(env.master_address(), env.master_port(), is_master=False),
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    use_device(options.device)
    ranks = Ranks(options, rank)
    comm = ranks.make(timeout_s=SOON_S)
    if rank == ranks.last:
        ranks.whole(comm, ranks.call(0, kind="fp32", full=True))
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    error = Fault(names="").provoke(ranks, comm)
    pipe.send((error, time.monotonic() - began))


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A deliberate fault, and words that some rank's error must contain."""

    names: str
    away: str = ""  # the call that the last rank does not make
    closes: bool = False  # instead
    differs: bool = False  # the call of rank 0

    def provoke(self, ranks: Ranks, comm: AllToAll) -> str:
        """Returns the error of this rank; empty: there was none."""
        stays = bool(self.away) and ranks.rank == ranks.last
        call = ranks.call(0, kind="fp16" if self.differs and ranks.rank == 0 else "fp32", full=True)
        if stays and self.away == "dispatch":
            if self.closes:
                comm.close()
            return ""
        try:
            for _ in range(CALLS):
                got = comm.dispatch(**call.given)
                finish(ranks.options.device)
                if stays:
                    return ""
                comm.combine(call.y, got)
                finish(ranks.options.device)
                if comm.broken:
                    break
        except errors.MoeP2pError as error:
            return str(error)
        return comm.broken
