"""Parameters of public models, as trainers and engine ranks hold them: input of `plan --weights`.

Names and shapes are those of the checkpoints (config.json on Hugging Face); engine ranks fuse them
as vLLM does: qkv_proj, gate_up_proj, w13 and w2. Layers for multi-token prediction are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from moe_p2p.errors import require
from moe_p2p.machine.models import MODELS as SIZES
from moe_p2p.weights.layout import FP8, Blocks, Param, Placement, Replicate, Shard, WeightLayout

BF16 = "bfloat16"
BLOCK = 128


@dataclass(frozen=True)
class Model:
    """Numbers of a config. q_lora: 0 where attention has KV heads, else that of MLA."""

    hidden: int
    layers: int
    dense_layers: int
    inner: int  # of dense layers
    experts: int
    expert_inner: int
    shared: int
    heads: int
    kv_heads: int
    vocab: int
    q_lora: int = 0
    kv_lora: int = 512
    rope: int = 64
    head_dim: int = 128  # of K without rope, and of V


def _model(name: str, **numbers: int) -> Model:
    hidden, experts, _, inner = SIZES[name]
    return Model(hidden=hidden, experts=experts, expert_inner=inner, **numbers)


# Models of SIZES whose attention is described here.
MODELS = {
    "qwen3-30b-a3b": _model(
        "qwen3-30b-a3b",
        layers=48,
        dense_layers=0,
        inner=0,
        shared=0,
        heads=32,
        kv_heads=4,
        vocab=151936,
    ),
    "qwen3-235b-a22b": _model(
        "qwen3-235b-a22b",
        layers=94,
        dense_layers=0,
        inner=0,
        shared=0,
        heads=64,
        kv_heads=4,
        vocab=151936,
    ),
    "deepseek-v3": _model(
        "deepseek-v3",
        layers=61,
        dense_layers=3,
        inner=18432,
        shared=1,
        heads=128,
        kv_heads=128,
        vocab=129280,
        q_lora=1536,
    ),
    "kimi-k2": _model(
        "kimi-k2",
        layers=61,
        dense_layers=1,
        inner=18432,
        shared=1,
        heads=64,
        kv_heads=64,
        vocab=163840,
        q_lora=1536,
    ),
}


class Weight(NamedTuple):
    """A parameter. split: the dimension that tensor parallelism cuts, None: each rank has it.

    fused: the engine rank's tensor, and which of its parts this is, 0 from the top. expert: its
    number. groups: most ranks that the dimension is cut among (KV heads); others have the same.
    """

    name: str
    shape: tuple[int, ...]
    split: int | None = None
    fused: tuple[str, int] = ("", 0)
    expert: int | None = None
    groups: int = 1 << 30
    quantized: bool = True
    layer: int = 0


@functools.cache
def weights(model: Model) -> tuple[Weight, ...]:
    """All parameters, in the order of layers."""
    outer = Weight("model.embed_tokens.weight", (model.vocab, model.hidden), 0, quantized=False)
    found = [outer]
    for layer in range(model.layers):
        at = f"model.layers.{layer}"
        for each in (*_attention(model), *_norms(model), *_mlp(model, layer)):
            tensor, part = each.fused
            name = f"{at}.{each.name}.weight"
            fused = (f"{at}.{tensor}.weight" if tensor else name, part)
            found.append(each._replace(name=name, fused=fused, layer=layer))
    last = model.layers - 1
    norm = Weight("model.norm.weight", (model.hidden,), quantized=False, layer=last)
    return (*found, norm, outer._replace(name="lm_head.weight", layer=last))


def _attention(model: Model) -> list[Weight]:
    hidden, heads, dim = model.hidden, model.heads, model.head_dim
    if not model.q_lora:
        kv = (model.kv_heads * dim, hidden)
        return [
            Weight("self_attn.q_proj", (heads * dim, hidden), 0, ("self_attn.qkv_proj", 0)),
            *(Weight(f"self_attn.{n}_proj", kv, 0, ("self_attn.qkv_proj", i),
                     groups=model.kv_heads) for i, n in enumerate("kv", 1)),
            Weight("self_attn.o_proj", (hidden, heads * dim), 1),
        ]  # fmt: skip
    fused = "self_attn.fused_qkv_a_proj"
    return [
        Weight("self_attn.q_a_proj", (model.q_lora, hidden), None, (fused, 0)),
        Weight(
            "self_attn.kv_a_proj_with_mqa", (model.kv_lora + model.rope, hidden), None, (fused, 1)
        ),
        Weight("self_attn.q_b_proj", (heads * (dim + model.rope), model.q_lora), 0),
        Weight("self_attn.kv_b_proj", (heads * 2 * dim, model.kv_lora), 0),
        Weight("self_attn.o_proj", (hidden, heads * dim), 1),
    ]


def _norms(model: Model) -> list[Weight]:
    sizes = {"input_layernorm": model.hidden, "post_attention_layernorm": model.hidden}
    if model.q_lora:
        sizes |= {
            "self_attn.q_a_layernorm": model.q_lora,
            "self_attn.kv_a_layernorm": model.kv_lora,
        }
    else:
        sizes |= {"self_attn.q_norm": model.head_dim, "self_attn.k_norm": model.head_dim}
    return [Weight(name, (size,), quantized=False) for name, size in sizes.items()]


def _mlp(model: Model, layer: int) -> Iterator[Weight]:
    if layer < model.dense_layers:
        yield from _gated("mlp", model.hidden, model.inner)
        return
    yield Weight("mlp.gate", (model.experts, model.hidden), quantized=False)
    if model.q_lora:
        yield Weight("mlp.gate.e_score_correction_bias", (model.experts,), quantized=False)
    if model.shared:
        yield from _gated("mlp.shared_experts", model.hidden, model.shared * model.expert_inner)
    for e in range(model.experts):
        fused = ("mlp.experts.w13", "mlp.experts.w2")
        yield from _gated(f"mlp.experts.{e}", model.hidden, model.expert_inner, fused, e)


def _gated(at: str, hidden: int, inner: int, fused: tuple[str, str] = ("", ""),
           expert: int | None = None) -> Iterator[Weight]:  # fmt: skip
    into = fused[0] or f"{at}.gate_up_proj"
    yield Weight(f"{at}.gate_proj", (inner, hidden), 0, (into, 0), expert)
    yield Weight(f"{at}.up_proj", (inner, hidden), 0, (into, 1), expert)
    yield Weight(f"{at}.down_proj", (hidden, inner), 1, (fused[1], 0), expert)


def trainers(model: Model, world: int, *, ep: int = 1, tp: int = 1, pp: int = 1,
             replicas: int = 1) -> WeightLayout:  # fmt: skip
    """FSDP2 over all ranks of a pipeline stage, over `tp` where that is above 1; experts dealt to
    `ep` ranks, each sharded over the others. replicas: HSDP, so many copies of everything."""
    stage = world // pp
    for name, size in (("ep", ep), ("tp", tp)):
        require(
            stage % (size * replicas) == 0 and world % pp == 0,
            f"trainers: {world} ranks do not divide by pp={pp}, replicas={replicas}, {name}={size}",
        )
    params = []
    shards = stage // replicas
    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]
    for each in weights(model):
        first = each.layer * pp // model.layers * stage
        if each.expert is not None:
            group = each.expert * ep // model.experts
            ranks = _range(first + group, stage, ep)
            mesh, placements = (replicas, shards // ep), (Replicate(), Shard(0))
        elif tp > 1:
            ranks, mesh = _range(first, stage), (replicas, shards // tp, tp)
            inner: Placement = Replicate() if each.split is None else Shard(each.split)
            outer = Shard(0, tp if each.split == 0 else 1)
            placements = (Replicate(), outer, inner)
        else:
            ranks, mesh = _range(first, stage), (replicas, shards)
            placements = (Replicate(), Shard(0))
        params.append(Param(each.name, each.shape, BF16, ranks, mesh, placements))
    return WeightLayout(tuple(params), world)


_ranges: dict[tuple[int, int, int], tuple[int, ...]] = {}


def _range(first: int, size: int, step: int = 1) -> tuple[int, ...]:
    """The same tuple each time: a plan has 70,000 of them."""
    return _ranges.setdefault(
        (first, size, step), tuple(range(first, first - first % step + size, step))
    )


def engine_ranks(model: Model, world: int, *, ep: int = 1, tp: int = 1,
               fp8: bool = True) -> WeightLayout:  # fmt: skip
    """Experts dealt to `ep` ranks, whole, or cut by `tp` where ep is 1; all else cut by `tp`, and
    the same on all groups of tp (data-parallel attention)."""
    require(
        world % ep == 0 and world % tp == 0 and model.experts % ep == 0,
        f"generators: {world} ranks and {model.experts} experts must divide by ep={ep}, and ranks "
        f"by tp={tp}",
    )
    params = []
    rows: dict[tuple[str, int], int] = {}  # where the parts of a fused tensor begin
    for each in weights(model):
        whole = ep > 1 and each.expert is not None
        cuts = 1 if each.split is None or whole else min(tp, each.groups)
        slot, ranks = 0, _range(0, world)
        if each.expert is not None:
            slot = each.expert % (model.experts // ep)
            ranks = _range(each.expert // (model.experts // ep), world, ep)
        mesh: tuple[int, ...] = (len(ranks),)
        placements: tuple[Placement, ...] = (Replicate(),)
        if cuts > 1:
            mesh = (len(ranks) // tp, cuts, tp // cuts)
            placements = (Replicate(), Shard(each.split or 0), Replicate())
        local = [size // cuts if d == each.split else size for d, size in enumerate(each.shape)]
        tensor, part = each.fused if each.fused[0] else (each.name, 0)
        before = rows.get((tensor, part), 0)
        total = local[0] * (2 if each.expert is not None and tensor.endswith("w13.weight") else 1)
        rows[tensor, part + 1] = before + local[0]
        params.append(
            _placed(each, (ranks, mesh, placements), tensor, (local, slot * total + before), fp8)
        )
    return WeightLayout(tuple(params), world)


_Spread = tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]


def _placed(
    each: Weight, spread: _Spread, tensor: str, local: tuple[list[int], int], fp8: bool
) -> Param:
    """local: the shape on a rank, and the row where the weight begins in the rank's tensor."""
    shape, row = local
    offset = row * (shape[1] if len(shape) > 1 else 1)
    if not (fp8 and each.quantized):
        return Param(each.name, each.shape, BF16, *spread, tensor=tensor, offset=offset)
    scales = tensor.removesuffix(".weight") + ".weight_scale_inv"
    blocks = Blocks(scales, row // BLOCK * -(-shape[1] // BLOCK))
    return Param(each.name, each.shape, FP8, *spread, tensor=tensor, offset=offset, blocks=blocks)
