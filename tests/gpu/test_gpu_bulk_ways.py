"""Other ways of kernels for few multiprocessors (moe_p2p/gpu/kernel_ways.py), bit for bit.

The calls are those of test_gpu_bulk.py; each test runs with one way of each part that is not the
present one, or with all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moe_p2p.gpu import launch_shape
from moe_p2p.gpu.kernel_ways import WAYS
from moe_p2p.gpu.kernels import Kernel
from tests.gpu.test_gpu import call, in_fp8, steps, to_one_expert
from tests.gpu.test_gpu_bulk import WIDE, unweighted, with_weights_of_one
from tests.gpu.test_gpu_calls import CHUNKED, LONG, LONG_COUNTS, chunks, halves
from tests.gpu.test_gpu_failures import SOON_S, settle
from tests.gpu.test_gpu_layouts import BY_RANK, columns, rows_of_every_type
from tests.gpu.test_gpu_mirror import calls as mirrored_calls
from tests.gpu.test_gpu_mirror import steps as mirrored_steps
from tests.support.cases import Wanted, dispatch_arguments, on_cpu
from tests.support.gpu_ranks import (
    DEVICE,
    MAX_TOKENS,
    PAYLOADS,
    Payload,
    World,
    compile_all,
    kernels_of,
    make,
    meet,
    prepare,
    run,
    worlds,
)
from tests.support.mirror_cases import key_of_world
from tests.support.ranks import Rank

pytestmark = pytest.mark.gpu

ALONE = [f"{part}={list(ways)[-1]}" for part, ways in WAYS.items()]
ALL = ",".join(ALONE)
OF_DISPATCH = [way for way in ALONE if way.startswith("dispatch_")]
# More tokens than the warps of a block route at once.
MANY: dict[str, Any] = {
    "max_tokens": 704,
    "chunk_tokens": 704,
    "hidden_dim": 16,
    "num_sms": 4,
    "extra_bytes": 0,
}


@pytest.fixture(scope="module", autouse=True)
def _every_step_in_bulk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_shape, "BULK_STEP", 0)
        if DEVICE != "cpu":
            compile_all(kernels_to_come())
        yield


def kernels_to_come() -> list[Kernel]:
    """Most kernels of the tests below: a rank would compile one after the other."""
    made = list[Kernel]()
    by_rank = [payload._replace(by_rank=True) for payload in PAYLOADS]
    wide = [Payload(torch.float8_e4m3fn), Payload(torch.bfloat16, quantize=True)]
    with pytest.MonkeyPatch.context() as patch:
        for world, ways in FEW:
            patch.setenv("MOE_P2P_KERNEL_SETTINGS", ways)
            made += kernels_of([(world, {})], by_rank)
            made += kernels_of([(world, WIDE)], [each._replace(by_rank=True) for each in wide])
            if ways == ALL:
                made += kernels_of([(world, WIDE)], wide[:1])
                made += kernels_of([(world, CHUNKED)], [PAYLOADS[0], by_rank[0]])
    return made


@pytest.fixture(name="ways")
def _ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    text = str(request.param)
    monkeypatch.setenv("MOE_P2P_KERNEL_SETTINGS", text)
    return text


def named(ways: str) -> str:
    return "all" if ways == ALL else ways.partition("=")[0]


def with_ways(*ways: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("ways", ways, ids=map(named, ways), indirect=True)


# Each way has kernels of its own for each world.
FEW = [*[(World(2, 2), way) for way in (*OF_DISPATCH, ALL)], (World(4, 4), ALL)]
of_dispatch_and_all = pytest.mark.parametrize(
    ("world", "ways"), FEW, ids=[f"{world}-{named(ways)}" for world, ways in FEW], indirect=["ways"]
)


@of_dispatch_and_all
def test_rows_by_rank_are_the_reference_bit_for_bit(world: World, ways: str) -> None:
    assert ways
    run(world, steps, rows_of_every_type(world), {})


def wide_rows(world: World) -> list[Wanted]:
    """Rows with scales that copies can carry, without scales, and quantized inside."""
    wide: dict[str, Any] = {"hidden_dim": 7168, "dtype": torch.bfloat16, **BY_RANK}
    counts = [MAX_TOKENS] * world.ranks
    return [
        call(world, 0, in_fp8(True), counts=counts, **wide),
        call(world, 2, in_fp8(False), counts=counts, **wide),
        call(world, 3, quantize=True, counts=counts, **wide),
        call(world, 0, in_fp8(True), counts=[1] * world.ranks, **wide),
        call(world, 2, in_fp8(True), counts=counts, **wide | {"layout": "grouped"}),
    ]


@of_dispatch_and_all
def test_rows_of_seven_thousand_values(world: World, ways: str) -> None:
    assert ways
    run(world, steps, wide_rows(world), WIDE)


@with_ways(ALL)
@pytest.mark.parametrize("world", worlds((2, 2)))
def test_scales_that_copies_cannot_store(world: World, ways: str) -> None:
    """In columns, and of one byte."""
    assert ways
    fields: dict[str, Any] = {"capacity": MAX_TOKENS * world.ranks + 1, **BY_RANK}
    quantized = fields | {"dtype": torch.bfloat16, "quantize": True}
    wanted = [
        call(world, 2, in_fp8(True), **fields),
        call(world, 2, **quantized, scale_format="power_of_two"),
        call(world, 0, **quantized, scale_format="ue8m0"),
    ]
    run(world, columns, wanted, False)


@with_ways("dispatch_routing=pieces,dispatch_counts=receiver", ALL)
@pytest.mark.parametrize("world", worlds((2, 2)))
def test_tokens_are_sent_before_others_are_routed(world: World, ways: str) -> None:
    assert ways
    many = {"hidden_dim": 16, "max_tokens": MANY["max_tokens"], "dtype": torch.bfloat16}
    for counts in ([704, 690], [5, 700]):
        wanted = [call(world, 0, counts=counts, **layout, **many) for layout in (BY_RANK, {})]
        run(world, steps, wanted, MANY)


@with_ways("combine_own=y", ALL)
@pytest.mark.parametrize("world", worlds((1, 1), (2, 2), (4, 4)))
def test_rows_of_own_tokens_come_from_y(world: World, ways: str) -> None:
    """By rank all of them; in other layouts those that are the only one of their slot."""
    assert ways
    wide: dict[str, Any] = {"hidden_dim": 7168, "dtype": torch.bfloat16, "topk": 6}
    wide["counts"] = [MAX_TOKENS] * world.ranks
    wanted = [
        call(world, 0, with_weights_of_one, layout="grouped", **wide),
        call(world, 1, with_weights_of_one, **BY_RANK, **wide),
        call(world, 2, with_weights_of_one, **wide),
        call(world, 3, to_one_expert(0), **BY_RANK, **wide),
    ]
    run(world, unweighted, wanted)


@with_ways(ALL)
@pytest.mark.parametrize("world", worlds((2, 2), (4, 4)))
def test_long_calls_run_in_chunks(world: World, ways: str) -> None:
    assert ways
    wanted = [
        call(world, 1, max_tokens=LONG, counts=LONG_COUNTS[::-1], **BY_RANK),
        call(world, 0, max_tokens=LONG, counts=LONG_COUNTS),
        call(world, 2, max_tokens=3, counts=[3, 0, 1, 2] * 2, **BY_RANK),
        call(world, 3, max_tokens=LONG, counts=[0] * 8, **BY_RANK),
        call(world, 4, to_one_expert(2), max_tokens=LONG, counts=LONG_COUNTS, **BY_RANK),
    ]
    run(world, chunks, wanted)


@with_ways(ALL)
@pytest.mark.parametrize("world", worlds((2, 2), (3, 3)))
def test_halves_of_two_steps_overlap(world: World, ways: str) -> None:
    assert ways
    wanted = [[call(world, 2 * i + j, **BY_RANK) for j in range(2)] for i in range(4)]
    run(world, halves, wanted)


@with_ways(ALL)
@pytest.mark.parametrize("partners", [World(1, 1), World(2, 2)], ids=("alone", "two"))
def test_rank_0_of_a_mirror_world(partners: World, ways: str) -> None:
    assert ways
    world = World(4, 4)
    run(partners, mirrored_steps, world, key_of_world(), mirrored_calls(world))


@with_ways(ALL)
@pytest.mark.parametrize("world", worlds((4, 4)))
def test_a_hundred_steps_of_changing_counts(world: World, ways: str) -> None:
    assert ways
    wanted = []
    for step in range(100):
        counts = [(step * 7 + rank * 11) % (MAX_TOKENS + 1) for rank in range(world.ranks)]
        change = to_one_expert(step % world.num_experts) if step % 20 == 3 else None
        wanted.append(call(world, step, change, counts=counts, **BY_RANK))
    run(world, steps, wanted, {}, deadline_s=100.0)


def without_a_flag(rank: Rank, world: World, wanted: Wanted) -> None:
    """Rank 0 gets counts of all ranks, and the slots of the last one but for one flag."""
    with make(rank, world, timeout_s=SOON_S) as comm:
        prepare(rank, comm, [wanted])
        assert comm._device is not None
        pending = comm.dispatch_send(**dispatch_arguments(comm, wanted))
        settle(comm)
        meet(rank, "sent")
        if rank.rank == 0:
            plan = comm.config.plan(world_size=world.ranks, ranks_per_node=world.per_node)
            regions, slots = world.ranks * 2, comm.config.steps_in_flight
            assert slots * world.ranks == regions
            memory: torch.Tensor = comm._device._memory  # type: ignore[attr-defined]
            first = -memory.data_ptr() % 4096 + plan["inbox"] // slots
            flags = memory[first : first + plan["inbox_flags"] // slots].view(torch.int32)
            of_last = flags.view(world.ranks, -1)[-1]
            assert of_last[2] == 1
            of_last[2] = 0
        got = comm.dispatch_recv(pending)
        text = settle(comm)
        if rank.rank == 0:
            assert f"rank {world.ranks - 1}" in text
            rows = on_cpu(got)
            assert torch.equal(rows.counts, wanted.received[0].counts)
            assert rows.x.isnan().all()
        meet(rank, "received")


@with_ways("dispatch_receive=place", ALL)
@pytest.mark.skipif(DEVICE != "cpu", reason="needs memory of the device that the host can write")
@pytest.mark.parametrize("world", worlds((2, 2)))
def test_a_slot_that_does_not_arrive_is_named(world: World, ways: str) -> None:
    assert ways
    run(world, without_a_flag, call(world, 2, **BY_RANK))
