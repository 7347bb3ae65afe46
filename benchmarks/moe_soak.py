"""Dispatches and combines for a long time while peers die and links fail: no loss, no growth.

    python benchmarks/soak.py --minutes 10                    three hosts, two interfaces each
    python benchmarks/soak.py --minutes 10 --over loopback    on this host; or lo, over its tcp
    python tests/rdma/vm.py --devices 6 --netem "loss 1%" --timeout 2400 -- \
        python benchmarks/soak.py --over roce --minutes 30

Over tcp, as root, hosts are network namespaces (tests/support/hosts.py); over roce they are pairs
of soft-RoCE devices in the machine of tests/rdma/vm.py, used through libibverbs; loopback is the
software NIC, which reorders. Every few seconds a link goes down for a moment, and ranks pause at
random. soak_rank.py compares every row.

Engines stay; communicators on them come and go. Most close in good order: ranks leave one by one,
some while their last writes are in flight. Every --replace-every seconds a rank is killed at a
random moment: in set-up, right after it, in a call, between calls, while it closes, or where the
others mask it. The others must notice, close, and make the next communicator with the process that
replaces it.

Exit status 1: a row was wrong, a rank failed, hung or noticed nothing, something is left in
/dev/shm, or a rank holds more descriptors, threads or memory than after its first quarter; 2: it
cannot run here; 130 and 143: ended by Ctrl-C and SIGTERM. On failure all ranks print their stacks.
Run for some seconds by tests/package/test_soak.py.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import soak
import soak_rank
from soak import FailedError
from soak_options import OVER, parse, why_not, wrong
from soak_rank import MOMENTS, Alive, Attempt, Connected, Failure, Report, Setting, Usage

from tests.support import hosts

START_S = 400.0  # longest time until a process has an engine, in an emulated machine
DOWN_S = 1.0  # longest time that a link is down


@dataclass
class Process:
    """A rank's process."""

    rank: int
    handle: BaseProcess
    pipe: Connection
    usages: list[Usage] = field(default_factory=list)  # one per attempt

    def receive(self) -> Any:
        """Returns the message it sent, or the time at which it was found dead."""
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            return time.monotonic()

    def growth(self) -> Usage:
        """Growth from the second quarter of its life to the last one."""
        quarter = len(self.usages) // 4
        early, late = self.usages[quarter : 2 * quarter + 1], self.usages[-max(1, quarter) :]
        before, after = ([max(values) for values in zip(*us, strict=True)] for us in (early, late))
        return Usage(*(b - a for a, b in zip(before, after, strict=True)))


class Run:
    """The ranks, and what happened to them."""

    def __init__(self, arguments: argparse.Namespace, network: hosts.Hosts) -> None:
        self.arguments, self.network = arguments, network
        self.draw = random.Random(arguments.seed)
        self.transport, self.settings, timeout_s = OVER[arguments.over]
        self.timeout_s = arguments.timeout_s or timeout_s
        self.world_size = arguments.hosts * arguments.ranks_per_host
        self.witness = arguments.seed % self.world_size  # never killed
        self.processes = soak.Processes("soak_rank")
        self.ended_by = 0  # a signal; handled later: end() cannot end a half-started process
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._end_by)
        self.started: list[Process] = []
        self.ranks: list[Process] = []  # the living, by rank
        self.setup_s = 1.0  # set-up time of the last attempt
        self.num_steps = self.num_attempts = self.num_flaps = 0
        self.deaths: list[str] = []  # moments of deaths
        self.died_at = 0.0
        self.noticed_s: dict[str, list[float]] = {moment: [] for moment in MOMENTS}
        self.left_s: list[float] = []  # durations of closing
        self.back_s: list[float] = []  # times from a death until all are connected again

    def _end_by(self, number: int, _: object) -> None:
        self.ended_by = number

    # --- processes ---

    def start(self) -> None:
        here = self._place(0)
        address = hosts.Hosts.address(0) if here else "127.0.0.1"
        _, self.store_pipe = self.processes.start(soak_rank.serve_store, here, address)
        if not self.store_pipe.poll(START_S):
            raise FailedError("the process with the store did not start")
        self.store = address, self.store_pipe.recv()
        self.ranks = [self._start_rank(rank) for rank in range(self.world_size)]
        self._await_word("ready", self.ranks)

    def _start_rank(self, rank: int) -> Process:
        host = rank // self.arguments.ranks_per_host
        setting = Setting(
            rank,
            self.world_size,
            self.arguments.ranks_per_host,
            self.transport,
            self.settings(host, self.arguments.seed),
            self.timeout_s,
            self.arguments.seed,
            self.witness,
            self._place(host),
        )
        self.started.append(
            Process(rank, *self.processes.start(soak_rank.run, setting, *self.store))
        )
        return self.started[-1]

    def _place(self, host: int) -> hosts.Place | None:
        return self.network.place(host) if self.network.names else None

    def close(self) -> None:
        """All ranks close their engines and end."""
        for process in self.ranks:
            process.pipe.send(None)
        self._await_word("closed", self.ranks)
        for process in self.ranks:
            process.handle.join(START_S)
            if process.handle.exitcode != 0:
                self._fail(f"rank {process.rank} ended with {process.handle.exitcode}")

    # --- messages of ranks ---

    def _messages(
        self, pending: set[int], timeout_s: float
    ) -> Iterator[tuple[Process, Any] | None]:
        """Yields messages of ranks in `pending`, from which the caller removes them; else None."""
        ends = time.monotonic() + timeout_s
        while pending:
            if self.ended_by:
                raise SystemExit(128 + self.ended_by)
            if time.monotonic() > ends:
                self._fail(f"ranks {sorted(pending)} hang: nothing within {timeout_s:.0f} s")
            pipes = [self.ranks[rank].pipe for rank in pending]
            ready = wait(pipes, 0.05)
            for process in [process for process in self.ranks if process.pipe in ready]:
                message = process.receive()
                ends = time.monotonic() + timeout_s
                if isinstance(message, Alive):
                    continue
                if isinstance(message, Failure):
                    self._fail(f"rank {process.rank}: {message.text}")
                yield process, message
            yield None

    def _await_word(self, word: str, processes: list[Process]) -> None:
        pending = {process.rank for process in processes}
        for found in self._messages(pending, START_S):
            if found is not None:
                process, message = found
                if message != word:
                    self._fail(f"rank {process.rank}: {message} instead of {word}")
                pending.remove(process.rank)

    def _show_where(self, process: Process) -> None:
        """Makes the rank print its Python stacks; prints state and CPU time of its threads."""
        name, pid = f"rank {process.rank}", process.handle.pid
        if not process.handle.is_alive():
            print(f"{name} has ended: {process.handle.exitcode}", flush=True)
            return
        threads = []
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                left, right = (task / "stat").read_text().rsplit(")", 1)
                values = right.split()
                cpu_s = (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")
                threads.append(f"{left.partition('(')[2]} {values[0]} {cpu_s:.2f} s")
        print(f"{name} is here; its threads: {', '.join(threads)}", flush=True)
        assert pid is not None
        os.kill(pid, soak_rank.SHOW_STACKS)
        time.sleep(0.5)  # the rank writes to the same terminal

    def _fail(self, text: str) -> NoReturn:
        """Fails with others' messages of the next moment too: the first is not always the cause."""
        time.sleep(1)
        for process in self.ranks:
            self._show_where(process)
            while process.pipe.poll() and isinstance(message := process.receive(), tuple):
                text += f"\nrank {process.rank}: {message}"
        raise FailedError(text)

    # --- attempts ---

    def soak(self) -> None:
        began = time.monotonic()
        ends = began + 60 * self.arguments.minutes
        every = self.arguments.replace_every_s
        next_death = began + every if every else math.inf
        moments: list[str] = []
        while (now := time.monotonic()) < ends or not self._enough():
            self.num_attempts += 1
            seconds = self.draw.random() * self.arguments.keep_s
            if now < ends:
                seconds = min(seconds, ends - now)
            seconds = min(seconds, max(self.draw.random(), next_death - now))
            attempt = Attempt(self.num_attempts, seconds)
            doomed = now + seconds >= next_death
            if doomed:
                moments = moments or self.draw.sample(
                    self.arguments.moments, k=len(self.arguments.moments)
                )
                others = [rank for rank in range(self.world_size) if rank != self.witness]
                attempt = attempt._replace(
                    victim=self.draw.choice(others), moment=moments.pop(), setup_s=self.setup_s
                )
            self._attempt(attempt)
            if doomed:
                next_death = max(next_death + every, time.monotonic() + every / 2)
            line = f"{(time.monotonic() - began) / 60:.1f} min, {self.num_steps} steps"
            if sys.stdout.isatty():
                print(f"\r{line} ", end="", flush=True)

    def _enough(self) -> bool:
        deaths, flaps = self.arguments.least_deaths, self.arguments.least_flaps
        return len(self.deaths) >= deaths and self.num_flaps >= flaps

    def _attempt(self, attempt: Attempt) -> None:
        for process in self.ranks:
            process.pipe.send(attempt)
        connected: list[float] = []
        reports: dict[int, Report] = {}
        died_at, next_flap, flaps_end = 0.0, 0.0, 0.0
        pending = set(range(self.world_size))
        # Longer than the ranks' own deadlines of set-up, a call and closing together.
        for found in self._messages(pending, 5 * self.timeout_s + START_S / 4):
            now = time.monotonic()
            if found is None:
                if next_flap < now < flaps_end:
                    self._flap()
                    next_flap = now + self.arguments.flap_every_s
                continue
            process, message = found
            if isinstance(message, Connected):
                connected.append(message.setup_s)
                if len(connected) == self.world_size:
                    next_flap = now + self.draw.random() * self.arguments.flap_every_s
                    flaps_end = now + attempt.seconds - 2 * DOWN_S
                    self._all_connected(max(connected))
                continue
            pending.remove(process.rank)
            if isinstance(message, Report):
                reports[process.rank] = message
                self.left_s.append(message.left_s)
                if message.usage.threads:
                    process.usages.append(message.usage)
            elif process.rank == attempt.victim:
                died_at = message
            else:
                process.handle.join(5)
                self._fail(f"rank {process.rank} ended by itself: {process.handle.exitcode}")
        self.num_steps += max(report.num_steps for report in reports.values())
        if attempt.victim >= 0:
            self._replace(attempt, died_at, reports)

    def _all_connected(self, setup_s: float) -> None:
        self.setup_s = setup_s
        if self.died_at:
            self.back_s.append(time.monotonic() - self.died_at)
            self.died_at = 0.0

    def _replace(self, attempt: Attempt, died_at: float, reports: dict[int, Report]) -> None:
        """Checks what survivors noticed, and starts a new process."""
        victim, moment = attempt.victim, attempt.moment
        if not died_at:
            self._fail(f"rank {victim} was to die in {moment} and did not: {reports}")
        took = {
            rank: max(0.0, report.noticed_at - died_at)
            for rank, report in reports.items()
            if report.noticed_at
        }
        texts = [report.error for report in reports.values()]
        if moment != "closing" and len(took) < self.world_size - 1:
            self._fail(f"rank {victim} died in {moment}, and not all noticed it: {reports}")
        if any(texts) and not any(f"rank {victim}" in text for text in texts):
            self._fail(f"no error names rank {victim}, which died in {moment}: {texts}")
        self.noticed_s[moment] += took.values()
        self.deaths.append(moment)
        self.died_at = died_at
        times = ", ".join(f"rank {rank} {seconds:.2f} s" for rank, seconds in took.items())
        print(f"rank {victim} died in {moment}; noticed by {times or 'nobody'}", flush=True)
        self.ranks[victim].handle.join()
        self.ranks[victim] = self._start_rank(victim)
        self._await_word("ready", [self.ranks[victim]])

    def _flap(self) -> None:
        """Takes a link down and up again."""
        down_s = self.draw.random() * DOWN_S
        if self.arguments.over == "tcp":
            interface = f"eth{self.draw.randrange(2)}"
            self.network.flap(self.draw.randrange(self.arguments.hosts), interface, down_s=down_s)
        elif self.arguments.over == "roce":  # the far end of a device's link
            link = f"rp{self.draw.randrange(2 * self.arguments.hosts)}"
            subprocess.run(["ip", "link", "set", link, "down"], check=True)
            time.sleep(down_s)
            subprocess.run(["ip", "link", "set", link, "up"], check=True)
        else:
            return
        self.num_flaps += 1

    # --- results ---

    def left_behind(self) -> list[str]:
        """Returns shared memory that our processes left."""
        folders = [self._place(host) for host in range(self.arguments.hosts)]
        pids = [process.handle.pid for process in self.started]
        return [
            file.name
            for folder in {place.shm if place else Path("/dev/shm") for place in folders}
            for file in folder.iterdir()
            if any(f".{pid}." in file.name for pid in pids)
        ]

    def summary(self) -> dict[str, Any]:
        oldest = [process for process in self.started if len(process.usages) >= 24]
        growth = [process.growth() for process in oldest]
        return {
            "over": self.arguments.over,
            "ranks": self.world_size,
            "steps": self.num_steps,
            "communicators": self.num_attempts,
            "flaps": self.num_flaps,
            "deaths": {moment: self.deaths.count(moment) for moment in MOMENTS},
            "noticed_s": {moment: spread(times) for moment, times in self.noticed_s.items()},
            "left_s": spread(self.left_s),
            "back_s": spread(self.back_s),
            "usage": [process.usages[-1] for process in oldest],
            "growth": list(map(max, zip(*growth, strict=True))) if growth else None,
            "left_behind": self.left_behind(),
        }


def spread(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    return {"p50": round(statistics.median(seconds), 3), "max": round(max(seconds), 3)}


def main() -> int:
    arguments = parse((__doc__ or "").splitlines()[0])
    if reason := why_not(arguments):
        print(reason)
        return 2
    num_hosts = arguments.hosts if arguments.over == "tcp" else 0
    with hosts.Hosts(num_hosts, num_interfaces=2) as network:
        run = Run(arguments, network)
        try:
            run.start()
            run.soak()
            run.close()
            summary = run.summary()
        except FailedError as error:
            print(f"{error}\nFAILED after {run.num_steps} steps, {len(run.deaths)} deaths")
            return 1
        except SystemExit:
            print(f"\nended after {run.num_steps} steps, {len(run.deaths)} deaths")
            raise
        finally:
            soak.end_all()
    print(json.dumps(summary))
    reason = wrong(arguments, summary)
    print(f"FAILED: {reason}" if reason else "ok")
    return int(bool(reason))
