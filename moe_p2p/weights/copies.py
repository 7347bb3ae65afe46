"""What a source rank makes of its shard before it writes: other types, other orders, fp8.

One rank: `maxima_of` its shard, then the exchanges of `plan.maxima` over the returned grid, then
`converted`. Tensors are the rank's own, as the layout describes them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_p2p.weights import fp8, pieces
from moe_p2p.weights.pieces import Box, Piece
from moe_p2p.weights.plan import Copy


def maxima_of(copy: Copy, tensor: Tensor) -> Tensor:
    """float32, one for each block of the parameter [.., n, k]; 0 where this rank has nothing."""
    blocks = _blocks(copy)
    shape = copy.param.elements
    grid = tensor.new_zeros([-(-n // b) for n, b in zip(shape, blocks, strict=True)],
                            dtype=torch.float32)  # fmt: skip
    for piece in pieces.held(copy.param, copy.position):
        part = grid[_touched(piece.box, blocks)]
        ours = fp8.block_amax(_view(copy, piece, tensor), _first(piece.box), blocks[-2:])
        part.copy_(fp8.merge([part, ours]))
    return grid


def converted(copy: Copy, tensor: Tensor, grid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The copy's elements and its scales, each one-dimensional. grid: merged maxima of fp8."""
    param, stage = copy.param, copy.stage
    axes = pieces.parameter_axes(param, copy.position)
    dims = len(param.elements)
    order = (*(d for d in range(dims) if d not in stage.order), *stage.order)
    ours, theirs = pieces.held(param, copy.position), pieces.dense(axes, order)
    count = sum(_count(piece.box) for piece in theirs)
    out = tensor.new_empty(count, dtype=getattr(torch, stage.dtype))
    for piece, place in zip(ours, theirs, strict=True):
        values = _view(copy, piece, tensor)
        if grid is not None:
            blocks = _blocks(copy)
            amax = grid[_touched(piece.box, blocks)]
            values = fp8.quantize(values, _first(piece.box), amax, blocks[-2:])
        _at(out, place, 0).copy_(values)
    return out, _scales(copy, grid) if grid is not None else out.new_empty(0, dtype=torch.float32)


def _scales(copy: Copy, grid: Tensor) -> Tensor:
    """Of the blocks whose first element this rank has: each is written by one shard."""
    axes = pieces.block_axes(pieces.parameter_axes(copy.param, copy.position), copy.stage.blocks)
    places = pieces.dense(axes)
    out = grid.new_empty(sum(_count(piece.box) for piece in places))
    for piece in places:
        part = grid[tuple(slice(first, first + size) for first, size in piece.box)]
        _at(out, piece, 0).copy_(fp8.scales(part))
    return out


def _view(copy: Copy, piece: Piece, tensor: Tensor) -> Tensor:
    return _at(tensor, piece, copy.param.offset)


def _at(tensor: Tensor, piece: Piece, offset: int) -> Tensor:
    sizes = [size for _, size in piece.box]
    base = tensor.storage_offset()
    return torch.as_strided(tensor, sizes, piece.strides, base + offset + piece.offset)


def _blocks(copy: Copy) -> tuple[int, ...]:
    return (1,) * (len(copy.param.elements) - 2) + copy.stage.blocks


def _touched(box: Box, blocks: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(
        slice(first // b, -(-(first + size) // b))
        for (first, size), b in zip(box, blocks, strict=True)
    )


def _first(box: Box) -> tuple[int, ...]:
    return tuple(first for first, _ in box)


def _count(box: Box) -> int:
    return math.prod(size for _, size in box)
