"""The oracle of weight plans: what each rank's tensors hold, by torch's own placements and views.

Nothing here uses moe_p2p.weights but the descriptions. `check` runs a plan byte by byte and
compares every byte of every target, and that each was written once.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict

import torch
from torch import Tensor
from torch.distributed.tensor import placement_types as torch_placements

from moe_p2p.weights import Param, Shard, WeightLayout, WeightPlan, copies

Side = dict[tuple[int, str], Tensor]  # (rank, tensor): uint8


def torch_placement(placement: object) -> torch_placements.Placement:
    if not isinstance(placement, Shard):
        return torch_placements.Replicate()
    if placement.split_factor == 1:
        return torch_placements.Shard(placement.dim)
    return torch_placements._StridedShard(placement.dim, split_factor=placement.split_factor)


def shard_by_torch(param: Param, position: int, whole: Tensor) -> Tensor:
    """The DTensor's local tensor on one rank, or the part that it holds."""
    if param.part:
        return whole[tuple(slice(first, first + size) for first, size in param.part)]
    index = torch.arange(len(param.ranks)).view(param.mesh).eq(position).nonzero()[0].tolist()
    for placement, times, at in zip(param.placements, param.mesh, index, strict=True):
        placed = torch_placement(placement)
        if not isinstance(placed, torch_placements.Replicate):
            parts, _ = placed._split_tensor(whole, times, with_padding=False, contiguous=True)
            whole = parts[at]
    return whole


def windowed(param: Param, value: Tensor) -> Tensor:
    """The tensor over all ranks; NaN-like filler beside the parameter."""
    if not param.window:
        return value.view(param.shape)
    filler = torch.full(param.shape, 77, dtype=torch.uint8).to(value.dtype)
    filler[tuple(slice(first, first + size) for first, size in param.window)] = value.view(
        [size for _, size in param.window]
    )
    return filler


def inside(param: Param) -> Tensor:
    """True where the tensor over all ranks has the parameter's elements."""
    sizes = [size for _, size in param.window] if param.window else list(param.shape)
    whole = torch.zeros(param.shape, dtype=torch.bool)
    slices = param.window or [(0, size) for size in param.shape]
    whole[tuple(slice(first, first + size) for first, size in slices)] = torch.ones(
        sizes, dtype=torch.bool
    )
    return whole


class Tensors:
    """Tensors of a side, as bytes, grown as Params ask for room."""

    def __init__(self) -> None:
        self.bytes: Side = {}
        self.expected: Side = {}  # True where a byte has to be written

    def put(self, key: tuple[int, str], local: Tensor, mask: Tensor, param: Param) -> None:
        item = local.element_size()
        if param.strides:
            steps = list(param.strides)
        else:
            order = param.order or tuple(range(local.dim()))
            dense = torch.empty([local.shape[d] for d in order])
            steps = [dense.stride(order.index(d)) for d in range(local.dim())]
        numbers = torch.full(list(local.shape), param.offset, dtype=torch.int64)
        for dim, step in enumerate(steps):  # where each element lies
            along = [1] * local.dim()
            along[dim] = -1
            numbers += (torch.arange(local.shape[dim]) * step).view(along)
        at = (numbers[mask].unsqueeze(-1) * item + torch.arange(item)).flatten()
        self._grow(key, int(at.max()) + 1 if at.numel() else 0)
        self.bytes[key][at] = local[mask].unsqueeze(-1).contiguous().view(torch.uint8).flatten()
        self.expected[key][at] = 1

    def _grow(self, key: tuple[int, str], size: int) -> None:
        have = self.bytes.setdefault(key, torch.zeros(0, dtype=torch.uint8))
        mask = self.expected.setdefault(key, torch.zeros(0, dtype=torch.uint8))
        missing = max(size - have.numel(), 0)
        self.bytes[key] = torch.cat([have, torch.full((missing,), 0xEE, dtype=torch.uint8)])
        self.expected[key] = torch.cat([mask, torch.zeros(missing, dtype=torch.uint8)])


def tensors_of(layout: WeightLayout, values: dict[str, Tensor], *, sent: bool) -> Tensors:
    """Every rank's tensors when parameters have `values`; of targets (`sent`) as converted."""
    found = Tensors()
    for param in layout.params:
        value = values[param.name]
        scales = None
        if param.blocks and not param.finalize:
            value, scales = quantized(value, param.blocks.shape)
        elif sent and not param.finalize:
            value = value.to(getattr(torch, param.dtype))
        for position, rank in enumerate(param.ranks):
            mask = shard_by_torch(param, position, inside(param))
            local = shard_by_torch(param, position, windowed(param, value))
            if param.finalize:
                dense = torch.masked_select(local, mask)
                found.put((rank, param.received), dense, torch.ones_like(dense) == 1,
                          Param(param.name, tuple(dense.shape), param.dtype, (0,)))  # fmt: skip
                continue
            found.put((rank, param.tensor), local, mask, param)
            if scales is not None:
                _put_scales(found, param, position, scales)
    return found


def _put_scales(found: Tensors, param: Param, position: int, scales: Tensor) -> None:
    """The scale of each element, sharded like elements, read at the first of each block."""
    assert param.blocks is not None
    (n, k), spread = param.blocks.shape, scales
    if scales.dim() > 1:
        spread = scales.repeat_interleave(n, -2)[..., : param.elements[-2], :]
    spread = spread.repeat_interleave(k, -1)[..., : param.elements[-1]].contiguous()
    local = shard_by_torch(param, position, windowed(param, spread))
    mask = shard_by_torch(param, position, inside(param))
    if not mask.any():
        return
    sizes = [int(mask.any(dim=tuple(d for d in range(mask.dim()) if d != dim)).sum())
             for dim in range(mask.dim())]  # fmt: skip
    grid = torch.masked_select(local, mask).view(sizes)[..., ::n, ::k]  # a Param has 2 dimensions
    grid = grid.reshape(grid.shape[-len(param.elements) :])
    place = Param("scales", tuple(grid.shape), "float32", (0,), offset=param.blocks.offset,
                  order=param.blocks.order, strides=param.blocks.strides)  # fmt: skip
    key = (param.ranks[position], param.blocks.tensor)
    found.put(key, grid, torch.ones_like(grid, dtype=torch.bool), place)


def quantized(value: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """fp8 and scales of the whole tensor, block by block; [K] is [1, K]."""
    if value.dim() == 1:
        elements, scales = quantized(value.unsqueeze(0), shape)
        return elements[0], scales[0]
    flat = value.reshape(-1, *value.shape[-2:]).to(torch.float32)
    out = torch.empty_like(flat, dtype=torch.float8_e4m3fn)
    counts = [-(-size // b) for size, b in zip(flat.shape[-2:], shape, strict=True)]
    scales = torch.empty(flat.shape[0], *counts)
    for e in range(flat.shape[0]):
        for i in range(counts[0]):
            for j in range(counts[1]):
                rows = slice(i * shape[0], (i + 1) * shape[0])
                columns = slice(j * shape[1], (j + 1) * shape[1])
                block = flat[e, rows, columns]
                amax = torch.clamp(block.abs().max(), min=1e-4)
                scales[e, i, j] = amax / 448
                out[e, rows, columns] = (block * (torch.tensor(448.0) / amax)).to(
                    torch.float8_e4m3fn
                )
    return out.view(value.shape), scales.view(*value.shape[:-2], *counts)


def check(plan: WeightPlan, values: dict[str, Tensor]) -> None:
    """Runs the plan and compares every byte."""
    source = tensors_of(plan.source, values, sent=False).bytes
    add_copies(plan, source)
    wanted = tensors_of(plan.target, values, sent=True)
    got = {key: torch.full_like(each, 0xEE) for key, each in wanted.bytes.items()}
    times = {key: torch.zeros_like(each) for key, each in wanted.bytes.items()}
    arrived: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0, 0]))
    for rank in range(plan.source.world_size):
        for write in plan.of_source(rank):
            assert write.source_rank == rank
            rows = write.rows
            ours, key = source[rank, write.source_tensor], (write.target_rank, write.target_tensor)
            for begin, to in rows.offsets:
                for row in range(rows.num_rows):
                    at, there = begin + row * rows.source_stride, to + row * rows.target_stride
                    part = ours[at : at + rows.row_bytes]
                    assert part.numel() == rows.row_bytes, (write, "outside the source's tensor")
                    got[key][there : there + rows.row_bytes] = part
                    times[key][there : there + rows.row_bytes] += 1
            counts = arrived[write.target_rank][rank]
            counts[0] += write.nbytes
            counts[1] += 1
            counts[2] += rows.num_rows * len(rows.offsets)
    for key, each in wanted.bytes.items():
        assert torch.equal(times[key], wanted.expected[key]), (key, "each byte is written once")
        assert torch.equal(got[key], each), key
    for rank in range(plan.target.world_size):
        told = {source_rank: list(counts) for source_rank, counts in plan.of_target(rank).items()}
        assert told == dict(arrived[rank])


def add_copies(plan: WeightPlan, source: Side) -> None:
    """Makes the copies of all source ranks; maxima go through the plan's exchanges only."""
    grids: dict[tuple[int, str], Tensor] = {}
    made = [(rank, copy) for rank in range(plan.source.world_size) for copy in plan.copies(rank)]
    ours = {
        (rank, copy.tensor): source.get((rank, copy.param.tensor), torch.zeros(0)).view(
            getattr(torch, copy.param.dtype)
        )
        for rank, copy in made
        if (rank, copy.param.tensor) in source
    }
    for rank, copy in made:
        if copy.stage.blocks and (rank, copy.tensor) in ours:
            grids[rank, copy.tensor] = copies.maxima_of(copy, ours[rank, copy.tensor])
    own = {key: grid.clone() for key, grid in grids.items()}
    for rank in range(plan.source.world_size):
        for each in plan.maxima(rank):
            at = tuple(slice(first, first + size) for first, size in each.blocks)
            parts = torch.stack([own[peer, each.tensor][at] for peer in each.ranks])
            grids[rank, each.tensor][at] = parts.amax(dim=0)
    for rank, copy in made:
        if (rank, copy.tensor) in ours:
            elements, scales = copies.converted(
                copy, ours[rank, copy.tensor], grids.get((rank, copy.tensor))
            )
            source[rank, copy.tensor] = elements.view(torch.uint8)
            source[rank, f"{copy.tensor}:scales"] = scales.view(torch.uint8)


def numbered(shape: tuple[int, ...], dtype: torch.dtype, first: int = 0) -> Tensor:
    """Element numbers: no two elements of 2^32 are alike in four bytes, of 2^16 in two."""
    numbers = torch.arange(first, first + math.prod(shape), dtype=torch.int64)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return numbers.to(kinds[dtype.itemsize]).view(dtype).view(shape)


def as_received(plan: WeightPlan) -> WeightPlan:
    """The plan with targets that the oracle knows to gather, where the plan says that they do."""
    numbers = {
        name: {number for number, _ in plan.templates[at].received}
        for name, at in zip(plan.names, plan.numbers, strict=True)
    }
    params, seen = [], defaultdict(int)
    for param in plan.target.params:
        number, seen[param.name] = seen[param.name], seen[param.name] + 1
        if number in numbers[param.name] and not param.finalize:
            assert param.blocks is not None
            assert not aligned(param), param
            dtype = plan.source.by_name[param.name][0].dtype
            param = dataclasses.replace(param, dtype=dtype, blocks=None, finalize="unaligned")
        params.append(param)
    return dataclasses.replace(plan, target=WeightLayout(tuple(params), plan.target.world_size))


def aligned(param: Param) -> bool:
    """Whether blocks of the parameter are blocks of each rank's tensor."""
    assert param.blocks is not None
    dims = len(param.elements)
    shape = ((1,) * (dims - 2) + param.blocks.shape)[-dims:]
    numbers = torch.zeros(param.elements, dtype=torch.int64)
    for dim, b in enumerate(shape):  # the number of each element in its block
        along = [1] * len(shape)
        along[dim] = -1
        numbers = numbers * b + (torch.arange(param.elements[dim]) % b).view(along)
    for position in range(len(param.ranks)):
        mask = shard_by_torch(param, position, inside(param))
        if not mask.any():
            continue
        local = torch.masked_select(shard_by_torch(param, position, windowed(param, numbers)), mask)
        sizes = [
            int(mask.any(dim=tuple(d for d in range(mask.dim()) if d != dim)).sum())
            for dim in range(mask.dim())
        ][mask.dim() - len(shape) :]
        wanted = torch.zeros(sizes, dtype=torch.int64)
        for dim, b in enumerate(shape):
            along = [1] * len(shape)
            along[dim] = -1
            wanted = wanted * b + (torch.arange(sizes[dim]) % b).view(along)
        if not torch.equal(local.view(sizes), wanted):
            return False
    return True
