"""What a source rank makes of its shard before it writes: other types, other orders, fp8.

One rank: `maxima_of` its shard, then the exchanges of `plan.maxima` over the returned grid, then
`converted`. Tensors are the rank's own, as the layout describes them. conversion.py does the same
for many copies, in parts of these: views of what is held, and where it goes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_p2p.machine import fp8
from moe_p2p.weights import boxes
from moe_p2p.weights.boxes import Axis, Box, PlacedBox
from moe_p2p.weights.plan import Copy


def maxima_of(copy: Copy, tensor: Tensor) -> Tensor:
    """float32, one for each block of the parameter [.., n, k]; 0 where this rank has nothing."""
    shape = copy.param.elements
    sizes = [-(-n // b) for n, b in zip(shape, block_shape(copy), strict=True)]
    grid = tensor.new_zeros(sizes, dtype=torch.float32)
    merge_maxima(copy, held(copy, tensor), grid)
    return grid


def converted(copy: Copy, tensor: Tensor, grid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The copy's elements and its scales, each one-dimensional. grid: merged maxima of fp8."""
    out = tensor.new_empty(num_elements(copy), dtype=getattr(torch, copy.stage.dtype))
    convert_into(copy, held(copy, tensor), grid, out)
    scales = tensor.new_empty(0 if grid is None else num_scales(copy), dtype=torch.float32)
    if grid is not None:
        scales_into(copy, grid, scales)
    return out, scales


def held(copy: Copy, tensor: Tensor) -> list[Tensor]:
    """Views of what the rank holds of the parameter."""
    ours = boxes.held(copy.param, copy.position)
    tensor = _typed(tensor, copy.param.dtype)
    return [_at(tensor, placed, copy.param.offset) for placed in ours]


def dense(copy: Copy, tensor: Tensor) -> list[Tensor]:
    """The same of a dense tensor of these elements alone, in the checkpoint's order."""
    return [_at(tensor, placed, 0) for placed in boxes.dense(_axes(copy))]


def window(copy: Copy) -> Box:
    """Blocks, (first, size) in each dimension, that hold all which the rank touches."""
    blocks = block_shape(copy)
    found = [_touched(placed.box, blocks) for placed in boxes.held(copy.param, copy.position)]
    if not found:
        return ((0, 0),) * len(blocks)
    return tuple(
        (
            min(each.start for each in along),
            max(e.stop for e in along) - min(e.start for e in along),
        )
        for along in zip(*found, strict=True)
    )


# In what follows a grid begins at block `origin` of the parameter; (): at its first one.


def merge_maxima(
    copy: Copy, views: Sequence[Tensor], grid: Tensor, origin: Sequence[int] = ()
) -> None:
    blocks = block_shape(copy)
    for placed, view in zip(boxes.held(copy.param, copy.position), views, strict=True):
        part = grid[_touched(placed.box, blocks, origin)]
        part.copy_(merge([part, block_amax(view, _first(placed.box), copy.stage.blocks)]))


def convert_into(
    copy: Copy,
    views: Sequence[Tensor],
    grid: Tensor | None,
    out: Tensor,
    origin: Sequence[int] = (),
) -> None:
    blocks = block_shape(copy)
    for view, place in zip(views, _places(copy), strict=True):
        values = view
        if grid is not None:
            amax = grid[_touched(place.box, blocks, origin)]
            values = quantize(view, _first(place.box), amax, copy.stage.blocks)
        _at(out, place, 0).copy_(values)


def scales_into(copy: Copy, grid: Tensor, out: Tensor, origin: Sequence[int] = ()) -> None:
    """Of the blocks whose first element this rank has: each is written by one shard."""
    for placed in _scale_places(copy):
        part = grid[_touched(placed.box, (1,) * len(placed.box), origin)]
        _at(out, placed, 0).copy_(scales(part))


def launch_boxes(
    copy: Copy,
    views: Sequence[Tensor],
    out: Tensor,
    scales: Tensor,
    grid: Tensor,
    origin: Sequence[int] = (),
) -> Iterator[tuple[list[Tensor], tuple[int, int]]]:
    """Elements, their fp8, cells of the blocks they touch, and scales of those that begin there,
    each [lead, rows, columns], and the index of the first element in the last two dimensions."""
    blocks = block_shape(copy)
    owned = {placed.box: _at(scales, placed, 0) for placed in _scale_places(copy)}
    for view, place in zip(views, _places(copy), strict=True):
        begin = tuple(
            (-(-at // b), -(-(at + n) // b) - -(-at // b))
            for (at, n), b in zip(place.box, blocks, strict=True)
        )
        cells = grid[_touched(place.box, blocks, origin)]
        none = scales.new_empty(0).expand(*cells.shape[:-1], 0)  # no block begins here
        parts = [view, _at(out, place, 0), cells, owned.get(begin, none)]
        first = (0, *_first(place.box))
        for at in itertools.product(*(range(size) for size in view.shape[:-3])):
            found = [part[at] for part in parts]
            if view.dim() < 3:
                found = [part.view((1,) * (3 - view.dim()) + part.shape) for part in found]
            yield found, (first[-2], first[-1])


def num_elements(copy: Copy) -> int:
    return sum(_count(placed.box) for placed in boxes.dense(_axes(copy)))


def num_scales(copy: Copy) -> int:
    return sum(_count(placed.box) for placed in _scale_places(copy))


def block_shape(copy: Copy) -> tuple[int, ...]:
    """In each dimension of the parameter; only where there are blocks."""
    return boxes.block_sizes(copy.param.elements, copy.stage.blocks)


def _axes(copy: Copy) -> tuple[Axis, ...]:
    return boxes.parameter_axes(copy.param, copy.position)


def _places(copy: Copy) -> list[PlacedBox]:
    """Where the copy has what `held` says, in its own order."""
    order = copy.stage.order
    dims = range(len(copy.param.elements))
    return boxes.dense(_axes(copy), (*(d for d in dims if d not in order), *order))


def _scale_places(copy: Copy) -> list[PlacedBox]:
    return boxes.dense(boxes.block_axes(_axes(copy), copy.stage.blocks))


def _typed(tensor: Tensor, dtype: str) -> Tensor:
    """A tensor of bytes as what lies in it."""
    wanted = getattr(torch, dtype)
    return tensor if tensor.dtype == wanted else tensor.view(-1).view(wanted)


def _at(tensor: Tensor, placed: PlacedBox, offset: int) -> Tensor:
    sizes = [size for _, size in placed.box]
    base = tensor.storage_offset()
    return torch.as_strided(tensor, sizes, placed.strides, base + offset + placed.offset)


def _touched(box: Box, blocks: tuple[int, ...], origin: Sequence[int] = ()) -> tuple[slice, ...]:
    return tuple(
        slice(first // b - at, -(-(first + size) // b) - at)
        for (first, size), b, at in zip(box, blocks, origin or (0,) * len(box), strict=True)
    )


def _first(box: Box) -> tuple[int, ...]:
    return tuple(first for first, _ in box)


def _count(box: Box) -> int:
    return math.prod(size for _, size in box)


# --- fp8 in blocks of a tensor that nobody holds whole: maxima travel, elements do not ---
#
# A shard takes the maxima of the blocks it touches, shards that share blocks merge theirs, and each
# quantizes what it holds: bit for bit what quantizing the gathered tensor gives. The
# arithmetic is in moe_p2p/machine/fp8.py, as DeepGEMM's per_block_cast_to_fp8 has it. Scales
# multiply q: weight_scale_inv of DeepSeek's checkpoints.
#
# Shapes: x [.., N, K], a box of a parameter whose first element has index `first` there; amax and
# scales [.., n, k], of the blocks that the box touches. Blocks divide the last two dimensions. x
# [K] is [1, K], with amax and scales [k].

BLOCK = (128, 128)


def block_amax(x: Tensor, first: Sequence[int], block: Sequence[int] = BLOCK) -> Tensor:
    """max |x| of each block that the box touches, float32; inf where there is an inf or a NaN."""
    if x.dim() == 1:  # [1, K]
        return block_amax(x.unsqueeze(0), (0, *first), block)[0]
    n, k = (
        _num_blocks(at, size, b)
        for at, size, b in zip(first[-2:], x.shape[-2:], block, strict=True)
    )
    before = [at % b for at, b in zip(first[-2:], block, strict=True)]
    after = [c * b - skip - size for c, b, skip, size in
             zip((n, k), block, before, x.shape[-2:], strict=True)]  # fmt: skip
    # 0 beside the box changes no maximum.
    padded = pad(x, (before[1], after[1], before[0], after[0]))
    cells = padded.reshape(*x.shape[:-2], n, block[0], k, block[1])
    return fp8.largest(cells, (-3, -1), keepdim=False)


def merge(maxima: Sequence[Tensor]) -> Tensor:
    """Maxima of the same blocks, of several shards."""
    return torch.stack(list(maxima)).amax(dim=0)


def scales(amax: Tensor) -> Tensor:
    """What dequantizing multiplies by, float32."""
    return fp8.factors(amax)[0]


def quantize(x: Tensor, first: Sequence[int], amax: Tensor, block: Sequence[int] = BLOCK) -> Tensor:
    """fp8 of the box, from the merged maxima of the blocks that it touches."""
    if x.dim() == 1:
        return quantize(x.unsqueeze(0), (0, *first), amax.unsqueeze(0), block)[0]
    multiplier = fp8.factors(amax)[1]
    for dim, at, size, b in zip((-2, -1), first[-2:], x.shape[-2:], block, strict=True):
        multiplier = multiplier.repeat_interleave(b, dim).narrow(dim, at % b, size)
    return fp8.to_e4m3(x.to(torch.float32) * multiplier)


def _num_blocks(first: int, size: int, block: int) -> int:
    return -(-(first + size) // block) - first // block
