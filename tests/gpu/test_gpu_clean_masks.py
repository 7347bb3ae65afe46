"""Masked ranks that are taken back on the same memory, on GPUs; captured graphs stay valid.

Ranks are threads that share one GPU (gpu_ranks.py).
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from moe_p2p import DispatchOptions, MoeP2pError
from tests.gpu.test_gpu_graphs import Inputs, call, capture, prepare_bf16
from tests.gpu.test_gpu_masks import masking, meet, regions_of
from tests.support import clean_cases as cases
from tests.support.cases import assert_received, finish, on_cpu
from tests.support.emulated_gpu import compute
from tests.support.gpu_ranks import LATER_S, MAX_TOKENS, World, make, run, worlds
from tests.support.mask_cases import masks_of, step
from tests.support.ranks import Rank

pytestmark = pytest.mark.gpu

EMULATED = "MOE_P2P_EMULATED_GPU" in os.environ


def body(rank: Rank, world: World, case: Any, fields: dict[str, Any]) -> None:
    with masking(rank, world, **fields) as comm:
        case(comm, lambda name: meet(rank, name, world.ranks))
        meet(rank, "done", world.ranks)


@pytest.mark.parametrize("steps_in_flight", [2, 3])
@pytest.mark.parametrize("world", worlds((2, 2), (3, 3)))
def test_ranks_that_made_different_calls_agree_again(world: World, steps_in_flight: int) -> None:
    run(world, body, cases.apart, {"steps_in_flight": steps_in_flight})


@pytest.mark.parametrize("world", worlds((2, 2)))
def test_open_calls_end(world: World) -> None:
    run(world, body, cases.halves, {})


@pytest.mark.parametrize("world", worlds((3, 3)))
def test_a_slow_rank_is_taken_back(world: World) -> None:
    run(world, body, cases.slow, {"timeout_s": LATER_S})


@pytest.mark.parametrize("world", worlds((3, 3)))
def test_who_calls_before_others_have_cleaned_masks_them(world: World) -> None:
    run(world, body, cases.not_cleaned, {"timeout_s": LATER_S})


def replayed(rank: Rank, world: World) -> None:
    """Each rank replays its graph alone, a different number of times, and then with all again."""
    others = [r for r in range(world.ranks) if r != rank.rank]
    with masking(rank, world) as comm:
        place = Inputs.make(MAX_TOKENS)

        given = place.arguments(MAX_TOKENS) | {"num_tokens": None}

        def pair() -> list[Any]:
            got = comm.dispatch(**given)
            y = torch.zeros_like(got.x)
            compute(lambda: torch.mul(got.x, 2, out=y))
            return [(got, comm.combine(y, got))]

        prepare_bf16(rank, comm)
        graph, ((live, out),) = capture(rank, pair)
        finish(comm)
        for time in range(3):
            meet(rank, f"alone {time}", world.ranks)
            comm.mask_ranks(others)
            for _ in range(1 + (rank.rank + time) % world.ranks * 5):
                graph.replay()
            finish(comm)
            cases.clean(comm)
            meet(rank, f"cleaned {time}", world.ranks)
            for seed in range(5):
                wanted = call(world, 5 * time + seed, all_count=True)
                place.set(wanted.tokens[rank.rank])
                graph.replay()
                finish(comm)
                assert_received(on_cpu(live), wanted.received[rank.rank])
                assert torch.equal(out.cpu(), wanted.out[rank.rank])
                step(comm, seed, [])  # and calls that are not captured
            assert masks_of(comm) == []
            comm.check()
        meet(rank, "done", world.ranks)


@pytest.mark.parametrize("world", worlds((2, 2), (3, 3)))
def test_a_captured_graph_stays_valid(world: World) -> None:
    run(world, replayed)


def header_alone(rank: Rank, world: World) -> None:
    """Of a rank that is lost within a step only the header came, and old flags fit the step.

    Steps are numbered from 1 << 40 on behind a clean, so the low halves of their numbers are those
    of the first steps. What rank 2 sent in one of these must not pass for what it sends now.
    """
    with masking(rank, world, timeout_s=LATER_S) as comm:
        slots = comm.config.steps_in_flight
        for seed in range(2 + 2 * slots):
            step(comm, seed % 2 + 4 * (seed // 2), [])  # no solo calls: a step each
        meet(rank, "all have combined", world.ranks)
        cases.clean(comm)
        meet(rank, "cleaned", world.ranks)
        if rank.rank != 2:
            inboxes = comm.config.plan(world_size=3, ranks_per_node=3)["inbox"] // slots // 3
            first = regions_of(comm, "inbox") + 2 * inboxes  # from rank 2, in step slot 0
            memory = comm._device._memory_bytes  # type: ignore[union-attr]
            at = first - memory.data_ptr()
            header = memory[at : at + 24].view(torch.int64)
            header[0] = (1 << 40) + slots + 1  # the next step: slot 0
            step(comm, 4, [2])
            assert masks_of(comm) == [2]
        meet(rank, "done", world.ranks)


@pytest.mark.skipif(not EMULATED, reason="writes to memory of an emulated GPU")
def test_flags_of_an_earlier_round_are_no_flags() -> None:
    run(World(3, 3), header_alone)


def refused(rank: Rank, world: World) -> None:
    with make(rank, world) as comm:
        with pytest.raises(MoeP2pError, match="has no masks"):
            comm.clean_masks()
        meet(rank, "without masks", world.ranks)
    with masking(rank, world) as comm:

        def clean() -> list[Any]:
            with pytest.raises(MoeP2pError, match="cannot be captured"):
                comm.clean_masks()
            got = comm.dispatch(**Inputs.make(MAX_TOKENS).arguments(MAX_TOKENS))
            return [(got, comm.combine(got.x * 2, got))]

        if comm._device is not None:
            comm._device.prepare_dispatch(torch.bfloat16, DispatchOptions(layout="grouped").number)
            comm._device.prepare_combine(torch.bfloat16, torch.bfloat16)
        meet(rank, "prepared bf16", world.ranks)
        from tests.gpu.test_gpu_graphs import record

        record(rank, "cleans", clean)
        step(comm, 0, [])
        meet(rank, "done", world.ranks)


@pytest.mark.parametrize("world", worlds((2, 2)))
def test_where_masks_are_not_cleaned(world: World) -> None:
    run(world, refused)
