"""Megatron's interface over AllToAll: layers that call it as Megatron does train as a plain MoE."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from tests.support.engine_layers import (
    COUNTS,
    EXPERTS,
    FP32,
    TOPK,
    WORLD,
    expert,
    first_expert,
    inputs,
    join,
    plain,
)
from tests.support.fakes import megatron as fake_megatron
from tests.support.ranks import Rank, run_processes


def megatron_inputs(rank: int, step: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [T, H], probabilities [T, E], routing map [T, E], and ids [T, K] as the router had them."""
    x, ids, weights = inputs(rank, step, torch.float32, device=device)
    weights[:1, 0] = 0.0  # chosen all the same: it has a gradient
    probs = x.new_zeros(len(x), EXPERTS).scatter_(1, ids, weights)
    chosen = torch.zeros_like(probs, dtype=torch.bool).scatter_(1, ids, True)
    chosen[: len(x) // 2, 0] = False  # dropped
    return x, probs, chosen, ids


def run_megatron(rank: Rank, alignment: int, device: str) -> None:
    fake_megatron.put(alignment=alignment)
    from moe_p2p.integrations import megatron

    megatron.install()
    made = sys.modules[f"{fake_megatron.MOE}.token_dispatcher"]._DeepepManager
    manager = made(
        group=join(rank, device),
        num_local_experts=EXPERTS // rank.world_size,
        router_topk=TOPK,
        num_experts=EXPERTS,
        config=fake_megatron.config(padding=alignment > 1),
    )
    assert isinstance(manager, fake_megatron._DispatchManager)
    num_local = EXPERTS // rank.world_size
    # Rows of each expert in this step.
    wanted = torch.zeros(num_local, dtype=torch.int64, device="cpu")

    def experts(rows: Tensor, counts: Tensor, probs: Tensor) -> Tensor:
        assert torch.equal(counts, wanted)
        assert int(counts.sum()) == len(rows) == len(probs)
        local = torch.arange(num_local, device="cpu").repeat_interleave(counts).to(device)
        ids, dispatched_probs = manager.get_dispached_metadata()
        assert torch.equal(ids[:, 0], local)
        assert torch.equal(dispatched_probs[:, 0], probs)
        return expert(rows, local + first_expert(rank)) * probs[:, None]

    for step in range(len(COUNTS)):
        everyone = [megatron_inputs(r, step, "cpu")[2] for r in range(rank.world_size)]
        mine = slice(first_expert(rank), first_expert(rank) + num_local)
        rows = torch.cat(everyone)[:, mine].sum(dim=0)
        wanted.copy_((rows + alignment - 1) // alignment * alignment)
        x, probs, chosen, ids = megatron_inputs(rank.rank, step, device)
        x_1, x_2, probs_1, probs_2 = (
            leaf.clone().requires_grad_() for leaf in (x, x, probs, probs)
        )
        out = fake_megatron.run_layer(manager, experts, x_1, chosen, probs_1)
        expected = plain(x_2, ids, torch.where(chosen, probs_2, 0.0).gather(1, ids))
        torch.testing.assert_close(out, expected, **FP32)
        grad = torch.linspace(-step, 1, out.numel(), dtype=out.dtype, device=device).sin()
        grad = grad.view(out.shape)
        out.backward(grad)
        expected.backward(grad)
        torch.testing.assert_close(x_1.grad, x_2.grad, **FP32)
        # Of probabilities: a sum over H products.
        torch.testing.assert_close(probs_1.grad, probs_2.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("alignment", [1, 16])
def test_megatron_layer_trains_as_a_plain_moe(alignment: int) -> None:
    run_processes(WORLD, run_megatron, alignment, "cpu")
