"""Steps of fabric-check: each is a new process beside each rank, and has a deadline.

A rank of torchrun or srun makes `Ranks` and calls `run` for one step after the other, all ranks the
same ones. A step that fails, hangs or is killed ends with its processes; the next one meets at a
port of its own. Ranks talk through the launcher's store alone, and never wait in it, so that
signals are seen. Nothing here opens a GPU or a NIC.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from moe_p2p import env
from moe_p2p.tools import launch

# How a step may end at a rank.
DONE, FAILED, LATE, STOPPED, SILENT = "done", "failed", "late", "stopped", "silent"
POLL_S = 0.1
GRACE_S = 15.0  # for the other ranks of a step in which one has failed: their reports come late
SILENT_S = 30.0  # beyond a step's deadline: a rank that says nothing then is gone
MEET_S = 120.0  # until all ranks of the launcher are there
MOST_OUTPUT = 40_000  # characters of a step's output, its end


class StoppedError(RuntimeError):
    """The run ends here: another rank was interrupted, or the launcher's store is gone."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a step ended at one rank. value: what it returned; output: what it printed."""

    how: str
    seconds: float = 0.0
    value: Any = None
    output: str = ""


class Ranks:
    """The ranks of the launcher, seen from one. module: of the steps, imported once for all.

    cleaned: applied to all that leaves this rank. Raises StoppedError in every call once the run is
    to end.
    """

    def __init__(self, module: str, *, most_s: float, cleaned: Callable[[Any], Any]) -> None:
        self._cleaned = cleaned
        launch.start_fork_server(module)
        with _store_errors():
            meeting = rendezvous("env://", timeout=timedelta(seconds=MEET_S))
            self._store, self.rank, self.size = next(meeting)
        self._ends = time.monotonic() + most_s + SILENT_S
        self._next = 0

    def begin(self) -> None:
        """Until processes of steps can start at once on all ranks: their imports may take long."""
        self.run(_nothing, None, MEET_S)

    def run(self, step: Callable[[Any], Any], given: Any, deadline_s: float) -> list[Ended]:
        """Calls step(given) in a new process beside each rank. Collective.

        step: importable by name; its result must be JSON. deadline_s: rank 0's holds. Returns how
        it ended at each rank on rank 0, elsewhere nothing.
        """
        number, self._next = self._next, self._next + 1
        begin = f"fabric/{number}/begin"
        with _store_errors():
            if self.rank == 0:
                self._store.set(begin, json.dumps([_free_port(), deadline_s]))
            elif not self._until([begin], self._ends):
                raise StoppedError("rank 0 does not answer")
            port, deadline_s = json.loads(self._store.get(begin))
            ended = self._run(step, given, port, deadline_s, failures=f"fabric/{number}/failures")
            text = json.dumps(self._cleaned(asdict(ended)))
            self._store.set(f"fabric/{number}/{self.rank}", text)
            if self.rank != 0:
                return []
            keys = [f"fabric/{number}/{rank}" for rank in range(self.size)]
            self._until(keys, time.monotonic() + deadline_s - ended.seconds + SILENT_S)
            there = [self._store.check([key]) for key in keys]
            return [
                Ended(**json.loads(self._store.get(key))) if known else Ended(how=SILENT)
                for key, known in zip(keys, there, strict=True)
            ]

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks on rank 0, elsewhere nothing. Collective, called once."""
        with _store_errors():
            self._store.set(f"fabric/value/{self.rank}", json.dumps(value))
            if self.rank != 0:
                return []
            keys = [f"fabric/value/{rank}" for rank in range(self.size)]
            if not self._until(keys, time.monotonic() + MEET_S):
                raise StoppedError(f"not all of {self.size} ranks have come within {MEET_S:.0f} s")
            return [json.loads(self._store.get(key)) for key in keys]

    def stop(self) -> None:
        """Ends the run of all ranks; for a rank that was interrupted."""
        with contextlib.suppress(RuntimeError):
            self._store.add("fabric/stop", 1)

    def _check(self) -> None:
        if self._store.add("fabric/stop", 0):
            raise StoppedError("another rank was interrupted")

    def _until(self, keys: list[str], ends: float) -> bool:
        """Returns whether all keys are there by then."""
        while not self._store.check(keys):
            self._check()
            if time.monotonic() > ends:
                return False
            time.sleep(POLL_S)
        return True

    def _run(
        self, step: Callable[[Any], Any], given: Any, port: int, deadline_s: float, failures: str
    ) -> Ended:
        with tempfile.TemporaryDirectory(prefix="moe_p2p_fabric_") as folder:
            context: Any = multiprocessing.get_context("forkserver")
            process = context.Process(target=_enter, args=(os.getpid(), folder, port, step, given))
            began = time.monotonic()
            with launch.signals_wait():
                process.start()
            try:
                how = self._watch(process, began + deadline_s, failures)
            finally:
                _end(process)
                torch.ops.moe_p2p.remove_stale_memory.default()
            value, output = Path(folder, "value"), Path(folder, "output")
            if how == DONE and not (process.exitcode == 0 and value.exists()):
                how = FAILED
            if how != DONE:
                self._store.add(failures, 1)
            return Ended(
                how=how,
                seconds=round(time.monotonic() - began, 1),
                value=json.loads(value.read_text()) if how == DONE else None,
                output=output.read_text(errors="replace")[-MOST_OUTPUT:] if output.exists() else "",
            )

    def _watch(self, process: Any, ends: float, failures: str) -> str:
        stops = None  # when this rank gives up, since another one has failed
        while process.is_alive():
            self._check()
            now = time.monotonic()
            if now > ends:
                return LATE
            if stops is None and self._store.add(failures, 0):
                stops = now + GRACE_S
            if stops is not None and now > stops:
                return STOPPED
            process.join(POLL_S)
        return DONE


@contextlib.contextmanager
def _store_errors() -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise StoppedError(f"the launcher's store does not answer: {error}") from error


def _nothing(_: None) -> None:
    pass


def _free_port() -> int:
    """Of this host, which is that of the store: rank 0's. Free at the moment."""
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def _end(process: Any) -> None:
    """Ends what is left of a step: it closes what it holds, then all of its processes are gone."""
    if process.is_alive():
        process.terminate()
        process.join(launch.END_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def _enter(launcher: int, folder: str, port: int, step: Callable[[Any], Any], given: Any) -> None:
    """In the new process. A group of its own: signals of the terminal are its rank's to handle."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, launch.exit_by_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # launch.start_fork_server
    launch.end_with(launcher)
    output = os.open(Path(folder, "output"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    env.meet_at(port)
    torch.set_num_threads(launch.threads_per_rank(env.local_world_size()))
    value = step(given)
    Path(folder, "value").write_text(json.dumps(value))
    sys.stdout.flush()
