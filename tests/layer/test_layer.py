"""The example layer: experts over ranks compute what one process computes, forward and backward."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_p2p import AllToAll, AllToAllConfig, Dispatched, InvalidArgumentError
from moe_p2p.layer import MoELayer, local_experts, products
from moe_p2p.machine import driver
from tests.support.ranks import Rank, run_threads

WORLD, EXPERTS, HIDDEN, FFN, TOPK, TOKENS = 4, 8, 64, 32, 3, 24
COUNTS = ([24, 0, 7, 13], [1, 5, 0, 24])  # tokens of each rank, step by step


@dataclass(frozen=True)
class Result:
    out: list[Tensor]  # per step [T, H]
    grad_x: list[Tensor]
    grad_router: Tensor
    grad_gate: Tensor  # [E_local, H, F]
    grad_down: Tensor


def config(**changes: object) -> AllToAllConfig:
    base = AllToAllConfig(
        num_experts=EXPERTS,
        hidden_dim=HIDDEN,
        topk=TOPK,
        max_tokens=TOKENS,
        dtype=torch.float32,
        ranks_per_node=2,
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def make_layer(all_to_all: AllToAll | None) -> MoELayer:
    layer = MoELayer(HIDDEN, EXPERTS, topk=TOPK, ffn_dim=FFN, all_to_all=all_to_all, seed=3)
    generator = torch.Generator().manual_seed(1)
    torch.nn.init.normal_(layer.router.score.weight.data, generator=generator)
    return layer


def inputs(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """x and the gradient that comes back to the layer, [T, H] each."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    shape = (COUNTS[step][rank], HIDDEN)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def run_layer(layer: MoELayer, ranks: list[int], *, device: str = "cpu") -> Result:
    """Forward and backward of all steps on the tokens of `ranks`, gradients summed over steps."""
    out, grad_x = [], []
    for step in range(len(COUNTS)):
        x, grad = (
            torch.cat(parts).to(device)
            for parts in zip(*(inputs(r, step) for r in ranks), strict=True)
        )
        x.requires_grad_()
        y = layer(x)
        y.backward(grad)
        assert x.grad is not None
        out.append(y.detach())
        grad_x.append(x.grad)
    weights = (layer.router.score.weight, layer.experts.w_gate, layer.experts.w_down)
    # A rank without experts has weights without elements, and no gradient for them.
    grads = [w.new_zeros(w.shape) if w.grad is None else w.grad for w in weights]
    return Result(out, grad_x, *grads)


def body(rank: Rank, expert_rank: tuple[int, ...] | None) -> tuple[list[int], Result]:
    made = config(expert_rank=expert_rank)
    with AllToAll(rank.store, made, rank=rank.rank, world_size=rank.world_size) as all_to_all:
        return local_experts(all_to_all), run_layer(make_layer(all_to_all), [rank.rank])


def assert_close(got: Tensor, want: Tensor) -> None:
    # fp32 sums of up to a few hundred products of size 1, in another order: 1e-5 is 100 roundings.
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("expert_rank", [None, (3, 0, 0, 3, 1, 3, 0, 3)])
def test_ranks_equal_one_process(expert_rank: tuple[int, ...] | None) -> None:
    alone = run_layer(make_layer(None), list(range(WORLD)))
    results = run_threads(WORLD, body, expert_rank)
    for step in range(len(COUNTS)):
        for mine, whole in (("out", alone.out), ("grad_x", alone.grad_x)):
            got = torch.cat([getattr(result, mine)[step] for _, result in results])
            assert_close(got, whole[step])
    # Replicated weights: the ranks' gradients add up. Experts: each lives on one rank.
    router = sum(result.grad_router for _, result in results)
    assert_close(router, alone.grad_router)
    for mine, result in results:
        assert_close(result.grad_gate, alone.grad_gate[mine])
        assert_close(result.grad_down, alone.grad_down[mine])
    assert sorted(e for mine, _ in results for e in mine) == list(range(EXPERTS))


def rows_of_experts(rank: Rank) -> list[tuple[int, int, int]]:
    """Of every step: rows that the experts get, rows that hold a token, words of the handle."""
    found = []
    made = config(max_tokens=100 * TOKENS, chunk_tokens=TOKENS)
    with AllToAll(rank.store, made, rank=rank.rank, world_size=rank.world_size) as all_to_all:
        layer = make_layer(all_to_all)
        handles = []
        dispatch = all_to_all.dispatch

        def kept(*args: Any, **kwargs: Any) -> Dispatched:
            received = dispatch(*args, **kwargs)
            handles.append(received.call.handle)
            return received

        all_to_all.dispatch = kept  # type: ignore[method-assign]
        layer.experts.register_forward_hook(
            lambda _, given, __: found.append((len(given[0]), int(given[1].sum())))
        )
        for step in range(len(COUNTS)):
            x, grad = inputs(rank.rank, step)
            layer(x.requires_grad_()).backward(grad)
        return [(*rows, handle.numel()) for rows, handle in zip(found, handles, strict=True)]


def test_training_has_room_for_the_rows_that_come() -> None:
    for rows in run_threads(WORLD, rows_of_experts):
        for room, came, words in rows:
            assert room == max(1, came)
            # One chunk of a hundred: [W, tokens, K + 2] and a little.
            assert words < 2 * WORLD * TOKENS * (TOPK + 2)


def test_one_process_equals_every_expert_on_every_token() -> None:
    layer = make_layer(None)
    x, _ = inputs(0, 0)
    topk_idx, topk_weights = layer.router(x)
    torch.testing.assert_close(topk_weights.sum(dim=1), torch.ones(len(x)))
    want = torch.zeros_like(x)
    for expert in range(EXPERTS):
        only = torch.zeros(EXPERTS, dtype=torch.int64)
        only[expert] = len(x)
        share = (topk_weights * (topk_idx == expert)).sum(dim=1, keepdim=True)
        want += share * layer.experts(x, only)
    assert_close(layer(x), want)


def test_rows_behind_the_counts_are_not_touched() -> None:
    """Rows that hold no token may be anything, and come back as zeros."""
    layer = make_layer(None)
    rows = torch.randn(10, HIDDEN)
    rows[6:] = float("nan")
    counts = torch.tensor([2, 0, 1, 0, 0, 3, 0, 0])
    y = layer.experts(rows, counts)
    assert bool(y[:6].isfinite().all())
    assert not y[6:].any()


def decode(rank: Rank) -> list[Tensor]:
    """Inference in bf16: no gradients, so dispatch leaves its step open for combine."""
    made = config(dtype=torch.bfloat16)
    with AllToAll(rank.store, made, rank=rank.rank, world_size=rank.world_size) as all_to_all:
        layer = make_layer(all_to_all).to(torch.bfloat16)
        with torch.no_grad():
            return [
                layer(inputs(rank.rank, step)[0].to(torch.bfloat16)) for step in range(len(COUNTS))
            ]


def test_inference_in_bf16() -> None:
    results = run_threads(WORLD, decode)
    layer = make_layer(None).to(torch.bfloat16)
    for step in range(len(COUNTS)):
        for rank in range(WORLD):
            with torch.no_grad():
                want = layer(inputs(rank, step)[0].to(torch.bfloat16))
            # Sums of values up to 2 rounded three times to 8 bits: 3 half steps of 2**-7.
            torch.testing.assert_close(results[rank][step], want, rtol=0.02, atol=0.03)


# --- on a GPU: experts are Triton kernels --------------------------------------------------------


def on_cpu(result: Result) -> Result:
    parts = dataclasses.asdict(result).values()
    return Result(*([t.cpu() for t in p] if isinstance(p, list) else p.cpu() for p in parts))


@pytest.mark.gpu
def test_gpu_equals_cpu_forward_and_backward() -> None:
    want = run_layer(make_layer(None), list(range(WORLD)))
    got = on_cpu(run_layer(make_layer(None).cuda(), list(range(WORLD)), device="cuda"))
    for step in range(len(COUNTS)):
        assert_close(got.out[step], want.out[step])
        assert_close(got.grad_x[step], want.grad_x[step])
    assert_close(got.grad_router, want.grad_router)
    assert_close(got.grad_gate, want.grad_gate)
    assert_close(got.grad_down, want.grad_down)


@pytest.mark.gpu
def test_gpu_layer_in_a_graph_and_compiled() -> None:
    """Neither allows the host to look at what is on the device."""
    layer = make_layer(None).cuda().bfloat16()
    x = inputs(0, 0)[0].cuda().bfloat16()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        # index_add sums the K rows of a token in any order: a bit of bf16 may differ.
        torch.testing.assert_close(compiled(x), layer(x), rtol=2**-7, atol=2**-9)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x)
        for change in (0.5, -1.0):
            x.mul_(change)
            graph.replay()
            torch.testing.assert_close(out, layer(x), rtol=2**-7, atol=2**-9)


def test_products_that_this_machine_lacks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("deep_gemm", "triton"):
        with pytest.raises(InvalidArgumentError, match=f"products {name}: it multiplies on GPUs"):
            products.make(name, *(torch.zeros(1, 2, 2) for _ in range(3)))
    assert products.why_not("torch", on_gpu=False) == ""
    assert "pip install sgl-deep-gemm" in products.why_not("deep_gemm", on_gpu=True)
    monkeypatch.setattr(products, "_is_there", lambda name: name != "triton")
    assert products.why_not("triton", on_gpu=True) == "no module is named triton"
    monkeypatch.setattr(driver, "capability", lambda _: (10, 0))
    assert "this GPU is 10.0" in products.why_not("deep_gemm", on_gpu=True)
    monkeypatch.setattr(driver, "capability", lambda _: (9, 0))
    assert products.why_not("deep_gemm", on_gpu=True) == ""
    monkeypatch.delattr(products.functional, "grouped_mm")
    assert "has no grouped_mm, 2.10 has" in products.why_not("torch", on_gpu=True)
