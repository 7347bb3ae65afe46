"""Several requests in one call of an `Engine`: the layers of a step of `kv.KVSignals`, submitted
before its forward pass, each of which waits for its layer, and parameters of a weight update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from moe_p2p.ops import call
from moe_p2p.transfers import LayerPlace, Memory, Region, Request, checked, indices

if TYPE_CHECKING:
    from moe_p2p.engine import Engine

_ops = torch.ops.moe_p2p


class LayerWrites:
    """A part of `Engine`."""

    number: int

    def layer_places(self, places: Sequence[LayerPlace]) -> Tensor:
        """What `write_layers` takes: made once, for memory and regions that stay."""
        rows = [
            (
                checked("memory", each.memory, Memory).number,
                each.offset,
                checked("region", each.region, Region).number,
                each.region_offset,
                each.layer,
            )
            for each in places
        ]
        return torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 5)

    def write_layers(
        self,
        places: Tensor,
        *,
        page_bytes: int,
        pages: Tensor,
        region_pages: Tensor,
        stride: int,
        region_stride: int,
        row_bytes: int,
        row_stride: int,
        region_row_stride: int,
        imm: int | None = None,
        priority: int = 1,
        after: tuple[int, int] | None = None,
    ) -> list[Request]:
        """The same pages of several layers: `write_pages` of each, imm_per_page=False, in one call.

        places: `layer_places`. after: number and step of the `kv.KVSignals` whose layers are waited
        for. All are submitted, or, where an argument is wrong, none.
        """
        engine = cast("Engine", self)
        first = call(
            _ops.engine_write_layers.default,
            self.number,
            indices("places", places),
            page_bytes,
            indices("pages", pages),
            stride,
            indices("region_pages", region_pages),
            region_stride,
            row_bytes,
            row_stride,
            region_row_stride,
            imm,
            priority,
            [] if after is None else list(after),
        )
        return [Request(engine, number) for number in range(int(first), int(first) + len(places))]

    def write_all(
        self,
        table: Tensor,
        pages: Tensor,
        region_pages: Tensor,
        *,
        imm: int | None = None,
        priority: int = 1,
    ) -> list[Request]:
        """Requests of any memories and regions: `write_pages` of each, imm_per_page=False.

        table: int64 [n, 8], of each memory.number, region.number, page_bytes, row_bytes,
        row_stride, region_row_stride, and its part of the pages: the first one, and how many.
        Pages are given by their first byte. All are submitted, or, where an argument is wrong,
        none.
        """
        engine = cast("Engine", self)
        op = _ops.engine_write_all.default
        first = int(call(op, self.number, table, pages, region_pages, imm, priority))
        return [Request(engine, number) for number in range(first, first + len(table))]
