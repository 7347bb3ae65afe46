"""A trainer's conversions: loads, fp8 and other types and orders, batch by batch into a ring.

Used by trainer.py: `maxima` of all that is quantized, an exchange of those that shards share, then
`convert` a batch, write it, and the next one. On a GPU one launch converts a batch
(kernels/triton/weights_fp8.py); elsewhere, and where Triton is not installed, torch does, bit for
bit the same.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from moe_p2p.errors import ResourceExhaustedError, make
from moe_p2p.weights import attempt, copies
from moe_p2p.weights.layout import item_bytes
from moe_p2p.weights.maxima import Grids
from moe_p2p.weights.plan import Copy, WeightPlan

if TYPE_CHECKING:  # Triton may not be installed
    from moe_p2p.kernels.triton.weights_fp8 import Boxes

# Device memory beside the ring, at most: of a block its number, two entries of a launch's tables,
# and its place in an exchange; of a copy its row of a table and what allocations are rounded up.
_BLOCK_BYTES, _COPY_BYTES = 32, 1024

# --- the ring: a place for each copy, the same in every update, so that it is registered once; a
# copy may be converted when all that lay in its place before has been written ---

_ALIGN = 256
_BATCH_BYTES = 256 << 20  # converted by one launch and written while the next is converted


class Need(NamedTuple):
    """Bytes of a copy: what is written, its scales, and its source where it is loaded first."""

    name: str
    elements: int
    scales: int = 0
    loaded: int = 0


class RingPlace(NamedTuple):
    """Offsets in the ring. after: number of the last copy that must be written before; -1: none."""

    elements: int
    scales: int
    loaded: int
    end: int
    after: int


def sizes(need: Need) -> tuple[int, int, int]:
    elements, scales, loaded = (-(-each // _ALIGN) * _ALIGN for each in need[1:])
    return elements, scales, loaded


def ring(needs: Sequence[Need], limit: int | None, who: str) -> tuple[list[RingPlace], int]:
    """Places of copies, in their order, and the size of the ring.

    Raises ResourceExhaustedError with a copy that is larger than `limit` by itself.
    """
    totals = [sum(sizes(need)) for need in needs]
    size = sum(totals) if limit is None else min(sum(totals), max(limit, 0) // _ALIGN * _ALIGN)
    for need, total in zip(needs, totals, strict=True):
        if total > size:
            text = (
                f"{who}: converting {need.name} takes {total} bytes, its watermark leaves {size}; "
                "raise watermark"
            )
            raise make(ResourceExhaustedError, text)
    places: list[RingPlace] = []
    at = lap = oldest = 0  # of the lap before, copies from `oldest` on lie in the ring
    for i, (need, total) in enumerate(zip(needs, totals, strict=True)):
        if at + total > size:
            at, oldest, lap = 0, lap, i
        while oldest < lap and places[oldest].elements < at + total:
            oldest += 1
        elements, scales, _ = sizes(need)
        places.append(RingPlace(at, at + elements, at + elements + scales, at + total, oldest - 1))
        at += total
    return places, size


def batches(places: Sequence[RingPlace], chosen: Sequence[int], size: int) -> Iterator[list[int]]:
    """Yields the numbers of copies to convert together: at most a quarter of the ring, and no two
    of them in the same place."""
    most = min(max(size // 4, 1), _BATCH_BYTES)
    batch: list[int] = []
    nbytes = 0
    for number in chosen:
        place = places[number]
        length = place.end - place.elements
        if batch and (nbytes + length > most or place.after >= batch[0]):
            yield batch
            batch, nbytes = [], 0
        batch.append(number)
        nbytes += length
    if batch:
        yield batch


# --- conversions ---


class _Work(NamedTuple):
    """What converts a batch. loaded: copies whose source is loaded first. launches: one for each
    source type and block shape. rest: copies that torch converts."""

    loaded: list[int]
    launches: list[Boxes]
    rest: list[int]


class Conversions:
    """tensors: the rank's own. device: where it is converted. watermark: most bytes of it beside
    the rank's own tensors. staged: what is written instead, by the plan's names.

    Raises ResourceExhaustedError when it is made; `allocate` takes the memory."""

    def __init__(
        self,
        plans: Iterable[WeightPlan],
        rank: int,
        tensors: Mapping[str, Tensor],
        *,
        device: torch.device,
        watermark: int | None = None,
        triton: bool | None = None,
    ) -> None:
        self._tensors, self._device = tensors, device
        self.copies: list[Copy] = _in_order(list(plans), rank)
        attempt.check_there(f"trainer {rank}", (each.param.tensor for each in self.copies), tensors)
        blocked = [each for each in self.copies if each.stage.blocks]
        self.grids = Grids({each.tensor: copies.window(each) for each in blocked}, device)
        self._beside = _BLOCK_BYTES * len(self.grids.flat) + _COPY_BYTES * len(blocked)
        left = None if watermark is None else watermark - self._beside
        needs = [self._need(each) for each in self.copies]
        self.places, self._size = ring(needs, left, f"trainer {rank}")
        self._ends = [0, *accumulate(each.end - each.elements for each in self.places)]
        self.number = {each.tensor: i for i, each in enumerate(self.copies)}
        self.staged: dict[str, Tensor] = {}
        self._loaded: dict[int, Tensor] = {}
        self._triton = device.type == "cuda" and _has_triton() if triton is None else triton
        self._works: dict[tuple[int, ...], _Work] = {}

    def allocate(self) -> None:
        self.buffer = torch.empty(self._size, dtype=torch.uint8, device=self._device)
        for i, copy in enumerate(self.copies):
            self._place(i, copy, self._need(copy))

    def _need(self, copy: Copy) -> Need:
        scales = 4 * copies.num_scales(copy) if copy.stage.blocks else 0
        count = copies.num_elements(copy)
        loaded = count * item_bytes(copy.param.dtype) if self._is_away(copy) else 0
        return Need(copy.name, count * item_bytes(copy.stage.dtype), scales, loaded)

    def _is_away(self, copy: Copy) -> bool:
        """In host memory, while a GPU converts."""
        return self._tensors[copy.param.tensor].device.type != self._device.type

    def _place(self, number: int, copy: Copy, need: Need) -> None:
        place = self.places[number]
        dtype = getattr(torch, copy.stage.dtype)
        at = place.elements
        self.staged[copy.tensor] = self.buffer[at : at + need.elements].view(dtype)
        if copy.stage.blocks:
            part = self.buffer[place.scales : place.scales + need.scales]
            self.staged[f"{copy.tensor}:scales"] = part.view(torch.float32)
        if need.loaded:
            part = self.buffer[place.loaded : place.loaded + need.loaded]
            self._loaded[number] = part.view(getattr(torch, copy.param.dtype))

    # --- an update ---

    def batches(self, names: set[str] | None = None) -> list[list[int]]:
        """Numbers of copies of all parameters or of `names`, converted together."""
        chosen = [i for i, each in enumerate(self.copies) if names is None or each.name in names]
        return list(batches(self.places, chosen, len(self.buffer)))

    def maxima(self, batches: Sequence[Sequence[int]]) -> None:
        """Of what is quantized, into the grids. What is in host memory is loaded for it, and again
        for `convert`: the ring need not hold all of it at once."""
        self.grids.flat.zero_()
        for batch in batches:
            work = self._work(batch)
            self._load(i for i in work.loaded if self.copies[i].stage.blocks)
            for each in work.launches:
                each.maxima()
            for i in work.rest:
                copy = self.copies[i]
                if copy.stage.blocks:
                    grid, origin = self.grids.of[copy.tensor], self.grids.origins[copy.tensor]
                    copies.merge_maxima(copy, self._views(i), grid, origin)

    def convert(self, batch: Sequence[int]) -> None:
        """Into the ring, by the grids; not done when it returns, on a GPU."""
        work = self._work(batch)
        self._load(work.loaded)
        for each in work.launches:
            each.quantize()
        for i in work.rest:
            copy = self.copies[i]
            grid = self.grids.of.get(copy.tensor)
            origin = self.grids.origins.get(copy.tensor, ())
            copies.convert_into(copy, self._views(i), grid, self.staged[copy.tensor], origin)
            if grid is not None:
                copies.scales_into(copy, grid, self.staged[f"{copy.tensor}:scales"], origin)

    def high_water(self, batch: Sequence[int], oldest: int | None) -> int:
        """Bytes in use once a batch is converted, with what is beside the ring. oldest: first copy
        that is being written."""
        first = batch[0] if oldest is None else oldest
        used = self._ends[batch[-1] + 1] - self._ends[first]
        return min(used, len(self.buffer)) + self._beside

    def after(self, batch: Sequence[int]) -> int:
        """Number of the last copy that must be written before the batch is converted; -1: none."""
        return self.places[batch[-1]].after if batch else -1  # it grows with the numbers

    def _views(self, number: int) -> list[Tensor]:
        copy = self.copies[number]
        if number not in self._loaded:
            return copies.held(copy, self._tensors[copy.param.tensor])
        return copies.dense(copy, self._loaded[number])

    def _load(self, numbers: Iterable[int]) -> None:
        """From pinned memory these are copies by the GPU; from other memory the CPU waits."""
        for i in numbers:
            copy = self.copies[i]
            ours = copies.held(copy, self._tensors[copy.param.tensor])
            for to, view in zip(self._views(i), ours, strict=True):
                to.copy_(view, non_blocking=True)

    def _work(self, batch: Sequence[int]) -> _Work:
        """Made in the first update: while thousands of copies are looked through, a GPU idles."""
        key = tuple(batch)
        if key not in self._works:
            blocked = [i for i in batch if self._triton and self.copies[i].stage.blocks]
            launches = self._make_launches(blocked) if blocked else []
            rest = sorted(set(batch).difference(blocked))
            self._works[key] = _Work([i for i in batch if i in self._loaded], launches, rest)
        return self._works[key]

    def _make_launches(self, batch: Sequence[int]) -> list[Boxes]:
        from moe_p2p.kernels.triton import weights_fp8

        rows: dict[tuple[torch.dtype, tuple[int, int]], list[tuple[list[int], int]]]
        rows = defaultdict(list)
        for i in batch:
            copy = self.copies[i]
            grid, out = self.grids.of[copy.tensor], self.staged[copy.tensor]
            scales = self.staged[f"{copy.tensor}:scales"]
            block = (copy.stage.blocks[-2], copy.stage.blocks[-1])
            origin = self.grids.origins[copy.tensor]
            for parts, first in copies.launch_boxes(
                copy, self._views(i), out, scales, grid, origin
            ):
                rows[parts[0].dtype, block].append(weights_fp8.box_row(parts, first, block))
        return [
            weights_fp8.Boxes(found, dtype, block, self._device)
            for (dtype, block), found in rows.items()
        ]


def _in_order(plans: Sequence[WeightPlan], rank: int) -> list[Copy]:
    """Copies by the first target that gets some of each: from the one behind this rank round to the
    one of the same number, as `of_source` has them. Ranks of the same number often share a GPU, and
    what crosses a link is under way then while the rest is converted."""
    found = {copy.tensor: copy for plan in plans for copy in plan.copies(rank)}
    turns: dict[str, int] = {}
    for plan in plans:
        for write in plan.of_source(rank):
            name = write.source_tensor.removesuffix(":scales")
            turn = (write.target_rank - rank - 1) % plan.target.world_size
            turns[name] = min(turns.get(name, turn), turn)
    return sorted(found.values(), key=lambda copy: turns.get(copy.tensor, 0))


def _has_triton() -> bool:
    with contextlib.suppress(ImportError):
        import moe_p2p.kernels.triton.weights_fp8  # noqa: F401

        return True
    return False
