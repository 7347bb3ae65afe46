"""Which KVLayout a rank of vLLM has, from its KVCacheConfig and its tensors. Refuses by name what
moe_p2p.kv, or this adapter, does not carry.

vLLM's tensor of a layer is [B, H, N, C], C being K and V side by side; its strides say how it lies.
A kernel's blocks may divide the scheduler's blocks: pages here are the kernel's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_p2p.errors import MoeP2pError, UnavailableError, make, require
from moe_p2p.integrations import required
from moe_p2p.integrations.kv.worker import regions_of
from moe_p2p.kv.layout import KVGroup, KVLayout
from moe_p2p.kv.memory import KVCache

_PARALLEL = {  # that moves tokens to other ranks
    "decode_context_parallel_size": "--decode-context-parallel-size 1",
    "prefill_context_parallel_size": "--prefill-context-parallel-size 1",
}
_ATTENTION = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "SlidingWindowMLASpec")


def refuse(what: str, instead: str) -> MoeP2pError:
    return make(UnavailableError, f"MoeP2pConnector does not carry {what}; {instead}")


def check_parallelism(vllm_config: Any) -> None:
    parallel = vllm_config.parallel_config
    stages = getattr(parallel, "pipeline_parallel_size", 1)
    if stages > 1 and vllm_config.kv_transfer_config.is_kv_consumer:
        raise refuse(
            f"pipeline_parallel_size={stages} of an engine that decodes",
            "start vLLM with --pipeline-parallel-size 1, or kv_role=kv_producer",
        )
    for name, option in _PARALLEL.items():
        if getattr(parallel, name, 1) > 1:
            raise refuse(f"{name}={getattr(parallel, name)}", f"start vLLM with {option}")


def stage_sizes(vllm_config: Any) -> tuple[int, ...]:
    """Layers of each pipeline stage."""
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages == 1:
        return ()
    total = vllm_config.model_config.get_total_num_hidden_layers()
    spans_of = required("vllm.distributed.utils", "vllm").get_pp_indices
    spans = [spans_of(total, stage, stages) for stage in range(stages)]
    return tuple(end - begin for begin, end in spans)


def layer_numbers(config: Any, sizes: tuple[int, ...] = (), stage: int = 0) -> dict[str, int]:
    """Layers of this rank by name, in an order that is equal on both sides whatever their groups
    are. sizes: of pipeline stages; each has all of its layers in one group."""
    names = [name for group in config.transfer_groups for name in group.layer_names]
    natural = {
        name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
        for name in names
    }
    if sizes and (len(config.transfer_groups) > 1 or len(names) != sizes[stage]):
        raise refuse(
            f"stage {stage} of {len(sizes)} pipeline stages with {len(names)} layers in "
            f"{len(config.transfer_groups)} cache groups, of which it has {sizes[stage]}",
            "start vLLM with --pipeline-parallel-size 1",
        )
    first = sum(sizes[:stage])
    return {name: first + at for at, name in enumerate(sorted(names, key=natural.__getitem__))}


@dataclass(frozen=True)
class VllmCache:
    """cache: of this rank. ratio: kernel's blocks in one of the scheduler's, of each group."""

    cache: KVCache
    layers: dict[str, int]
    ratios: tuple[int, ...]

    def pages(self, blocks: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Block lists of all transfer groups, as the scheduler has them, as lists of pages."""
        found = {}
        for group, ratio, ids in zip(self.cache.layout.groups, self.ratios, blocks, strict=True):
            pages = torch.tensor(list(ids), dtype=torch.int32, device="cpu")
            if ratio > 1:
                pages = (pages[:, None] * ratio + torch.arange(ratio, device="cpu")).flatten()
            found[group.name] = pages.to(torch.int32)
        return found


def vllm_cache(vllm_config: Any, config: Any, tensors: Mapping[str, Tensor]) -> VllmCache:
    check_parallelism(vllm_config)
    parallel = vllm_config.parallel_config
    tp, sizes = parallel.tensor_parallel_size, stage_sizes(vllm_config)
    rank = parallel.rank % (tp * max(len(sizes), 1))  # DP is outside of stages, they of TP
    numbers = layer_numbers(config, sizes, rank // tp)
    groups, ratios, order = [], [], ""
    for at, group in enumerate(config.transfer_groups):
        names = sorted(group.layer_names, key=numbers.__getitem__)
        made = [_group(vllm_config, f"group{at}", group, name, tensors[name]) for name in names]
        require(
            len({(*vars(one).values(),) for one, _ in made}) == 1
            and len({o for _, o in made}) == 1,
            f"MoeP2pConnector: layers of cache group {at} differ in shape or strides: {names[:4]}; "
            "start vLLM without VLLM_KV_CACHE_LAYOUT",
        )
        one, its_order = made[0]
        require(
            "" in (order, its_order) or order == its_order,
            f"MoeP2pConnector: cache groups are laid out as {order} and {its_order}; set "
            "VLLM_KV_CACHE_LAYOUT=LBHNC",
        )
        order = order or its_order
        layers = tuple(range(sum(sizes))) if sizes else tuple(numbers[name] for name in names)
        groups.append(KVGroup(**{**vars(one), "layers": layers}))
        ratios.append(tensors[names[0]].shape[0] // config.num_blocks)
    layout = KVLayout(
        tuple(groups), order=order or "LBNHC", tp=tp, pp=max(len(sizes), 1), stages=sizes or None
    )
    regions, found = regions_of([tensors[name] for name in numbers])
    places = dict(zip(numbers.values(), found, strict=True))
    at_places = tuple(
        tuple((places[layer],) for layer in group.layers if layer in places) for group in groups
    )
    pages = {
        group.name: config.num_blocks * ratio for group, ratio in zip(groups, ratios, strict=True)
    }
    return VllmCache(KVCache(layout, rank, at_places, regions, pages), numbers, tuple(ratios))


def _group(
    vllm_config: Any, name: str, group: Any, layer: str, tensor: Tensor
) -> tuple[KVGroup, str]:
    """The group, with one layer, and the order of its memory; "": either."""
    spec = group.kv_cache_spec
    spec = getattr(spec, "kv_cache_specs", {}).get(layer, spec)
    kind = type(spec).__name__
    if kind not in _ATTENTION:
        raise refuse(f"the {kind} of layer {layer}", "use NixlConnector for this model")
    if spec.tokens_per_state != 1 or group.host_resident:
        raise refuse(
            f"states of {spec.tokens_per_state} tokens, or on the host, of layer {layer}",
            "use NixlConnector for this model",
        )
    _, heads, tokens, _ = tensor.shape
    size = tensor.element_size()
    page, head, token, value = (stride * size for stride in tensor.stride())
    content = tensor.shape[3] * size
    if value != size or (head, token) not in (
        (tokens * content, content),
        (content, heads * content),
    ):
        raise refuse(
            f"layer {layer} with strides {tensor.stride()} of shape {list(tensor.shape)}",
            "set VLLM_KV_CACHE_LAYOUT=LBHNC",
        )
    # Of earlier tokens; blocks before them are not allocated.
    window = spec.num_retained_tokens if kind.startswith("Sliding") else None
    made = KVGroup(
        name,
        (0,),
        heads=_heads(vllm_config, spec, heads),
        k_bytes=content,
        v_bytes=0,
        page_size=tokens,
        kind="attention" if window is None else "window",
        window=None if window is None else max(window, 1),
        page_stride=page,
    )
    return made, "" if heads == 1 else "LBHNC" if token == content else "LBNHC"


def _heads(vllm_config: Any, spec: Any, local: int) -> int:
    """Of the whole model; ranks beyond it keep the same heads."""
    tp = vllm_config.parallel_config.tensor_parallel_size
    if "MLA" in type(spec).__name__:
        require(local == 1, f"MoeP2pConnector: a latent has {local} head slots, must have 1")
        return 1
    shards = spec.max_tp_shards or vllm_config.model_config.get_total_num_kv_heads() // local
    return int(local * min(tp, max(shards, 1)))
