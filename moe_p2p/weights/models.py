"""Public models as trainers and engine ranks hold them: input of `plan --weights`.

Parameters themselves are described in parameters.py.
"""

from __future__ import annotations

import math

from moe_p2p.errors import require
from moe_p2p.weights.layout import FP8, Blocks, Param, Placement, Replicate, Shard, WeightLayout
from moe_p2p.weights.parameters import MODELS, Model, Weight, weights

__all__ = ["MODELS", "Model", "Weight", "engine_ranks", "trainers", "weights"]

BLOCK = 128


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
        params.append(Param(each.name, each.shape, each.dtype, ranks, mesh, placements))
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
    offset = row * math.prod(shape[1:])
    if not (fp8 and each.quantized):
        return Param(each.name, each.shape, each.dtype, *spread, tensor=tensor, offset=offset)
    scales = tensor.removesuffix(".weight") + ".weight_scale_inv"
    blocks = Blocks(scales, row // BLOCK * -(-shape[1] // BLOCK))
    return Param(each.name, each.shape, FP8, *spread, tensor=tensor, offset=offset, blocks=blocks)
