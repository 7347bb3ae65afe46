"""Calls past torch's dispatcher take tensors of a GPU (moe_p2p/moe/direct.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_p2p import DispatchOptions
from moe_p2p.moe import direct
from tests.support.cases import finish, make_tokens, on_device
from tests.support.gpu_ranks import World, make, run
from tests.support.ranks import Rank

pytestmark = pytest.mark.gpu

HIDDEN_DIM, T = 512, 7


def no_op(*_: object) -> None:
    raise AssertionError("the op was called")


def called(rank: Rank, world: World) -> None:
    dispatch = direct.call_of("dispatch_inference", no_op)
    combine = direct.call_of("combine_inference", no_op)
    with make(rank, world, hidden_dim=HIDDEN_DIM, dtype=torch.bfloat16) as comm:
        mine = make_tokens(0, 0, T, dtype=torch.bfloat16, num_experts=4, hidden_dim=HIDDEN_DIM)
        given = [on_device(comm, t) for t in (mine.x, mine.topk_idx, mine.topk_weights)]
        first = comm._comm, DispatchOptions().number, T
        received = comm.dispatch(*given)  # compiles kernels
        want = comm.combine(received.x, received)
        for grad in (True, False):
            with torch.inference_mode(not grad):
                made: Any = dispatch(*first, T, *given)
                got = combine(*first, made[5], made[0], given[1], made[2])[0]
                finish(comm)
                assert made[0].device == given[0].device
                assert torch.equal(got.cpu(), want.cpu())


@pytest.mark.skipif(direct.FACTS is None, reason="this torch has no direct calls")
def test_they_take_tensors_of_a_gpu() -> None:
    run(World(1, 1), called)
