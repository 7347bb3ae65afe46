"""Training on GPUs: gradients of dispatch and combine, the example layer, torch.compile.

Ranks are processes (on one GPU they take turns): backward of all threads of a process would run in
one thread per device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import test_autograd
from cases import finish, topology_of
from gpu_ranks import DEVICE, World, make, run, worlds
from moe_p2p import AllToAll
from moe_p2p.layer import MoELayer
from ranks import Rank

pytestmark = pytest.mark.gpu

HIDDEN_DIM, FFN_DIM, TOPK = test_autograd.HIDDEN_DIM, 32, test_autograd.TOPK
NUM_EXPERTS = test_autograd.NUM_EXPERTS
# Matrix products on a GPU add up in another order, in fp32 (no TF32): sums of up to 48 products of
# up to 20, so 48 * 20 * 2^-24 = 6e-5.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def communicator(rank: Rank, world: World, **config: Any) -> AllToAll:
    fixed = {"num_experts": NUM_EXPERTS, "hidden_dim": HIDDEN_DIM, "topk": TOPK, "extra_bytes": 0}
    return make(rank, world, **(fixed | config))


def gradients(
    rank: Rank, world: World, config: dict[str, Any], options: dict[str, Any], layers: int
) -> test_autograd.Gradients:
    with communicator(rank, world, **config) as comm:
        local = topology_of(comm).local_experts(rank.rank)
        experts = test_autograd.expert_weights()[local].to(DEVICE).requires_grad_()
        given = test_autograd.Inputs(*(t.to(DEVICE) for t in test_autograd.inputs(rank.rank)))
        x, weights = given.x.requires_grad_(), given.topk_weights.requires_grad_()
        out = x
        for _ in range(layers):
            out = test_autograd.layer(comm, out, given, weights, experts, **options)
        out.backward(given.grad)
        finish(comm)
        found = (out.detach(), x.grad, weights.grad, experts.grad)
        return test_autograd.Gradients(*(t.cpu() if t is not None else None for t in found))


GRADIENTS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "padded": ({}, {}, 1),
    "grouped": ({}, {"layout": "grouped", "alignment": 4}, 1),
    "chunks": ({"chunk_tokens": 2}, {}, 1),
    "three layers": ({}, {}, 3),
}


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("world", worlds((2, 2), (2, 1)) + worlds((4, 2), devices=True))
def test_gradients_are_those_of_a_dense_layer(world: World, name: str) -> None:
    config, options, layers = GRADIENTS[name]
    wanted, experts = test_autograd.dense(world.ranks, layers=layers)
    results = run(world, gradients, config, options, layers, processes=True)
    for rank, (got, want) in enumerate(zip(results, wanted, strict=True)):
        mine = experts[world.topology(num_experts=NUM_EXPERTS).local_experts(rank)]
        pairs = zip(got, want._replace(experts=mine), strict=True)
        for found, expected in pairs:
            torch.testing.assert_close(found, expected, **CLOSE)


# --- the layer ---


def make_layer(comm: AllToAll | None) -> MoELayer:
    layer = MoELayer(HIDDEN_DIM, NUM_EXPERTS, topk=TOPK, ffn_dim=FFN_DIM, all_to_all=comm, seed=3)
    generator = torch.Generator().manual_seed(1)
    torch.nn.init.normal_(layer.router.score.weight.data, generator=generator)
    return layer


def tokens_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn((5 + 3 * rank + 2 * step) % 12 + 1, HIDDEN_DIM, generator=generator)


def train(layer: MoELayer, ranks: list[int], device: str, reduce: Any) -> list[Tensor]:
    """Outputs of every step of gradient descent to smaller outputs, on two batches in turn."""
    outs = []
    for step in range(4):
        x = torch.cat([tokens_of(rank, step % 2) for rank in ranks]).to(device)
        out = layer(x)
        layer.zero_grad()
        out.square().sum().backward()
        reduce(layer.router.score.weight, step)
        with torch.no_grad():
            for parameter in layer.parameters():
                if parameter.grad is not None:
                    parameter -= 0.001 * parameter.grad
        outs.append(out.detach().cpu())
    return outs


def trained(rank: Rank, world: World) -> list[Tensor]:
    with communicator(rank, world) as comm:
        layer = make_layer(comm).to(DEVICE)

        def reduce(weight: Tensor, step: int) -> None:
            """Adds up the gradients of what all ranks have, as a data-parallel engine does."""
            assert weight.grad is not None
            finish(comm)
            mine = weight.grad.cpu()
            rank.store.set(f"gradient {step} of {rank.rank}", mine.numpy().tobytes())
            total = torch.zeros_like(mine)
            for other in range(rank.world_size):
                data = bytearray(rank.store.get(f"gradient {step} of {other}"))
                total += torch.frombuffer(data, dtype=mine.dtype).view(mine.shape)
            weight.grad.copy_(total)

        return train(layer, [rank.rank], DEVICE, reduce)


@pytest.mark.parametrize("world", worlds((2, 2), (2, 1)) + worlds((4, 2), devices=True))
def test_ranks_train_as_one_process_does(world: World) -> None:
    alone = train(make_layer(None), list(range(world.ranks)), "cpu", lambda weight, step: None)
    results = run(world, trained, processes=True, deadline_s=100.0)
    assert alone[2].square().mean() < alone[0].square().mean()  # of the same tokens
    for step, want in enumerate(alone):
        got = torch.cat([outs[step] for outs in results])
        # Differences of the first steps pass into the weights of the later ones.
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def layer_gradients(layer: MoELayer, run_layer: Any, x: Tensor) -> list[Tensor]:
    layer.zero_grad()
    x = x.detach().requires_grad_()
    out = run_layer(x)
    out.square().sum().backward()
    grads = [x.grad, *(parameter.grad for parameter in layer.parameters())]
    return [out.detach().cpu(), *(grad.cpu() for grad in grads if grad is not None)]


def compiled(rank: Rank, world: World, backend: str) -> int:
    with communicator(rank, world, steps_in_flight=4) as comm:
        layer = make_layer(comm).to(DEVICE)
        counter = CompileCounterWithBackend(backend)
        fast = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
        for step in range(3):
            x = tokens_of(rank.rank, step).to(DEVICE)
            wanted = layer_gradients(layer, layer, x)
            for got, want in zip(layer_gradients(layer, fast, x), wanted, strict=True):
                torch.testing.assert_close(got, want, **CLOSE)
        with torch.no_grad():
            x = tokens_of(rank.rank, 5).to(DEVICE)
            torch.testing.assert_close(fast(x).cpu(), layer(x).cpu(), **CLOSE)
        return counter.frame_count


@pytest.mark.parametrize(
    ("world", "backend"),
    [
        pytest.param(World(1, 1), "inductor", id="1rank-inductor"),
        pytest.param(World(2, 2), "aot_eager", id="2ranks-2pernode"),
        pytest.param(World(2, 1), "aot_eager", id="2ranks-1pernode"),
    ],
)
def test_a_compiled_layer_is_one_graph_and_equals_eager(world: World, backend: str) -> None:
    frames = run(world, compiled, backend, processes=True, deadline_s=110.0)
    assert frames == [2] * world.ranks  # with gradients and without
