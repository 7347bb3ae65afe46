"""Partial sums as 10-bit integers and in blocks of 16-bit values on a GPU, bit for bit as
the reference has them."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_p2p.moe import reference
from moe_p2p.moe.options import Partials, partials_of
from moe_p2p.moe.reference import Topology
from tests.gpu.test_gpu import call
from tests.gpu.test_gpu_calls import LONG, LONG_COUNTS
from tests.gpu.test_gpu_failures import settle
from tests.gpu.test_gpu_sum_order import summed_steps
from tests.moe.test_int10 import HIDDEN_DIM, KINDS, LAYOUTS, run_int10, with_specials
from tests.support import cases
from tests.support.cases import Wanted, combine_arguments, dispatch_arguments, finish
from tests.support.gpu_ranks import SOON_S, World, make, meet, prepare, run, worlds
from tests.support.ranks import Rank

pytestmark = pytest.mark.gpu


def sums(world: World, wanted: Wanted, kind: Partials, num_biases: int) -> list[Tensor]:
    return cases.sums_of(world.topology(), wanted, num_biases, combine_dtype=kind)


def check(world: World, wanted: list[Wanted], kind: Partials, **config: Any) -> None:
    wants = [sums(world, step, kind, i % 3) for i, step in enumerate(wanted)]
    take = functools.partial(run_int10, kind=kind)
    config["hidden_dim"] = HIDDEN_DIM
    run(world, summed_steps, wanted, wants, take, (False, partials_of(kind)), config)


def calls(world: World, dtype: torch.dtype, num: int = 4, **options: Any) -> list[Wanted]:
    return [
        call(
            world,
            seed,
            with_specials if seed == 3 else None,
            dtype=dtype,
            layout=LAYOUTS[seed % 3],
            hidden_dim=HIDDEN_DIM,
            **options,
        )
        for seed in range(num)
    ]


@pytest.mark.parametrize("world", worlds((1, 1), (2, 2), (2, 1), (4, 2), (4, 4)))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_those_of_the_reference(world: World, kind: Partials, dtype: torch.dtype) -> None:
    check(world, calls(world, dtype), kind)


# Steps of 300 tokens have flags of their own; steps of a masking communicator too.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", worlds((2, 2), (4, 2)))
@pytest.mark.parametrize("way", ["flags", "bulk", "masks", "chunks", "parts"])
def test_however_rows_arrive(kind: Partials, world: World, way: str) -> None:
    ways: dict[str, dict[str, Any]] = {
        "flags": {"max_tokens": 300, "chunk_tokens": 300},
        "bulk": {"max_tokens": 300, "chunk_tokens": 300, "num_sms": 8},
        "masks": {"mask_lost_ranks": True},
        "chunks": {"max_tokens": LONG, "chunk_tokens": 4},
        "parts": {"part_bytes": 2048},
    }
    if way == "masks" and world.per_node < world.ranks:
        world = World(2, 1)
    more: dict[str, Any] = {"max_tokens": LONG, "counts": LONG_COUNTS} if way == "chunks" else {}
    check(world, calls(world, torch.bfloat16, **more), kind, **ways[way])


def of_largest_numbers(topology: Topology, rank: int, received: reference.Received) -> Tensor:
    """Sums whose integers would have all bits set in a scale one less, as some of its code has."""
    y = cases.apply_experts(topology, rank, received)
    return torch.full_like(y, (2 - 2**-13) * 2.0**4)


@pytest.mark.parametrize("world", worlds((2, 2), (4, 2)))
def test_no_word_of_a_block_is_all_ones(world: World) -> None:
    """Such a word would be one that never arrives, or NaN."""

    def weigh(tokens: reference.Tokens, _rank: int) -> reference.Tokens:
        return replace(tokens, topk_weights=torch.ones(tokens.topk_idx.shape))

    more: dict[str, Any] = {"hidden_dim": HIDDEN_DIM, "experts": of_largest_numbers}
    check(world, [call(world, 0, weigh, layout="grouped", **more)], "block16")


def combines_never(
    rank: Rank, world: World, wanted: Wanted, want: list[Tensor], kind: Partials
) -> None:
    """The last rank stops between dispatch and combine: sums with its rows are NaN, others not."""
    lost = world.ranks - 1
    with make(rank, world, hidden_dim=HIDDEN_DIM, timeout_s=SOON_S) as comm:
        if comm._device is not None:
            comm._device.prepare_combine(torch.float32, torch.float32, False, partials_of(kind))
        prepare(rank, comm, [wanted])
        run_int10(comm, wanted, want, kind=kind, num_biases=0)
        got = comm.dispatch(**dispatch_arguments(comm, wanted))
        finish(comm)
        if rank.rank != lost:
            back = combine_arguments(comm, wanted, partials=kind)
            out = comm.combine(dispatched=got, **back)
            settle(comm)
            first = lost * world.num_experts // world.ranks
            needs = (wanted.tokens[rank.rank].topk_idx >= first).any(dim=1)
            assert needs.any()
            assert not needs.all()
            assert out.cpu()[needs].isnan().all()
            assert torch.equal(out.cpu()[~needs], want[rank.rank][~needs])
            with pytest.raises(TimeoutError, match=f"rank {lost}"):
                comm.check()
        meet(rank, "reported")


@pytest.mark.parametrize("world", worlds((2, 2), (2, 1)))
@pytest.mark.parametrize("kind", KINDS)
def test_sums_with_rows_of_a_lost_rank_are_poisoned(world: World, kind: Partials) -> None:
    wanted = call(world, 2, hidden_dim=HIDDEN_DIM, layout="grouped")
    run(world, combines_never, wanted, sums(world, wanted, kind, 0), kind)
