"""Weights that combine is given, bias and waiting times on a GPU, bit for bit as the reference.

Ranks are threads that share one GPU (gpu_ranks.py). What combine makes of late weights is what it
makes of early ones; steps without any stand between, so that stale ones would be seen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_p2p
from moe_p2p import AllToAll
from moe_p2p.moe import reference
from moe_p2p.moe.reference import Tokens
from tests.gpu.test_gpu import call, steps
from tests.gpu.test_gpu_calls import CHUNKED, LONG, LONG_COUNTS
from tests.gpu.test_gpu_failures import error_of
from tests.gpu.test_gpu_graphs import Inputs, capture, doubled, prepare_bf16
from tests.moe.test_late_weights import late_combine, late_dispatch, late_halves
from tests.support import cases, gpu_ranks
from tests.support.cases import TOPK, Wanted
from tests.support.gpu_ranks import HIDDEN_DIM, MAX_TOKENS, SOON_S, Payload, World
from tests.support.ranks import Rank

pytestmark = pytest.mark.gpu

ALL_WORLDS = [
    (1, 1), (2, 2), (2, 1), (4, 2), (4, 1), (4, 4), (8, 4), (8, 2), (8, 8), (3, 3), (6, 2),
]  # fmt: skip
FEW_WORLDS = [(2, 2), (2, 1), (4, 2), (3, 3)]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    payloads = [Payload(torch.float32), Payload(torch.bfloat16)]
    gpu_ranks.compile_ahead([(World(*shape), {}) for shape in ALL_WORLDS], payloads)
    gpu_ranks.compile_ahead([(World(*shape), CHUNKED) for shape in FEW_WORLDS], payloads[:1])


def run_late(comm: AllToAll, wanted: Wanted) -> None:
    got = comm.dispatch(**late_dispatch(comm, wanted))
    cases.finish(comm)
    out = comm.combine(**late_combine(comm, wanted, got))
    cases.finish(comm)
    assert torch.equal(out.cpu(), wanted.out[comm.rank])


def mixed_steps(rank: Rank, world: World, wanted: list[Wanted], config: dict[str, Any]) -> None:
    with gpu_ranks.make(rank, world, **config) as comm:
        gpu_ranks.prepare(rank, comm, wanted)
        for i, step in enumerate([*wanted, *wanted[::-1]]):
            if i % 3 == 2:
                cases.run_step(comm, step)
            else:
                run_late(comm, step)


@pytest.mark.parametrize("world", gpu_ranks.worlds(*ALL_WORLDS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_late_weights_are_as_good_as_early_ones(world: World, dtype: torch.dtype) -> None:
    layouts = ("padded", "grouped")
    wanted = [call(world, seed, dtype=dtype, layout=layouts[seed % 2]) for seed in range(5)]
    gpu_ranks.run(world, mixed_steps, wanted, {})


@pytest.mark.parametrize("world", gpu_ranks.worlds(*FEW_WORLDS))
def test_late_weights_of_several_chunks(world: World) -> None:
    wanted = [
        call(world, 0, max_tokens=LONG, counts=LONG_COUNTS, layout="grouped"),
        call(world, 1, max_tokens=3, counts=[3, 0, 1, 2] * 2, layout="grouped"),
        call(world, 2, max_tokens=7, counts=[7, 4, 0, 1] * 2, layout="grouped"),
    ]
    gpu_ranks.run(world, mixed_steps, wanted, CHUNKED)


@pytest.mark.parametrize("seed", [1, 2])
def test_late_weights_over_a_hostile_network(seed: int) -> None:
    world = World(4, 2)
    wanted = [call(world, i) for i in range(5)]
    gpu_ranks.run(world, mixed_steps, wanted, {"transport_settings": f"seed={seed}"})


def halves(rank: Rank, world: World, pairs: list[list[Wanted]]) -> None:
    with gpu_ranks.make(rank, world) as comm:
        gpu_ranks.prepare(rank, comm, pairs[0])
        for pair in pairs:
            outs = late_halves(comm, pair)
            cases.finish(comm)
            for step, out in zip(pair, outs, strict=True):
                assert torch.equal(out.cpu(), step.out[comm.rank])


@pytest.mark.parametrize(
    "world", gpu_ranks.worlds((2, 2), (2, 1), (4, 2), (3, 3))
)  # eight calls queued
def test_late_weights_in_halves_of_two_steps_in_flight(world: World) -> None:
    gpu_ranks.run(world, halves, [[call(world, 2 * i + j) for j in range(2)] for i in range(4)])


def repeated(rank: Rank, world: World, wanted: Wanted) -> None:
    with gpu_ranks.make(rank, world) as comm:
        gpu_ranks.prepare(rank, comm, [wanted])
        got = comm.dispatch(**cases.dispatch_arguments(comm, wanted))
        late = late_combine(comm, wanted, got)
        weights = [late["topk_weights"] * factor for factor in (1.0, 0.5, 0.0)]
        cases.finish(comm)
        for factor, given in zip((1.0, 0.5, 0.0), weights, strict=True):
            out = comm.combine(**late | {"topk_weights": given})
            cases.finish(comm)
            # A power of two scales every product and sum exactly.
            assert torch.equal(out.cpu(), wanted.out[rank.rank] * factor)


@pytest.mark.parametrize("world", gpu_ranks.worlds(*FEW_WORLDS))
def test_one_handle_takes_other_late_weights_each_time(world: World) -> None:
    gpu_ranks.run(world, repeated, call(world, 0))


# --- graphs --------------------------------------------------------------------------------------


def graph_call(world: World, seed: int) -> Wanted:
    """Tensors have all rows, of which a number that changes counts."""

    def tokens(rank: int) -> Tokens:
        sizes = {"num_experts": world.num_experts, "hidden_dim": HIDDEN_DIM}
        made = cases.make_tokens(seed, rank, MAX_TOKENS, dtype=torch.bfloat16, **sizes)
        return replace(made, num_tokens=(5 * seed + 3 * rank) % (MAX_TOKENS + 1))

    made = [tokens(rank) for rank in range(world.ranks)]
    return cases.expect(
        world.topology(), made, max_tokens=MAX_TOKENS, experts=doubled, layout="grouped"
    )


def captured(rank: Rank, world: World, steps: list[Wanted]) -> None:
    with gpu_ranks.make(rank, world) as comm:
        inputs = Inputs.make(MAX_TOKENS)
        arguments = inputs.arguments(MAX_TOKENS)
        early = arguments.pop("topk_weights")
        assert early is inputs.topk_weights

        def body() -> list[tuple[Any, Tensor]]:
            got = comm.dispatch(**arguments)
            return [(got, comm.combine(got.x * 2, got, topk_weights=inputs.topk_weights))]

        prepare_bf16(rank, comm)
        graph, results = capture(rank, body)
        for wanted in steps:
            inputs.set(wanted.tokens[rank.rank])
            graph.replay()
            cases.finish(comm)
            ((_, out),) = results
            assert torch.equal(out.cpu(), wanted.out[rank.rank])
        gpu_ranks.meet(rank, "replayed")


@pytest.mark.parametrize("world", gpu_ranks.worlds((1, 1), (2, 2), (2, 1), (4, 2), (4, 4)))
def test_a_captured_graph_follows_late_weights(world: World) -> None:
    gpu_ranks.run(world, captured, [graph_call(world, seed) for seed in range(20)])


# --- bias, scalars by rank, waiting times --------------------------------------------------------


def with_bias(
    rank: Rank, world: World, wanted: Wanted, want: list[Tensor], num_biases: int
) -> None:
    with gpu_ranks.make(rank, world) as comm:
        gpu_ranks.prepare(rank, comm, [wanted])
        given = cases.given_biases(comm, wanted, num_biases)
        for late in (False, True, True):
            if late:
                got = comm.dispatch(**late_dispatch(comm, wanted))
                back = late_combine(comm, wanted, got)
            else:
                got = comm.dispatch(**cases.dispatch_arguments(comm, wanted))
                back = cases.combine_arguments(comm, wanted) | {"dispatched": got}
            cases.finish(comm)
            ones = cases.on_device(comm, torch.ones(got.row_weights.shape))
            out, found = comm.combine(**back, **given, row_scalars=ones)
            cases.finish(comm)
            assert torch.equal(out.cpu(), want[rank.rank])
            named = wanted.tokens[rank.rank].topk_idx >= 0
            assert torch.equal(found.cpu(), named.float())


@pytest.mark.parametrize("world", gpu_ranks.worlds((1, 1), (2, 2), (2, 1), (4, 2), (8, 4)))
@pytest.mark.parametrize("num_biases", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_is_the_first_addend(world: World, num_biases: int, dtype: torch.dtype) -> None:
    wanted = call(world, 0, dtype=dtype)
    gpu_ranks.run(
        world, with_bias, wanted, cases.sums_of(world.topology(), wanted, num_biases), num_biases
    )


def by_rank(
    rank: Rank, world: World, wanted: Wanted, values: list[Tensor], want: list[Tensor]
) -> None:
    with gpu_ranks.make(rank, world) as comm:
        gpu_ranks.prepare(rank, comm, [wanted])
        scalars = cases.on_device(comm, values[rank.rank])
        for _ in range(3):
            got = comm.dispatch(**cases.dispatch_arguments(comm, wanted))
            back = cases.combine_arguments(comm, wanted)
            cases.finish(comm)
            out, sums = comm.combine(dispatched=got, **back, row_scalars=scalars)
            cases.finish(comm)
            assert torch.equal(out.cpu(), wanted.out[rank.rank])
            assert torch.equal(sums.cpu(), want[rank.rank])


@pytest.mark.parametrize("world", gpu_ranks.worlds((1, 1), (2, 2), (2, 1), (4, 2), (4, 4), (6, 2)))
def test_scalars_by_rank_are_summed_over_the_ranks_of_a_token(world: World) -> None:
    wanted = call(world, 0, layout="by_rank")
    routing = reference.route(
        world.topology(), wanted.tokens, layout="by_rank", max_tokens=MAX_TOKENS
    )
    generator = torch.Generator().manual_seed(3)
    values = [
        torch.randn(rows.row_weights.shape[0], TOPK, generator=generator)
        for rows in wanted.received
    ]
    want = [reference.combine_scalars(routing, rank, values) for rank in range(world.ranks)]
    gpu_ranks.run(world, by_rank, wanted, values, want)


def waits(comm: AllToAll, step: Wanted) -> None:
    got = comm.dispatch(**cases.dispatch_arguments(comm, step))
    back = cases.combine_arguments(comm, step, with_wait_ticks=True) | {"dispatched": got}
    cases.finish(comm)
    out, ticks = comm.combine(**back)
    cases.finish(comm)
    assert torch.equal(out.cpu(), step.out[comm.rank])
    reported, mine, local = ticks.cpu(), comm.rank, comm.ranks_per_node
    assert reported.shape == (comm.world_size,)
    speaks = [
        r // local == mine // local or r % local == mine % local for r in range(len(reported))
    ]
    assert [t > 0 for t in reported.tolist()] == speaks
    assert int(reported.max()) < 20e9 * 3  # cycles: below the timeout at 3 GHz


@pytest.mark.parametrize("world", gpu_ranks.worlds((1, 1), (2, 2), (2, 1), (4, 2), (6, 2)))
@pytest.mark.parametrize("chunked", [False, True])
def test_combine_reports_how_long_it_waited(world: World, chunked: bool) -> None:
    wanted = [call(world, seed) for seed in range(3)]
    config = {"chunk_tokens": 6} if chunked else {}
    gpu_ranks.run(world, steps, wanted, config, waits)


# --- what is missed ------------------------------------------------------------------------------


def without_weights(rank: Rank, world: World, wanted: Wanted) -> str:
    with gpu_ranks.make(rank, world, timeout_s=SOON_S) as comm:
        gpu_ranks.prepare(rank, comm, [wanted])
        got = comm.dispatch(**late_dispatch(comm, wanted))
        late = late_combine(comm, wanted, got)
        cases.finish(comm)
        gpu_ranks.meet(rank, "dispatched")
        text = ""
        if rank.rank == 0:
            text = error_of(comm, lambda: comm.combine(**late))
        gpu_ranks.meet(rank, "reported")
        return text


@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (2, 1)))
def test_weights_that_do_not_come_are_missed_by_name(world: World) -> None:
    text, _ = gpu_ranks.run(world, without_weights, call(world, 0))
    # The kernel's receiving half waits as long for sums of the same rank: either may be reported.
    assert "late weights of step 0" in text or "combine of step 0" in text
    assert "rank 1" in text


def short_weights(rank: Rank, world: World, wanted: Wanted) -> None:
    with gpu_ranks.make(rank, world) as comm:
        gpu_ranks.prepare(rank, comm, [wanted])
        got = comm.dispatch(**late_dispatch(comm, wanted))
        late = late_combine(comm, wanted, got)
        cases.finish(comm)
        with pytest.raises(moe_p2p.InvalidArgumentError, match="topk_weights"):
            comm.combine(**late | {"topk_weights": late["topk_weights"][:-1]})
        out = comm.combine(**late)
        cases.finish(comm)
        assert torch.equal(out.cpu(), wanted.out[rank.rank])


def test_late_weights_that_do_not_fit_are_refused_before_anything_is_sent() -> None:
    world = World(2, 2)
    gpu_ranks.run(world, short_weights, call(world, 0))
