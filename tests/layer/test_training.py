"""Ways to train through dispatch and combine: checkpoints, streams, an engine's own functions, and
torch.compile of the example layer.

FORMS give the gradients of the dense layer of test_autograd.py, and its tolerances hold.
tests/gpu/test_gpu_training.py runs all of it on GPUs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from moe_p2p import AllToAll, Dispatched, DispatchOptions
from moe_p2p.layer import MoELayer
from tests.moe.test_autograd import (
    NUM_EXPERTS,
    Gradients,
    Inputs,
    apply_experts,
    dense,
    expert_weights,
    inputs,
    layer,
)
from tests.support.cases import HIDDEN_DIM, TOPK, finish, in_options, make
from tests.support.ranks import Rank, run_processes, run_threads

# (communicator, x, inputs, weights, experts, **options of dispatch) -> out
Form = Callable[..., Tensor]
NUM_MICRO_BATCHES = 4
FFN_DIM = 32
NUM_TOKENS = (7, 1, 12, 0, 2)  # of rank 0, step by step; the next rank is one step ahead


def checkpointed(
    comm: AllToAll,
    x: Tensor,
    given: Inputs,
    weights: Tensor,
    experts: Tensor,
    *,
    use_reentrant: bool = False,
    **options: Any,
) -> Tensor:
    """Nothing of forward is kept: backward dispatches and combines once more."""

    def forward(x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        return layer(comm, x, given, weights, experts, **options)

    out: Tensor = checkpoint(forward, x, weights, experts, use_reentrant=use_reentrant)
    return out


def beside_other_work(
    comm: AllToAll, x: Tensor, given: Inputs, weights: Tensor, experts: Tensor, **options: Any
) -> Tensor:
    """Dispatch and combine on a stream of their own, while the current one has work of its own."""
    device = torch.get_device_module(x.device)  # streams of a CPU do nothing
    here, side = device.current_stream(), device.Stream()

    def lend(stream: Any, *tensors: Tensor) -> None:
        if x.is_cuda:
            for tensor in tensors:
                tensor.record_stream(stream)

    side.wait_stream(here)
    lend(side, x, weights, given.topk_idx)
    with device.stream(side):
        received = comm.dispatch(x, given.topk_idx, weights, **in_options(**options))
    shared = (x @ x.t()).softmax(1) @ x
    here.wait_stream(side)
    lend(here, received.x, received.row_weights, received.counts, received.offsets)
    y = apply_experts(received, experts)
    side.wait_stream(here)
    lend(side, y)
    with device.stream(side):
        out = comm.combine(y, received)
    nothing = shared.sin() - shared.sin()
    here.wait_stream(side)
    lend(here, out)
    return out + nothing


FUSED = DispatchOptions(layout="by_rank", zero_padding=True)


class FusedDispatch(torch.autograd.Function):
    """As engines do that bring functions of their own: rows by rank, whose gradients go home with
    those of the weights beside them."""

    @staticmethod
    def forward(
        ctx: Any, comm: AllToAll, x: Tensor, topk_idx: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Dispatched]:
        received = comm.dispatch(x, topk_idx, weights, options=FUSED)
        ctx.comm, ctx.received = comm, received
        return received.x, received.row_weights, received

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        rows, weights, _ = grads
        present = ctx.received.row_topk >= 0
        grad_x, grad_weights = ctx.comm.combine(
            rows.contiguous(), ctx.received, row_scalars=weights.where(present, 0.0)
        )
        return None, grad_x, None, grad_weights


class FusedCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: AllToAll, y: Tensor, received: Dispatched) -> Tensor:
        ctx.comm, ctx.topk_idx = comm, received.topk_idx
        return comm.combine(y, received)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        options = dataclasses.replace(FUSED, solo=True)
        rows = ctx.comm.dispatch(grads[0].contiguous(), ctx.topk_idx, options=options)
        return None, rows.x, None


def with_own_functions(
    comm: AllToAll, x: Tensor, given: Inputs, weights: Tensor, experts: Tensor
) -> Tensor:
    rows, row_weights, received = FusedDispatch.apply(comm, x, given.topk_idx, weights)
    y = apply_experts(received._replace(x=rows, row_weights=row_weights), experts)
    out: Tensor = FusedCombine.apply(comm, y, received)
    return out


FORMS: dict[str, tuple[Form, dict[str, Any]]] = {
    "checkpoints": (checkpointed, {}),
    "checkpoints by rank": (checkpointed, {"layout": "by_rank"}),
    "reentrant checkpoints": (checkpointed, {"use_reentrant": True, "layout": "grouped"}),
    "side stream": (beside_other_work, {"layout": "grouped"}),
    "side stream by rank": (beside_other_work, {"layout": "by_rank"}),
    "own functions": (with_own_functions, {}),
}


def local_experts(comm: AllToAll) -> Tensor:
    count = comm.num_local_experts
    mine = expert_weights()[comm.rank * count :][:count]
    return mine.to(comm.config.device).requires_grad_()


def inputs_of(comm: AllToAll, step: int = 0) -> Inputs:
    return Inputs(*(tensor.to(comm.config.device) for tensor in inputs(comm.rank, step=step)))


def gradients(comm: AllToAll, form: Form, options: dict[str, Any], *, layers: int) -> Gradients:
    """Of this rank's tokens and experts, on the CPU."""
    experts, given = local_experts(comm), inputs_of(comm)
    x, weights = given.x.requires_grad_(), given.topk_weights.requires_grad_()
    out = x
    for _ in range(layers):
        out = form(comm, out, given, weights, experts, **options)
    out.backward(given.grad)
    finish(comm)
    found = (out.detach(), x.grad, weights.grad, experts.grad)
    return Gradients(*(t.cpu() if t is not None else None for t in found))


def assert_dense(
    results: Sequence[Gradients], *, layers: int, rtol: float = 1e-5, atol: float = 1e-5
) -> None:
    wanted, experts = dense(len(results), layers=layers)
    mine = experts.chunk(len(results))
    for got, want, of_rank in zip(results, wanted, mine, strict=True):
        for found, expected in zip(got, want._replace(experts=of_rank), strict=True):
            torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def accumulated(comm: AllToAll, form: Form, options: dict[str, Any]) -> Tensor:
    """Gradient of this rank's experts over micro-batches, of which two are under way at a time."""
    experts = local_experts(comm)
    under_way: list[tuple[Tensor, Tensor]] = []
    for step in range(NUM_MICRO_BATCHES):
        given = inputs_of(comm, step)
        out = form(comm, given.x, given, given.topk_weights.requires_grad_(), experts, **options)
        under_way.append((out, given.grad))
        if step > 0:
            earlier, grad = under_way.pop(0)
            earlier.backward(grad)
    for last, grad in under_way:
        last.backward(grad)
    assert experts.grad is not None
    finish(comm)
    return experts.grad.cpu()


def assert_accumulated(results: list[Tensor], *, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    steps = [dense(len(results), step=step)[1] for step in range(NUM_MICRO_BATCHES)]
    torch.testing.assert_close(torch.cat(results), torch.stack(steps).sum(0), rtol=rtol, atol=atol)


@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(1, 1), (4, 2)])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_has_the_gradients_of_a_dense_layer(
    world_size: int, ranks_per_node: int, name: str
) -> None:
    def body(rank: Rank) -> Gradients:
        with make(rank, num_experts=NUM_EXPERTS, ranks_per_node=ranks_per_node) as comm:
            return gradients(comm, *FORMS[name], layers=2)

    assert_dense(run_threads(world_size, body), layers=2)


@pytest.mark.parametrize("name", ["padded", *FORMS])
def test_gradients_of_micro_batches_add_up(name: str) -> None:
    form, options = FORMS.get(name, (layer, {"zero_padding": True}))

    def body(rank: Rank) -> Tensor:
        with make(rank, num_experts=NUM_EXPERTS, ranks_per_node=2) as comm:
            return accumulated(comm, form, options)

    assert_accumulated(run_threads(4, body))


# --- torch.compile of the layer ------------------------------------------------------------------


def make_layer(comm: AllToAll | None) -> MoELayer:
    layer = MoELayer(HIDDEN_DIM, NUM_EXPERTS, topk=TOPK, ffn_dim=FFN_DIM, all_to_all=comm, seed=3)
    generator = torch.Generator().manual_seed(1)
    torch.nn.init.normal_(layer.router.score.weight.data, generator=generator)
    return layer


def random_tokens(comm: AllToAll, step: int, *, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + comm.rank)
    return torch.randn(count, HIDDEN_DIM, generator=generator).to(comm.config.device)


def layer_gradients(
    layer: MoELayer, run_layer: Callable[[Tensor], Tensor], x: Tensor, *, any_count: bool = True
) -> list[Any]:
    """The result of `run_layer` on x, and the gradients of x and of the weights, on the CPU.

    any_count: compile for every number of tokens; 0 and 1 are no cases of their own.
    """
    layer.zero_grad()
    x = x.detach().requires_grad_()
    if any_count:
        torch._dynamo.decorators.mark_unbacked(x, 0)
    out = run_layer(x)
    out.square().sum().backward()
    if layer.all_to_all is not None:
        finish(layer.all_to_all)
    grads = [x.grad, *(parameter.grad for parameter in layer.parameters())]
    return [out.detach().cpu(), *(grad if grad is None else grad.cpu() for grad in grads)]


def compiled(
    comm: AllToAll,
    backend: str,
    *,
    checkpoints: bool,
    none: bool = True,
    rtol: float = 1e-5,
    atol: float = 1e-5,
) -> int:
    """How many graphs a compiled layer needs that trains, and then infers, as an eager one does.

    none: in one step this rank has no tokens.
    """
    layer = make_layer(comm).to(comm.config.device)
    counter = CompileCounterWithBackend(backend)
    fast = torch.compile(layer, fullgraph=True, backend=counter)

    def forward(x: Tensor) -> Tensor:
        out: Tensor = checkpoint(fast, x, use_reentrant=False) if checkpoints else fast(x)
        return out

    def tokens(step: int) -> Tensor:
        count = NUM_TOKENS[(step + comm.rank) % len(NUM_TOKENS)]
        return random_tokens(comm, step, count=count if none else max(count, 1))

    for step in range(len(NUM_TOKENS)):
        x = tokens(step)
        wanted = layer_gradients(layer, layer, x)
        for got, want in zip(layer_gradients(layer, forward, x), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=rtol, atol=atol)
    with torch.no_grad():
        for step in range(len(NUM_TOKENS)):
            x = tokens(step)
            torch._dynamo.decorators.mark_unbacked(x, 0)
            out, want = fast(x), layer(x)
            finish(comm)
            torch.testing.assert_close(out.cpu(), want.cpu(), rtol=rtol, atol=atol)
    return counter.frame_count


def compile_layer(rank: Rank, checkpoints: bool) -> int:
    config = {"num_experts": NUM_EXPERTS, "ranks_per_node": 1, "steps_in_flight": 4}
    with make(rank, **config) as comm:
        return compiled(comm, "aot_eager", checkpoints=checkpoints)


@pytest.mark.parametrize(("world_size", "checkpoints"), [(1, False), (2, True)])
def test_one_graph_serves_every_number_of_tokens(world_size: int, checkpoints: bool) -> None:
    torch._dynamo.reset()
    run = run_threads if world_size == 1 else run_processes
    frames = run(world_size, compile_layer, checkpoints, deadline_s=110.0)
    assert frames == [2] * world_size  # with gradients and without
