"""Rows that flag themselves (docs/gpu.md): words that would pass for none, and who shares a row.

Ranks are threads that share one GPU (gpu_ranks.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_p2p.moe import reference
from moe_p2p.moe.reference import Tokens
from tests.gpu.test_gpu import call, steps
from tests.support import cases
from tests.support.cases import Wanted
from tests.support.gpu_ranks import World, make, prepare, run, worlds
from tests.support.ranks import Rank

pytestmark = pytest.mark.gpu

WORLDS = worlds((1, 1), (2, 2), (4, 2))


def every_second_row_all_ones(x: Tensor) -> Tensor:
    x = x.clone()
    x.view(torch.uint8)[::2] = 0xFF
    return x


def of_all_ones(t: Tokens, rank: int) -> Tokens:
    return replace(t, x=every_second_row_all_ones(t.x))


def in_fp8_of_all_ones(t: Tokens, rank: int) -> Tokens:
    q, scales = reference.quantize(t.x)
    return replace(t, x=every_second_row_all_ones(q), scales=scales)


def assert_same(got: Tensor, wanted: Tensor) -> None:
    """Bit for bit, but that one NaN is as good as another."""
    got, wanted = got.float(), wanted.float()
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def nan_steps(rank: Rank, world: World, wanted: list[Wanted], after: list[Wanted]) -> None:
    with make(rank, world) as comm:
        prepare(rank, comm, [*wanted, *after])
        for step in wanted:
            live = comm.dispatch(**cases.dispatch_arguments(comm, step))
            cases.finish(comm)
            got, theirs = cases.on_cpu(live), step.received[rank.rank]
            filled = theirs.row_weights != 0
            assert_same(got.x[: len(theirs.x)][filled], theirs.x[filled])
            out = comm.combine(dispatched=live, **cases.combine_arguments(comm, step))
            cases.finish(comm)
            assert_same(out.cpu(), step.out[rank.rank])
        for step in after:
            cases.run_step(comm, step)


@pytest.mark.parametrize("world", WORLDS)
def test_rows_of_all_ones_arrive(world: World) -> None:
    options: dict[str, Any] = {"layout": "grouped", "counts": [9, 4, 12, 1]}
    wanted = [
        call(world, 0, of_all_ones, dtype=torch.bfloat16, **options),
        call(world, 1, of_all_ones, dtype=torch.float16, **options),
        call(world, 2, of_all_ones, **options),
        call(world, 3, in_fp8_of_all_ones, **options),
    ]
    assert any(t.x.float().isnan().any() for step in wanted for t in step.tokens)
    run(world, nan_steps, wanted, [call(world, seed, layout="grouped") for seed in range(3)])


def opaque_scales(rank: Rank, world: World, wanted: list[Wanted]) -> None:
    with make(rank, world) as comm:
        prepare(rank, comm, wanted)
        for i, step in enumerate(wanted):
            given = cases.dispatch_arguments(comm, step)
            ones = torch.full_like(given["scales"], -1, dtype=torch.int32)
            got = comm.dispatch(**(given | {"scales": ones}))
            cases.finish(comm)
            filled = step.received[rank.rank].row_weights != 0
            scales = cases.on_cpu(got).scales
            assert scales is not None
            assert scales.dtype == torch.int32
            assert bool((scales[: len(filled)][filled] == -1).all())
            comm.combine(dispatched=got, **cases.combine_arguments(comm, step))
            cases.finish(comm)
            cases.run_step(comm, wanted[i - 1])  # words were left as the next ones need them


@pytest.mark.parametrize("world", WORLDS)
def test_scales_of_the_callers_own_may_be_any_words(world: World) -> None:
    def fp8(t: Tokens, rank: int) -> Tokens:
        q, scales = reference.quantize(t.x)
        return replace(t, x=q, scales=scales)

    run(world, opaque_scales, [call(world, seed, fp8, layout="grouped") for seed in (0, 2, 4)])


@pytest.mark.parametrize("num_sms", [1, 2, 3, 7, 24])
def test_workers_that_are_fewer_than_the_parts_of_a_row(num_sms: int) -> None:
    world = World(2, 2)
    wide = {"hidden_dim": 7168, "dtype": torch.bfloat16}
    wanted = [call(world, seed, layout="grouped", **wide) for seed in range(4)]
    config = wide | {"max_tokens": 12, "extra_bytes": 0, "num_sms": num_sms}
    run(world, steps, wanted, config)
