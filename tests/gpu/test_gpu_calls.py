"""Chunks, solo calls, halves, releases and repeated combines on a GPU, bit for bit.

Ranks are threads that share one GPU (gpu_ranks.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_p2p import AllToAll, Dispatched, InvalidArgumentError
from moe_p2p.moe import reference
from tests.gpu.test_gpu import call, steps, to_one_expert
from tests.support import cases, gpu_ranks
from tests.support.cases import Wanted
from tests.support.gpu_ranks import Payload, World
from tests.support.ranks import Rank

pytestmark = pytest.mark.gpu

WORLDS = gpu_ranks.worlds((2, 2), (2, 1), (4, 2), (3, 3), (6, 2))
CHUNKED_WORLDS = [(1, 1), (2, 2), (2, 1), (4, 2), (3, 3), (6, 2), (8, 4)]
LONG = 27  # tokens of nine chunks
CHUNKED = {"chunk_tokens": 3, "max_tokens": LONG}
LONG_COUNTS = [27, 1, 14, 0, 8, 27, 3, 20]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    payloads = [Payload(torch.float32), Payload(torch.bfloat16), Payload(torch.float32, True)]
    gpu_ranks.compile_ahead([(World(*shape), CHUNKED) for shape in CHUNKED_WORLDS], payloads)


@pytest.mark.parametrize("world", gpu_ranks.worlds(*CHUNKED_WORLDS))
def test_long_calls_run_in_chunks(world: World) -> None:
    wanted = [
        call(world, 0, max_tokens=LONG, counts=LONG_COUNTS),
        call(world, 1, max_tokens=3, counts=[3, 0, 1, 2] * 2),
        call(world, 2, max_tokens=7, counts=[7, 4, 0, 1] * 2, layout="grouped"),
        call(world, 3, max_tokens=LONG, counts=LONG_COUNTS[::-1], layout="grouped", alignment=4),
        call(world, 4, max_tokens=6, counts=[6] * 8, dtype=torch.bfloat16, layout="grouped"),
        call(world, 5, max_tokens=LONG, counts=LONG_COUNTS, quantize=True, layout="grouped"),
        call(world, 6, to_one_expert(2), max_tokens=LONG, counts=LONG_COUNTS, layout="grouped"),
        call(world, 7, max_tokens=LONG, counts=[0] * 8),
        call(world, 8, max_tokens=2, counts=[2, 1] * 4),
    ]
    gpu_ranks.run(world, steps, wanted, CHUNKED)


def solo(rank: Rank, world: World, wanted: list[Wanted]) -> None:
    with gpu_ranks.make(rank, world) as comm:
        for i, step in enumerate(wanted):
            cases.run_step(comm, step, solo=i % 3 != 2)


@pytest.mark.parametrize("world", WORLDS)
def test_solo_calls_close_their_steps(world: World) -> None:
    gpu_ranks.run(world, solo, [call(world, seed) for seed in range(9)])


def solo_dispatches_only(rank: Rank, world: World, wanted: list[Wanted]) -> None:
    with gpu_ranks.make(rank, world) as comm:
        for step in wanted:
            got = comm.dispatch(**cases.dispatch_arguments(comm, step, solo=True))
            cases.finish(comm)
            cases.assert_received(cases.on_cpu(got), step.received[rank.rank])
        cases.run_step(comm, wanted[0])


@pytest.mark.parametrize("world", WORLDS)
def test_a_solo_dispatch_needs_no_combine(world: World) -> None:
    gpu_ranks.run(world, solo_dispatches_only, [call(world, seed) for seed in range(7)])


def solo_then_two_halves(rank: Rank, world: World, wanted: list[Wanted], met: bool) -> None:
    """The second sending half takes the slot of the solo dispatch, and knows no later step.

    met: all ranks have read the solo dispatch by then, which only their hosts know.
    """
    with gpu_ranks.make(rank, world) as comm:
        got = comm.dispatch(**cases.dispatch_arguments(comm, wanted[0], solo=True))
        sent = [comm.dispatch_send(**cases.dispatch_arguments(comm, wanted[1]))]
        if met:
            cases.finish(comm)
            gpu_ranks.meet(rank, "the solo dispatch is read")
        sent.append(comm.dispatch_send(**cases.dispatch_arguments(comm, wanted[2])))
        came = [comm.dispatch_recv(pending) for pending in sent]
        outs = [
            comm.combine(dispatched=each, **cases.combine_arguments(comm, step))
            for step, each in zip(wanted[1:], came, strict=True)
        ]
        cases.finish(comm)
        cases.assert_received(cases.on_cpu(got), wanted[0].received[rank.rank])
        for step, out in zip(wanted[1:], outs, strict=True):
            cases.assert_combined(out.cpu(), step.out[rank.rank])


@pytest.mark.parametrize("met", [False, True])
@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (3, 3)))
def test_a_sending_half_takes_the_slot_of_a_solo_dispatch(world: World, met: bool) -> None:
    gpu_ranks.run(world, solo_then_two_halves, [call(world, seed) for seed in range(3)], met)


def two_in_flight(comm: AllToAll, pair: list[Wanted], reused: list[Dispatched]) -> list[Dispatched]:
    """Both dispatches are sent before either is received, and so with the combines."""
    given = [cases.dispatch_arguments(comm, step) for step in pair]
    back = [cases.combine_arguments(comm, step) for step in pair]
    sent = [comm.dispatch_send(**arguments) for arguments in given]
    got = [
        comm.dispatch_recv(pending, out=out)
        for pending, out in zip(sent, reused or [None] * 2, strict=True)
    ]
    combining = [
        comm.combine_send(dispatched=g, **arguments) for g, arguments in zip(got, back, strict=True)
    ]
    outs = [comm.combine_recv(pending) for pending in combining]
    cases.finish(comm)
    for step, g, out in zip(pair, got, outs, strict=True):
        cases.assert_received(cases.on_cpu(g), step.received[comm.rank])
        assert torch.equal(out.cpu(), step.out[comm.rank])
    return got


def halves(rank: Rank, world: World, pairs: list[list[Wanted]]) -> None:
    with gpu_ranks.make(rank, world) as comm:
        gpu_ranks.prepare(rank, comm, pairs[0])
        received: list[Dispatched] = []
        for pair in pairs:
            received = two_in_flight(comm, pair, received)
        cases.run_step(comm, pairs[0][0])


@pytest.mark.parametrize(
    "world", gpu_ranks.worlds((2, 2), (2, 1), (4, 2), (3, 3))
)  # eight calls queued
@pytest.mark.parametrize("seed", [0, 5])
def test_halves_of_two_steps_overlap(world: World, seed: int) -> None:
    options = {"layout": "grouped"} if seed else {}
    pairs = [[call(world, seed + 2 * i + j, **options) for j in range(2)] for i in range(4)]
    gpu_ranks.run(world, halves, pairs)


def slow_neighbour(rank: Rank, world: World, wanted: list[Wanted]) -> None:
    """Rank 1 begins to read the first step once rank 2 has sent the third, or late."""
    with gpu_ranks.make(rank, world, timeout_s=30.0) as comm:
        gpu_ranks.prepare(rank, comm, wanted)
        first = comm.dispatch_send(**cases.dispatch_arguments(comm, wanted[0]))
        if rank.rank == 1:
            cases.finish(comm)
            with contextlib.suppress(dist.DistStoreError):  # it cannot, before this rank has read
                rank.store.wait(["third"], timedelta(seconds=1))
        sent = [first]
        for i, step in enumerate(wanted):
            got = comm.dispatch_recv(sent[i])
            pending = comm.combine_send(dispatched=got, **cases.combine_arguments(comm, step))
            cases.finish(comm)
            cases.assert_received(cases.on_cpu(got), step.received[rank.rank])
            out = comm.combine_recv(pending)
            cases.finish(comm)
            assert torch.equal(out.cpu(), step.out[rank.rank])
            if i == 0:
                sent += [
                    comm.dispatch_send(**cases.dispatch_arguments(comm, s)) for s in wanted[1:]
                ]
                cases.finish(comm)
                if rank.rank == 2:
                    rank.store.set("third", "")


def test_a_step_is_not_sent_over_what_a_slow_neighbour_reads() -> None:
    """(R4) at a gateway: what it sends for its node says that all of the node have read.

    The first tokens are for rank 0, which has no need of rank 1 to add them up.
    """
    world = World(4, 2)
    wanted = [call(world, 2, to_one_expert(0)), call(world, 1), call(world, 2, to_one_expert(5))]
    gpu_ranks.run(world, slow_neighbour, wanted)


def chunked_halves(rank: Rank, world: World, wanted: list[Wanted]) -> None:
    with gpu_ranks.make(rank, world, chunk_tokens=6) as comm:
        for step in wanted:
            back = cases.combine_arguments(comm, step)
            pending = comm.dispatch_send(**cases.dispatch_arguments(comm, step))
            got = comm.dispatch_recv(pending)
            out = comm.combine_recv(comm.combine_send(dispatched=got, **back))
            cases.finish(comm)
            cases.assert_received(cases.on_cpu(got), step.received[rank.rank])
            assert torch.equal(out.cpu(), step.out[rank.rank])


@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (4, 2)))
def test_halves_of_as_many_chunks_as_steps_in_flight(world: World) -> None:
    gpu_ranks.run(world, chunked_halves, [call(world, seed) for seed in range(4)])


def releases(rank: Rank, world: World, wanted: list[Wanted]) -> None:
    with gpu_ranks.make(rank, world) as comm:
        for i, step in enumerate(wanted):
            arguments = cases.dispatch_arguments(comm, step)
            if i % 3 == 0:
                comm.release(comm.dispatch(**arguments))
            elif i % 3 == 1:
                comm.release(comm.dispatch_send(**arguments))
            else:
                cases.run_step(comm, step)
        # Two open steps, given up in the order in which they were opened.
        opened = [comm.dispatch(**cases.dispatch_arguments(comm, step)) for step in wanted[:2]]
        for step, got in zip(wanted, opened, strict=False):
            comm.release(got)
            cases.finish(comm)
            cases.assert_received(cases.on_cpu(got), step.received[rank.rank])
        cases.run_step(comm, wanted[0])


@pytest.mark.parametrize("world", WORLDS)
def test_a_dispatch_without_combine_is_released(world: World) -> None:
    gpu_ranks.run(world, releases, [call(world, seed) for seed in range(9)])


def two_combines(rank: Rank, world: World, wanted: list[Wanted]) -> None:
    with gpu_ranks.make(rank, world) as comm:
        for step in wanted:
            _, out = cases.run_step(comm, step)
            back = cases.combine_arguments(comm, step)
            live = comm.dispatch(**cases.dispatch_arguments(comm, step))
            for _ in range(3):  # the first closes the step, the others open steps of their own
                again = comm.combine(dispatched=live, **back)
                cases.finish(comm)
                assert torch.equal(again.cpu(), out)


@pytest.mark.parametrize("world", WORLDS)
def test_one_handle_serves_several_combines(world: World) -> None:
    gpu_ranks.run(world, two_combines, [call(world, seed) for seed in range(3)])


def scalars(
    rank: Rank, world: World, step: Wanted, values: list[Tensor], want: list[Tensor]
) -> None:
    with gpu_ranks.make(rank, world) as comm:
        back = cases.combine_arguments(comm, step)
        back["row_scalars"] = cases.on_device(comm, values[rank.rank])
        for _ in range(4):
            got = comm.dispatch(**cases.dispatch_arguments(comm, step))
            out, mine = comm.combine(dispatched=got, **back)
            cases.finish(comm)
            assert torch.equal(out.cpu(), step.out[rank.rank])
            assert torch.equal(mine.cpu(), want[rank.rank])


@pytest.mark.parametrize("world", WORLDS)
def test_combine_returns_scalars_to_their_place(world: World) -> None:
    step = call(world, 0)
    routing = reference.route(world.topology(), step.tokens, max_tokens=12)
    values = [rows.x.reshape(-1, rows.x.shape[-1])[:, 0].contiguous() for rows in step.received]
    want = [reference.combine_scalars(routing, rank, values) for rank in range(world.ranks)]
    gpu_ranks.run(world, scalars, step, values, want)


def many_open(rank: Rank, world: World, wanted: list[Wanted]) -> None:
    with gpu_ranks.make(rank, world) as comm:
        arguments = [cases.dispatch_arguments(comm, step) for step in wanted]
        back = [cases.combine_arguments(comm, step) for step in wanted]
        opened = [comm.dispatch(**arguments[i]) for i in range(2)]
        with pytest.raises(InvalidArgumentError, match="steps_in_flight"):
            comm.dispatch(**arguments[2])
        # The later one first: which step a combine closes is what its handle says.
        for i in (1, 0):
            out = comm.combine(dispatched=opened[i], **back[i])
            cases.finish(comm)
            assert torch.equal(out.cpu(), wanted[i].out[rank.rank])
        cases.run_step(comm, wanted[2])


@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (4, 2)))
def test_open_steps_are_counted_and_closed_in_any_order(world: World) -> None:
    gpu_ranks.run(world, many_open, [call(world, seed) for seed in range(3)])


def results(got: Dispatched, out: Tensor) -> Iterator[Tensor]:
    rows = slice(0, int(got.offsets[-1]))
    yield from (got.x[rows], got.row_weights[rows], got.counts, got.offsets, out)


def repeats(rank: Rank, world: World, wanted: Wanted, config: dict[str, Any]) -> None:
    with gpu_ranks.make(rank, world, **config) as comm:
        first: list[Tensor] = []
        for _ in range(8):
            live = comm.dispatch(**cases.dispatch_arguments(comm, wanted))
            out = comm.combine(live.x, live)
            cases.finish(comm)
            found = [t.contiguous().clone() for t in results(cases.on_cpu(live), out.cpu())]
            first = first or found
            for mine, theirs in zip(found, first, strict=True):
                assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("world", gpu_ranks.worlds((4, 4), (4, 2)))
def test_results_of_a_large_call_repeat_to_the_bit(world: World) -> None:
    sizes = {"hidden_dim": 1024, "num_experts": 64, "topk": 8, "dtype": torch.bfloat16}
    wanted = call(world, 0, layout="grouped", counts=[128] * 8, max_tokens=128, **sizes)
    settings = "seed=3" if world.per_node < world.ranks else ""
    gpu_ranks.run(
        world, repeats, wanted, sizes | {"max_tokens": 128, "transport_settings": settings}
    )
