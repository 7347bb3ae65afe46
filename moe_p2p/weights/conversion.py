"""A trainer's conversions of one update: block maxima exchanged through the store, then fp8 and
other types and orders, into tensors that were registered once. Used by trainer.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from moe_p2p.errors import InvalidArgumentError, make
from moe_p2p.transfers import bytes_from, tensor_from
from moe_p2p.weights import copies, fp8
from moe_p2p.weights.plan import Copy, WeightPlan

_Blocks = tuple[tuple[int, int], ...]
_Place = tuple[str, _Blocks]  # copy, and blocks of its grid
Exchange = Callable[[bytes, tuple[int, ...]], Mapping[int, bytes]]  # gives mine, gets the peers'


class Conversions:
    """tensors: the rank's own. staged: what is written instead, by the plan's names."""

    def __init__(self, plan: WeightPlan, rank: int, tensors: Mapping[str, Tensor]) -> None:
        self.rank, self._tensors = rank, tensors
        self._copies: list[Copy] = list(plan.copies(rank))
        missing = {each.param.tensor for each in self._copies} - tensors.keys()
        if missing:
            text = f"trainer {rank} has no tensor {sorted(missing)[0]!r}, which its layout names"
            raise make(InvalidArgumentError, text)
        self._exchanges = list(plan.maxima(rank))
        self._peers = tuple(sorted({peer for each in self._exchanges for peer in each.ranks}))
        self._places = {peer: _places(plan, peer) for peer in self._peers}
        self.staged: dict[str, Tensor] = {}
        for copy in self._copies:
            tensor = tensors[copy.param.tensor]
            grid = copies.maxima_of(copy, tensor) if copy.stage.blocks else None
            elements, scales = copies.converted(copy, tensor, grid)
            self.staged[copy.tensor] = elements
            if grid is not None:
                self.staged[f"{copy.tensor}:scales"] = scales

    def run(self, exchange: Exchange) -> None:
        """Converts what the tensors hold now."""
        grids = {
            copy.tensor: copies.maxima_of(copy, self._tensors[copy.param.tensor])
            for copy in self._copies
            if copy.stage.blocks
        }
        self._merge(grids, exchange)
        for copy in self._copies:
            grid = grids.get(copy.tensor)
            elements, scales = copies.converted(copy, self._tensors[copy.param.tensor], grid)
            self.staged[copy.tensor].copy_(elements)
            if grid is not None:
                self.staged[f"{copy.tensor}:scales"].copy_(scales)

    def _merge(self, grids: dict[str, Tensor], exchange: Exchange) -> None:
        if not self._exchanges:
            return
        own = [grids[tensor][_at(blocks)].flatten() for tensor, blocks in self._places[self.rank]]
        mine = torch.cat(own).cpu()
        found = exchange(bytes_from(mine.view(torch.uint8)), self._peers)
        parts = {peer: _split(found[peer], self._places[peer]) for peer in self._peers}
        for each in self._exchanges:
            place = (each.tensor, each.blocks)
            part = grids[each.tensor][_at(each.blocks)]
            merged = fp8.merge([parts[peer][place].view(part.shape) for peer in each.ranks])
            part.copy_(merged)


def _places(plan: WeightPlan, rank: int) -> list[_Place]:
    """What a rank gives, in this order."""
    return list(dict.fromkeys((each.tensor, each.blocks) for each in plan.maxima(rank)))


def _at(blocks: _Blocks) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in blocks)


def _split(data: bytes, places: list[_Place]) -> dict[_Place, Tensor]:
    sizes = [math.prod(size for _, size in blocks) for _, blocks in places]
    values = torch.split(tensor_from(data).view(torch.float32), sizes)
    return dict(zip(places, values, strict=True))
