"""vLLM 0.33's ElasticEPScalingExecutor, EplbState with its async worker, stateless groups and
NixlEPAll2AllManager over moe_p2p.nixl_ep and the EPLB communicator, on CPU ranks: grow, shrink,
lose a rank, replace it. vllm_elastic.py lists what is replaced for want of CUDA.

The executor's methods are called as elastic_state.py calls them, in its order. It has none for a
rank that is lost: its shrink is collective over the ranks that go. What the test leaves out of it
then is the move of experts (`perform_scale_down_eplb_reshuffle`).
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

from tests.engines import vllm_elastic as elastic
from tests.engines.vllm_elastic import EACH, HASH, LAYERS, LOGICAL, MOST, Worker
from tests.support.ranks import DiedError, Rank, run_processes

pytestmark = [pytest.mark.engine("vllm"), pytest.mark.timeout(400)]


def together(rank: Rank, name: str, count: int) -> None:
    if rank.store.add(f"came to {name}", 1) == count:
        rank.store.set(name, "")
    rank.store.wait([name])


def prepare(worker: Worker, name: str, size: int, steps: range, **lost: Any) -> None:
    """In the executor's thread, beside steps of the ranks that are there."""
    key = worker.executor.start_async("prepare_reconfiguration", worker.request(name, size), True)
    for step in steps:
        worker.model_runner.step(step, **lost)
    port = worker.executor.reconfig_request.coord_store_port
    assert key.endswith(f"/{worker.rank}/{worker.rank}")
    elastic.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False).wait([key])
    worker.executor.clear_async()


def moves(worker: Worker, steps: range) -> int:
    """Steps while experts move in EPLB's thread. Returns in how many of them they still moved."""
    state = worker.model_runner.eplb_state.model_states[HASH]
    beside = 0
    for step in steps:
        beside += state.rebalanced
        worker.model_runner.step(step)
    while state.rebalanced:
        worker.model_runner.eplb_state.step()
    return beside


def grow(worker: Worker, rank: Rank, name: str, size: int, first: int) -> None:
    prepare(worker, name, size, range(first, first + 3))
    together(rank, name, size)
    worker.executor.commit_scale_up(True)
    after(worker, size, range(first + 3, first + 9))


def come(rank: Rank, seat: int, name: str, size: int, first: int) -> Worker:
    worker = Worker(rank, seat, size)
    worker.join(name, size)
    worker.model_runner.load(size, dummy=True)
    worker.executor.prepare_new_worker()
    assert bool((worker.model_runner.model.gate == 3).all())  # from a rank that was there
    worker.executor.warmup_new_worker()
    assert worker.model_runner.alone == [elastic.TOKENS] * LAYERS
    together(rank, name, size)
    worker.executor.commit_scale_up(False)
    after(worker, size, range(first + 3, first + 9))
    return worker


def after(worker: Worker, size: int, steps: range) -> None:
    """Nobody is masked, experts move, and each has its slots."""
    assert not worker.model_runner.manager.query_fault()
    assert moves(worker, steps) >= LAYERS
    members(worker, size)
    all_have_slots(worker.model_runner.placement(), size)


def all_have_slots(placement: list[list[int]], size: int) -> None:
    for experts in placement:
        assert len(experts) == size * EACH
        assert set(experts) == set(range(LOGICAL))


def members(worker: Worker, size: int, lost: tuple[int, ...] = ()) -> None:
    from vllm.distributed.parallel_state import get_ep_group

    manager = get_ep_group().device_communicator.all2all_manager
    worker.model_runner.manager = manager
    assert manager.world_size == get_ep_group().world_size == size
    masked = manager.query_active_mask().nonzero().flatten().tolist()
    assert masked == list(lost)
    buffer, everyone = manager._buffer, torch.zeros(MOST, dtype=torch.int32)
    assert (buffer.connected_ep_size, buffer.active_ep_size) == (size, size)
    buffer.buffer.query_mask_buffer(everyone)
    assert everyone.nonzero().flatten().tolist() == [*lost, *range(size, MOST)]
    assert worker.vllm_config.parallel_config.data_parallel_size == size


def live(rank: Rank) -> str:
    elastic.begin()
    seat = min(rank.rank, MOST - 1)  # the last process takes the lost one's seat
    if rank.rank == MOST:
        rank.store.wait(["seat 3 is lost"])
        worker = come(rank, seat, "replaced", MOST, 24)
    else:
        if seat < 2:
            worker = Worker(rank, seat, 2)
            worker.join("begins", 2)
            worker.model_runner.load(2, dummy=False)
            for step in range(3):
                worker.model_runner.step(step)
            grow(worker, rank, "grown", MOST, 3)
        else:
            worker = come(rank, seat, "grown", MOST, 3)
        together(rank, "all have grown", MOST)
        if seat == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        lose(worker, rank)
        grow(worker, rank, "replaced", MOST, 24)
    # Ranks 2 and 3 leave.
    executor = worker.executor
    if seat < 2:
        prepare(worker, "small", 2, range(33, 36))
    else:
        for step in range(33, 36):
            worker.model_runner.step(step)
    together(rank, "small", MOST)
    executor.commit_scale_down(2, removing=seat >= 2)
    if seat >= 2:
        executor.shutdown()
        return "left"
    members(worker, 2)
    for step in range(36, 40):
        worker.model_runner.step(step)
    all_have_slots(worker.model_runner.placement(), 2)
    executor.shutdown()
    return "done"


def lose(worker: Worker, rank: Rank) -> None:
    """Rank 3 is killed: steps go on, then three ranks are a world."""
    manager = worker.model_runner.manager
    for step in range(12, 15):
        worker.model_runner.step(step, frozenset({3}))
    assert manager.query_fault()
    members(worker, MOST, lost=(3,))
    if rank.rank == 0:
        rank.store.set("seat 3 is lost", "")
    prepare(worker, "smaller", 3, range(15, 18), lost=frozenset({3}))
    together(rank, "smaller", 3)
    retired = worker.executor.switch_and_prepare()
    worker.executor._start_group_cleanup(retired)
    members(worker, 3)
    keep_what_is_left(worker)
    for step in range(18, 24):
        worker.model_runner.step(step)


def keep_what_is_left(worker: Worker) -> None:
    """The map of the slots that are left, in which each expert still has one."""
    from vllm.distributed.eplb import eplb_state

    state = worker.model_runner.eplb_state.model_states[HASH]
    left = state.physical_to_logical_map.clone()
    all_have_slots(left.tolist(), 3)
    eplb_state._commit_eplb_maps(state, left)


def test_its_executor_grows_loses_a_rank_replaces_it_and_shrinks() -> None:
    results = run_processes(MOST + 1, live, return_errors=True, deadline_s=340)
    assert isinstance(results.pop(3), DiedError), results
    assert results == ["done", "done", "left", "left"], [
        getattr(each, "__dict__", {}).get("traceback", each) for each in results
    ]
