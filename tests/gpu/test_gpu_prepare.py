"""A capture right behind prepare(): no call was made before, and torch's default mode allows only
what a graph can hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_p2p import AllToAll, CombineOptions, Dispatched, DispatchOptions, UnavailableError
from tests.gpu.test_gpu_graphs import record
from tests.support.cases import finish, make_tokens, on_device
from tests.support.gpu_ranks import DEVICE, World, make, run
from tests.support.ranks import Rank

pytestmark = pytest.mark.gpu

HIDDEN_DIM = 512
INT10 = CombineOptions(partials="int10")
OPTIONS = DispatchOptions(layout="grouped", quantize=True, scale_format="ue8m0")


def first_captured(rank: Rank, world: World) -> None:
    with make(rank, world, hidden_dim=HIDDEN_DIM, dtype=torch.bfloat16) as comm:
        mine = make_tokens(0, 0, 7, dtype=torch.bfloat16, num_experts=4, hidden_dim=HIDDEN_DIM)
        given = [on_device(comm, t) for t in (mine.x, mine.topk_idx, mine.topk_weights)]
        rows = torch.zeros(world.ranks * 12 * 4, HIDDEN_DIM, dtype=torch.bfloat16)
        y = on_device(comm, rows.fill_(0.5))
        comm.prepare(OPTIONS, y_dtype=torch.bfloat16, combine=INT10)
        graph, (_got, captured) = record_globally(rank, "first", lambda: pair(comm, given, y))
        for _ in range(3):
            graph.replay()
        finish(comm)
        assert torch.equal(captured.cpu(), pair(comm, given, y)[1].cpu())
        assert captured.any()
        with pytest.raises(UnavailableError, match=r"call prepare\(DispatchOptions\(layout="):
            record_globally(rank, "other", lambda: comm.dispatch(*given[:2], layout="by_rank"))
        assert torch.equal(captured.cpu(), pair(comm, given, y)[1].cpu())


def record_globally(rank: Rank, name: str, body: Callable[[], Any]) -> tuple[Any, Any]:
    """As test_gpu_graphs.record(), but in torch's default mode, for one rank."""
    if DEVICE == "cpu":
        return record(rank, name, body)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, body()


def pair(comm: AllToAll, given: list[Tensor], y: Tensor) -> tuple[Dispatched, Tensor]:
    got = comm.dispatch(*given, options=OPTIONS)
    return got, comm.combine(y[: got.x.shape[0]], got, options=INT10)


def test_a_first_call_may_be_captured_once_it_is_prepared() -> None:
    run(World(1, 1), first_captured)
