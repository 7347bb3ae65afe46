"""merge_duplicates on a GPU: the reference's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_p2p import DispatchOptions
from moe_p2p.moe import reference
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
