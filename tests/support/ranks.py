"""Runs a function once per rank, as threads of this process or as processes, before a deadline.

Threads are cheap and share a HashStore; processes are for tests that need isolation: a killed rank,
a process group, shared memory between address spaces. A fork server, itself a copy (warm.py),
starts them in milliseconds.

    def body(rank: Rank, hidden_dim: int) -> float: ...
    results = run_threads(4, body, 64)            # in rank order
    results = run_processes(4, body, 64)          # body is a function of a module, not a closure

    @on_ranks(4)                                  # a test of pytest on 4 threads
    def test_it(rank: Rank, dtype: torch.dtype) -> None: ...

A rank that raises makes the call raise RankError with the traceback of every failed rank. With
return_errors=True exceptions are returned instead of results.
"""

from __future__ import annotations

import faulthandler
import functools
import inspect
import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from tests.support import warm

DEADLINE_S = 200.0  # ends what hangs, also on a busy machine


@dataclass(frozen=True)
class Rank:
    """A rank's number, world and store, passed to its body."""

    rank: int
    world_size: int
    store: dist.Store


class StoreGroup:
    """The part of a ProcessGroup that buffers use, also for ranks that are threads."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank.rank

    def size(self) -> int:
        return self._rank.world_size

    def get_group_store(self) -> Store:
        store: Store = self._rank.store
        return store


class RankError(AssertionError):
    """Some ranks raised; the text has the traceback of each."""


class DiedError(Exception):
    """A rank's process ended without a result."""


def _with_traceback(error: BaseException) -> BaseException:
    """Attaches the traceback as text, so that it survives pickling."""
    error.__dict__["traceback"] = "".join(traceback.format_exception(error))
    return error


def _finish(results: list[Any], return_errors: bool) -> list[Any]:
    """return_errors: returns exceptions, but raises for failed assertions of the test itself."""
    unwanted = AssertionError if return_errors else BaseException
    failed = {r: e for r, e in enumerate(results) if isinstance(e, unwanted)}
    if failed:
        texts = [
            f"--- rank {r} ---\n{e.__dict__.get('traceback', repr(e))}" for r, e in failed.items()
        ]
        raise RankError("\n".join(texts))
    return results


def run_threads(
    world_size: int,
    body: Callable[..., Any],
    *arguments: Any,
    deadline_s: float = DEADLINE_S,
    return_errors: bool = False,
) -> list[Any]:
    """Runs body(Rank, *arguments) on one thread per rank; returns results in rank order."""
    store = dist.HashStore()
    results: list[Any] = [DiedError(f"did not return within {deadline_s} s")] * world_size

    def run(rank: int) -> None:
        try:
            results[rank] = body(Rank(rank, world_size, store), *arguments)
        except BaseException as error:
            results[rank] = _with_traceback(error)

    threads = [
        threading.Thread(target=run, args=(rank,), daemon=True, name=f"rank {rank}")
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    ends = time.monotonic() + deadline_s
    for thread in threads:
        thread.join(max(0.0, ends - time.monotonic()))
    alive = any(thread.is_alive() for thread in threads)
    if alive:
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    return _finish(results, return_errors and not alive)


def on_ranks(
    world_size: int, *, deadline_s: float = DEADLINE_S
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of a body for one rank, its first argument: it runs on a thread for each."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**given: Any) -> None:
            run_threads(world_size, functools.partial(body, **given), deadline_s=deadline_s)

        _, *others = inspect.signature(body).parameters.values()
        test.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        return test

    return decorate


@contextmanager
def repeated(step: Callable[[], object]) -> Iterator[None]:
    """Another thread makes one step after the other meanwhile."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            step()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _process(
    rank: int,
    world_size: int,
    port: int,
    pipe: Connection,
    call: bytes,
) -> None:
    # The fork server may be that of a command that ran within the tests: its processes begin with
    # SIGINT blocked (launch.start_fork_server), and what they send to themselves never arrives.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        body, arguments = torch.load(io.BytesIO(call), weights_only=False)
        outcome = body(Rank(rank, world_size, store), *arguments)
    except BaseException as error:
        outcome = _with_traceback(error)
    try:
        data = pickle.dumps(outcome)
    except Exception:
        data = pickle.dumps(DiedError(f"result cannot be pickled: {outcome!r}"))
    pipe.send_bytes(data)
    pipe.close()
    # Whatever a body left open must not reach the next test; atexit handlers still run.
    sys.stdout.flush()


def run_processes(
    world_size: int,
    body: Callable[..., Any],
    *arguments: Any,
    deadline_s: float = DEADLINE_S,
    return_errors: bool = False,
    fork: bool = False,
) -> list[Any]:
    """Runs body(Rank, *arguments) in one process per rank; returns results in rank order.

    A process that ends without a result (killed) counts as having raised DiedError. At the
    deadline all are killed. fork: copies of this process, which must have no threads of its own;
    saves importing torch for a server.
    """
    context: Any = multiprocessing.get_context("fork" if fork else "forkserver")
    if not fork:
        context.set_forkserver_preload(["moe_p2p", "pytest"])
        with warm.copies():
            forkserver.ensure_running()
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # As bytes: multiprocessing would pass each tensor as a file descriptor, and these run out.
    # By torch: pickle alone does not support fp8.
    call = io.BytesIO()
    torch.save((body, arguments), call)
    receivers: dict[Connection, int] = {}
    processes = []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_process,
            args=(rank, world_size, server.port, sender, call.getvalue()),
            daemon=True,
        )
        process.start()
        sender.close()
        receivers[receiver] = rank
        processes.append(process)
    results: list[Any] = [DiedError(f"did not return within {deadline_s} s")] * world_size
    ends = time.monotonic() + deadline_s
    while receivers and (ready := wait(list(receivers), max(0.0, ends - time.monotonic()))):
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = receivers.pop(receiver)
            try:
                results[rank] = pickle.loads(receiver.recv_bytes())
            except EOFError:
                results[rank] = DiedError("the process ended without a result")
    for process in processes:
        process.join(0.0 if receivers else max(0.0, ends - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    if receivers:
        late = ", ".join(str(rank) for rank in receivers.values())
        raise RankError(f"ranks {late} did not return within {deadline_s} s: {results}")
    return _finish(results, return_errors)


def cpu_count() -> int:
    return len(os.sched_getaffinity(0))
