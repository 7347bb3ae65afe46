"""Checks of EPBuffer's balanced experts: functions of one rank, on the CPU or on a GPU.

Symbols: n ranks of a node, S redundant slots of a rank, L experts of a rank.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from moe_p2p.deep_ep_v25 import BufferAllocator, EPBuffer
from tests.support import elastic_cases
from tests.support.ranks import Rank

LOCAL, SLOTS = 3, 2
WIDTH = 40  # values of a row of gradients
Made = tuple[Any, list[Tensor], Tensor]


def make(rank: Rank, **options: Any) -> Made:
    """The buffer, the slots of two weights, and those of gradients."""
    plan = BufferAllocator()
    weights = [
        plan.allocate((SLOTS, 4, 6), torch.bfloat16),
        plan.allocate([SLOTS, 16], torch.float8_e4m3fn),
    ]
    grads = plan.allocate((SLOTS, WIDTH), torch.float32)
    buffer = elastic_cases.make_buffer(
        rank, EPBuffer, lb_allocation_plan_or_num_bytes=plan, **options
    )
    return buffer, weights, grads


def drawn(seed: int, num_ranks: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(-1, num_ranks * LOCAL) for _ in range(SLOTS)] for _ in range(num_ranks)]


def of_expert(expert: int, step: int) -> list[Tensor]:
    """Two weights. The first has another type and shape in its slots, and as many bytes."""
    first = torch.arange(48, dtype=torch.int32).mul(3 * expert + 7 * step + 1).remainder(113)
    second = torch.arange(16).add(expert + step).remainder(15).to(torch.float8_e4m3fn)
    return [first.to(torch.int8), second]


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(torch.uint8).flatten()


def prefetch(rank: Rank, made: Made, device: str, step: int, first: int, num_ranks: int) -> None:
    """first: the node's first rank."""
    buffer, weights, _ = made
    place = rank.rank - first
    local = [of_expert(first * LOCAL + place * LOCAL + e, step) for e in range(LOCAL)]
    experts = [torch.stack([each[n].view(torch.uint8) for each in local]) for n in range(2)]
    given = [experts[0].view(torch.int8).to(device), experts[1].view(LOCAL, 4, 4).to(device)]
    mapping = drawn(step, num_ranks)
    for each in weights:
        each.view(torch.uint8).fill_(77)
    at = "cpu" if step % 2 else device  # a mapping of either place
    table = torch.tensor(mapping, dtype=torch.int32, device=at)
    previous = {"previous_event": buffer.capture()} if step % 3 == 0 else {}
    event = buffer.lb_prefetch_weights(weights, tuple(given), table, num_sms=4 * step, **previous)
    event.current_stream_wait()
    for slot, expert in enumerate(mapping[place]):
        wanted = of_expert(first * LOCAL + expert, step)
        for got, want in zip(weights, wanted, strict=True):
            if expert < 0:
                assert (as_bytes(got[slot]) == 77).all()
            else:
                assert torch.equal(as_bytes(got[slot]), as_bytes(want))


def gradient(slot: int, rank: int, step: int) -> Tensor:
    return torch.arange(WIDTH).mul(slot + 2 * rank + step + 1).remainder(17).float() / 3


def reduce(rank: Rank, made: Made, device: str, step: int, first: int, num_ranks: int) -> None:
    buffer, _, grads = made
    place, mapping = rank.rank - first, drawn(step, num_ranks)
    for slot in range(SLOTS):
        grads[slot] = gradient(slot, rank.rank, step).to(device)
    wanted = torch.arange(LOCAL * WIDTH).view(LOCAL, WIDTH).float()
    own = wanted.clone().to(device).requires_grad_(step % 2 == 0)
    for other, row in enumerate(mapping):
        for slot, expert in enumerate(row):
            if expert >= 0 and expert // LOCAL == place:
                wanted[expert % LOCAL] += gradient(slot, first + other, step)
    event = buffer.lb_reduce_grads(
        grads, own, torch.tensor(mapping, dtype=torch.int32, device=device)
    )
    event.current_stream_wait()
    grads.fill_(torch.nan)  # nobody reads them any more
    assert torch.equal(own.detach().cpu(), wanted)


def rounds(rank: Rank, device: str, num_rounds: int, ranks_per_node: int) -> None:
    """Weights to copies and gradients back, by other mappings, beside dispatches."""
    made = make(rank)
    first = rank.rank // ranks_per_node * ranks_per_node
    for step in range(num_rounds):
        prefetch(rank, made, device, step, first, ranks_per_node)
        reduce(rank, made, device, step, first, ranks_per_node)
    made[0].destroy()
