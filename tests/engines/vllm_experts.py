"""A whole MoE layer of vLLM: its Triton experts between our prepare and finalize.

The four functions that experts call and that vLLM compiles are in torch here; nothing waits for
the host, so that a CUDA graph can hold them. Triton kernels, configurations, workspaces and the
modular kernel are vLLM's own.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

from tests.engines import vllm_layers, vllm_ranks
from tests.support.ranks import Rank

TOKENS, HIDDEN, FFN, EXPERTS, TOPK = 16, 256, 128, 8, 2
_DEFINITIONS = {
    "_C::silu_and_mul": "(Tensor! out, Tensor x) -> ()",
    "_C::masked_moe_activation": "(Tensor! out, Tensor x, Tensor counts, str name, float limit, "
    "float alpha, float beta, float situ_beta, float linear_beta) -> ()",
    "_moe_C::moe_sum": "(Tensor x, Tensor! out, Tensor? ids, Tensor? expert_map) -> ()",
    "_moe_C::moe_align_block_size": "(Tensor ids, int num_experts, int block, Tensor! sorted, "
    "Tensor! experts, Tensor! num_padded, Tensor? expert_map, Tensor? scatter) -> ()",
}


def _silu_and_mul(out: Tensor, x: Tensor) -> None:
    gate, up = x.float().chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def _masked_moe_activation(out: Tensor, x: Tensor, counts: Tensor, name: str, *_: float) -> None:
    assert name == "silu"
    gate, up = x.float().chunk(2, dim=-1)
    there = torch.arange(x.shape[1], device=x.device) < counts[:, None]
    y = torch.nn.functional.silu(gate) * up
    out.copy_(torch.where(there[..., None], y, out.float()))


def _local(ids: Tensor, expert_map: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns experts and which of the ids name one."""
    there = ids >= 0
    experts = ids.clamp_min(0).long()
    if expert_map is not None:
        experts = expert_map[experts].long()
        there &= experts >= 0
    return experts, there


def _moe_sum(x: Tensor, out: Tensor, ids: Tensor | None, expert_map: Tensor | None) -> None:
    if ids is not None:  # slots of other ranks' experts were not written
        x = torch.where(_local(ids, expert_map)[1][..., None], x, 0)
    torch.sum(x, dim=1, out=out)


def _moe_align_block_size(
    ids: Tensor,
    num_experts: int,
    block: int,
    sorted_ids: Tensor,
    experts: Tensor,
    num_padded: Tensor,
    expert_map: Tensor | None,
    scatter: Tensor | None,
) -> None:
    assert scatter is None
    each, there = _local(ids.flatten(), expert_map)
    key = torch.where(there, each, num_experts)
    order = key.argsort(stable=True)
    key = key[order]
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, key, torch.ones_like(key))
    padded = (counts + block - 1) // block * block
    ends = padded.cumsum(0)
    place = torch.arange(key.numel(), device=ids.device) - (counts.cumsum(0) - counts)[key]
    place += (ends - padded)[key]
    place = torch.where(key < num_experts, place, sorted_ids.numel())  # others: past the end
    wide = torch.full((sorted_ids.numel() + 1,), ids.numel(), device=ids.device)
    sorted_ids.copy_(wide.scatter_(0, place, order)[:-1])
    first = torch.arange(experts.numel(), device=ids.device) * block
    last = num_experts - 1
    experts.copy_(torch.searchsorted(ends[:num_experts], first, right=True).clamp_max(last))
    num_padded.copy_(ends[last : last + 1])


_FUNCTIONS = {
    "_C::silu_and_mul": _silu_and_mul,
    "_C::masked_moe_activation": _masked_moe_activation,
    "_moe_C::moe_sum": _moe_sum,
    "_moe_C::moe_align_block_size": _moe_align_block_size,
}


def begin(rank: Rank, device: str) -> None:
    vllm_layers.begin(rank, device)
    compute_in_torch(device)


def compute_in_torch(device: str) -> None:
    """Functions that vLLM compiles, and the memory that experts share."""
    for name, schema in _DEFINITIONS.items():
        torch.library.define(name, schema)
        torch.library.impl(name, ("CPU", "CUDA"), _FUNCTIONS[name])
    from vllm.model_executor.layers.fused_moe.experts import fused_batched_moe
    from vllm.v1.worker import workspace

    if device == "cpu":
        fused_batched_moe._is_capturing_or_compiling = bool
    elif not hasattr(torch.Stream, "is_capturing"):  # torch before 2.12
        fused_batched_moe._is_capturing_or_compiling = torch.cuda.is_current_stream_capturing
    workspace.init_workspace_manager(torch.device(device))


def _config(rank: Rank, backend: str) -> Any:
    """FusedMoEConfig of a rank; backend "": all experts are on this one."""
    from vllm.model_executor.layers.fused_moe import config as moe
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    world, index = (rank.world_size, rank.rank) if backend else (1, 0)
    parallel = moe.FusedMoEParallelConfig(
        tp_size=1, pcp_size=1, dp_size=world, ep_size=world, tp_rank=0, pcp_rank=0,
        dp_rank=index, ep_rank=index, sp_size=1, use_ep=bool(backend), all2all_backend=backend,
        enable_eplb=False,
    )  # fmt: skip
    return moe.FusedMoEConfig(
        num_experts=EXPERTS,
        experts_per_token=TOPK,
        hidden_dim=HIDDEN,
        intermediate_size=FFN,
        num_local_experts=EXPERTS // world,
        num_logical_experts=EXPERTS,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=moe.RoutingMethodType.TopK,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
        max_num_tokens=TOKENS,
    )


class Layer:
    """FusedMoEKernel of one backend with this rank's experts."""

    def __init__(self, rank: Rank, backend: str, device: str) -> None:
        from vllm.model_executor.layers.fused_moe import all2all_utils
        from vllm.model_executor.layers.fused_moe import modular_kernel as mk
        from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
        from vllm.model_executor.layers.fused_moe.experts.fused_batched_moe import (
            BatchedTritonExperts,
        )
        from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

        config, plain = _config(rank, backend), FusedMoEQuantConfig.make()
        self.manager = vllm_ranks.make_manager(backend) if backend else None
        prepare_finalize = all2all_utils.maybe_make_prepare_finalize(
            config, plain, allow_new_interface=True, all2all_manager=self.manager
        )
        batched = prepare_finalize.activation_format is mk.FusedMoEActivationFormat.BatchedExperts
        experts = (
            BatchedTritonExperts(config, plain, TOKENS, prepare_finalize.num_dispatchers())
            if batched
            else TritonExperts(config, plain)
        )
        self.kernel = mk.FusedMoEKernel(prepare_finalize, experts)
        each = config.num_local_experts
        first = rank.rank * each if backend else 0
        host = torch.Generator().manual_seed(1)
        w1 = torch.randn(EXPERTS, 2 * FFN, HIDDEN, generator=host, device="cpu") / HIDDEN**0.5
        w2 = torch.randn(EXPERTS, HIDDEN, FFN, generator=host, device="cpu") / FFN**0.5
        mine = slice(first, first + each)
        self.w1, self.w2 = (w[mine].to(device, torch.bfloat16) for w in (w1, w2))
        self.expert_map = None
        if backend and not batched:
            host_map = torch.full((EXPERTS,), -1, dtype=torch.int32, device="cpu")
            host_map[mine] = torch.arange(each, dtype=torch.int32, device="cpu")
            self.expert_map = host_map.to(device)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation

        out: Tensor = self.kernel.apply(
            x, self.w1, self.w2, weights, ids, MoEActivation.SILU, EXPERTS, self.expert_map, False
        )
        return out


def inputs(rank: int, seed: int, device: str) -> types.SimpleNamespace:
    host = torch.Generator().manual_seed(1_000 * seed + rank)
    x = torch.randn(TOKENS, HIDDEN, generator=host, device="cpu").to(torch.bfloat16)
    scores = torch.rand(TOKENS, EXPERTS, generator=host, device="cpu")
    weights, ids = scores.softmax(-1).topk(TOPK, dim=-1)
    return types.SimpleNamespace(x=x.to(device), ids=ids.to(device), weights=weights.to(device))


def dense(layer: Layer, given: types.SimpleNamespace) -> Tensor:
    """What a layer with all experts computes, in torch; [T, H] fp32."""
    out = torch.zeros(given.x.shape, device=given.x.device)
    for k in range(TOPK):
        w1, w2 = layer.w1[given.ids[:, k]].float(), layer.w2[given.ids[:, k]].float()
        gate, up = torch.einsum("tfh,th->tf", w1, given.x.float()).chunk(2, dim=-1)
        inner = torch.nn.functional.silu(gate) * up
        out += given.weights[:, k, None] * torch.einsum("thf,tf->th", w2, inner)
    return out
