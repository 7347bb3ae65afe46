"""Arrivals from other nodes that kernels see in their own memory (EngineConfig.arrivals).

The software NIC stores flags where a CPU can store to the GPU's memory, so most of it is for the
emulated GPU; a real one is told what it lacks.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest
import torch

from moe_p2p import InvalidArgumentError, UnavailableError
from tests.gpu.test_gpu import call, every_format, steps
from tests.gpu.test_gpu_calls import CHUNKED, LONG, LONG_COUNTS
from tests.gpu.test_gpu_late_weights import run_late
from tests.support.cases import Wanted, run_step
from tests.support.gpu_ranks import World, make, prepare, run, worlds
from tests.support.ranks import Rank

pytestmark = pytest.mark.gpu
emulated = pytest.mark.skipif(
    "MOE_P2P_EMULATED_GPU" not in os.environ, reason="needs GPU memory that a CPU can store to"
)
WAYS = ["write", "gdrcopy"]


def fields(way: str, seed: int = 0) -> dict[str, Any]:
    """Fields of a configuration whose ranks see arrivals this way."""
    if way == "gdrcopy":
        from tests.support import emulated_gpu

        emulated_gpu.gdrcopy()
    return {
        "transport_settings": f"arrival_flags={way},seed={seed}"
        + (",ordered=1" if way == "write" else ""),
        "nics_per_rank": 3,
    }


@emulated
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", worlds((2, 1), (4, 2), (3, 1)))
def test_every_format_is_the_reference_bit_for_bit(world: World, way: str) -> None:
    run(world, steps, every_format(world), fields(way))


@emulated
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(1, 4))
def test_a_hostile_network_changes_nothing(seed: int, way: str) -> None:
    world = World(4, 2) if seed == 2 else World(3, 1)
    wanted = [call(world, step, dtype=torch.float32) for step in range(15)]
    run(world, steps, wanted, fields(way, seed) | {"part_bytes": 1 if seed == 3 else 2 << 20})


@emulated
@pytest.mark.parametrize("way", WAYS)
def test_long_calls_run_in_chunks(way: str) -> None:
    world = World(2, 1)
    wanted = [
        call(world, seed, max_tokens=LONG, counts=(LONG_COUNTS[seed:] + LONG_COUNTS[:seed])[:2])
        for seed in range(2)
    ]
    run(world, steps, wanted, CHUNKED | fields(way, 5))


@emulated
@pytest.mark.parametrize("way", WAYS)
def test_ranks_with_masks_see_them_too(way: str) -> None:
    world = World(3, 1)
    wanted = [call(world, step, dtype=torch.float32) for step in range(6)]
    run(world, steps, wanted, fields(way, 2) | {"mask_lost_ranks": True})


def late_weights(rank: Rank, world: World, wanted: list[Wanted], way: str) -> str:
    with make(rank, world, **fields(way, 4)) as comm:
        prepare(rank, comm, wanted)
        for number, step in enumerate(wanted):
            (run_late if number % 2 else run_step)(comm, step)
        return comm.arrival_flags


@emulated
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", worlds((2, 1), (4, 2)))
def test_late_weights_are_relayed_between_them(world: World, way: str) -> None:
    assert set(run(world, late_weights, [call(world, s) for s in range(8)], way)) == {way}


def lone(rank: Rank, world: World, config: dict[str, Any]) -> str:
    with make(rank, world, **config) as comm:
        return comm.arrival_flags


def has_gdrcopy() -> bool:
    """The machine's, or the stand-in where an earlier test of this process has loaded it."""
    try:
        library = ctypes.CDLL("libgdrapi.so.2")
    except OSError:
        return False
    library.gdr_open.restype = ctypes.c_void_p
    opened = library.gdr_open()
    if opened:
        library.gdr_close(ctypes.c_void_p(opened))
    return bool(opened)


def test_without_anything_that_orders_it_is_relayed() -> None:
    way = "gdrcopy" if has_gdrcopy() else "relay"
    assert run(World(2, 1), lone, {}) == [way] * 2
    assert run(World(2, 2), lone, {}) == ["none"] * 2


def refused(rank: Rank, world: World, config: dict[str, Any], text: str) -> None:
    with pytest.raises(UnavailableError, match=text):
        make(rank, world, **config)


def test_what_cannot_be_is_refused_by_all_ranks() -> None:
    run(
        *(World(2, 1), refused, {"transport_settings": "arrival_flags=write"}),
        "arrival_flags=write: rank 0: its NICs do",
    )
    if "MOE_P2P_EMULATED_GPU" not in os.environ:
        ordered = {"transport_settings": "arrival_flags=write,ordered=1"}
        run(World(2, 1), refused, ordered, "a CPU can store to")


def differing(rank: Rank, world: World) -> None:
    way = "relay" if rank.rank else "auto"
    with pytest.raises(InvalidArgumentError, match="arrival_flags"):
        make(rank, world, transport_settings=f"arrival_flags={way}")


def test_ranks_that_differ_are_refused_by_name() -> None:
    run(World(2, 1), differing)
