"""What a GPU's kernels leave out after a failure cannot pass for a result, asked or not.

Ranks are threads that share one GPU. A call that does not ask the host (`unasked`) is what the
replay of a graph is; test_gpu_graphs.py replays real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_p2p
from moe_p2p import AllToAll, Dispatched
from tests.gpu.test_gpu import call
from tests.gpu.test_gpu_failures import settle
from tests.support import cases, gpu_ranks
from tests.support.cases import Wanted
from tests.support.gpu_ranks import HIDDEN_DIM, SOON_S, World
from tests.support.ranks import Rank

pytestmark = pytest.mark.gpu


@contextmanager
def unasked(comm: AllToAll) -> Iterator[None]:
    """Calls launch kernels whatever these have found, as the replay of a graph does."""
    assert comm._device is not None
    reported = comm._device._fault.clone()
    comm._device._fault.zero_()
    yield
    settle(comm)
    comm._device._fault.copy_(reported)


def assert_nothing_known(got: Dispatched) -> None:
    """Nothing of it can be taken for a row, or for a number of rows."""
    got = cases.on_cpu(got)
    assert (got.counts == -1).all()
    assert (got.offsets == 0).all()
    floats = [got.x, got.row_weights] + ([] if got.scales is None else [got.scales])
    assert all(values.float().isnan().all() for values in floats)
    assert all((cases.bits(extra) == 255).all() for extra in got.extras)
    assert got.source is not None
    assert (got.source == -1).all()
    assert got.row_topk is None or (got.row_topk == -1).all()
    if got.ranges is not None:  # from row 0 on, -1 of them
        assert (got.ranges == 0xFFFFFFFF).all()


def combined(comm: AllToAll, got: Dispatched, wanted: Wanted) -> Tensor:
    y = torch.ones_like(wanted.y[comm.rank])
    out = comm.combine(y=cases.on_device(comm, y), dispatched=got, out_dtype=wanted.out_dtype)
    assert isinstance(out, Tensor)
    settle(comm)
    return out.cpu()


def assert_raises_it_all(comm: AllToAll, text: str) -> None:
    for _ in range(2):
        with pytest.raises(moe_p2p.MoeP2pError) as error:
            comm.check()
        assert str(error.value) == comm.broken
        assert text in str(error.value)


def without_one(rank: Rank, world: World, wanted: list[Wanted]) -> None:
    """Rank 0 goes on without the last, which comes when it is too late."""
    lost = world.ranks - 1
    with gpu_ranks.make(rank, world, timeout_s=SOON_S) as comm:
        gpu_ranks.prepare(rank, comm, wanted)
        for step in wanted[:-1]:
            cases.run_step(comm, step)
        comm.check()
        arguments = cases.dispatch_arguments(comm, wanted[-1])
        if rank.rank != lost:
            got = comm.dispatch(**arguments)
            settle(comm)
            assert_nothing_known(got)
        gpu_ranks.meet(rank, "given up")
        if rank.rank == lost:
            comm.dispatch(**arguments)
            settle(comm)
        gpu_ranks.meet(rank, "too late")
        if rank.rank != lost:
            with unasked(comm):
                assert combined(comm, got, wanted[-1]).isnan().all()
                for _ in range(2):
                    again = comm.dispatch(**arguments)
                    settle(comm)
                    assert_nothing_known(again)
                    assert combined(comm, again, wanted[-1]).isnan().all()
            assert_raises_it_all(comm, "rank ")
        gpu_ranks.meet(rank, "reported")
        gpu_ranks.assert_device_usable()


LOST_FORMATS: dict[str, dict[str, Any]] = {
    "padded": {"layout": "padded", "with_ranges": True},
    "fp8": {"layout": "grouped", "quantize": True, "column_scales": True},
    "by_rank": {"layout": "by_rank"},
}


def beside_another(rank: Rank, world: World, wanted: Wanted) -> None:
    with gpu_ranks.make(rank, world, timeout_s=SOON_S) as comm:
        gpu_ranks.prepare(rank, comm, [wanted])
        cases.run_step(comm, wanted)
        assert comm._device is not None
        state = comm._device._state  # kernels/abi/params.h, DeviceState
        # As another kernel leaves it, all blocks of which have begun, and which has not ended. All
        # but its first block find this before they can see the fault.
        state[0] += 65536  # launches: kLaunch more
        state[1:3] = state[1:3].max()  # the step behind its own
        with unasked(comm):
            got = comm.dispatch(**cases.dispatch_arguments(comm, wanted))
            settle(comm)
            assert_nothing_known(got)
            assert combined(comm, got, wanted).isnan().all()
        assert comm.broken == ""
        # begun: 1 more; not aborted, as the combine of what is no handle has left it.
        state[3] += (1 << 32) - (state[3] & 1)
        comm.dispatch(**cases.dispatch_arguments(comm, wanted))
        settle(comm)
        assert_raises_it_all(comm, "began while another call of this communicator was running")
        gpu_ranks.assert_device_usable()


@pytest.mark.parametrize("form", ["padded", "by_rank"])
def test_a_call_beside_another_one_is_poisoned(form: str) -> None:
    world = World(1, 1)
    gpu_ranks.run(world, beside_another, call(world, 0, **LOST_FORMATS[form]))


@pytest.mark.parametrize("form", LOST_FORMATS)
@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (2, 1)))
def test_what_a_lost_rank_leaves_out_is_poisoned(world: World, form: str) -> None:
    options = LOST_FORMATS[form]
    gpu_ranks.run(world, without_one, [call(world, 0, **options), call(world, 2, **options)])


def combines_never(rank: Rank, world: World, wanted: Wanted) -> None:
    """The last rank stops between dispatch and combine: sums with its rows are lost, others not."""
    lost = world.ranks - 1
    with gpu_ranks.make(rank, world, timeout_s=SOON_S) as comm:
        gpu_ranks.prepare(rank, comm, [wanted])
        cases.run_step(comm, wanted)
        got = comm.dispatch(**cases.dispatch_arguments(comm, wanted))
        settle(comm)
        if rank.rank != lost:
            out = comm.combine(dispatched=got, **cases.combine_arguments(comm, wanted))
            settle(comm)
            mine, expected = wanted.tokens[rank.rank], wanted.out[rank.rank]
            first = lost * world.num_experts // world.ranks
            needs = (mine.topk_idx >= first).any(dim=1)
            assert needs.any()
            assert not needs.all()
            assert out.cpu()[needs].isnan().any(dim=1).all()
            assert torch.equal(out.cpu()[~needs], expected[~needs])
            assert_raises_it_all(comm, f"rank {lost}")
        gpu_ranks.meet(rank, "reported")
        gpu_ranks.assert_device_usable()


@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (2, 1)))
def test_sums_with_rows_of_a_lost_rank_are_poisoned(world: World) -> None:
    gpu_ranks.run(world, combines_never, call(world, 2))


def overflows(rank: Rank, world: World, wanted: Wanted, capacity: int) -> None:
    """Counts and offsets stay within the outputs of rank 0, then and in later replays."""
    expected = wanted.received[0]
    padded = wanted.options.get("layout", "padded") == "padded"
    needed = int(expected.counts.max() if padded else expected.offsets[-1])
    assert needed > capacity
    with gpu_ranks.make(rank, world, timeout_s=SOON_S) as comm:
        gpu_ranks.prepare(rank, comm, [wanted])
        cases.run_step(comm, wanted)
        arguments = cases.dispatch_arguments(comm, wanted)
        if rank.rank == 0:
            arguments["capacity"] = capacity
        live = comm.dispatch(**arguments)
        settle(comm)
        if rank.rank == 0:
            got = cases.on_cpu(live)
            rows = got.x.shape[0] * (got.x.shape[1] if padded else 1)
            assert (got.counts >= 0).all()
            assert (got.counts <= capacity).all()
            assert (got.offsets[1:] >= got.offsets[:-1]).all()
            assert (got.offsets <= rows).all()
            if wanted.options.get("layout") == "grouped":
                assert int((got.offsets[:-1] + got.counts).max()) <= rows
            if got.ranges is not None:
                begin, count = got.ranges >> 32, got.ranges & 0xFFFFFFFF
                assert (begin + count <= capacity).all()
            with unasked(comm):
                y = torch.ones(rows, HIDDEN_DIM, dtype=wanted.out_dtype)
                out = comm.combine(cases.on_device(comm, y), live)
                assert isinstance(out, Tensor)
                settle(comm)
                assert out.cpu().isnan().all()
                again = comm.dispatch(**arguments)
                settle(comm)
                assert_nothing_known(again)
            assert_raises_it_all(comm, f" needs {needed} rows, capacity is {capacity}")
        gpu_ranks.meet(rank, "reported")
        gpu_ranks.assert_device_usable()


@pytest.mark.parametrize("layout", ["padded", "grouped", "by_rank"])
def test_too_little_capacity_is_never_exceeded(layout: str) -> None:
    world = World(2, 2)
    options = {"with_ranges": True} if layout == "padded" else {}
    gpu_ranks.run(world, overflows, call(world, 2, layout=layout, **options), 2)
