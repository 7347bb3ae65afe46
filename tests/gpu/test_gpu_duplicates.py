"""merge_duplicates on a GPU: the reference's bits, in CUDA graphs too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_p2p import DispatchOptions
from moe_p2p.moe import arguments, reference
from tests.gpu.test_gpu_graphs import between, capture
from tests.moe.test_duplicates import hashed
from tests.support import cases, gpu_ranks
from tests.support.cases import HIDDEN_DIM
from tests.support.gpu_ranks import World
from tests.support.ranks import Rank

pytestmark = pytest.mark.gpu
COUNT = 7


def merging(rank: Rank, world: World, layout: Any) -> None:
    options = DispatchOptions(layout=layout, merge_duplicates=True)
    with gpu_ranks.make(rank, world, num_experts=8, hidden_dim=HIDDEN_DIM) as comm:
        for seed in range(3):
            tokens = [hashed(seed, r, COUNT - seed) for r in range(world.ranks)]
            wanted = cases.expect(
                cases.topology_of(comm),
                [reference.merge_duplicates(each) for each in tokens],
                max_tokens=comm.config.max_tokens,
                layout=layout,
            )
            t = tokens[rank.rank]
            given = [cases.on_device(comm, each) for each in (t.x, t.topk_idx, t.topk_weights)]
            got = comm.dispatch(*given, options=options)
            y = cases.on_device(comm, wanted.y[rank.rank].reshape(-1, HIDDEN_DIM))
            out = comm.combine(y, got)
            assert isinstance(out, torch.Tensor)
            cases.finish(comm)
            cases.assert_received(cases.on_cpu(got), wanted.received[rank.rank])
            cases.assert_combined(out.cpu(), wanted.out[rank.rank])


@pytest.mark.parametrize("layout", ["padded", "by_rank"])
@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (2, 1)))
def test_every_weight_counts(world: World, layout: str) -> None:
    gpu_ranks.run(world, merging, layout)


def replayed(rank: Rank, world: World, layout: Any) -> None:
    options = DispatchOptions(layout=layout, merge_duplicates=True)
    config = {"num_experts": 8, "hidden_dim": HIDDEN_DIM}
    with gpu_ranks.make(rank, world, chunk_tokens=COUNT, max_tokens=COUNT, **config) as comm:
        first = hashed(9, rank.rank, COUNT)
        given = [cases.on_device(comm, t) for t in (first.x, first.topk_idx, first.topk_weights)]
        y: list[Tensor] = []

        def body() -> list[Any]:
            got = comm.dispatch(*given, options=options)
            if not y:  # before the capture, whose graph finds it at its place
                y.append(torch.empty_like(got.x))
            between(lambda: torch.mul(got.x, 2, out=y[0]))
            return [(got, comm.combine(y[0], got))]

        graph, ((live, out),) = capture(rank, body)
        for seed in range(6):  # more than steps_in_flight; all rows, of which some name nobody
            tokens = [hashed(seed, r, COUNT) for r in range(world.ranks)]
            wanted = cases.expect(
                cases.topology_of(comm),
                [reference.merge_duplicates(each) for each in tokens],
                max_tokens=COUNT,
                experts=lambda _, __, got: got.x.reshape(-1, HIDDEN_DIM) * 2,
                layout=layout,
            )
            t = tokens[rank.rank]
            for place, values in zip(given, (t.x, t.topk_idx, t.topk_weights), strict=True):
                assert values is not None
                place.copy_(values)
            graph.replay()
            cases.finish(comm)
            cases.assert_received(cases.on_cpu(live), wanted.received[rank.rank])
            assert torch.equal(out.cpu(), wanted.out[rank.rank])
        gpu_ranks.meet(rank, "replayed")


@pytest.mark.parametrize("layout", ["padded", "by_rank"])
@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (2, 1)))
def test_replays_merge_the_routing_that_they_find(
    world: World, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels of the merge are in the graph: nothing of it is decided when it is captured."""
    if gpu_ranks.DEVICE == "cpu":  # an emulated graph holds the package's kernels and such steps
        merged = arguments.merged

        def again(topk_idx: Tensor, topk_weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
            into = merged(topk_idx, topk_weights)

            def merge() -> None:
                for place, values in zip(into, merged(topk_idx, topk_weights), strict=True):
                    if place is not None and values is not None:
                        place.copy_(values)

            between(merge)
            return into

        monkeypatch.setattr(arguments, "merged", again)
    gpu_ranks.run(world, replayed, layout)
