"""The rows of a request's chunks between one pair of workers, and what is done with them: writes,
reads, checksums. They come in units, which a layer has alike at another place: their indices are
worked out once a chunk."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from moe_p2p.engine.checksum import add, apart, rows_checksum
from moe_p2p.engine.engine import Engine
from moe_p2p.engine.transfers import Request
from moe_p2p.errors import require
from moe_p2p.kv.layout import KVLayout
from moe_p2p.kv.memory import KVCache, KVRequest
from moe_p2p.kv.pair import Pair, page_rows
from moe_p2p.kv.plan import KVMove
from moe_p2p.kv.requests import Span, indices, num_units, span_of

Pages = Mapping[str, Tensor]
Chunk = tuple[int, int]
Step = tuple[int, int]  # of which KVSignals, and its number


class ChunkRows:
    """Of tokens `begin` to `total`. source, target: pages by group. None: of the other side, and
    not known here."""

    def __init__(
        self,
        pair: Pair,
        total: int,
        *,
        begin: int = 0,
        source: Pages | None = None,
        target: Pages | None = None,
    ) -> None:
        self.pair, self.begin, self.total = pair, begin, total
        plan = pair.plan
        self.source = _blank(plan.source, total) if source is None else source
        self.target = _blank(plan.target, total) if target is None else target
        self._known: dict[tuple[int, Chunk], tuple[Tensor, Tensor]] = {}
        self._num_rows: dict[tuple[int, Chunk], int] = {}  # by move

    def of(self, move: KVMove, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """int64, at the source and at the target, in the order of tokens."""
        key = (id(move), chunk)
        if key not in self._known:
            span = self._span(move, chunk)
            for name, lists in (("source", self.source), ("target", self.target)):
                require(move.group in lists, f"the {name} gave no pages of group {move.group!r}")
            ours, theirs = indices(move, span, self.source[move.group], self.target[move.group])
            self._known[key] = (ours.to(torch.int64), theirs.to(torch.int64))
        return self._known[key]

    def _span(self, move: KVMove, chunk: Chunk) -> Span:
        plan = self.pair.plan
        return span_of(plan, plan.source.group(move.group), *chunk, self.total)

    def _rows(self, move: KVMove, chunk: Chunk) -> int:
        key = (id(move), chunk)
        if key not in self._num_rows:
            self._num_rows[key] = num_units(move, self._span(move, chunk)) * move.shape.num_rows
        return self._num_rows[key]

    def of_layers(self, layers: list[int], chunk: Chunk) -> None:
        for request in (each for layer in layers for each in self.pair.requests[layer]):
            self.of(request.move, chunk)

    def each(self, layer: int, chunk: Chunk) -> Iterator[tuple[KVRequest, Tensor, Tensor]]:
        """Requests of a layer that have something to carry."""
        for request in self.pair.requests[layer]:
            ours, theirs = self.of(request.move, chunk)
            if len(ours):
                yield request, ours, theirs

    def write(
        self, engine: Engine, layers: tuple[int, ...], chunk: Chunk, imm: int, after: Step | None
    ) -> list[Request]:
        """Submits layers from here to the pair's worker; one immediate by each NIC a request."""
        found: list[Request] = []
        for move, rows, places in self.pair.placed(engine, layers):
            ours, theirs = self.of(move, chunk)
            if len(ours):
                found += engine.write_layers(
                    places,
                    pages=ours,
                    region_pages=theirs,
                    imm=imm,
                    after=after,
                    rows=rows,
                )
        return found

    def read(self, engine: Engine, chunk: Chunk) -> list[Request]:
        """Submits reads of all layers from the pair's worker to here."""
        pair = self.pair
        return [
            engine.read_pages(
                pair.memory.kv[request.target.region],
                pair.regions[request.source.region],
                pages=theirs,
                region_pages=ours,
                offset=request.target.offset,
                region_offset=request.source.offset,
                rows=page_rows(request.move, here="target"),
            )
            for layer in pair.layers
            for request, ours, theirs in self.each(layer, chunk)
        ]

    def checksum(self, cache: KVCache, layer: int, chunk: Chunk, *, at_source: bool) -> int:
        """Of one layer of a chunk. A row's number is its place among all rows of the request, one
        move after the other, so sums of chunks add up to that of the request, however it was cut.
        """
        total = first = 0
        for request in self.pair.requests[layer]:
            move, shape = request.move, request.move.shape
            ours, theirs = self.of(move, chunk)
            row = first + self._rows(move, (self.begin, chunk[0]))
            first += self._rows(move, (self.begin, self.total))
            place = request.source if at_source else request.target
            memory = cache.tensors[place.region]
            with apart(memory.device):
                part = rows_checksum(
                    memory,
                    ours if at_source else theirs,
                    offset=place.offset,
                    unit=shape.source_unit if at_source else shape.target_unit,
                    row_bytes=shape.row_bytes,
                    num_rows=shape.num_rows,
                    row_stride=shape.source_row_stride if at_source else shape.target_row_stride,
                    first_row=row,
                )
            total = add(total, part)
        return total


def _blank(layout: KVLayout, total: int) -> Pages:
    """As many pages as the other side has; their numbers are not used."""
    return {
        group.name: torch.zeros(
            1 if group.kind == "state" else -(-total // layout.page_tokens(group)),
            dtype=torch.int32,
            device="cpu",
        )
        for group in layout.groups
    }


def int32_bytes(pages: Tensor) -> bytes:
    return struct.pack(f"<{len(pages)}i", *pages.tolist())


def int32_tensor(data: bytes) -> Tensor:
    if not data:
        return torch.empty(0, dtype=torch.int32, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.int32)
