"""Thousands of KV requests while users cancel, and workers leave, stop, are killed and replaced.

    python benchmarks/kv_soak.py --requests 1000                  the software NIC, which reorders
    python benchmarks/kv_soak.py --requests 1000 --over tcp       libfabric's tcp

Two prefill and two decode workers are processes (kv_peer.py). A tenth of the requests is cancelled
at either side, a tenth is preempted at prefill and begun anew, a third has a prefix at the decode
side, half are pulled, some come in chunks. All bytes are compared and all checksums are on. With
--pack half of the prefill workers pack their rows. Every --trouble-every requests one prefill or
decode worker is in trouble, each kind for each role in turn:

    kill              another one joins
    restart           a process under the same name begins at once
    replace           that begins while the first lives, which has to find out and leave by itself
    replace stopped   the same while the first is stopped, which goes on afterwards
    stop              for longer than drain_s, while users give its requests up
    leave             in good order; another one joins

Requests that no trouble touched have to complete at both sides; a worker counts as troubled until
it and all others agree about their pairs, within HEAL_S.

    python benchmarks/kv_soak.py --requests 3000 --mutations      each part is needed

runs it once for each part that all workers leave out: exit status 1 where a run ends well.

Exit status 1: wrong bytes, a write into pages that were free, pages, slots or reservations that did
not come back, a request that ended nowhere; 2: it cannot run here. Run by tests/kv/test_kv_soak.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import soak
from soak import FailedError

# isort: split
from kv_peer import LEASE_S, Cancel, Job, Leave, Left, Pairs, Result, Setting
from kv_peer import main as peer_main
from torch.distributed import TCPStore

from moe_p2p import Engine, EngineConfig, UnavailableError, kv
from moe_p2p.bench.harness import at
from moe_p2p.tools import launch

OVER = {
    "loopback": ("loopback", "seed={seed}"),
    "tcp": ("libfabric", "provider=tcp,interfaces=lo,timeout_ms=2000"),
}
WINDOW = 12  # requests under way
MUTATIONS = ("no fence", "no nonce", "no epoch", "reuse before drain")  # of kv_mutations.py
ROLES = ("prefill", "decode")
TROUBLES = ("kill", "restart", "replace", "replace stopped", "stop", "leave")
HEAL_S = 30.0  # until a worker must have met all others after trouble
MOST_TOUCHED = 4  # requests that a worker gets before it has healed
ASK_S = 0.1  # between two questions for pairs
STUCK_S = 90.0  # after which a request that has not ended at a living worker hangs
START_S = 90.0


@dataclass
class Process:
    role: str
    instance: str
    handle: BaseProcess
    pipe: Connection
    jobs: dict[int, float] = field(default_factory=dict)  # under way: since when
    stopped_until: float = 0.0
    leaving: bool = False
    replaced: bool = False
    heals_since: float | None = None  # None: nothing is wrong with it
    touched: int = 0  # requests that it got since then
    pairs: Pairs = field(default_factory=lambda: Pairs(-1e9, {}))  # its last word

    def begin_healing(self, after_s: float = 0.0) -> None:
        self.heals_since, self.touched = time.monotonic() + after_s, 0


class Soak:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.draw = random.Random(arguments.seed)
        self.workers = soak.Processes("kv_peer")
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.timeouts = kv.KVTimeouts(
            connect_s=30,
            open_s=10,
            layers_s=30,
            tail_s=30,
            drain_s=arguments.drain_s,
            lease_s=LEASE_S,
        )
        self.processes: list[Process] = []
        self.num_started = self.num_done = 0
        self.ends: dict[str, int] = {}
        self.troubles = dict.fromkeys(TROUBLES, 0)
        self.preempted = 0  # requests that were preempted and completed all the same
        self.packed = 0  # writes of packed rows, of requests that are complete
        self.reusable_s: list[float] = []
        self.excused: set[int] = set()  # requests that may fail: cancelled, or touched by trouble
        self.asked_at = 0.0
        self.began = time.monotonic()

    # --- workers ---

    def start(self, role: str, instance: str = "") -> None:
        """instance: its name, which another one may have had, or has."""
        self.num_started += 1
        transport, settings = OVER[self.arguments.over]
        setting = Setting(
            role,
            instance or f"{role}-{self.num_started}",
            self.store.port,
            transport,
            settings.format(seed=self.arguments.seed and self.arguments.seed + self.num_started),
            self.timeouts,
            num_pages=96,
            verify=self.arguments.verify,
            token_bytes=self.arguments.token_bytes,
            link=self.link(role),
            device=self.arguments.device.get(role, "cpu"),
            mutation=self.arguments.mutation,
            fence=self.arguments.fence,
        )
        handle, ours = self.workers.start(peer_main, setting)
        if not ours.poll(START_S) or ours.recv() != "ready":
            raise FailedError(f"{setting.instance} did not start")
        self.processes.append(Process(role, setting.instance, handle, ours))
        self.processes[-1].begin_healing()

    def link(self, role: str) -> kv.KVLink | None:
        """With --pack every other prefill worker packs all rows, into parts of two pages, one or
        two in a write, of which the decode side has less than a request needs."""
        if not self.arguments.pack:
            return None
        pack = "auto" if role == "decode" else self.num_started % 2 == 1
        write_bytes = 2 * 4 * self.arguments.token_bytes
        return kv.KVLink("soak", 1e9, 1e6, write_bytes, pack, 8 * write_bytes)

    def of(self, role: str) -> list[Process]:
        return [p for p in self.of_all() if p.role == role]

    def of_all(self) -> list[Process]:
        return [p for p in self.processes if not p.leaving]

    def candidates(self, role: str) -> list[Process]:
        """Those that have healed, and those that have not for some requests."""
        while True:
            found = self.of(role)
            found = [p for p in found if p.heals_since is None or p.touched < MOST_TOUCHED]
            if found:
                return found
            self.receive(0.05)

    # --- requests ---

    def submit(self, number: int) -> None:
        draw = self.draw
        prefill, decode = (draw.choice(self.candidates(role)) for role in ROLES)
        total = draw.randint(1, 60)
        prefix = 8 * draw.randint(0, min(2, (total - 1) // 8)) if draw.random() < 1 / 3 else 0
        cuts = sorted({draw.randint(1, total) for _ in range(draw.choice([0, 0, 1, 2]))} | {total})
        job = Job(
            number,
            prefill.instance,
            decode.instance,
            total,
            prefix,
            tuple(cuts),
            pull=draw.random() < 0.5,
            cancel=draw.choices(["", "prefill", "decode"], [9, 0.5, 0.5])[0],
            cancel_after_s=draw.random() * 0.05,
            pause_s=draw.choice([0, 0, 0, 0.002]),
            preempted=draw.random() < 0.1,
        )
        now = time.monotonic()
        if job.cancel or any(each.heals_since is not None for each in (prefill, decode)):
            self.excused.add(number)
        for process in (decode, prefill):
            process.touched += 1
            process.jobs[number] = now
            try:
                process.pipe.send(job)
            except (BrokenPipeError, ConnectionResetError):
                process.jobs.pop(number)  # it was killed just now

    def receive(self, timeout_s: float) -> None:
        by_pipe = {process.pipe: process for process in self.processes}
        for pipe in wait(list(by_pipe), timeout_s):
            process = by_pipe[pipe]  # type: ignore[index]
            try:
                self.take(process, process.pipe.recv())
            except (EOFError, ConnectionResetError):
                raise FailedError(f"{process.instance} died by itself") from None
        now = time.monotonic()
        for process in self.processes:
            if process.stopped_until and now >= process.stopped_until:
                self.go_on(process)
            for number, since in process.jobs.items():
                if now - since > STUCK_S:
                    raise FailedError(f"request {number} hangs at {process.instance}")
        self.heal(now)

    def go_on(self, process: Process) -> None:
        process.stopped_until = 0.0
        os.kill(process.handle.pid or 0, signal.SIGCONT)
        # What it had to drain is late now, and its pairs may end once more.
        process.begin_healing(self.timeouts.drain_s + 1)

    def heal(self, now: float) -> None:
        """Workers have met where both say that they have the same pair."""
        runs = [p for p in self.processes if not (p.leaving or p.stopped_until)]
        healing = [p for p in runs if p.heals_since is not None]
        if healing and now - self.asked_at > ASK_S:
            self.asked_at = now
            for process in runs:
                process.pipe.send("pairs")
        for process in healing:
            since = process.heals_since or 0.0
            others = [other for other in runs if other.role != process.role]
            if all(
                each.pairs.at > since
                and each.pairs.tags.get(f"{other.instance}/0", 0)
                == other.pairs.tags.get(f"{each.instance}/0", 1)
                for one in others
                for each, other in ((process, one), (one, process))
            ):
                process.heals_since = None
            elif now - since > HEAL_S:
                names = ", ".join(other.instance for other in others)
                raise FailedError(
                    f"{process.instance} has not met {names} {HEAL_S} s after trouble"
                )

    def take(self, process: Process, message: Any) -> None:
        if isinstance(message, Pairs):
            process.pairs = message
            return
        if isinstance(message, Left):
            if message.missing or message.slots or message.requests or message.held:
                raise FailedError(f"{process.instance} left with {message}")
            if process.replaced and not message.replaced:
                raise FailedError(f"{process.instance} was replaced, and has not found out")
            process.handle.join(30)
            self.processes.remove(process)
            return
        result: Result = message
        process.jobs.pop(result.number, None)
        if result.end == "wrong":
            raise FailedError(f"{process.instance}: request {result.number}: {result.text}")
        if result.end != "complete" and result.number not in self.excused:
            raise FailedError(
                f"{process.instance}: request {result.number} did not complete, and nothing was "
                f"wrong: {result.text}"
            )
        self.packed += result.packed
        self.preempted += result.preempted
        name = f"{result.role} {'lost' if result.lost else result.end}"
        self.ends[name] = self.ends.get(name, 0) + 1
        if result.end == "failed":
            self.reusable_s.append(result.reusable_at - result.ended_at)
            if self.arguments.verbose:
                print(f"{process.instance}: {result.text}", flush=True)

    @property
    def under_way(self) -> int:
        return len({number for process in self.processes for number in process.jobs})

    # --- trouble ---

    def trouble(self) -> None:
        at = sum(self.troubles.values())
        kind, role = TROUBLES[at % len(TROUBLES)], ROLES[(at + at // len(TROUBLES)) % len(ROLES)]
        victim = self.draw.choice([each for each in self.of(role) if not each.stopped_until])
        self.troubles[kind] += 1
        self.excused |= victim.jobs.keys()
        pid = victim.handle.pid or 0
        if kind in ("kill", "restart"):
            os.kill(pid, signal.SIGKILL)
            victim.handle.join(30)
            self.processes.remove(victim)
        if kind in ("stop", "replace stopped"):
            os.kill(pid, signal.SIGSTOP)
            victim.stopped_until = time.monotonic() + 2 * self.timeouts.drain_s
        if kind == "stop":
            victim.begin_healing()
            self.give_up(victim)
            return
        self.start(role, "" if kind in ("kill", "leave") else victim.instance)
        if kind not in ("kill", "restart"):
            victim.replaced = kind != "leave"
            self.send_away(victim)

    def send_away(self, process: Process) -> None:
        process.leaving = True
        process.pipe.send(Leave(process.replaced))

    def give_up(self, victim: Process) -> None:
        """The other side cancels what is under way: its pages must come back by a fence."""
        for process in self.processes:
            for number in process.jobs.keys() & victim.jobs.keys() if process is not victim else ():
                process.pipe.send(Cancel(number))

    # --- all of it ---

    def run(self) -> None:
        for role in ROLES:
            for _ in range(2):
                self.start(role)
        while any(process.heals_since is not None for process in self.processes):
            self.receive(0.05)
        every = self.arguments.trouble_every
        for number in range(1, self.arguments.requests + 1):
            self.submit(number)
            while self.under_way >= WINDOW:
                self.receive(0.05)
            self.receive(0)
            if number % every == 0 and number < self.arguments.requests:
                self.trouble()
            if number % 500 == 0:
                seconds = time.monotonic() - self.began
                print(
                    f"{number} requests, {seconds:.0f} s, {self.troubles}, {self.ends}", flush=True
                )
        while self.under_way:
            self.receive(0.05)
        while any(p.stopped_until or p.heals_since is not None for p in self.of_all()):
            self.receive(0.05)
        for process in self.of_all():
            self.send_away(process)
        ending = time.monotonic()
        while self.processes:
            self.receive(0.1)
            if time.monotonic() - ending > STUCK_S:
                raise FailedError(f"{[p.instance for p in self.processes]} do not leave")

    def summary(self) -> dict[str, Any]:
        p50, p99 = (at(self.reusable_s or [0.0], percent) for percent in (50, 99))
        return {
            "requests": self.arguments.requests,
            "over": self.arguments.over,
            "seconds": round(time.monotonic() - self.began, 1),
            "ends": self.ends,
            "troubles": self.troubles,
            "untouched": self.arguments.requests - len(self.excused),
            "packed": self.packed,
            "preempted": self.preempted,
            "reusable_ms": {"p50": round(p50 * 1e3, 1), "p99": round(p99 * 1e3, 1)},
        }


def why_not(over: str) -> str:
    transport, settings = OVER[over]
    try:
        Engine(
            EngineConfig(transport=transport, transport_settings=settings.format(seed=1))
        ).close()
    except UnavailableError as error:
        return str(error)
    return ""


def main() -> int:
    signal.signal(signal.SIGTERM, launch.exit_by_signal)
    about, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--over", choices=OVER, default="loopback")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pack", action="store_true", help="half of the workers pack their rows")
    parser.add_argument("--mutations", action="store_true", help="each of them must be caught")
    parser.add_argument("--trouble-every", type=int, default=80)
    parser.add_argument(
        "--verbose", action="store_true", help="error texts of requests that failed"
    )
    parser.add_argument(
        "--drain-s", type=float, default=2.0, help="others may take the CPU for so long"
    )
    parser.set_defaults(verify="always", token_bytes=64, device={}, fence="key", mutation="")
    arguments = parser.parse_args()
    if reason := why_not(arguments.over):
        print(f"kv_soak: {reason}", file=sys.stderr)
        return 2
    if not arguments.mutations:
        error = failure_of(arguments)
        if error:
            print(f"kv_soak, seed {arguments.seed}: {error}", file=sys.stderr)
        return 1 if error else 0
    caught = []
    for arguments.mutation in MUTATIONS:
        error = failure_of(arguments)
        caught.append(bool(error))
        lines = error.strip().splitlines() or ["NOT CAUGHT"]
        print(f"{arguments.mutation}: {lines[-1][:200]}", flush=True)
    return 0 if all(caught) else 1


def failure_of(arguments: argparse.Namespace) -> str:
    """Empty: all went well."""
    run = Soak(arguments)
    try:
        run.run()
    except FailedError as error:
        return str(error)
    finally:
        soak.end_all()
    print(json.dumps(run.summary()), flush=True)
    return ""


if __name__ == "__main__":
    sys.exit(main())
