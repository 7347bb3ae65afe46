"""Megatron-Core's real MoELayer over ours, on CPU ranks, against its own all-to-all dispatcher."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_p2p.bench import megatron_layer
from moe_p2p.bench.megatron_layer import SYSTEMS, Layer
from tests.engines import packages
from tests.support import engine_layers as plain
from tests.support.ranks import Rank, run_processes

pytestmark = [pytest.mark.engine("megatron-core"), pytest.mark.timeout(400)]

TOKENS, STEPS = 12, 3
FLEX = [system for system in SYSTEMS if not system.startswith("alltoall")]  # these have a manager
SMALL: dict[str, Any] = {"hidden": 64, "ffn": 32, "experts": 8, "topk": 4, "dtype": torch.float32}
SHARED = {"moe_shared_expert_intermediate_size": 48}
# Sums in another order; bf16 also rounds rows, gradients and sums, 2^-9 of a value each.
FP32, BF16 = 1e-6, 1e-2
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
DROPPED = {"moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "probs"}
CASES = {
    "top-4": (Layer(**SMALL), FP32),
    "bf16": (Layer(**SMALL | {"dtype": torch.bfloat16}), BF16),
    "dropped tokens": (Layer(**SMALL, more=DROPPED), FP32),
    "hidden size 72, top-2": (Layer(**SMALL | {"hidden": 72, "topk": 2}), FP32),
    "shared experts": (Layer(**SMALL, more=SHARED), FP32),
    "shared experts beside": (
        Layer(**SMALL, more=SHARED | {"moe_shared_expert_overlap": True}),
        FP32,
    ),
    "recompute": (Layer(**SMALL, more=SELECTIVE), FP32),
}


def begin(rank: Rank, device: str = "cpu", tensor_ranks: int = 1) -> None:
    """Imports Megatron in a rank's process and makes its groups."""
    sys.path.insert(0, str(packages.where("megatron-core")))
    plain.join(rank, device)
    megatron_layer.start(device, tensor_ranks)


def trained(system: str, layer: Layer, device: str) -> list[dict[str, Tensor]]:
    """Output and all gradients of each step, by name."""
    made = megatron_layer.make(system, layer, device)
    dispatcher = made.token_dispatcher
    assert made.config.moe_permute_fusion == system.endswith("_fused")
    if system in FLEX:
        manager = type(dispatcher._comm_manager)
        ours = "moe_p2p" in manager.__mro__[1].__module__
        assert ours == (system == "integration")
    results = []
    for step in range(STEPS):
        x, grad = megatron_layer.inputs(step, layer, TOKENS, device)
        out, x_grad = megatron_layer.train(made, x, grad)
        of_parameters = {
            name: parameter.grad.clone()
            for name, parameter in made.named_parameters()
            if parameter.grad is not None
        }
        assert any("experts" in name for name in of_parameters)
        assert any("router" in name for name in of_parameters)
        results.append({"out": out, "x": x_grad, **of_parameters})
    return results


def apart(mine: Tensor, other: Tensor) -> float:
    return float((mine.double() - other.double()).norm() / other.double().norm().clamp_min(1e-9))


def run_case(rank: Rank, names: list[str], tensor_ranks: int, device: str = "cpu") -> None:
    begin(rank, device, tensor_ranks)
    for name in names:
        layer, near = CASES[name]
        if device == "cuda":  # its products of matrices depend on the order of rows
            near = max(near, 1e-5)
        layer = Layer(**{**vars(layer), "tensor_ranks": tensor_ranks})
        expected = trained(SYSTEMS[0], layer, device)
        for system in SYSTEMS[1:]:
            for step, (mine, other) in enumerate(
                zip(trained(system, layer, device), expected, strict=True)
            ):
                assert mine.keys() == other.keys()
                for what in mine:
                    difference = apart(mine[what], other[what])
                    assert difference < near, f"{name}, {system}, step {step}: {what} {difference}"


def test_tensor_parallel_ranks_train_as_with_alltoall() -> None:
    run_processes(2, run_case, ["top-4"], 2, deadline_s=200.0)


def train_in_parts(device: str) -> None:
    """As 1F1B overlap: each part of a layer has a graph of its own (fine_grained_callables.py)."""
    layer = Layer(**SMALL)
    made = megatron_layer.make("integration", layer, device)
    manager = made.token_dispatcher._comm_manager
    assert (manager.dispatched_probs, manager.token_probs) == (None, None)
    x, grad = megatron_layer.inputs(0, layer, TOKENS, device)
    expected = megatron_layer.train(made, x, grad)
    expected_router = made.router.weight.grad.clone()
    made.router.weight.grad = None

    def cut(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_()

    given = cut(x)
    probs, routing_map = made.route(given)
    rows, probs = made.preprocess(given, probs, routing_map)
    rows_in, probs_in = cut(rows), cut(probs)
    manager.token_probs = probs_in
    sent, sent_probs = made.dispatch(rows_in, probs_in)
    sent_in, sent_probs_in = cut(sent), cut(sent_probs)
    manager.dispatched_probs = sent_probs_in
    y, _ = made.routed_experts_compute(sent_in, sent_probs_in)
    y_in = cut(y)
    out = made.postprocess(made.combine(y_in), None)
    torch.testing.assert_close(out, expected[0])
    out.backward(grad)
    assert sent_probs_in.grad is None, "combine's graph reaches the experts"
    y.backward(y_in.grad)
    assert rows_in.grad is None, "the experts' graph reaches dispatch"
    assert probs_in.grad is None
    torch.autograd.backward((sent, sent_probs), (sent_in.grad, sent_probs_in.grad))
    assert given.grad is None, "dispatch's graph reaches the router"
    torch.autograd.backward((rows, probs), (rows_in.grad, probs_in.grad))
    torch.testing.assert_close(given.grad, expected[1])
    torch.testing.assert_close(made.router.weight.grad, expected_router)


@contextlib.contextmanager
def sums_in_one_order(device: str) -> Iterator[None]:
    """Of a token's rows. `unpermute` of moe_utils.py adds them by `scatter_add_`, which on a GPU is
    atomics, in any order, unless torch is asked for deterministic algorithms. It is asked only
    there: in that mode torch also fills new memory. A CPU's `scatter_add_` becomes like a GPU's."""
    from megatron.core.transformer.moe import token_dispatcher

    unpermute = token_dispatcher.unpermute

    def deterministic(*given: Any, **options: Any) -> Tensor:
        torch.use_deterministic_algorithms(True)
        try:
            return unpermute(*given, **options)  # type: ignore[no-any-return]
        finally:
            torch.use_deterministic_algorithms(False)

    def by_atomics(out: Tensor, _: int, index: Tensor, source: Tensor) -> Tensor:
        for row in torch.randperm(len(index)).tolist():
            out[index[row, 0]] += source[row]  # rounded each time
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_dispatcher, "unpermute", deterministic)
        if device == "cpu":
            patch.setattr(torch.Tensor, "scatter_add_", by_atomics)
        yield


def replay_router(system: str, device: str) -> None:
    """As `--cuda-graph-scope moe_router moe_preprocess`: router and metadata are replayed, dispatch
    reads what they left in the manager's attributes."""
    layer = Layer(**SMALL | {"hidden": 256, "dtype": torch.bfloat16})
    made = megatron_layer.make(system, layer, device)
    x, _ = megatron_layer.inputs(0, layer, TOKENS, device)

    def front() -> tuple[Tensor, Tensor]:
        probs, routing_map = made.route(x)
        return made.preprocess(x, probs, routing_map)  # type: ignore[no-any-return]

    def back(rows: Tensor, probs: Tensor) -> Tensor:
        y, _ = made.routed_experts_compute(*made.dispatch(rows, probs))
        return made.postprocess(made.combine(y), None)  # type: ignore[no-any-return]

    def whole() -> Tensor:
        out = made(x)
        return out[0] if isinstance(out, tuple) else out

    with torch.no_grad(), sums_in_one_order(device):
        back(*front())
        replay, results = recorded(front, device)
        for number in range(1, 4):
            x.copy_(megatron_layer.inputs(number, layer, TOKENS, device)[0])
            results = replay() or results
            found = back(*results).clone()
            assert found.abs().sum() > 0
            # Eager, which gives the manager other tensors; the next replay must be seen again.
            manager = made.token_dispatcher._comm_manager
            kept = {
                name: value for name, value in vars(manager).items() if isinstance(value, Tensor)
            }
            assert torch.equal(found, whole())
            vars(manager).update(kept)


def recorded(front: Any, device: str) -> tuple[Any, Any]:
    """Returns what runs front() again, and its results: in a CUDA graph, or on a CPU anew."""
    if device == "cpu":
        return front, front()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        front()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        results = front()

    def replay() -> None:
        graph.replay()

    return replay, results


class Weighted(torch.nn.Module):
    """Experts that ask the host for nothing: a row times its probability."""

    def forward(self, rows: Tensor, _: Any, probs: Tensor, *__: Any) -> tuple[Tensor, None]:
        return (rows * probs[:, None]).to(rows.dtype), None


def with_budget(system: str, layer: Layer, factor: float | None, device: str) -> Any:
    """A layer whose HybridEP has room for factor * T * K rows of a rank, and waits for no host.

    Megatron offers the budget with experts of TransformerEngine only, which is not here.
    """
    made = megatron_layer.make(system, layer, device)
    made.experts = Weighted()
    if factor is not None:
        from megatron.core.transformer.moe import token_dispatcher

        token_dispatcher.get_align_size_for_quantization = lambda _: 16  # as those experts ask
        made.config.moe_expert_rank_capacity_factor = factor
        made.token_dispatcher._comm_manager.moe_expert_rank_capacity_factor = factor
    return made


def train_with_a_budget() -> None:
    """Past a budget rows are dropped, and Megatron's flag says so."""
    layer = Layer(**SMALL)
    plain_layer = with_budget("alltoall", layer, None, "cpu")
    roomy, scarce = (with_budget("hybridep", layer, factor, "cpu") for factor in (2.0, 0.5))
    for step in range(STEPS):
        given = megatron_layer.inputs(step, layer, TOKENS, "cpu")
        expected = megatron_layer.train(plain_layer, *given)
        for mine, other in zip(megatron_layer.train(roomy, *given), expected, strict=True):
            assert apart(mine, other) < FP32
        for mine in megatron_layer.train(scarce, *given):
            assert mine.isfinite().all()
    flags = [made.token_dispatcher._comm_manager.over_budget for made in (roomy, scarce)]
    over = torch.stack([flag.int() for flag in flags])
    dist.all_reduce(over)
    assert over.tolist()[0] == [0]
    assert over.tolist()[1] > [0]  # of one rank at least: half of the rows have no place


def replayed(device: str) -> None:
    """Forward and backward of a whole layer but for its experts, in one CUDA graph on a GPU."""
    layer = Layer(**SMALL | {"hidden": 256, "dtype": torch.bfloat16})
    made = with_budget("hybridep", layer, 2.0, device)
    x, grad = megatron_layer.inputs(0, layer, TOKENS, device)
    x.requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        out = made(x)
        out = out[0] if isinstance(out, tuple) else out
        (x_grad,) = torch.autograd.grad(out, x, grad)
        return out.detach(), x_grad

    side = torch.cuda.Stream() if device == "cuda" else None
    if side is None:
        step()
        results = step()
        again = step
    else:
        with torch.cuda.stream(side):  # a node of autograd keeps the stream of its first use
            step()
            step()
        side.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            results = step()

        def again() -> tuple[Tensor, Tensor]:
            graph.replay()
            torch.cuda.synchronize()
            return results

    for number in range(1, 4):
        new_x, new_grad = megatron_layer.inputs(number, layer, TOKENS, device)
        with torch.no_grad():
            x.copy_(new_x)
            grad.copy_(new_grad)
        found = [tensor.clone() for tensor in again()]
        dist.barrier()
        with torch.cuda.stream(side):
            expected = step()
        if side is not None:
            side.synchronize()
        for mine, eager in zip(found, expected, strict=True):
            assert mine.abs().sum() > 0
            assert torch.equal(mine, eager)  # sums have one order
        dist.barrier()
    assert not made.token_dispatcher._comm_manager.over_budget


def train_with_few_multiprocessors() -> None:
    layer = Layer(**SMALL, more={"moe_flex_dispatcher_num_sms": 8})
    made = megatron_layer.make("integration", layer, "cpu")
    megatron_layer.train(made, *megatron_layer.inputs(0, layer, TOKENS, "cpu"))
    manager = made.token_dispatcher._comm_manager
    pool = manager._shared[manager.group]
    assert {config.num_sms for config, _ in pool._made} == {8, None}, "None: of layers before"
    manager.check()


def manager_inputs(rank: int, step: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [T, H], probabilities [T, E], routing map [T, E], and ids [T, K] as the router had them."""
    x, ids, weights = plain.inputs(rank, step, torch.float32, device=device)
    weights[:1, 0] = 0.0  # chosen all the same: it has a gradient
    probs = x.new_zeros(len(x), plain.EXPERTS).scatter_(1, ids, weights)
    chosen = torch.zeros_like(probs, dtype=torch.bool).scatter_(1, ids, True)
    chosen[: len(x) // 2, 0] = False  # dropped
    return x, probs, chosen, ids


def train_manager(rank: Rank, alignment: int, device: str) -> None:
    """The manager alone, with experts of its own function each, and rows padded for quantization.

    Megatron pads for FP8 and FP4, whose experts need TransformerEngine.
    """
    from megatron.core.transformer.moe import token_dispatcher

    from moe_p2p.integrations.moe import megatron

    megatron.install()
    num_local = plain.EXPERTS // rank.world_size
    config = types.SimpleNamespace(
        moe_router_dtype="fp32",
        moe_router_padding_for_quantization=alignment > 1,
        use_transformer_engine_op_fuser=False,
        fp8="hybrid",
        fp8_recipe="delayed",  # 16 rows
    )
    manager = token_dispatcher._DeepepManager(
        group=dist.group.WORLD,
        num_local_experts=num_local,
        router_topk=plain.TOPK,
        num_experts=plain.EXPERTS,
        config=config,
    )
    first = plain.first_expert(rank)
    for step in range(len(plain.COUNTS)):
        everyone = [manager_inputs(r, step, "cpu")[2] for r in range(rank.world_size)]
        arriving = torch.cat(everyone)[:, first : first + num_local].sum(dim=0)
        x, probs, chosen, ids = manager_inputs(rank.rank, step, device)
        x_1, x_2, probs_1, probs_2 = (
            leaf.clone().requires_grad_() for leaf in (x, x, probs, probs)
        )
        manager.setup_metadata(chosen, probs_1)
        rows = manager.dispatch(x_1, async_finish=True, allocate_on_comm_stream=True)
        rows, row_probs = manager.get_permuted_hidden_states_by_experts(rows)
        counts = manager.get_number_of_tokens_per_expert()
        assert torch.equal(counts, (arriving + alignment - 1) // alignment * alignment)
        assert int(counts.sum()) == len(rows) == len(row_probs)
        local = torch.arange(num_local, device="cpu").repeat_interleave(counts).to(device)
        y = plain.expert(rows, local + first) * row_probs[:, None]
        y = manager.get_restored_hidden_states_by_experts(y)
        out = manager.combine(y, async_finish=True, allocate_on_comm_stream=True)
        expected = plain.plain(x_2, ids, torch.where(chosen, probs_2, 0.0).gather(1, ids))
        torch.testing.assert_close(out, expected, **plain.FP32)
        grad = torch.linspace(-step, 1, out.numel(), dtype=out.dtype, device=device).sin()
        out.backward(grad.view(out.shape))
        expected.backward(grad.view(out.shape))
        torch.testing.assert_close(x_1.grad, x_2.grad, **plain.FP32)
        # Of probabilities: a sum over H products.
        torch.testing.assert_close(probs_1.grad, probs_2.grad, rtol=1e-4, atol=1e-3)


def run_all(rank: Rank) -> None:
    """In one process, because importing Megatron takes seconds."""
    run_case(rank, list(CASES), 1)
    train_in_parts("cpu")
    for system in FLEX:
        replay_router(system, "cpu")
    train_with_few_multiprocessors()
    train_with_a_budget()
    replayed("cpu")
    for alignment in (1, 16):
        train_manager(rank, alignment, "cpu")


def test_training_gives_the_outputs_and_gradients_of_alltoall() -> None:
    run_processes(2, run_all, deadline_s=200.0)
