"""vLLM's EPLB over engines, in GPU memory, in the order of its move_to_buffer and move_from_buffer.
Ranks are threads that share one GPU (gpu_ranks.py); tests/engines/test_eplb.py has vLLM's code."""

from __future__ import annotations

import pytest
import torch

from moe_p2p.integrations.moe.vllm_eplb import Communicator
from tests.support import gpu_ranks
from tests.support.gpu_ranks import DEVICE, World
from tests.support.ranks import Rank, StoreGroup

pytestmark = pytest.mark.gpu

SLOTS, LAYERS, ROUNDS, BYTES = 3, 2, 4, 1 << 16


def moves(rank: Rank, world: World) -> None:
    """The copies of a layer out of the buffer are late, and the next layer's reads wait for them.
    In each round all experts of a rank go to the one before."""
    device = "cuda:0" if DEVICE == "cuda" else DEVICE
    first, ranks = rank.rank * SLOTS, world.ranks
    held = [*range(SLOTS * ranks)]
    weights = [
        [torch.zeros(SLOTS, BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
        for _ in range(LAYERS)
    ]
    for layer, tensors in enumerate(weights):
        for number, each in enumerate(tensors):
            for slot in range(SLOTS):
                each[slot] = 100 * layer + 50 * number + first + slot
    buffer = [torch.zeros_like(each) for each in weights[0]]
    ours = Communicator(StoreGroup(rank), weights, buffer)
    after, before = (rank.rank + 1) % ranks, (rank.rank - 1) % ranks
    for number in range(ROUNDS):
        _settle(rank, f"round {number}")
        for layer, tensors in enumerate(weights):
            ours.set_transfer_context(torch.tensor(held), layer)
            for slot in range(SLOTS):
                ours.add_send([], before, held[first + slot])
                ours.add_recv([each[slot] for each in buffer], after, held[after * SLOTS + slot])
            ours.execute()
            if DEVICE == "cuda":
                torch.cuda._sleep(20_000_000)
            for each, received in zip(tensors, buffer, strict=True):
                each.copy_(received, non_blocking=True)
        held = held[SLOTS:] + held[:SLOTS]
    _settle(rank, "moved")
    for layer, tensors in enumerate(weights):
        for number, each in enumerate(tensors):
            for slot in range(SLOTS):
                wanted = 100 * layer + 50 * number + held[first + slot]
                assert bool((each[slot].cpu() == wanted).all()), (layer, number, slot)
    _settle(rank, "compared")
    ours._engine.close()


def _settle(rank: Rank, name: str) -> None:
    if DEVICE == "cuda":
        torch.cuda.current_stream().synchronize()
    gpu_ranks.meet(rank, name)


@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (4, 4)))
def test_experts_move_layer_by_layer(world: World) -> None:
    gpu_ranks.run(world, moves)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), devices=True))
def test_experts_move_between_gpus(world: World) -> None:
    gpu_ranks.run(world, moves_between, processes=True)


def moves_between(rank: Rank, world: World) -> None:
    device = f"cuda:{torch.cuda.current_device()}"
    weights = [[torch.full((SLOTS, BYTES), rank.rank + 1, dtype=torch.uint8, device=device)]]
    buffer = [torch.zeros_like(weights[0][0])]
    ours = Communicator(StoreGroup(rank), weights, buffer)
    torch.cuda.current_stream().synchronize()
    gpu_ranks.meet(rank, "filled")
    peer = (rank.rank + 1) % world.ranks
    ours.set_transfer_context(torch.arange(SLOTS * world.ranks), 0)
    for slot in range(SLOTS):
        ours.add_send([], (rank.rank - 1) % world.ranks, rank.rank * SLOTS + slot)
        ours.add_recv([buffer[0][slot]], peer, peer * SLOTS + slot)
    ours.execute()
    assert bool((buffer[0].cpu() == peer + 1).all())
    gpu_ranks.meet(rank, "compared")
    ours._engine.close()
