"""A MoE layer of vLLM in a rank of a test: its manager, prepare-finalize and modular kernel.

Experts are of torch, each with a function of its own, and so is the quantizer: vLLM's are compiled.
run_backend() compares outputs with one process's MoE.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import torch
from torch import Tensor

from moe_p2p.moe import reference
from tests.engines import vllm_ranks
from tests.support import engine_layers as plain
from tests.support.engine_layers import BF16, COUNTS, EXPERTS, HIDDEN, TOKENS
from tests.support.ranks import Rank

LOW_LATENCY, HIGH_THROUGHPUT, V2 = "deepep_low_latency", "deepep_high_throughput", "deepep_v2"
BLOCKS = {"quant_dtype": torch.float8_e4m3fn, "block_shape": [128, 128]}
ROWS = {"quant_dtype": torch.float8_e4m3fn, "per_act_token_quant": True}
# A step of e4m3 is 2^-4 of a value, where rows are rounded after dispatch with a scale per row.
NEAR_ROWS = {"rtol": 0.1, "atol": 0.15}


def make_layer(rank: Rank, backend: str, quantized: dict[str, Any]) -> tuple[Any, Any, Any]:
    """A manager, prepare-finalize and quantization config, made by vLLM's own functions."""
    from vllm.model_executor.layers.fused_moe import all2all_utils
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    manager = vllm_ranks.make_manager(backend)
    each = EXPERTS // rank.world_size
    moe = types.SimpleNamespace(
        moe_parallel_config=types.SimpleNamespace(
            use_passthrough_all2all=False, use_all2all_kernels=True, sp_size=1
        ),
        use_deepep_ht_kernels=backend == HIGH_THROUGHPUT,
        use_deepep_ll_kernels=backend == LOW_LATENCY,
        use_deepep_v2_kernels=backend == V2,
        max_num_tokens=TOKENS,
        hidden_dim=HIDDEN,
        num_experts=EXPERTS,
        num_local_experts=each,
        experts_per_token=plain.TOPK,
        dp_size=rank.world_size,
    )
    quant_config = FusedMoEQuantConfig.make(**quantized)
    made = all2all_utils.maybe_make_prepare_finalize(moe, quant_config, all2all_manager=manager)
    return manager, made, quant_config


class Experts:
    """What the modular kernel reads of experts; run() computes them in torch."""

    expects_unquantized_inputs = False

    def __init__(self, rank: Rank, prepare_finalize: Any, quant_config: Any) -> None:
        from vllm.model_executor.layers.fused_moe import modular_kernel as mk
        from vllm.model_executor.layers.fused_moe import topk_weight_and_reduce as reduce

        self.rank, self.quant_config = rank, quant_config
        batched = mk.FusedMoEActivationFormat.BatchedExperts
        self.batched = prepare_finalize.activation_format is batched
        self._reduce = reduce.TopKWeightAndReduceDelegate()
        if not self.batched:
            self._reduce = reduce.TopKWeightAndReduceNoOP()
        self.moe_config = types.SimpleNamespace(moe_parallel_config=None)

    def finalize_weight_and_reduce_impl(self) -> Any:
        return self._reduce

    def run(self, rows: Tensor, scales: Any, metadata: Any, ids: Tensor, weights: Tensor) -> Tensor:
        num_local = EXPERTS // self.rank.world_size
        first = plain.first_expert(self.rank)
        if self.batched:
            assert rows.shape == (num_local, self.rank.world_size * TOKENS, HIDDEN)
            local = torch.arange(num_local, device=rows.device)[:, None].expand(rows.shape[:2])
            y = plain.expert(plain.wide(rows, scales), local + first)
            # Nobody may look at rows past the count.
            place = torch.arange(rows.shape[1], device=rows.device)
            unused = place >= metadata.expert_num_tokens[:, None]
            return y.masked_fill(unused[..., None], float("nan")).to(torch.bfloat16)
        mine = (ids >= first) & (ids < first + num_local)
        if ids.shape[1] == 1 and metadata.expert_num_tokens_cpu is not None:
            counts = ids[mine].bincount(minlength=EXPERTS)[first : first + num_local].cpu()
            assert torch.equal(metadata.expert_num_tokens_cpu, counts.to(torch.int32))
            assert torch.equal(metadata.expert_num_tokens.cpu(), counts.to(torch.int32))
        wide = plain.wide(rows, scales)
        each = plain.expert(wide[:, None].expand(-1, ids.shape[1], -1), ids)
        return (each * (weights * mine)[..., None]).sum(1).to(torch.bfloat16)


def make_kernel(rank: Rank, prepare_finalize: Any, quant_config: Any) -> Any:
    from vllm.model_executor.layers.fused_moe import modular_kernel as mk

    experts: Any = Experts(rank, prepare_finalize, quant_config)
    return mk.FusedMoEKernelModularImpl(prepare_finalize, experts)


def run_kernel(
    kernel: Any, x: Tensor, ids: Tensor, weights: Tensor, *, on_input: bool = False
) -> Tensor:
    """The modular kernel's own _prepare and _finalize around the experts."""
    output = torch.empty_like(x)
    rows, scales, metadata, row_ids, row_weights = kernel._prepare(
        x, weights, ids, EXPERTS, None, on_input
    )
    experts = kernel.fused_experts
    y = experts.run(rows, scales, metadata, row_ids, row_weights)
    kernel._finalize(output, y, x, row_weights, row_ids, on_input, None, None)
    return output


def by_row(
    rows: Tensor,
    scale: Any,
    quant_dtype: Any,
    per_act_token_quant: bool,
    block_shape: Any = None,
    **_: Any,
) -> tuple[Tensor, Any]:
    """vLLM's quantizer calls its compiled kernels; this is what they compute."""
    if quant_dtype is None:
        return rows, scale
    if block_shape is None:
        scales = rows.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-4) / 448
        return (rows.float() / scales).to(quant_dtype), scales
    return reference.quantize(rows)


def run_backend(rank: Rank, backend: str, names: list[str], device: str = "cpu") -> None:
    kinds: dict[str, Any] = {
        "none": ({}, BF16),
        "blocks": (BLOCKS, BF16),
        "rows": (ROWS, NEAR_ROWS),
    }
    for name in names:
        quantized, near = kinds[name]
        manager, prepare_finalize, quant_config = make_layer(rank, backend, quantized)
        assert prepare_finalize.num_dispatchers() == rank.world_size
        kernel = make_kernel(rank, prepare_finalize, quant_config)
        for step in range(len(COUNTS)):
            x, ids, weights = plain.inputs(rank.rank, step, torch.bfloat16, device=device)
            out = run_kernel(kernel, x, ids, weights)
            expected = plain.plain(plain.as_sent(x) if name == "blocks" else x, ids, weights)
            torch.testing.assert_close(out.float(), expected, **near)
        manager.destroy()


def use_quantizer() -> None:
    """Where modules have bound vLLM's quantizer."""
    importlib.import_module(f"{vllm_ranks.FUSED_MOE}.all2all_utils")
    for module in list(sys.modules.values()):
        name = getattr(module, "__name__", "")
        if name.startswith(vllm_ranks.FUSED_MOE) and hasattr(module, "moe_kernel_quantize_input"):
            module.moe_kernel_quantize_input = by_row  # type: ignore[attr-defined]


def run_backends(rank: Rank) -> None:
    for backend in (LOW_LATENCY, HIGH_THROUGHPUT):
        run_backend(rank, backend, ["none", "blocks"])


def begin(rank: Rank, device: str = "cpu", **options: Any) -> None:
    """vLLM in a rank's process, with our classes installed."""
    vllm_ranks.begin(rank, device)
    from moe_p2p.integrations.moe import vllm

    vllm.install()
    vllm_ranks.use(vllm_ranks.config(**options))
    use_quantizer()
