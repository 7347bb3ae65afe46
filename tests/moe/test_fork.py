"""Processes that fork: a child has no part in the communicators and engines of its parent.

Each rank is a process of its own. What a child does must not show at its parent or at other ranks,
whether they are of its node (one node of 2) or of another one (2 nodes of 1).
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import moe_p2p
from moe_p2p import Engine, EngineConfig
from tests.support.cases import make, steps, text_of_loss
from tests.support.ranks import Rank, run_processes

CHILD_S = 20.0  # what a child may take at most; a parent that waits longer kills it


def in_child(act: Callable[[], object]) -> str:
    """What act() returns or raises in a forked child; it leaves as a program does that ends."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = str(act())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writer, answer.encode())
        atexit._run_exitfuncs()
        os._exit(0)
    os.close(writer)
    answer = "silent"
    if select.select([reader], [], [], CHILD_S)[0]:
        answer = os.read(reader, 4096).decode()
    ends = time.monotonic() + CHILD_S
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > ends:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"{answer}, and did not end"
        time.sleep(0.01)
    os.close(reader)
    return answer


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> int:
        gc.collect()
        return i


def put_one(queue: Any) -> None:
    gc.collect()
    queue.put(1)


def write_to_itself() -> str:
    """An engine made in the child works there."""
    with Engine(EngineConfig(transport="loopback", timeout_s=10)) as engine:
        source, target = torch.arange(64), torch.zeros(64, dtype=torch.int64)
        region = engine.resolve(engine.register(target).descriptor)
        engine.write(engine.register(source), region, imm=1).wait()
        engine.wait_imm(1, engine.num_nics)
        return str(torch.equal(source, target))


def shared_memory() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if f".{os.getpid()}." in name]


def forks(rank: Rank, ranks_per_node: int) -> None:
    comm: Any
    with make(rank, ranks_per_node=ranks_per_node) as comm:
        engine: Any = comm.engine
        steps(comm)
        if rank.rank == 0:
            objects = shared_memory()
            assert objects
            x, topk_idx = (
                torch.ones(2, comm.config.hidden_dim),
                torch.zeros(2, 3, dtype=torch.int64),
            )
            forked = f"of process {os.getpid()}, from which this one was forked"
            assert in_child(sys.exit) == "SystemExit: "
            assert in_child(comm.close) == "None"
            assert in_child(engine.close) == "None"
            assert in_child(lambda: (comm.closed, engine.closed)) == "(True, True)"
            assert in_child(lambda: comm.broken) == forked
            assert forked in in_child(lambda: repr(comm))
            for call in (
                lambda: comm.dispatch(x, topk_idx),
                lambda: comm.gather_counts(torch.ones(1, dtype=torch.int32)),
                lambda: engine.address,
                lambda: engine.imm_value(3),
            ):
                answer = in_child(call)
                assert answer.startswith("ClosedError: "), answer
                assert "belongs to its parent; make one here" in answer
            assert in_child(write_to_itself) == "True"
            assert shared_memory() == objects
        steps(comm)
        if rank.rank == 0:
            # Ranks are daemons of the test, which may have no children.
            multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
            loader = torch.utils.data.DataLoader(
                Numbers(), num_workers=2, multiprocessing_context="fork"
            )
            assert sum(int(i) for i in loader) == 28
            context = multiprocessing.get_context("fork")
            queue = context.Queue()
            process = context.Process(target=put_one, args=(queue,))
            process.start()
            assert queue.get(timeout=CHILD_S) == 1
            process.join(CHILD_S)
            assert process.exitcode == 0
            assert shared_memory() == objects
        steps(comm)


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_a_forked_child_leaves_its_parents_communicator_alone(ranks_per_node: int) -> None:
    run_processes(2, forks, ranks_per_node)


def is_collected(rank: Rank) -> None:
    """The last reference goes in the child; the parent still holds its own."""
    comm = make(rank)
    steps(comm)
    if rank.rank == 0:
        child = os.fork()
        if child == 0:
            del comm
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    steps(comm)
    comm.close()


def test_an_object_that_is_collected_in_a_child_stays_open() -> None:
    run_processes(2, is_collected)


def dies_with_a_child(rank: Rank, ranks_per_node: int) -> tuple[float, str]:
    comm = make(rank, ranks_per_node=ranks_per_node, timeout_s=60.0)
    steps(comm)
    if rank.rank == 0:
        child = os.fork()
        if child == 0:
            signal.pause()
        rank.store.set("child", str(child))
        os.kill(os.getpid(), signal.SIGKILL)
    child = int(rank.store.get("child"))
    began = time.monotonic()
    try:
        steps(comm)
    except moe_p2p.MoeP2pError as error:
        return time.monotonic() - began, f"{type(error).__name__}: {error}"
    finally:
        os.kill(child, signal.SIGKILL)
    return time.monotonic() - began, "never noticed"


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_a_rank_that_is_killed_is_missed_although_its_child_lives(ranks_per_node: int) -> None:
    results = run_processes(2, dies_with_a_child, ranks_per_node, return_errors=True)
    text_of_loss(results, 0)
