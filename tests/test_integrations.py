"""Engines' interfaces over AllToAll: layers that call them as the engine does compute a plain MoE.

Every expert has a function of its own, and every step other numbers of tokens; ranks are processes,
each with a gloo group, as engines have them.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_p2p import InvalidArgumentError, UnavailableError, reference
from tests.fakes import megatron as fake_megatron
from tests.fakes import sglang as fake_sglang
from tests.fakes import vllm as fake_vllm
from tests.ranks import Rank, run_processes

WORLD, EXPERTS, HIDDEN, TOPK, TOKENS = 3, 12, 256, 3, 20
COUNTS = ([20, 0, 7, 11], [1, 13, 20, 0], [0, 0, 1, 0])  # tokens of each rank, step by step
# Three roundings to bf16 (row, partial sum, sum), each 2^-9 of a value, and sums that cancel.
BF16 = {"rtol": 2e-2, "atol": 2e-2}
FP32 = {"rtol": 1e-5, "atol": 1e-5}  # the order of sums is another one


@dataclass(frozen=True)
class Shape:
    max_num_tokens: int = TOKENS
    hidden_dim: int = HIDDEN
    num_experts: int = EXPERTS
    experts_per_token: int = TOPK


def inputs(
    rank: int, step: int, dtype: torch.dtype, *, topk: int = TOPK, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, H], ids [T, K] and weights [T, K] of one rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    num_tokens = COUNTS[step][rank]
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
    scores = torch.rand(num_tokens, EXPERTS, generator=generator)
    weights, ids = scores.topk(topk, dim=-1)
    return x.to(device), ids.to(device), weights.to(device)


def expert(x: Tensor, ids: Tensor) -> Tensor:
    """The experts' functions: x [..., H], expert of each row [...]."""
    e = ids[..., None].float() / EXPERTS
    return x.float() * (0.5 + e) + (e - 0.25)


def plain(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """One process's MoE, fp32."""
    return (expert(x[:, None].expand(-1, ids.shape[1], -1), ids) * weights[..., None]).sum(dim=1)


def as_sent(x: Tensor) -> Tensor:
    """x as experts see it after a block-wise quantized dispatch."""
    return reference.dequantize(*reference.quantize(x))


def join(rank: Rank, device: str) -> Any:
    if device == "cuda":
        torch.cuda.set_device(rank.rank)
    dist.init_process_group("gloo", store=rank.store, rank=rank.rank, world_size=rank.world_size)
    return dist.group.WORLD


def first_expert(rank: Rank) -> int:
    return rank.rank * EXPERTS // rank.world_size


# --- vLLM ---


def wide(rows: Tensor, scales: Tensor | None) -> Tensor:
    """Rows in fp32; one scale for each block of 128 values, or for each row."""
    if scales is None:
        return rows.float()
    return (rows.float().unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]).flatten(-2)


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


# --- SGLang ---


def low_latency_experts(rank: Rank, got: Any) -> Tensor:
    """[E_local, rows, H], weights left to combine."""
    rows, scales = (
        got.hidden_states_fp8
        if hasattr(got, "hidden_states_fp8")
        else (got.hidden_states, got.hidden_states_scale)
    )
    local = torch.arange(len(rows), device=rows.device)[:, None].expand(rows.shape[:2])
    y = expert(wide(rows, scales), local + first_expert(rank))
    for e, count in enumerate(got.masked_m.tolist()):
        y[e, count:] = float("nan")
    return y.to(torch.bfloat16)


def normal_experts(rank: Rank, got: Any) -> Tensor:
    """As the runner: scatters rows to their experts by id, applies weights, gathers them again."""
    rows = wide(got.hidden_states, got.hidden_states_scale)
    ids, weights = got.topk_ids, got.topk_weights
    assert ids.dtype == torch.int64
    assert [len(ids), 1] == list(ids.shape) == list(weights.shape)
    counts = ids[:, 0].bincount(minlength=EXPERTS // rank.world_size)
    assert got.num_recv_tokens_per_expert == ((counts + 127) // 128 * 128).tolist()
    return (expert(rows, ids[:, 0] + first_expert(rank)) * weights).to(torch.bfloat16)


def run_sglang(rank: Rank, dtype: str, older: bool, device: str) -> None:
    fake_sglang.put(max_tokens=TOKENS, older=older)
    fake_sglang.State.dtype = fake_sglang.OutputDtype(dtype)
    from moe_p2p.integrations import sglang

    sglang.install()
    made = sys.modules["sglang.srt.batch_overlap.two_batch_overlap"].DeepEPDispatcher
    group = join(rank, device)
    two = [
        made(
            group=group,
            router_topk=TOPK,
            permute_fusion=True,
            num_experts=EXPERTS,
            num_local_experts=EXPERTS // rank.world_size,
            hidden_size=HIDDEN,
            params_dtype=torch.bfloat16,
            deepep_mode=fake_sglang.DeepEPMode.AUTO,
            async_finish=True,
            return_recv_hook=True,
        )
        for _ in range(2)
    ]
    assert isinstance(two[0], fake_sglang.BaseDispatcher)
    between: list[object] = []
    registered = two[0].register_deepep_dispatch_hook(between.append)
    for step in range(len(COUNTS)):
        fake_sglang.State.extend = step % 2 == 1
        x, ids, weights = inputs(rank.rank, step, torch.bfloat16, device=device)
        topk = fake_sglang.TopKOutput(weights, ids)
        got = two[0].dispatch(x, topk)
        experts = normal_experts if fake_sglang.State.extend else low_latency_experts
        y = experts(rank, got)
        out = two[0].combine(fake_sglang.CombineInput(y, ids, weights))
        expected = plain(as_sent(x) if dtype == "fp8" else x, ids, weights)
        torch.testing.assert_close(out.float(), expected, **BF16)
    assert between == [two[0]] * len(COUNTS)
    registered.remove()
    _two_batches(rank, two, dtype, device)


def _two_batches(rank: Rank, two: list[Any], dtype: str, device: str) -> None:
    """Halves of two micro-batches take turns."""
    fake_sglang.State.extend = False
    batches = [inputs(rank.rank, step, torch.bfloat16, device=device) for step in (0, 1)]
    for one, (x, ids, weights) in zip(two, batches, strict=True):
        one.dispatch_a(x, fake_sglang.TopKOutput(weights, ids))
    for one, (_, ids, weights) in zip(two, batches, strict=True):
        y = low_latency_experts(rank, one.dispatch_b())
        one.combine_a(fake_sglang.CombineInput(y, ids, weights))
    for one, (x, ids, weights) in zip(two, batches, strict=True):
        expected = plain(as_sent(x) if dtype == "fp8" else x, ids, weights)
        torch.testing.assert_close(one.combine_b().float(), expected, **BF16)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_sglang_layer_computes_a_plain_moe_in_both_modes(dtype: str) -> None:
    run_processes(WORLD, run_sglang, dtype, False, "cpu")


def test_sglang_outputs_of_older_versions() -> None:
    run_processes(WORLD, run_sglang, "fp8", True, "cpu")


def run_sglang_refused(rank: Rank) -> None:
    fake_sglang.put(max_tokens=TOKENS)
    fake_sglang.State.dtype = fake_sglang.OutputDtype.NVFP4
    from moe_p2p.integrations import sglang

    one = sglang.dispatcher_class()(
        join(rank, "cpu"), TOPK, num_experts=EXPERTS, deepep_mode=fake_sglang.DeepEPMode.LOW_LATENCY
    )
    with pytest.raises(UnavailableError, match="--enable-single-batch-overlap"):
        one.set_overlap_args(object(), {})
    x, ids, weights = inputs(rank.rank, 0, torch.bfloat16)
    with pytest.raises(InvalidArgumentError, match="nvfp4; bf16 and fp8"):
        one.dispatch(x, fake_sglang.TopKOutput(weights, ids))


def test_sglang_refuses_what_it_cannot_do() -> None:
    run_processes(1, run_sglang_refused)


# --- Megatron ---


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
    wanted = torch.zeros(num_local, dtype=torch.int64)  # rows of each expert in this step

    def experts(rows: Tensor, counts: Tensor, probs: Tensor) -> Tensor:
        assert torch.equal(counts, wanted)
        assert int(counts.sum()) == len(rows) == len(probs)
        local = torch.arange(num_local).repeat_interleave(counts).to(device)
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
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(step)).to(device)
        out.backward(grad)
        expected.backward(grad)
        torch.testing.assert_close(x_1.grad, x_2.grad, **FP32)
        # Of probabilities: a sum over H products.
        torch.testing.assert_close(probs_1.grad, probs_2.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("alignment", [1, 16])
def test_megatron_layer_trains_as_a_plain_moe(alignment: int) -> None:
    run_processes(WORLD, run_megatron, alignment, "cpu")


# --- without the other project ---


@pytest.mark.parametrize("project", ["vllm", "sglang", "megatron"])
def test_without_the_project_it_imports_and_says_what_is_missing(
    project: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == project]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, project, None)  # importlib then finds nothing
    module = importlib.import_module(f"moe_p2p.integrations.{project}")
    with pytest.raises(ImportError, match=rf"integrations\.{project} needs {project}"):
        module.install()
    assert "deep_ep" not in sys.modules
