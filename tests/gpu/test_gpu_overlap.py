"""Kernels that are on the GPU together: begun early behind each other, and of two streams.

All are replayed, so the host is not in between. On an emulated GPU a stream is a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore

from moe_p2p import AllToAll, DispatchOptions
from moe_p2p.moe.reference import Received, Topology
from tests.gpu.test_gpu_graphs import Inputs, Result, prepare_bf16, record
from tests.support.cases import TOPK, Wanted, assert_received, expect, finish, make_tokens, on_cpu
from tests.support.gpu_ranks import DEVICE, HIDDEN_DIM, MAX_TOKENS, World, make, meet, run, worlds
from tests.support.ranks import Rank

pytestmark = pytest.mark.gpu

WORLDS = worlds((2, 2), (2, 1))


def rows_as_they_are(topology: Topology, rank: int, received: Received) -> torch.Tensor:
    return received.x.reshape(-1, received.x.shape[-1])


def call(world: World, seed: int) -> Wanted:
    tokens = [
        make_tokens(
            seed,
            rank,
            MAX_TOKENS,
            dtype=torch.bfloat16,
            num_experts=world.num_experts,
            hidden_dim=HIDDEN_DIM,
            topk=TOPK,
        )
        for rank in range(world.ranks)
    ]
    return expect(
        world.topology(), tokens, max_tokens=MAX_TOKENS, experts=rows_as_they_are, layout="grouped"
    )


class Stream:
    """One of the GPU's, or a thread of an emulated one."""

    def __init__(self) -> None:
        if DEVICE == "cpu":
            from tests.support import emulated_gpu

            self._stream: Any = emulated_gpu.Stream()
        else:
            self._stream = torch.cuda.Stream()

    def run(self, step: Callable[[], object]) -> Any:
        """An event behind it."""
        if DEVICE == "cpu":
            return self._stream.run(step)
        with torch.cuda.stream(self._stream):
            step()
        return self._stream.record_event()

    def replay(self, graph: Any) -> Any:
        return self.run(graph.replay)

    def wait(self, event: Any) -> None:
        self._stream.wait_event(event)

    def finish(self) -> None:
        self._stream.synchronize()


class Pairs:
    """A graph of some pairs of dispatch and combine, with nothing between them."""

    def __init__(self, rank: Rank, comm: AllToAll, name: str, num_pairs: int) -> None:
        self.comm = comm
        self.inputs = [Inputs.make(MAX_TOKENS) for _ in range(num_pairs)]
        self._pairs()
        self.graph, self.results = record(rank, name, self._pairs)

    def _pairs(self) -> list[Result]:
        results = []
        for place in self.inputs:
            got = self.comm.dispatch(**place.arguments(MAX_TOKENS) | {"num_tokens": None})
            results.append((got, self.comm.combine(got.x, got)))
        return results

    def set(self, rank: Rank, wanted: list[Wanted]) -> None:
        for place, step in zip(self.inputs, wanted, strict=True):
            place.set(step.tokens[rank.rank])

    def check(self, rank: Rank, wanted: list[Wanted]) -> None:
        finish(self.comm)
        for (got, out), step in zip(self.results, wanted, strict=True):
            assert_received(on_cpu(got), step.received[rank.rank])
            assert torch.equal(out.cpu(), step.out[rank.rank])


def behind_each_other(rank: Rank, world: World, steps: list[list[Wanted]]) -> None:
    with make(rank, world) as comm:
        prepare_bf16(rank, comm)
        pairs = Pairs(rank, comm, "pairs", len(steps[0]))
        for wanted in steps:
            pairs.set(rank, wanted)
            pairs.graph.replay()
            pairs.check(rank, wanted)
        meet(rank, "done")


@pytest.mark.parametrize("world", WORLDS)
def test_kernels_of_a_graph_begin_early(world: World) -> None:
    steps = [[call(world, 2 * step + i) for i in range(2)] for step in range(3)]
    run(world, behind_each_other, steps)


def two_communicators(rank: Rank, world: World, steps: list[list[Wanted]]) -> None:
    other = replace(rank, store=PrefixStore("second", rank.store))
    with make(rank, world) as first, make(other, world) as second:
        made = []
        for i, comm in enumerate((first, second)):
            if comm._device is not None:
                comm._device.prepare_dispatch(torch.bfloat16, DispatchOptions().number)
                comm._device.prepare_combine(torch.bfloat16, torch.bfloat16)
            meet(rank, f"prepared {i}")
            made.append(Pairs(rank, comm, f"pairs {i}", 2))
        streams = [Stream() for _ in made]
        for wanted in steps:
            parts = (wanted[:2], wanted[2:])
            for pairs, part in zip(made, parts, strict=True):
                pairs.set(rank, part)
            for stream, pairs in zip(streams, made, strict=True):
                stream.replay(pairs.graph)
            for stream in streams:
                stream.finish()
            for pairs, part in zip(made, parts, strict=True):
                pairs.check(rank, part)
        meet(rank, "done")


@pytest.mark.parametrize("world", WORLDS)
def test_two_communicators_on_two_streams(world: World) -> None:
    steps = [[call(world, 4 * step + i) for i in range(4)] for step in range(3)]
    run(world, two_communicators, steps)


def in_turns(rank: Rank, world: World, steps: list[list[Wanted]]) -> None:
    """Each stream waits for the other one's event; what they share is the communicator."""
    with make(rank, world) as comm:
        prepare_bf16(rank, comm)
        made = [Pairs(rank, comm, f"pairs {i}", 1) for i in range(2)]
        streams = [Stream() for _ in made]
        for wanted in steps:
            for pairs, step in zip(made, wanted, strict=True):
                pairs.set(rank, [step])
            event = None
            for stream, pairs in zip(streams * 2, made * 2, strict=True):
                if event is not None:
                    stream.wait(event)
                event = stream.replay(pairs.graph)
            for stream in streams:
                stream.finish()
            for pairs, step in zip(made, wanted, strict=True):
                pairs.check(rank, [step])
        meet(rank, "done")


@pytest.mark.parametrize("world", WORLDS)
def test_one_communicator_on_two_streams_in_turns(world: World) -> None:
    run(world, in_turns, [[call(world, 2 * step + i) for i in range(2)] for step in range(4)])
