"""A rank on a GPU that kernels wait for is named long before their deadline, by a thread beside."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import pytest

import moe_p2p
from moe_p2p import AllToAll
from moe_p2p.moe.counts import Counts, OnDevice
from moe_p2p.moe.gpu.watch import Watch
from tests.gpu.test_gpu import call
from tests.support import cases, gpu_ranks
from tests.support.cases import Wanted
from tests.support.gpu_ranks import DEADLINE_S, LATER_S, World
from tests.support.ranks import Rank

pytestmark = pytest.mark.gpu


def times_named(comm: AllToAll) -> list[int]:
    return [times for _, times in Counts.of(comm._comm).waits]


def one_is_late(
    rank: Rank, world: World, at: str, comms: list[AllToAll], wanted: list[Wanted]
) -> list[int]:
    """The last rank makes its second dispatch, or combine, once the others have named it."""
    late = world.ranks - 1
    with gpu_ranks.make(rank, world, timeout_s=2 * LATER_S) as comm:
        gpu_ranks.prepare(rank, comm, wanted)
        comms[rank.rank] = comm
        cases.run_step(comm, wanted[0])
        gpu_ranks.meet(rank, "the first step")

        def is_named() -> bool:
            return all(any(times_named(each)) for each in comms[:late])

        def linger(when: str) -> None:
            ends = time.monotonic() + DEADLINE_S
            while rank.rank == late and when == at and not is_named():
                assert time.monotonic() < ends
                time.sleep(0.01)

        linger("dispatch")
        got = comm.dispatch(**cases.dispatch_arguments(comm, wanted[1]))
        linger("combine")
        comm.combine(got.x, got)
        cases.finish(comm)
        times = times_named(comm)
        gpu_ranks.meet(rank, "all have combined")
        cases.run_step(comm, wanted[2])
        text = moe_p2p.prometheus_text(comm)
        gpu_ranks.meet(rank, "read")
        # Two kernels of a step, none of which the host has to have launched: three steps are over.
        assert re.search(r"^moe_p2p_moe_kernels_total\{.*\} 6$", text, re.MULTILINE), text
        assert re.search(r'^moe_p2p_moe_calls_total\{.*call="combine"\} 3$', text, re.MULTILINE)
    return times


@pytest.mark.parametrize("at", ["dispatch", "combine"])
@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (2, 1), (4, 2)))
def test_a_rank_that_is_late_is_named_once(
    world: World, at: str, capfd: pytest.CaptureFixture[str]
) -> None:
    comms: list[Any] = [None] * world.ranks
    found = gpu_ranks.run(world, one_is_late, at, comms, [call(world, seed) for seed in range(3)])
    late = world.ranks - 1
    lines = capfd.readouterr().err.splitlines()
    for rank in range(late):
        # Sums of a node come from the partner, whose node waits for the late rank.
        who = late if at == "dispatch" or rank // world.per_node == late // world.per_node else (
            late - (late - rank) % world.per_node
        )  # fmt: skip
        assert found[rank] == [int(other == who) for other in range(world.ranks)]
        own = [line for line in lines if re.search(rf"\] rank {rank} (on \S+ has|goes)", line)]
        assert len(own) == 2, lines
        named = rf"rank {rank} on \S+ has waited \d+ ms, of at most \d+, for rank {who} on \S+:"
        assert re.search(f"{named} a kernel of step 1 has begun here, and not there", own[0])
        assert re.search(rf"rank {rank} goes on after \d+ ms: rank {who} came", own[1])
    assert found[late] == [0] * world.ranks


class Told:
    """A device whose words are given."""

    def __init__(self) -> None:
        self.run(0)

    def run(self, kernels: int) -> None:
        self.seen = OnDevice(kernels, next_step=(kernels + 1) // 2, masked=[])


def watched(
    rank: Rank, world: World, devices: list[Told], watches: list[Watch], met: threading.Barrier
) -> None:
    """Two ranks of a node, whose watches look when they are asked to."""
    with gpu_ranks.make(rank, world, timeout_s=DEADLINE_S) as comm:
        if comm._device is not None and comm._device._watch is not None:
            comm._device._watch.close()
        device = devices[rank.rank]
        watch = Watch(rank.rank, 4e6, lambda: comm._comm, lambda: device.seen, by_kernel=True)
        watches[rank.rank] = watch
        try:
            met.wait(DEADLINE_S)
            if rank.rank == 0:
                name_what_is_late(comm, devices, watches)
            met.wait(DEADLINE_S)
        finally:
            watch.close()


def name_what_is_late(comm: AllToAll, devices: list[Told], watches: list[Watch]) -> None:
    now = 0.0

    def pass_time(seconds: float) -> int:
        nonlocal now
        now += seconds
        for watch in reversed(watches):
            watch.look(now)
        return times_named(comm)[1]

    assert pass_time(100) == pass_time(100) == 0  # nothing has begun
    for each in devices:
        each.run(3)
    assert pass_time(0) == pass_time(100) == 0  # both idle
    devices[0].run(4)
    assert pass_time(0) == pass_time(4.9) == 0
    assert pass_time(0.2) == pass_time(100) == 1  # once
    devices[1].run(4)
    assert pass_time(1) == pass_time(100) == 1
    devices[0].run(5)
    with watches[1].prepares():
        assert pass_time(0) == pass_time(100) == 1  # it compiles
    assert pass_time(0) == 2  # and was no faster afterwards
    devices[0].run(6)  # which cannot be without rank 1
    assert pass_time(0) == 2


def test_who_is_as_far_or_compiles_is_not_named(capfd: pytest.CaptureFixture[str]) -> None:
    world = World(2, 2)
    given = [Told(), Told()], [None, None], threading.Barrier(2)
    gpu_ranks.run(world, watched, *given)
    err = capfd.readouterr().err
    assert len(re.findall(r"rank 0 on \S+ has waited 5100 ms, of at most", err)) == 1
    assert len(re.findall(r"rank 0 on \S+ has waited", err)) == 2
    assert re.findall(r"rank 0 goes on after (\d+) ms: rank 1 came", err) == ["106100", "100000"]
