"""Training on GPUs: gradients of dispatch and combine, the example layer, torch.compile.

Ranks are processes (on one GPU they take turns), because backward of all threads of a process would
run in one thread per device. On the CPU, where GPUs are emulated, it runs in the caller's.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_p2p import AllToAll
from moe_p2p.layer import MoELayer
from tests.layer import test_training
from tests.moe import test_autograd
from tests.support.cases import finish
from tests.support.gpu_ranks import DEVICE, World, make, run, worlds
from tests.support.ranks import Rank

pytestmark = pytest.mark.gpu

PROCESSES = "MOE_P2P_EMULATED_GPU" not in os.environ
HIDDEN_DIM, TOPK = test_autograd.HIDDEN_DIM, test_autograd.TOPK
NUM_EXPERTS = test_autograd.NUM_EXPERTS
# Matrix products on a GPU add up in another order, in fp32 (no TF32): sums of up to 48 products of
# up to 20, so 48 * 20 * 2^-24 = 6e-5.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def communicator(rank: Rank, world: World, **config: Any) -> AllToAll:
    fixed = {"num_experts": NUM_EXPERTS, "hidden_dim": HIDDEN_DIM, "topk": TOPK, "extra_bytes": 0}
    return make(rank, world, **(fixed | config))


class OneByOne(TorchDispatchMode):
    """Calls of this package end before anything else is called."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "moe_p2p" and DEVICE == "cuda":
            torch.cuda.current_stream().synchronize()
        return result


def load_kernels(world: World, body: Callable[[], object]) -> None:
    """Between nodes, does once what is to be tested, call by call.

    At its first use a kernel of torch or Triton is loaded when those that run have ended. They may
    wait for the software NIC, whose copies wait for that load.
    """
    if world.per_node < world.ranks:
        with OneByOne(), torch.compiler.set_stance("force_eager"):
            body()


def gradients(
    rank: Rank, world: World, config: dict[str, Any], name: str, layers: int
) -> test_autograd.Gradients:
    with communicator(rank, world, **config) as comm:
        body = functools.partial(test_training.gradients, comm, *FORMS[name], layers=layers)
        load_kernels(world, body)
        return body()


FORMS: dict[str, tuple[test_training.Form, dict[str, Any]]] = {
    "padded": (test_autograd.layer, {}),
    "grouped": (test_autograd.layer, {"layout": "grouped", "alignment": 4}),
    "by rank": (test_autograd.layer, {"layout": "by_rank"}),
    **test_training.FORMS,
}
LAYOUTS = ("padded", "grouped", "by rank")
CHUNKS = {"chunk_tokens": 2}


@pytest.mark.parametrize(
    ("name", "config", "layers"),
    [(name, {}, 3) for name in LAYOUTS] + [("padded", CHUNKS, 1), ("by rank", CHUNKS, 1)],
    ids=[*LAYOUTS, "padded, chunks", "by rank, chunks"],
)
@pytest.mark.parametrize("world", worlds((2, 2), (2, 1)) + worlds((4, 2), devices=True))
def test_gradients_are_those_of_a_dense_layer(
    world: World, name: str, config: dict[str, Any], layers: int
) -> None:
    results = run(world, gradients, config, name, layers, processes=PROCESSES)
    test_training.assert_dense(results, layers=layers, **CLOSE)


@pytest.mark.parametrize("name", test_training.FORMS)
def test_every_form_has_the_gradients_of_a_dense_layer(name: str) -> None:
    results = run(World(2, 2), gradients, {}, name, 2, processes=PROCESSES)
    test_training.assert_dense(results, layers=2, **CLOSE)


def accumulated(rank: Rank, world: World, name: str) -> Tensor:
    form, options = FORMS[name]
    with communicator(rank, world) as comm:
        return test_training.accumulated(comm, form, {"zero_padding": True} | options)


@pytest.mark.parametrize("name", ["padded", "by rank", "side stream"])
def test_gradients_of_micro_batches_add_up(name: str) -> None:
    results = run(World(2, 2), accumulated, name, processes=PROCESSES)
    test_training.assert_accumulated(results, **CLOSE)


# --- the layer ---


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
        layer, other = (test_training.make_layer(comm).to(DEVICE) for _ in range(2))
        load_kernels(world, lambda: train(other, [rank.rank], DEVICE, lambda weight, step: None))

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
    alone = train(
        test_training.make_layer(None), list(range(world.ranks)), "cpu", lambda weight, step: None
    )
    results = run(world, trained, processes=PROCESSES)
    assert alone[2].square().mean() < alone[0].square().mean()  # of the same tokens
    for step, want in enumerate(alone):
        got = torch.cat([outs[step] for outs in results])
        # Differences of the first steps pass into the weights of the later ones.
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def compiled(rank: Rank, world: World, backend: str, checkpoints: bool) -> int:
    with communicator(rank, world, steps_in_flight=4) as comm:
        # Grids of torch 2.11's inductor divide by the number of tokens.
        options = {"checkpoints": checkpoints, "none": backend != "inductor", **CLOSE}
        body = functools.partial(test_training.compiled, comm, backend, **options)
        load_kernels(world, body)
        return body()


@pytest.mark.parametrize(
    ("world", "backend", "checkpoints"),
    [
        pytest.param(World(1, 1), "inductor", False, id="1rank-inductor"),
        pytest.param(World(2, 2), "aot_eager", False, id="2ranks-2pernode"),
        pytest.param(World(2, 2), "aot_eager", True, id="2ranks-2pernode-checkpoints"),
        pytest.param(World(2, 1), "aot_eager", False, id="2ranks-1pernode"),
    ],
)
def test_one_graph_serves_every_number_of_tokens(
    world: World, backend: str, checkpoints: bool
) -> None:
    frames = run(world, compiled, backend, checkpoints, processes=True)
    assert frames == [2] * world.ranks  # with gradients and without


def replayed(rank: Rank, world: World) -> int:
    """Trains and infers with CUDA graphs of torch.compile; how often one was given up."""
    num_tokens = 5 + rank.rank
    with communicator(rank, world, steps_in_flight=4) as comm:
        layer = test_training.make_layer(comm).to(DEVICE)
        fast = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
        for step in range(5):  # a warm-up, a capture, replays
            x = test_training.random_tokens(comm, step, count=num_tokens)
            wanted = test_training.layer_gradients(layer, layer, x)
            torch.compiler.cudagraph_mark_step_begin()
            found = test_training.layer_gradients(layer, fast, x, any_count=False)
            for got, want in zip(found, wanted, strict=True):
                torch.testing.assert_close(got, want, **CLOSE)
        with torch.no_grad():
            for step in range(5):
                x = test_training.random_tokens(comm, step, count=num_tokens)
                want = layer(x)
                torch.compiler.cudagraph_mark_step_begin()
                out = fast(x)
                finish(comm)
                torch.testing.assert_close(out.cpu(), want.cpu(), **CLOSE)
        return int(torch._dynamo.utils.counters["inductor"]["cudagraph_skips"])


@pytest.mark.parametrize("world", worlds((1, 1), (2, 2)))
def test_a_compiled_layer_runs_in_cuda_graphs(world: World) -> None:
    skips = run(world, replayed, processes=True)
    assert skips == [0] * world.ranks
