"""vLLM as far as its MoE layers meet an all2all backend: bases, and the kernel that calls them."""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from tests.support.fakes import module

COMMUNICATORS = "vllm.distributed.device_communicators"
FUSED_MOE = "vllm.model_executor.layers.fused_moe"


class All2AllManagerBase:
    def __init__(self, cpu_group: Any, tcp_store_group: Any = None) -> None:
        self.cpu_group = cpu_group
        self.rank, self.world_size = cpu_group.rank(), cpu_group.size()

    def get_handle(self, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def set_num_sms(self, num_sms: int) -> None: ...

    def max_sms_used(self) -> int | None:
        return None

    def destroy(self) -> None: ...


class OlderAll2AllManagerBase(All2AllManagerBase):
    def __init__(self, cpu_group: Any) -> None:
        super().__init__(cpu_group)


class FusedMoEActivationFormat(Enum):
    Standard = ("standard",)
    BatchedExperts = ("batched_experts",)


@dataclass
class ExpertTokensMetadata:
    expert_num_tokens: Tensor | None
    expert_num_tokens_cpu: Tensor | None


class FusedMoEPrepareAndFinalizeModular(ABC):
    @property
    @abstractmethod
    def activation_format(self) -> FusedMoEActivationFormat: ...

    @abstractmethod
    def topk_indices_dtype(self) -> torch.dtype | None: ...

    @abstractmethod
    def max_num_tokens_per_rank(self) -> int | None: ...

    @abstractmethod
    def num_dispatchers(self) -> int: ...

    @abstractmethod
    def output_is_reduced(self) -> bool: ...

    def post_init_setup(self, fused_experts: Any) -> None:
        return None

    def supports_async(self) -> bool:
        return False

    @abstractmethod
    def prepare(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool,
    ) -> Any: ...

    @abstractmethod
    def finalize(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None: ...


class TopKWeightAndReduceDelegate:
    """Finalize has to apply the weights."""


class TopKWeightAndReduceNoOP:
    """The experts have applied them."""

    def apply(
        self,
        output: Tensor | None,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
    ) -> Tensor:
        assert output is None
        return fused_expert_output


@dataclass(frozen=True)
class QuantConfig:
    """What prepare reads of FusedMoEQuantConfig."""

    quant_dtype: Any = None
    block_shape: list[int] | None = None
    per_act_token_quant: bool = False
    a1_scale: Tensor | None = None


def moe_kernel_quantize_input(
    rows: Tensor, scale: Tensor | None, dtype: Any, per_token: bool, block_shape: list[int] | None
) -> tuple[Tensor, Tensor]:
    """One scale for each row."""
    assert rows.dim() == 2
    assert per_token
    scales = rows.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-4) / 448
    return (rows.float() / scales).to(dtype), scales


def normalize_batched_scales_shape(scales: Tensor, num_experts: int) -> Tensor:
    return scales.view(num_experts, -1, scales.shape[-1])


def run_layer(
    prepare_finalize: Any,
    experts: Any,
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    num_experts: int,
    quant_config: QuantConfig,
    on_input: bool = False,
) -> Tensor:
    """The calls that the modular kernel makes for one layer, in its order."""
    output = torch.empty_like(hidden_states)
    inputs = (hidden_states, topk_weights, topk_ids, num_experts, None, on_input, quant_config)
    if prepare_finalize.supports_async():
        hook, receiver = prepare_finalize.prepare_async(*inputs, defer_input_quant=False)
        hook()
        rows, scales, metadata, row_ids, row_weights = receiver()
    else:
        rows, scales, metadata, row_ids, row_weights = prepare_finalize.prepare(
            *inputs, defer_input_quant=False
        )
    ids = topk_ids if row_ids is None else row_ids
    weights = topk_weights if row_weights is None else row_weights
    y, reduce = experts(rows, scales, metadata, weights, ids)
    given = (output, y, weights, ids, on_input, reduce)
    if prepare_finalize.supports_async():
        hook, receiver = prepare_finalize.finalize_async(*given)
        hook()
        receiver()
    else:
        prepare_finalize.finalize(*given)
    return output


def make_layer(backend: str, group: Any, shape: Any) -> Any:
    """What vLLM makes for a layer: its manager, the handle, and prepare-finalize over it.

    shape: max_num_tokens, hidden_dim, num_experts, experts_per_token.
    """
    import vllm.distributed.device_communicators.all2all as managers  # type: ignore
    import vllm.model_executor.layers.fused_moe.all2all_utils as makers  # type: ignore

    each = shape.num_experts // group.size()
    if backend == "deepep_low_latency":
        manager = managers.DeepEPLLAll2AllManager(group, None)
        arguments = {
            "max_num_tokens_per_dp_rank": shape.max_num_tokens,
            "token_hidden_size": shape.hidden_dim,
            "num_ep_ranks": group.size(),
            "num_global_experts": shape.num_experts,
            "num_local_experts": each,
        }
        made = makers.DeepEPLLPrepareAndFinalize(
            manager.get_handle(arguments),
            max_tokens_per_rank=shape.max_num_tokens,
            num_dispatchers=group.size(),
            use_fp8_dispatch=True,
            global_to_physical=None,
            physical_to_global=None,
            local_expert_global_ids=None,
        )
    elif backend == "deepep_high_throughput":
        manager = managers.DeepEPHTAll2AllManager(group)
        made = makers.DeepEPHTPrepareAndFinalize(
            manager.get_handle({}),
            num_dispatchers=group.size(),
            dp_size=group.size(),
            rank_expert_offset=group.rank() * each,
        )
    else:
        manager = managers.DeepEPV2All2AllManager(group, None)
        arguments = {
            "num_max_tokens_per_rank": shape.max_num_tokens,
            "hidden": shape.hidden_dim,
            "num_topk": shape.experts_per_token,
            "num_experts": shape.num_experts,
            "use_fp8_dispatch": False,
        }
        made = makers.DeepEPV2PrepareAndFinalize(
            buffer=manager.get_handle(arguments),
            num_dispatchers=group.size(),
            dp_size=group.size(),
            rank_expert_offset=group.rank() * each,
            num_experts=shape.num_experts,
            num_topk=shape.experts_per_token,
            use_fp8_dispatch=False,
            use_cudagraph=False,
        )
    return manager, made


def put(*, scheduled_tokens: int, manager_base: Any = All2AllManagerBase) -> None:
    """Into sys.modules."""
    config = types.SimpleNamespace(
        scheduler_config=types.SimpleNamespace(max_num_batched_tokens=scheduled_tokens)
    )
    current: Callable[[], int] = lambda: 0  # noqa: E731
    module("vllm.config", get_current_vllm_config=lambda: config)
    module(f"{COMMUNICATORS}.base_device_communicator", All2AllManagerBase=manager_base)
    module(f"{COMMUNICATORS}.all2all", All2AllManagerBase=manager_base)
    # Versions with the older manager know one class for both kinds of kernels.
    older = manager_base is OlderAll2AllManagerBase
    base = f"FusedMoEPrepareAndFinalize{'' if older else 'Modular'}"
    module(
        f"{FUSED_MOE}.modular_kernel",
        **{base: FusedMoEPrepareAndFinalizeModular},
        FusedMoEActivationFormat=FusedMoEActivationFormat,
        ExpertTokensMetadata=ExpertTokensMetadata,
    )
    module(
        f"{FUSED_MOE}.topk_weight_and_reduce",
        TopKWeightAndReduceDelegate=TopKWeightAndReduceDelegate,
        TopKWeightAndReduceNoOP=TopKWeightAndReduceNoOP,
    )
    module(
        f"{FUSED_MOE}.utils",
        moe_kernel_quantize_input=moe_kernel_quantize_input,
        normalize_batched_scales_shape=normalize_batched_scales_shape,
    )
    module(f"{FUSED_MOE}.all2all_utils")
    module("vllm.v1.worker.ubatching", dbo_current_ubatch_id=current)
