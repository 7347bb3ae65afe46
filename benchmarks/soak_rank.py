"""One rank of benchmarks/moe_soak.py: communicators in a row on one engine, every row checked.

Tokens follow from the numbers of attempt, step and rank, so each rank knows what the others send
and compares rows and sums with its own computation. Experts multiply by different factors, so
wrong rows, wrong weights and stale slots show.
"""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import math
import os
import random
import signal
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe_p2p import AllToAll, AllToAllConfig, Engine, EngineConfig, MoeP2pError
from tests.support import hosts

STEPS_PER_ROUND = 10
EXPERTS_PER_RANK, TOPK, HIDDEN_DIM, MAX_TOKENS = 4, 4, 256, 64
PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20
STORE_S = 120.0
SHOW_STACKS = signal.SIGUSR1  # makes a rank print its threads' stacks
LATE_S = 0.03  # longest delay between two ranks that leave in good order
# Moments at which a victim dies. "connected": before its first call; "masked": like "between", in a
# communicator that masks lost ranks.
MOMENTS = ("dispatch", "between", "combine", "set-up", "connected", "closing", "masked")


class Setting(NamedTuple):
    """Constants of a rank's whole life."""

    rank: int
    world_size: int
    ranks_per_node: int
    transport: str
    settings: str
    timeout_s: float
    seed: int
    witness: int  # a rank that is never killed
    place: hosts.Place | None


class Attempt(NamedTuple):
    """A communicator's life, the same on all ranks; ends in good order unless there is a victim."""

    number: int
    seconds: float
    victim: int = -1
    moment: str = ""
    setup_s: float = 1.0  # set-up time of the last attempt


class Connected(NamedTuple):
    setup_s: float


class Alive(NamedTuple):
    """Sent every second between two steps."""

    num_steps: int


class Usage(NamedTuple):
    """Resources of a process."""

    descriptors: int
    threads: int
    memory_mib: float  # resident
    allocated_mib: float  # heap memory, touched or not

    @staticmethod
    def now() -> Usage:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return Usage(
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            round(pages * PAGE_MIB, 2),
            round(allocated_mib(), 2),
        )


class _MallInfo(ctypes.Structure):
    """struct mallinfo2 of <malloc.h>."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def allocated_mib() -> float:
    """Returns heap memory in use; 0 where the C library has no mallinfo2."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0.0
    mallinfo.restype = _MallInfo
    found = mallinfo()
    return float(found.uordblks + found.hblkhd) / 2**20


NOTHING = Usage(0, 0, 0.0, 0.0)


class Report(NamedTuple):
    """End of an attempt on this rank."""

    num_steps: int
    noticed_at: float  # time.monotonic() when the victim's death was noticed; 0: it was not
    error: str  # text of the error that reported it; empty where the victim was masked
    left_s: float  # duration of closing
    usage: Usage  # while all were connected; NOTHING if they never were


class Failure(NamedTuple):
    text: str


class Tokens(NamedTuple):
    x: Tensor  # [T, H]
    weights: Tensor  # [T, K]
    experts: Tensor  # [T, K]


def serve_store(place: hosts.Place | None, address: str, pipe: Connection) -> None:
    """Runs the process with the store, which outlives ranks; sends its port."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if place is not None:
        place.enter()
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    with suppress(EOFError):
        pipe.recv()


def run(setting: Setting, address: str, port: int, pipe: Connection) -> None:
    """Runs attempts from the pipe, until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C moe_soak.py ends its ranks
    faulthandler.enable()
    faulthandler.register(SHOW_STACKS)
    torch.set_num_threads(1)
    if setting.place is not None:
        setting.place.enter()
    try:
        store = dist.TCPStore(address, port, timeout=timedelta(seconds=STORE_S))
        with Engine(
            EngineConfig(
                transport=setting.transport,
                nics_per_rank=2,
                transport_settings=setting.settings,
                timeout_s=setting.timeout_s,
            ),
            label=f"rank {setting.rank}",
        ) as engine:
            pipe.send("ready")
            while (attempt := pipe.recv()) is not None:
                prefixed = dist.PrefixStore(f"attempt {attempt.number}", store)
                pipe.send(Life(setting, attempt, engine, prefixed, pipe).run())
        pipe.send("closed")
    except EOFError:
        return  # moe_soak.py has ended
    except BaseException:
        pipe.send(Failure(traceback.format_exc()))


class Life:
    """One attempt of one rank."""

    def __init__(
        self,
        setting: Setting,
        attempt: Attempt,
        engine: Engine,
        store: dist.Store,
        pipe: Connection,
    ) -> None:
        self.setting, self.attempt, self.engine = setting, attempt, engine
        self.store, self.pipe = store, pipe
        self.rank, self.ranks = setting.rank, range(setting.world_size)
        self.is_victim = attempt.victim == setting.rank
        self.draw = random.Random(f"{setting.seed} {attempt.number} {setting.rank}")
        together = random.Random(f"{setting.seed} {attempt.number}")
        self.die_at = together.randrange(STEPS_PER_ROUND)
        # Releases the last dispatch instead of combining it.
        self.releases = together.random() < 0.5 and attempt.moment in ("", "closing")
        self.masks = attempt.moment == "masked"
        self.config = AllToAllConfig(
            num_experts=EXPERTS_PER_RANK * setting.world_size,
            hidden_dim=HIDDEN_DIM,
            topk=TOPK,
            max_tokens=MAX_TOKENS,
            chunk_tokens=MAX_TOKENS if self.masks else together.choice([16, MAX_TOKENS]),
            dtype=torch.float32,
            ranks_per_node=setting.ranks_per_node,
            timeout_s=setting.timeout_s,
            num_threads=1,
            mask_lost_ranks=self.masks,
        )
        self.round = -1
        self.num_steps = 0
        self.next_word = 0.0
        self.may_miss = False  # from the victim's last step on, its tokens and experts may be lost
        self.masked_at = 0.0
        self.took_s = {"dispatch": 0.0, "combine": 0.0}  # of the last step

    def run(self) -> Report:
        noticed_at, error_text, usage, leaves_at = 0.0, "", NOTHING, 0.0
        self._die_within("set-up", self.attempt.setup_s)
        began = time.monotonic()
        try:
            comm = AllToAll(
                self.store,
                self.config,
                rank=self.rank,
                world_size=len(self.ranks),
                engine=self.engine,
            )
            with comm:
                self.pipe.send(Connected(time.monotonic() - began))
                if self.is_victim and self.attempt.moment == "connected":
                    os.kill(os.getpid(), signal.SIGKILL)
                try:
                    usage = self._rounds(comm)
                    if self.attempt.moment not in ("", "closing"):
                        self._go_on(comm)
                    time.sleep(self.draw.random() * LATE_S if self.draw.random() < 0.7 else 0)
                finally:
                    leaves_at = time.monotonic()
                self._die_within("closing", LATE_S)
            if self.is_victim:
                signal.pause()
        except MoeP2pError as error:
            if self.rank == self.setting.witness:
                # Others may finish this round's last step before they can notice the death.
                self.store.set(f"round {self.round + 1}", "go")
            if self.attempt.victim < 0:
                raise
            noticed_at, error_text = (
                leaves_at or time.monotonic(),
                f"{type(error).__name__}: {error}",
            )
        left_s = time.monotonic() - leaves_at if leaves_at else 0.0
        return Report(self.num_steps, noticed_at or self.masked_at, error_text, left_s, usage)

    def _rounds(self, comm: AllToAll) -> Usage:
        """Steps until the witness ends the attempt; any other rank might die before it could."""
        ends = time.monotonic() + self.attempt.seconds
        for self.round in itertools.count():
            key = f"round {self.round}"
            if self.rank == self.setting.witness:
                self.store.set(key, "last" if time.monotonic() >= ends else "go")
            last = self.store.get(key) == b"last"
            usage = Usage.now()
            for i in range(STEPS_PER_ROUND):
                dies = last and i == self.die_at
                self.may_miss |= dies and self.masks
                self._step(
                    comm,
                    dies=dies and self.is_victim,
                    releases=last and self.releases and i == STEPS_PER_ROUND - 1,
                )
            if last:
                return usage
        raise AssertionError

    def _go_on(self, comm: AllToAll) -> None:
        """Steps until the death is noticed; with masks, equally many on every rank."""
        ends = time.monotonic() + 3 * self.setting.timeout_s
        last = self.num_steps + 2 * STEPS_PER_ROUND if self.masks else math.inf
        while self.num_steps < last and time.monotonic() < ends:
            self._step(comm)
        assert self.masked_at, f"rank {self.attempt.victim} is dead, and steps go on as before"

    def _step(self, comm: AllToAll, *, dies: bool = False, releases: bool = False) -> None:
        """One dispatch and combine of random numbers of tokens, checked."""
        if time.monotonic() > self.next_word:
            self.next_word = time.monotonic() + 1
            self.pipe.send(Alive(self.num_steps))
        if self.draw.random() < 0.1:
            time.sleep(self.draw.random() * 0.02)  # plays a late rank
        everyones = [self._tokens(rank) for rank in self.ranks]
        mine = everyones[self.rank]
        if dies and self.attempt.moment == "dispatch":
            die_within(self.draw, self.took_s["dispatch"])
        began = time.monotonic()
        received = comm.dispatch(mine.x, mine.experts, mine.weights, layout="grouped")
        self.took_s["dispatch"] = time.monotonic() - began
        self.num_steps += 1
        lost = [-1, self.attempt.victim] if self.may_miss else [-1]
        local = torch.arange(EXPERTS_PER_RANK) + self.rank * EXPERTS_PER_RANK
        x = received.x[: int(received.counts.sum())]
        check(x, [rows_of(local, everyones, without=rank) for rank in lost])
        if releases:
            comm.release(received)
            return
        y = received.x.clone()
        y[: len(x)] *= factor(local.repeat_interleave(received.counts.long())).unsqueeze(1)
        if dies and self.attempt.moment in ("between", "masked"):
            os.kill(os.getpid(), signal.SIGKILL)
        if dies and self.attempt.moment == "combine":
            die_within(self.draw, self.took_s["combine"])
        began = time.monotonic()
        out = comm.combine(y, received)
        self.took_s["combine"] = time.monotonic() - began
        check(out, [sums_of(mine, without=rank) for rank in lost])
        if self.masks and not self.masked_at and comm.masked[self.attempt.victim]:
            self.masked_at = time.monotonic()

    def _tokens(self, rank: int) -> Tokens:
        """Returns what `rank` sends in this step; equal on every rank."""
        generator = torch.Generator().manual_seed(
            hash((self.setting.seed, self.attempt.number, self.num_steps, rank)) & 2**62 - 1
        )
        count = int(torch.randint(0, MAX_TOKENS + 1, (1,), generator=generator))
        x = torch.randn(count, HIDDEN_DIM, generator=generator)
        chances = torch.rand(count, self.config.num_experts, generator=generator)
        return Tokens(x, *chances.topk(TOPK, dim=1))

    def _die_within(self, moment: str, seconds: float) -> None:
        if self.is_victim and self.attempt.moment == moment:
            die_within(self.draw, seconds)


def die_within(draw: random.Random, seconds: float) -> None:
    """Kills this process within `seconds`, at any point, by a signal that nothing handles."""
    signal.setitimer(signal.ITIMER_REAL, max(1e-6, draw.random() * seconds))


def factor(expert: Tensor) -> Tensor:
    """The factor by which an expert multiplies its rows."""
    return 0.5 + 0.125 * expert.float()


def rows_of(experts: Tensor, everyones: list[Tokens], *, without: int) -> Tensor:
    """[R, H]: rows that these experts receive, grouped. without: a lost rank; -1: none."""
    return torch.cat(
        [
            tokens.x[(tokens.experts == expert).any(dim=1)]
            for expert in experts
            for rank, tokens in enumerate(everyones)
            if rank != without
        ]
    )


def sums_of(tokens: Tokens, *, without: int) -> Tensor:
    """[T, H]: result of combine. without: likewise."""
    there = tokens.experts // EXPERTS_PER_RANK != without
    return tokens.x * (tokens.weights * factor(tokens.experts) * there).sum(dim=1, keepdim=True)


def check(found: Tensor, expected: list[Tensor]) -> None:
    """Asserts that `found` equals one of `expected`.

    The tolerance covers sums of four fp32 products in another order: some units in the last place.
    """
    if not any(e.shape == found.shape and torch.allclose(found, e, 1e-5, 1e-5) for e in expected):
        torch.testing.assert_close(found, expected[0], rtol=1e-5, atol=1e-5)
        raise AssertionError
