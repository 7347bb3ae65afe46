"""Steps whose numbers do not fit in 32 bits, and words that were last written long before.

A communicator counts on from there: its counter and the headers of the steps before are set, flags
of slots and rows are as they were at the start. The emulated GPU only, whose memory is at hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moe_p2p import AllToAll
from moe_p2p.moe.gpu import launch_shape
from tests.gpu.test_gpu import call
from tests.gpu.test_gpu_late_weights import run_late
from tests.gpu.test_gpu_layouts import BY_RANK
from tests.support.cases import Wanted, run_step
from tests.support.gpu_ranks import DEVICE, World, make, meet, prepare, run
from tests.support.ranks import Rank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE != "cpu", reason="memory of regions is at hand on the emulated GPU"),
]

WORLD = World(2, 2)
FAR = {"2^31": 1 << 31, "2^32": 1 << 32}


def go_on_from(comm: AllToAll, step: int) -> None:
    """As if this rank had made `step` steps, of which all were combined and none had a token."""
    device, slots, local = comm._device, comm.config.steps_in_flight, comm.ranks_per_node
    assert device is not None
    device._state[1:3] = step  # DeviceState.next_step
    plan = comm.config.plan(world_size=comm.world_size, ranks_per_node=local)
    names = list(plan)[: list(plan).index("signals")]
    step_bytes = sum(plan[name] for name in names) // slots
    before = sum(plan[name] for name in names[: names.index("partial_inbox")]) // slots
    start = -device._memory_bytes.data_ptr() % 4096
    region_bytes = plan["partial_inbox"] // slots // local
    for last in range(step - slots, step):  # in its slot
        for source in range(local):
            at = start + last % slots * step_bytes + before + source * region_bytes
            device._memory_bytes[at : at + 8].view(torch.int64)[0] = last + 1  # RegionHeader.step


def far_steps(
    rank: Rank, world: World, first: int, wanted: list[Wanted], config: dict[str, Any]
) -> None:
    with make(rank, world, **config) as comm:
        prepare(rank, comm, wanted)
        go_on_from(comm, first)
        meet(rank, "there")
        for i, step in enumerate(wanted):
            (run_late if i % 2 else run_step)(comm, step)


def calls() -> list[Wanted]:
    return [
        call(WORLD, seed, counts=[12, 11], **(BY_RANK if seed == 4 else {})) for seed in range(6)
    ]


@pytest.fixture(name="way", params=["bulk", "registers"])
def way_of_rows(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "bulk":
            patch.setattr(launch_shape, "BULK_STEP", 0)
            yield {}
        else:  # with masks rows do not flag themselves
            yield {"mask_lost_ranks": True}


@pytest.mark.parametrize("far", FAR)
def test_words_of_long_ago_are_waited_for(far: str, way: dict[str, Any]) -> None:
    run(WORLD, far_steps, FAR[far] - 3, calls(), way)
