"""Ranks on a GPU that are masked: the others go on without them, bit for bit as the reference does.

Ranks are threads that share one GPU but where one of them is killed (gpu_ranks.py).
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch

from moe_p2p import AllToAll, DispatchOptions
from moe_p2p.moe.gpu import lookout
from moe_p2p.moe.gpu.kernels import _NO_REGIONS
from tests.gpu.test_gpu import call
from tests.support import cases, gpu_ranks
from tests.support.cases import Wanted
from tests.support.emulated_gpu import EmulatedDevice
from tests.support.gpu_ranks import DEADLINE_S, LATER_S, Payload, World
from tests.support.mask_cases import (
    check_sums,
    expect_without,
    given_by,
    last_step,
    lose_before_backward,
    masks_of,
    step,
)
from tests.support.ranks import DiedError, Rank

pytestmark = pytest.mark.gpu
emulated = pytest.mark.skipif(
    "MOE_P2P_EMULATED_GPU" not in os.environ, reason="writes to memory of an emulated GPU"
)

STEPS = 21  # after a rank is gone
SHAPES = [(2, 2), (2, 1), (3, 3), (4, 1), (4, 4), (8, 8)]
PAYLOADS = [
    Payload(torch.float32),
    Payload(torch.float32, by_rank=True),
    Payload(torch.bfloat16, quantize=True),
]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    gpu_ranks.compile_ahead(
        [(World(*shape), {"mask_lost_ranks": True}) for shape in SHAPES], PAYLOADS
    )


def masking(rank: Rank, world: World, **overrides: Any) -> AllToAll:
    """With the kernels of mask_cases.step loaded: later that would wait for ranks that wait."""
    comm = gpu_ranks.make(rank, world, mask_lost_ranks=True, **overrides)
    if comm._device is not None:
        comm._device.prepare_dispatch(torch.float32, DispatchOptions(layout="by_rank").number)
    meet(rank, "made", world.ranks)
    return comm


def meet(rank: Rank, name: str, ranks: int) -> None:
    """Returns when so many ranks have come."""
    if rank.store.add(f"came to {name}", 1) == ranks:
        rank.store.set(name, "")
    rank.store.wait([name], timedelta(seconds=DEADLINE_S))


def all_there(rank: Rank, world: World, wanted: list[Wanted]) -> None:
    with masking(rank, world) as comm:
        gpu_ranks.prepare(rank, comm, wanted)
        for each in wanted:
            cases.run_step(comm, each)
        for seed in range(8):
            step(comm, seed, [])
        assert masks_of(comm) == []
        meet(rank, "done", world.ranks)


@pytest.mark.parametrize("world", gpu_ranks.worlds(*SHAPES))
def test_nothing_changes_while_all_are_there(world: World) -> None:
    options: list[dict[str, Any]] = [{}, {"dtype": torch.bfloat16, "quantize": True}]
    wanted = [call(world, seed, **each) for each in options for seed in range(3)]
    gpu_ranks.run(world, all_there, wanted)


def by_hand(rank: Rank, world: World) -> None:
    lost = world.ranks - 1
    with masking(rank, world, timeout_s=DEADLINE_S) as comm:
        for seed in range(3):
            step(comm, seed, [])
        meet(rank, "all have combined", world.ranks)  # a mask drops what is still on its way
        if rank.rank != lost:
            comm.mask_ranks([lost])
            for seed in range(3, 3 + STEPS):
                step(comm, seed, [lost])  # to wait once for who is lost would end the test
            assert masks_of(comm) == [lost]
        meet(rank, "done", world.ranks)


@pytest.mark.parametrize("world", gpu_ranks.worlds(*SHAPES))
def test_masks_set_by_hand_are_not_waited_for(world: World) -> None:
    gpu_ranks.run(world, by_hand)


def never_came(rank: Rank, world: World, lost: list[int]) -> None:
    if rank.rank in lost:
        return
    here = world.ranks - len(lost)
    more = {"mask_lost_ranks": True, "gone": lambda other: other in lost}
    with gpu_ranks.make(rank, world, **more) as comm:
        if comm._device is not None:
            comm._device.prepare_dispatch(torch.float32, DispatchOptions(layout="by_rank").number)
        meet(rank, "made", here)
        for seed in range(STEPS):
            step(comm, seed, lost)
        assert masks_of(comm) == lost
        meet(rank, "done", here)
    gpu_ranks.assert_device_usable()


@pytest.mark.parametrize("lost", [[0], [1], [2], [1, 2]], ids=str)
@pytest.mark.parametrize("world", gpu_ranks.worlds((3, 3), (4, 1)))
def test_ranks_that_never_came_are_masked(world: World, lost: list[int]) -> None:
    gpu_ranks.run(world, never_came, lost)


def slow(rank: Rank, world: World) -> None:
    """Rank 1 comes back in the middle of a step that the others have ended without it."""
    others = [r for r in range(world.ranks) if r != 1]
    gone = others if rank.rank == 1 else [1]
    with masking(rank, world, timeout_s=LATER_S) as comm:
        for seed in range(4):
            step(comm, seed, [])
        if rank.rank == 1:
            rank.store.wait([f"masked by {r}" for r in others], timedelta(seconds=DEADLINE_S))
        else:
            step(comm, 4, [1])
            assert masks_of(comm) == [1]
            rank.store.set(f"masked by {rank.rank}", "")
        if rank.rank == 1:
            last_step(comm, 4, [], others)  # they dispatched before they masked it
        for seed in range(5, 5 + STEPS):
            step(comm, seed, gone)
        assert masks_of(comm) == gone
        meet(rank, "done", world.ranks)
    gpu_ranks.assert_device_usable()


@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (2, 1), (4, 4), (4, 1)))
def test_a_slow_rank_is_masked_and_masks_the_others(world: World) -> None:
    gpu_ranks.run(world, slow)


def stops(rank: Rank, world: World, last_half: str) -> None:
    """Rank 1 makes nothing of step 8 behind this half."""
    with masking(rank, world, timeout_s=LATER_S) as comm:
        for seed in range(3):
            step(comm, seed, [])
        wanted = expect_without(comm, 8, [])
        if rank.rank != 1:
            if last_half == "combine_send":
                step(comm, 8, [])
            else:
                last_step(comm, 8, [], [1])
            for seed in range(9, 9 + STEPS):
                step(comm, seed, [1])
            assert masks_of(comm) == [1]
        elif last_half == "dispatch_send":
            comm.dispatch_send(**given_by(comm, 8))
        else:
            got = comm.dispatch(**given_by(comm, 8))
            if last_half == "combine_send":
                comm.combine_send(dispatched=got, **cases.combine_arguments(comm, wanted))
        meet(rank, "done", world.ranks)
    gpu_ranks.assert_device_usable()


@pytest.mark.parametrize("last_half", ["dispatch_send", "dispatch", "combine_send"])
@pytest.mark.parametrize("world", gpu_ranks.worlds((3, 3), (4, 1)))
def test_a_rank_stops_behind_a_half(world: World, last_half: str) -> None:
    gpu_ranks.run(world, stops, last_half)


def halves(rank: Rank, world: World) -> None:
    with masking(rank, world) as comm:
        step(comm, 0, [])
        meet(rank, "all have combined", world.ranks)
        if rank.rank != 0:
            comm.mask_ranks([0])
            for seed in range(1, 1 + STEPS):
                first = comm.dispatch_send(**given_by(comm, seed))
                second = comm.dispatch_send(**given_by(comm, seed + 1))
                got = comm.dispatch_recv(first)
                comm.release(second)
                check_sums(comm, got, expect_without(comm, seed, [0]), seed)
        meet(rank, "done", world.ranks)


@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (3, 3), (4, 1)))
def test_halves_in_flight_and_releases(world: World) -> None:
    gpu_ranks.run(world, halves)


def masked_after_sending(rank: Rank, world: World) -> None:
    """What each rank has sent is there, and is left out: the other one has masked it since."""
    other = 1 - rank.rank
    with masking(rank, world, timeout_s=DEADLINE_S) as comm:
        step(comm, 0, [])
        pending = comm.dispatch_send(**given_by(comm, 2))
        cases.finish(comm)
        meet(rank, "sent", world.ranks)
        comm.mask_ranks([other])
        live = comm.dispatch_recv(pending)
        cases.finish(comm)
        wanted = expect_without(comm, 2, [other])
        cases.assert_received(cases.on_cpu(live), wanted.received[rank.rank])
        check_sums(comm, live, wanted, 2)
        meet(rank, "done", world.ranks)


@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (2, 1)))
def test_what_a_masked_rank_has_sent_is_left_out(world: World) -> None:
    gpu_ranks.run(world, masked_after_sending)


def header_alone(rank: Rank, world: World) -> None:
    """Rank 2 ends when its dispatch has sent a header for two tokens, and no slot of them."""
    with masking(rank, world, timeout_s=LATER_S) as comm:
        for seed in range(4):  # five steps: solo calls open one each
            step(comm, seed, [])
        if rank.rank != 2:
            plan = comm.config.plan(world_size=3, ranks_per_node=3)
            regions = [size for name, size in plan.items() if name not in _NO_REGIONS]
            assert isinstance(comm._device, EmulatedDevice)
            inbox = (comm._device._memory_bytes.data_ptr() + 4095) // 4096 * 4096  # of step slot 0
            header = inbox + sum(regions) // 2 + 2 * (plan["inbox"] // 2 // 3)
            word = ctypes.c_uint64.from_address(header)  # RegionHeader of the last use of slot 1
            assert word.value == 3 + 1
            ctypes.c_uint32.from_address(header + 8).value = 2
            word.value = 5 + 1
            began = time.monotonic()
            for seed in range(4, 4 + STEPS):
                step(comm, seed, [2])
            assert time.monotonic() - began >= LATER_S
            assert masks_of(comm) == [2]
        meet(rank, "done", world.ranks)


def regions_of(comm: AllToAll, region: str) -> int:
    """Where those of an emulated rank begin, for step slot 0."""
    assert isinstance(comm._device, EmulatedDevice)
    plan = comm.config.plan(world_size=comm.world_size, ranks_per_node=comm.ranks_per_node)
    at = (comm._device._memory_bytes.data_ptr() + 4095) // 4096 * 4096
    for name, size in plan.items():
        if name == region:
            return at
        at += size // comm.config.steps_in_flight
    raise AssertionError(region)


def compile_halves(rank: Rank, world: World) -> None:
    """So that no rank compiles while others wait for it."""
    with masking(rank, world, timeout_s=60.0) as comm:
        step(comm, 12, [])
        got = comm.dispatch(**given_by(comm, 1))
        arguments = cases.combine_arguments(comm, expect_without(comm, 1, []))
        comm.combine_recv(comm.combine_send(dispatched=got, **arguments))
        cases.finish(comm)
        meet(rank, "compiled", world.ranks)


def impatient(rank: Rank, world: World) -> None:
    """Rank 2 is gone: its combine has come to rank 0 and not to rank 1.

    So rank 0 waits in the next step for both, and rank 1 in this one for rank 2, until a quarter
    of the deadline later.
    """
    timeout_s = 8.0
    compile_halves(rank, world)
    with masking(rank, world, timeout_s=timeout_s) as comm:
        try:
            got = comm.dispatch(**given_by(comm, 1))  # no tokens
            cases.finish(comm)
            if rank.rank != 2:
                wanted = expect_without(comm, 1, [2])
                pending = comm.combine_send(dispatched=got, **cases.combine_arguments(comm, wanted))
                cases.finish(comm)
            meet(rank, "sent", world.ranks)
            if rank.rank == 0:
                size = comm.config.plan(world_size=3, ranks_per_node=3)["partial_inbox"]
                header = regions_of(comm, "partial_inbox")
                one = size // comm.config.steps_in_flight // 3
                ctypes.memmove(header + 2 * one, header + one, 128)
            if rank.rank == 1:
                time.sleep(timeout_s / 4)
            if rank.rank != 2:
                comm.combine_recv(pending)
                cases.finish(comm)
                step(comm, 12, [2])
                assert masks_of(comm) == [2]
        finally:  # rank 2 waits for the others, also when one of them has failed
            meet(rank, "done", world.ranks)


@emulated
def test_a_rank_that_ends_within_its_sending_is_absent_as_a_whole() -> None:
    gpu_ranks.run(World(3, 3), header_alone)


@emulated
def test_a_rank_that_waits_for_a_lost_one_is_not_masked() -> None:
    gpu_ranks.run(World(3, 3), impatient)


def lost_before_backward(rank: Rank, world: World, by_rank: bool) -> None:
    with masking(rank, world) as comm:
        lose_before_backward(rank, comm, by_rank)


@pytest.mark.parametrize("by_rank", [False, True])
@pytest.mark.parametrize("world", gpu_ranks.worlds((3, 3)))
def test_a_rank_lost_before_a_backward_pass(world: World, by_rank: bool) -> None:
    gpu_ranks.run(world, lost_before_backward, by_rank)


def seen_to_end(rank: Rank, world: World, gone: list[int]) -> None:
    """Rank 1 makes no call any more, while the others wait in a kernel: as if its process ended."""
    with masking(rank, world, timeout_s=10 * DEADLINE_S) as comm:
        for seed in range(3):
            step(comm, seed, [])
        meet(rank, "all writes have come", world.ranks)
        if rank.rank != 1:
            threading.Timer(0.3, gone.append, [1]).start()
            for seed in range(3, 3 + STEPS):
                step(comm, seed, [1])
            assert masks_of(comm) == [1]
        meet(rank, "done", world.ranks)


@emulated
def test_kernels_that_wait_go_on_once_a_neighbours_end_is_seen() -> None:
    gone: list[int] = []
    with mock.patch.object(lookout, "call", return_value=gone):
        gpu_ranks.run(World(3, 3), seen_to_end, gone)


def killed(rank: Rank, world: World) -> float:
    lost = world.ranks - 1
    # Neighbours see its end: who waits for the deadline instead fails the test.
    timeout_s = LATER_S if world.per_node == 1 else 10 * DEADLINE_S
    comm = masking(rank, world, timeout_s=timeout_s)
    for seed in range(3):
        step(comm, seed, [])
    meet(rank, "all writes have come", world.ranks)  # who is killed takes his with him
    began = time.monotonic()
    if rank.rank == lost:
        comm.dispatch(**given_by(comm, 3))
        os.kill(os.getpid(), signal.SIGKILL)
    last_step(comm, 3, [], [lost])
    for seed in range(4, 4 + STEPS):
        step(comm, seed, [lost])
    assert masks_of(comm) == [lost]
    took = time.monotonic() - began
    meet(rank, "done", lost)
    comm.close()
    gpu_ranks.assert_device_usable()
    return took


# Without a device for each, processes take turns on one.
@pytest.mark.parametrize(
    "world",
    gpu_ranks.worlds((2, 2), (2, 1)) + gpu_ranks.worlds((4, 4), (4, 1), (8, 8), devices=True),
)
def test_a_process_that_is_killed_is_masked(world: World) -> None:
    lost = world.ranks - 1
    results = gpu_ranks.run(world, killed, processes=True, return_errors=True)
    assert isinstance(results[lost], DiedError), results
    assert all(isinstance(took, float) for took in results[:lost]), results
