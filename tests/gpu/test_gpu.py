"""Dispatch and combine on a GPU, bit for bit as the reference has them: types, shapes, counts.

Ranks are threads that share one GPU (gpu_ranks.py); test_gpu_processes.py runs the same bodies with
a GPU per rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_p2p import AllToAll
from moe_p2p.moe import reference
from moe_p2p.moe.reference import Tokens
from tests.support import gpu_ranks
from tests.support.cases import TOPK, Wanted, expect, make_tokens, run_step
from tests.support.gpu_ranks import HIDDEN_DIM, MAX_TOKENS, Payload, World
from tests.support.ranks import Rank

pytestmark = pytest.mark.gpu

ALL_WORLDS = [
    (1, 1), (2, 2), (2, 1), (4, 2), (4, 1), (4, 4), (8, 4), (8, 2), (8, 8), (3, 3), (6, 3), (6, 2),
]  # fmt: skip
FEW_WORLDS = [(2, 2), (2, 1), (4, 2)]
# Tokens of rank r in step s: all of them somewhere, none at some ranks, at all, one, the most.
COUNTS = [
    [5, 3, 0, 12, 1, 7, 2, 9], [0] * 8, [12] * 8, [0, 0, 0, 1, 0, 0, 0, 0], [1] * 8,
]  # fmt: skip
# Fields of the configuration that change what is compiled.
SHAPES: dict[str, tuple[World, dict[str, Any]]] = {
    "one expert for each token": (World(4, 2), {"topk": 1}),
    "thirty-two experts for each token": (World(4, 2), {"topk": 32, "num_experts": 40}),
    "all experts": (World(2, 1), {"topk": 8, "num_experts": 8}),
    "a thousand experts": (World(4, 2), {"num_experts": 1024}),
    "experts anywhere": (World(3, 1), {"num_experts": 7, "expert_rank": (2, 0, 0, 2, 0, 2, 0)}),
    "experts anywhere on one node": (
        World(4, 4),
        {"num_experts": 9, "expert_rank": (3, 3, 1, 3, 0, 3, 1, 3, 0)},
    ),
    "rows of one line": (World(4, 2), {"hidden_dim": 16}),
    "three steps in flight": (World(4, 2), {"steps_in_flight": 3}),
    "parts of three tokens": (World(4, 2), {"part_bytes": 1}),
    "parts of some tokens": (World(3, 1), {"part_bytes": 1500, "num_experts": 9}),
}
Change = Callable[[Tokens, int], Tokens]  # (tokens, rank) -> tokens


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    gpu_ranks.compile_ahead([(World(*shape), {}) for shape in ALL_WORLDS])
    gpu_ranks.compile_ahead(SHAPES.values(), [Payload(torch.float32), Payload(torch.float32, True)])


def call(world: World, seed: int, change: Change | None = None, **options: Any) -> Wanted:
    """A call of all ranks; options: dtype and hidden_dim, of the topology, and of dispatch."""
    dtype = options.pop("dtype", torch.float32)
    hidden_dim = options.pop("hidden_dim", HIDDEN_DIM)
    topk = options.pop("topk", TOPK)
    counts = options.pop("counts", COUNTS[seed % len(COUNTS)])
    fields = {k: options.pop(k) for k in ("num_experts", "expert_rank") if k in options}
    topology = world.topology(**fields)
    tokens = [
        make_tokens(
            seed,
            rank,
            counts[rank],
            dtype=dtype,
            topk=topk,
            num_experts=topology.num_experts,
            hidden_dim=hidden_dim,
        )
        for rank in range(world.ranks)
    ]
    if change is not None:
        tokens = [change(t, rank) for rank, t in enumerate(tokens)]
    return expect(topology, tokens, **({"max_tokens": MAX_TOKENS} | options))


def in_fp8(with_scales: bool) -> Change:
    def change(t: Tokens, rank: int) -> Tokens:
        q, scales = reference.quantize(t.x)
        return replace(t, x=q, scales=scales if with_scales else None)

    return change


def with_extras(t: Tokens, rank: int) -> Tokens:
    """Three extras, of 24, 1 and 10 bytes."""
    count = len(t.x)
    numbers = torch.arange(count * 3, dtype=torch.int64).reshape(count, 3) + 100 * rank
    flags = (numbers % 2 == 0)[:, :1].contiguous()
    return replace(t, extras=(numbers, flags, torch.full((count, 5), float(rank)).half()))


def int32_ids(t: Tokens, rank: int) -> Tokens:
    return replace(t, topk_idx=t.topk_idx.int())


def to_one_expert(expert: int) -> Change:
    def change(t: Tokens, rank: int) -> Tokens:
        t.topk_idx[:] = -1
        t.topk_idx[:, expert % t.topk_idx.shape[1]] = expert
        return t

    return change


def every_format(world: World) -> list[Wanted]:
    grouped = {"layout": "grouped", "alignment": 4}
    return [
        call(world, 0),
        call(world, 1),
        call(world, 2, **grouped),
        call(world, 3, int32_ids, layout="grouped"),
        call(world, 4, dtype=torch.bfloat16),
        call(world, 0, with_extras, dtype=torch.bfloat16, **grouped),
        call(world, 2, dtype=torch.float16),
        call(world, 0, int32_ids, dtype=torch.float16, layout="grouped", alignment=16),
        call(world, 0, quantize=True),
        call(world, 2, dtype=torch.bfloat16, quantize=True, **grouped),
        call(world, 0, with_extras, dtype=torch.float16, quantize=True),
        call(world, 0, in_fp8(True)),
        call(world, 2, in_fp8(False), **grouped),
        call(world, 2, to_one_expert(1), layout="grouped"),
    ]


def of_changing_counts(world: World, num_steps: int) -> list[Wanted]:
    wanted = []
    for step in range(num_steps):
        counts = [(step * 7 + rank * 11) % (MAX_TOKENS + 1) for rank in range(world.ranks)]
        change = to_one_expert(step % world.num_experts) if step % 20 == 3 else None
        wanted.append(call(world, step, change, counts=counts, layout="grouped"))
    return wanted


def steps(
    rank: Rank,
    world: World,
    wanted: list[Wanted],
    config: dict[str, Any],
    take: Callable[[AllToAll, Wanted], object] = run_step,
) -> None:
    """All of `wanted`, one after the other; take: makes one, and checks what comes."""
    with gpu_ranks.make(rank, world, **config) as comm:
        gpu_ranks.prepare(rank, comm, wanted)
        for step in wanted:
            take(comm, step)


@pytest.mark.parametrize("world", gpu_ranks.worlds(*ALL_WORLDS))
def test_every_format_is_the_reference_bit_for_bit(world: World) -> None:
    gpu_ranks.run(world, steps, every_format(world), {"transport_settings": f"seed={world.ranks}"})


@pytest.mark.parametrize("seed", range(1, 7))
def test_a_hostile_network_changes_nothing(seed: int) -> None:
    world = World(4, 2) if seed % 2 else World(3, 1)
    wanted = [call(world, step, dtype=torch.float32) for step in range(15)]
    gpu_ranks.run(world, steps, wanted, {"transport_settings": f"seed={seed}", "nics_per_rank": 3})


@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (4, 2)))
def test_two_hundred_steps_of_changing_counts(world: World) -> None:
    gpu_ranks.run(world, steps, of_changing_counts(world, 200), {})


@pytest.mark.parametrize("world", gpu_ranks.worlds(*FEW_WORLDS))
def test_rows_of_seven_thousand_values(world: World) -> None:
    wide = {"hidden_dim": 7168, "layout": "grouped", "dtype": torch.bfloat16}
    wanted = [call(world, step, **wide, quantize=step % 2 == 1) for step in range(4)]
    config = {"hidden_dim": 7168, "dtype": torch.bfloat16, "extra_bytes": 0}
    gpu_ranks.run(world, steps, wanted, config)


def of_calls(config: dict[str, Any]) -> dict[str, Any]:
    """What calls of a shape are made for; the rest concerns communicators only."""
    return {k: v for k, v in config.items() if k not in ("steps_in_flight", "part_bytes")}


@pytest.mark.parametrize("name", SHAPES)
def test_shape(name: str) -> None:
    world, config = SHAPES[name]
    fields = of_calls(config)
    wanted = [
        call(world, 0, **fields),
        call(world, 2, layout="grouped", **fields),
        call(world, 0, quantize=True, **fields),
        call(world, 3, layout="grouped", alignment=8, **fields),
    ]
    gpu_ranks.run(world, steps, wanted, config)


def counts_on_the_device(
    rank: Rank, world: World, wanted: list[Wanted], dtype: torch.dtype | None
) -> None:
    with gpu_ranks.make(rank, world) as comm:
        for step in wanted:
            count = step.tokens[rank.rank].num_tokens
            given = (
                torch.tensor([count], dtype=dtype, device=comm.config.device) if dtype else count
            )
            _, out = run_step(comm, step, num_tokens=given)
            assert not out[count:].any()


@pytest.mark.parametrize("dtype", [None, torch.int32, torch.int64])
@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (4, 2)))
def test_counts_only_the_first_rows(world: World, dtype: torch.dtype | None) -> None:
    def count(step: int) -> Change:
        return lambda t, rank: replace(t, num_tokens=(5 * step + 3 * rank) % (len(t.x) + 1))

    wanted = [call(world, step, count(step), counts=[9] * 8) for step in range(6)]
    gpu_ranks.run(world, counts_on_the_device, wanted, dtype)


def padding(comm: AllToAll, step: Wanted) -> None:
    got, _ = run_step(comm, step, zero_padding=True)
    theirs = step.received[comm.rank]
    assert torch.equal(got.x.view(torch.uint8), theirs.x.view(torch.uint8))
    assert torch.equal(got.row_weights, theirs.row_weights)


@pytest.mark.parametrize("world", gpu_ranks.worlds(*FEW_WORLDS))
def test_empty_padding_is_zero_when_asked(world: World) -> None:
    wanted = [
        call(world, 2),
        call(world, 0, dtype=torch.bfloat16),
        call(world, 0, layout="grouped", alignment=8),
        call(world, 1, layout="grouped"),
    ]
    gpu_ranks.run(world, steps, wanted, {}, padding)
