"""Calls past torch's dispatcher take tensors of a GPU (moe_p2p/moe/direct.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_p2p import CombineOptions, DispatchOptions
from moe_p2p.moe import direct
from moe_p2p.moe.dispatched import OBJECTS, WHOLE
from tests.support.cases import finish, make_tokens, on_device
from tests.support.gpu_ranks import World, make, run
from tests.support.ranks import Rank

pytestmark = pytest.mark.gpu

HIDDEN_DIM, T = 512, 7


def called(rank: Rank, world: World) -> None:
    dispatch, combine = (direct.call_of(name, *OBJECTS) for name in ("dispatch", "combine"))
    with make(rank, world, hidden_dim=HIDDEN_DIM, dtype=torch.bfloat16) as comm:
        mine = make_tokens(0, 0, T, dtype=torch.bfloat16, num_experts=4, hidden_dim=HIDDEN_DIM)
        given = [on_device(comm, t) for t in (mine.x, mine.topk_idx, mine.topk_weights)]
        first = comm._comm, DispatchOptions().number, T, T
        received = comm.dispatch(*given)
        want = comm.combine(received.x, received)
        for grad in (True, False):
            with torch.inference_mode(not grad):
                made: Any = dispatch(*first, *given, None, None, WHOLE)
                got = combine(comm._comm, made.x, made, 0, None, None, None)
                finish(comm)
                assert made.x.device == given[0].device
                assert torch.equal(got.cpu(), want.cpu())
        # A kernel that is not compiled: only the op's caller compiles it.
        grouped = DispatchOptions(layout="by_rank", solo=True)
        other = comm._comm, grouped.number, T, T, *given, None, None, WHOLE
        halves = CombineOptions(partials="block16").number
        assert dispatch(*other) is None
        assert combine(comm._comm, made.x, made, halves, None, None, None) is None
        rows = comm.dispatch(*given, options=grouped).x
        finish(comm)
        assert torch.equal(dispatch(*other).x[:T].cpu(), rows[:T].cpu())


@pytest.mark.skipif(direct.FACTS is None, reason="this torch has no direct calls")
def test_they_take_tensors_of_a_gpu() -> None:
    run(World(1, 1), called)
