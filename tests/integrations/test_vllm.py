"""vLLM's interface over AllToAll: layers that call it as vLLM does compute a plain MoE."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_p2p import InvalidArgumentError
from tests.support.engine_layers import (
    BF16,
    COUNTS,
    EXPERTS,
    FP32,
    HIDDEN,
    TOKENS,
    WORLD,
    Shape,
    as_sent,
    expert,
    first_expert,
    inputs,
    join,
    plain,
    wide,
)
from tests.support.fakes import vllm as fake_vllm
from tests.support.ranks import Rank, run_processes


def batched_experts(rank: Rank, dtype: torch.dtype) -> Any:
    """As vLLM's batched experts: all rows up to each count, weights left to finalize."""
    num_local = EXPERTS // rank.world_size

    def run(rows: Tensor, scales: Any, metadata: Any, weights: Tensor, ids: Tensor) -> Any:
        assert rows.shape == (num_local, rank.world_size * TOKENS, HIDDEN)
        assert metadata.expert_num_tokens_cpu is None
        place = torch.arange(rows.shape[1], device=rows.device)
        local = torch.arange(num_local, device=rows.device)[:, None].expand(rows.shape[:2])
        y = expert(wide(rows, scales), local + first_expert(rank))
        # Nobody may look at rows past the count.
        unused = place >= metadata.expert_num_tokens[:, None]
        y = y.masked_fill(unused[..., None], float("nan"))
        return y.to(dtype), fake_vllm.TopKWeightAndReduceDelegate()

    return run


def standard_experts(rank: Rank, dtype: torch.dtype, *, delegates: bool) -> Any:
    """As vLLM's experts on rows: top-1 with global ids."""
    mine = slice(first_expert(rank), first_expert(rank) + EXPERTS // rank.world_size)

    def run(rows: Tensor, scales: Any, metadata: Any, weights: Tensor, ids: Tensor) -> Any:
        assert ids.shape == weights.shape == (rows.shape[0], 1)
        if metadata.expert_num_tokens_cpu is not None:  # not while a graph is captured
            counts = ids[:, 0].bincount(minlength=EXPERTS).to(torch.int32)
            assert int(counts.sum()) == int(counts[mine].sum())
            assert torch.equal(metadata.expert_num_tokens, counts[mine])
            assert torch.equal(metadata.expert_num_tokens_cpu, counts[mine].cpu())
        y = expert(wide(rows, scales), ids[:, 0])
        if delegates:
            return y[:, None].to(dtype), fake_vllm.TopKWeightAndReduceDelegate()
        return (y * weights).to(dtype), fake_vllm.TopKWeightAndReduceNoOP()

    return run


QUANTIZED = {
    "none": fake_vllm.QuantConfig(),
    "blocks": fake_vllm.QuantConfig(quant_dtype=torch.float8_e4m3fn, block_shape=[128, 128]),
    "rows": fake_vllm.QuantConfig(quant_dtype=torch.float8_e4m3fn, per_act_token_quant=True),
}


def make_vllm(rank: Rank, backend: str, device: str, older: bool = False) -> tuple[Any, Any]:
    """A manager, and a layer's prepare-finalize, as vLLM makes them once ours are installed."""
    base = fake_vllm.OlderAll2AllManagerBase if older else fake_vllm.All2AllManagerBase
    fake_vllm.put(scheduled_tokens=TOKENS, manager_base=base)
    from moe_p2p.integrations import vllm

    vllm.install()
    manager, layer = fake_vllm.make_layer(backend, join(rank, device), Shape())
    assert isinstance(manager, base)
    assert isinstance(layer, fake_vllm.FusedMoEPrepareAndFinalizeModular)
    return manager, layer


def vllm_experts(rank: Rank, layer: Any, dtype: torch.dtype, *, delegates: bool = True) -> Any:
    batched = layer.activation_format is fake_vllm.FusedMoEActivationFormat.BatchedExperts
    if batched:
        return batched_experts(rank, dtype)
    return standard_experts(rank, dtype, delegates=delegates)


def run_vllm(rank: Rank, backend: str, delegates: bool, older: bool, device: str) -> None:
    manager, layer = make_vllm(rank, backend, device, older)
    assert layer.num_dispatchers() == rank.world_size
    assert type(layer).maybe_roundup_layer_hidden_size(2880, torch.bfloat16) == 2880
    for quantized, quant_config in QUANTIZED.items():
        dtype = torch.float32 if quantized == "none" else torch.bfloat16
        experts = vllm_experts(rank, layer, dtype, delegates=delegates)
        for step in range(len(COUNTS)):
            x, ids, weights = inputs(rank.rank, step, dtype, device=device)
            out = fake_vllm.run_layer(
                layer, experts, x, weights, ids, num_experts=EXPERTS, quant_config=quant_config
            )
            expected = plain(as_sent(x) if quantized == "blocks" else x, ids, weights)
            # A step of e4m3 is 2^-4 of a value where rows are rounded after dispatch.
            near = {"rtol": 0.1, "atol": 0.15} if quantized == "rows" else BF16
            torch.testing.assert_close(
                out.float(), expected, **(FP32 if quantized == "none" else near)
            )
    manager.destroy()


@pytest.mark.parametrize("backend", ["deepep_low_latency", "deepep_v2"])
def test_vllm_layer_computes_a_plain_moe(backend: str) -> None:
    run_processes(WORLD, run_vllm, backend, True, False, "cpu")


def test_vllm_experts_may_apply_the_weights_and_versions_be_older() -> None:
    run_processes(WORLD, run_vllm, "deepep_high_throughput", False, True, "cpu")


def run_vllm_top1(rank: Rank, backend: str) -> None:
    manager, layer = make_vllm(rank, backend, "cpu")
    experts = vllm_experts(rank, layer, torch.float32)
    given: dict[str, Any] = {"num_experts": EXPERTS, "quant_config": QUANTIZED["none"]}
    x, ids, weights = inputs(rank.rank, 0, torch.float32)
    with pytest.raises(InvalidArgumentError, match="top-3: it is for top-1"):
        fake_vllm.run_layer(layer, experts, x, weights, ids, on_input=True, **given)
    x, ids, weights = inputs(rank.rank, 1, torch.float32, topk=1)
    out = fake_vllm.run_layer(layer, experts, x, weights, ids, on_input=True, **given)
    torch.testing.assert_close(out, plain(x * weights, ids, torch.ones_like(weights)), **FP32)
    manager.destroy()


@pytest.mark.parametrize("backend", ["deepep_low_latency", "deepep_v2"])
def test_vllm_weights_on_the_input_are_for_top_1(backend: str) -> None:
    run_processes(WORLD, run_vllm_top1, backend)


def run_vllm_packed(rank: Rank) -> None:
    manager, layer = make_vllm(rank, "deepep_low_latency", "cpu")
    layer.post_init_setup(types.SimpleNamespace(supports_packed_ue8m0_act_scales=lambda: True))
    inner = batched_experts(rank, torch.bfloat16)

    def experts(rows: Tensor, scales: Tensor, *rest: Any) -> Any:
        assert scales.dtype == torch.int32
        assert scales.shape == (*rows.shape[:2], 1)  # four exponents, of which H has two
        assert scales.stride()[1] == 1  # column by column
        packed = scales.clone(memory_format=torch.contiguous_format)
        exponents = packed.view(torch.uint8)[..., : HIDDEN // 128]
        return inner(rows, torch.exp2(exponents.float() - 127), *rest)

    x, ids, weights = inputs(rank.rank, 0, torch.bfloat16)
    out = fake_vllm.run_layer(
        layer, experts, x, weights, ids, num_experts=EXPERTS, quant_config=QUANTIZED["blocks"]
    )
    blocks = x.float().unflatten(-1, (-1, 128))
    scale = torch.exp2((blocks.abs().amax(-1, keepdim=True) / 448).log2().ceil())
    sent = ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)
    torch.testing.assert_close(out.float(), plain(sent, ids, weights), **BF16)
    manager.destroy()


def test_vllm_experts_may_take_packed_scales() -> None:
    run_processes(WORLD, run_vllm_packed)


def run_vllm_placement(rank: Rank) -> None:
    fake_vllm.put(scheduled_tokens=TOKENS)
    from moe_p2p.integrations import vllm

    vllm.install()
    batched, _ = vllm.prepare_and_finalize_classes()
    handle = vllm.Handle(join(rank, "cpu"), TOKENS)
    physical = torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(1))
    layer = batched(handle, num_dispatchers=WORLD, global_to_physical=physical)
    x, ids, weights = inputs(rank.rank, 0, torch.float32)
    out = fake_vllm.run_layer(
        layer, batched_experts(rank, torch.float32), x, weights, ids,
        num_experts=EXPERTS, quant_config=QUANTIZED["none"],
    )  # fmt: skip
    torch.testing.assert_close(out, plain(x, physical[ids], weights), **FP32)
    handle.destroy()


def test_vllm_experts_may_lie_in_another_order() -> None:
    run_processes(WORLD, run_vllm_placement)
