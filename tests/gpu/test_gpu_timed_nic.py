"""Kernels that store what goes to other nodes into the partners' memory, over the timed NIC."""

from __future__ import annotations

import pytest

from moe_p2p.bench import hops
from moe_p2p.moe.gpu import kernels
from tests.gpu.test_gpu import call, every_format, steps
from tests.gpu.test_gpu_calls import CHUNKED, LONG, LONG_COUNTS
from tests.gpu.test_gpu_late_weights import run_late
from tests.support.cases import Wanted, run_step
from tests.support.gpu_ranks import World, make, prepare, run, worlds
from tests.support.ranks import Rank

pytestmark = pytest.mark.gpu

TIMED = {"transport": "timed", "transport_settings": "flush=0", "nics_per_rank": 1}


@pytest.mark.parametrize("world", worlds((2, 1), (4, 2), (3, 1)))
def test_every_format_is_the_reference_bit_for_bit(world: World) -> None:
    run(world, steps, every_format(world), TIMED)


def test_long_calls_run_in_chunks() -> None:
    world = World(4, 2)
    wanted = [
        call(world, seed, max_tokens=LONG, counts=LONG_COUNTS[seed:] + LONG_COUNTS[:seed])
        for seed in range(2)
    ]
    run(world, steps, wanted, CHUNKED | TIMED)


def test_late_weights_go_the_same_way() -> None:
    world = World(4, 2)
    run(world, steps, [call(world, seed) for seed in range(4)], TIMED, run_late)


def stamped(rank: Rank, world: World, wanted: list[Wanted]) -> hops.Stamps:
    with make(rank, world, **TIMED) as comm:
        prepare(rank, comm, wanted)
        hops.times(comm)
        for step in wanted:
            run_step(comm, step)
        return hops.read(comm)


def test_kernels_and_proxies_note_when_they_get_there(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2, 1)
    monkeypatch.setitem(kernels.measuring, "MOE_P2P_STAMPS", 1)
    ranks = run(world, stamped, [call(world, seed) for seed in range(6)])
    for phase in range(2):  # one of them may be late: then the other's word is there before
        assert sum(stamps.far[phase] for stamps in ranks) > 2 * 2_700
    for stamps, other in zip(ranks, reversed(ranks), strict=True):
        assert all(ns > 0 for ns in stamps.kernels)
        assert all(ns >= 0 for ns in stamps.rings)
        for taken, published in zip(other.taken, stamps.published, strict=True):
            assert published - taken >= 2_700  # the link's latency


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world", worlds((2, 1), devices=True))
def test_every_format_between_gpus(world: World) -> None:
    run(world, steps, every_format(world), TIMED | {"num_sms": None}, processes=True)
