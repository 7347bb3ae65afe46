"""Where the layers of one rank lie, its pages, and the requests that follow from it and a plan.

What two workers tell each other when they meet is one `KVMemory` and one `KVLayout` per rank, as
bytes; each then makes the plan and resolves it by itself.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_p2p.errors import ProtocolError, make, require, require_type
from moe_p2p.kv.layout import KVGroup, KVLayout
from moe_p2p.kv.plan import KVMove, KVPlan
from moe_p2p.library import refuse_freed, refuse_lazy

FORMAT = 1  # of the bytes; another one is refused
_HEAD = struct.Struct("<HHHH")  # format, rank, groups, regions
_COUNTS = struct.Struct("<HB")  # layers of a group, places of a layer
_PLACE = struct.Struct("<HQ")
_LENGTH = struct.Struct("<I")


class Place(NamedTuple):
    region: int  # place in KVMemory.regions
    offset: int  # bytes


@dataclass(frozen=True)
class KVMemory:
    """layers: per group, per layer that the rank keeps, where it begins: one place, or one of K
    and one of V where the layout's kv_split is "layer". regions: descriptors of the memory
    (`Memory.descriptor`), which `Engine.resolve` takes."""

    rank: int
    layers: tuple[tuple[tuple[Place, ...], ...], ...]
    regions: tuple[bytes, ...]

    def check(self, layout: KVLayout) -> None:
        """Raises where it is not the memory of a rank of `layout`."""
        require(
            0 <= self.rank < layout.world_size and len(self.layers) == len(layout.groups),
            f"KVMemory of rank {self.rank} with {len(self.layers)} groups is not of a layout with "
            f"{layout.world_size} ranks and {len(layout.groups)} groups",
        )
        for group, layers in zip(layout.groups, self.layers, strict=True):
            wanted = len(layout.layers_of(group, self.rank // layout.tp))
            places = places_of_layer(layout, group)
            require(
                len(layers) == wanted and all(len(layer) == places for layer in layers),
                f"KVMemory of rank {self.rank}, group {group.name!r}: {wanted} layers with "
                f"{places} places each are needed, here are {[len(layer) for layer in layers]}",
            )
            for place in (place for layer in layers for place in layer):
                require(
                    0 <= place.region < len(self.regions) and place.offset >= 0,
                    f"KVMemory of rank {self.rank}, group {group.name!r}: {place} is outside of "
                    f"its {len(self.regions)} regions",
                )

    def to_bytes(self) -> bytes:
        parts = [_HEAD.pack(FORMAT, self.rank, len(self.layers), len(self.regions))]
        for layers in self.layers:
            parts.append(_COUNTS.pack(len(layers), len(layers[0]) if layers else 0))
            parts += [_PLACE.pack(*place) for layer in layers for place in layer]
        for region in self.regions:
            parts += [_LENGTH.pack(len(region)), region]
        return b"".join(parts)

    @staticmethod
    def from_bytes(data: bytes) -> KVMemory:
        require_type("KVMemory.from_bytes: data", data, bytes, "bytes")
        reader = _Reader(data)
        form, rank, num_groups, num_regions = reader.take(_HEAD)
        if form != FORMAT:
            raise make(ProtocolError, f"KVMemory: format {form}, this build reads {FORMAT}")
        groups = []
        for _ in range(num_groups):
            num_layers, places = reader.take(_COUNTS)
            groups.append(
                tuple(
                    tuple(Place(*reader.take(_PLACE)) for _ in range(places))
                    for _ in range(num_layers)
                )
            )
        regions = tuple(reader.bytes(*reader.take(_LENGTH)) for _ in range(num_regions))
        if reader.at != len(data):
            raise make(ProtocolError, f"KVMemory: {len(data) - reader.at} bytes too many")
        return KVMemory(rank, tuple(groups), regions)


@dataclass(frozen=True)
class KVCache:
    """The KV memory of one rank.

    layers: as in `KVMemory`: where each layer of each group begins, by place in `tensors`.
    tensors: contiguous, all on one device. pages: number of pages of each group.
    """

    layout: KVLayout
    rank: int
    layers: tuple[tuple[tuple[Place, ...], ...], ...]
    tensors: tuple[Tensor, ...]
    pages: Mapping[str, int]

    def __post_init__(self) -> None:
        require_type("KVCache.layout", self.layout, KVLayout, "a KVLayout")
        require_type("KVCache.rank", self.rank, int, "an int")
        require_type("KVCache.layers", self.layers, (tuple, list), "a tuple, as of KVMemory")
        require_type("KVCache.pages", self.pages, Mapping, "a dict of ints by group")
        self._check_tensors()
        self.memory((b"",) * len(self.tensors)).check(self.layout)
        names = [group.name for group in self.layout.groups]
        require(
            sorted(self.pages) == sorted(names),
            f"KVCache.pages has groups {sorted(self.pages)}, the layout {sorted(names)}",
        )
        self._check_places()

    def _check_tensors(self) -> None:
        """Contiguous, on one device."""
        tensors = self.tensors
        require_type("KVCache.tensors", tensors, (tuple, list), "a tuple of torch.Tensors")
        require(bool(tensors), "KVCache.tensors is empty, must have the memory of all layers")
        for number, tensor in enumerate(tensors):
            name = f"KVCache.tensors[{number}]"
            require_type(name, tensor, Tensor)
            require(tensor.device.type != "meta", f"{name} is on the meta device: it has no bytes")
            require(tensor.is_contiguous(), f"{name} must be contiguous; pass .contiguous()")
            refuse_lazy(**{name: tensor})
            refuse_freed(**{name: tensor})
            require(
                tensor.device == tensors[0].device,
                f"{name} is on {tensor.device}, others on {tensors[0].device}; must be one device",
            )

    def _check_places(self) -> None:
        """All pages of each layer lie within the tensor that its place names."""
        layout = self.layout
        for group, layers in zip(layout.groups, self.layers, strict=True):
            count = self.pages[group.name]
            require_type(f"KVCache.pages[{group.name!r}]", count, int, "an int")
            require(count > 0, f"KVCache.pages[{group.name!r}] is {count}, must be at least 1")
            heads = max(group.heads // layout.tp, 1) - 1
            for layer in layers:
                for i, part in enumerate(layout.parts(group, len(layers))):
                    place = layer[i if len(layer) > 1 else 0]
                    end = place.offset + part.offset + (count - 1) * part.page_stride + part.nbytes
                    end += heads * part.head_stride + (group.page_size - 1) * part.token_stride
                    tensor = self.tensors[place.region]
                    nbytes = tensor.numel() * tensor.element_size()
                    require(
                        end <= nbytes,
                        f"KVCache of rank {self.rank}, group {group.name!r}: {count} pages of a "
                        f"layer at byte {place.offset} end at byte {end} of tensor {place.region}, "
                        f"which has {nbytes}",
                    )

    def memory(self, descriptors: tuple[bytes, ...]) -> KVMemory:
        return KVMemory(self.rank, self.layers, descriptors)

    def page_lists(self, who: str, pages: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A copy of `pages`, which the caller may change afterwards: lists of groups that the
        layout has."""
        require_type(f"{who}: pages", pages, Mapping, "a dict of torch.Tensors by group")
        names = [group.name for group in self.layout.groups]
        for name, each in pages.items():
            what = f"{who}: pages of group {name!r}"
            require(name in names, f"{what}: there is no such group, only {names}")
            require_type(what, each, Tensor)
            require(
                each.dtype == torch.int32 and each.dim() == 1 and each.device.type == "cpu",
                f"{what} are {each.dtype} {list(each.shape)} on {each.device}, must be int32 [n] "
                "on the CPU",
            )
        return {name: each.clone() for name, each in pages.items()}

    def check_bounds(self, who: str, pages: Mapping[str, Tensor]) -> None:
        """Another layer lies behind a layer's last page."""
        for name, each in pages.items():
            count = self.pages[name]
            if len(each) and not (int(each.min()) >= 0 and int(each.max()) < count):
                bad = each[(each < 0) | (each >= count)][:4].tolist()
                require(False, f"{who}: group {name!r} has {count} pages, not {bad}")


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def bytes(self, size: int) -> bytes:
        found = self.data[self.at : self.at + size]
        if len(found) < size:
            raise make(ProtocolError, f"KVMemory: cut short at byte {len(self.data)}")
        self.at += size
        return found

    def take(self, form: struct.Struct) -> tuple[int, ...]:
        return form.unpack(self.bytes(form.size))


def places_of_layer(layout: KVLayout, group: KVGroup) -> int:
    return 2 if layout.kv_split == "layer" and group.v_bytes else 1


def dense_memory(
    layout: KVLayout, rank: int, num_pages: int, regions: tuple[bytes, ...] = ()
) -> tuple[KVMemory, tuple[int, ...]]:
    """Groups of `num_pages` pages each, in one region a group, without gaps between layers.

    Returns the memory and the size of each region in bytes. As vLLM allocates them where groups do
    not share memory; engines with a tensor per layer make a KVMemory with a region per tensor.
    """
    require_type("dense_memory: layout", layout, KVLayout, "a KVLayout")
    for name, value, most in (
        ("rank", rank, layout.world_size - 1),
        ("num_pages", num_pages, None),
    ):
        require_type(f"dense_memory: {name}", value, int, "an int")
        require(
            value >= 0 and (most is None or value <= most),
            f"dense_memory: {name} is {value}, must be 0 to {'any' if most is None else most}",
        )
    groups, sizes = [], []
    for number, group in enumerate(layout.groups):
        num_layers = len(layout.layers_of(group, rank // layout.tp))
        parts = layout.parts(group, num_layers)
        if layout.order.startswith("BL"):
            step, size = [_page_of_layer(layout, group)], num_pages * parts[0].page_stride
        else:
            step = [
                num_pages * part.page_stride for part in parts[: places_of_layer(layout, group)]
            ]
            size = num_layers * sum(step)
        layers = []
        for layer in range(num_layers):
            at = layer * sum(step)
            layers.append(tuple(Place(number, at + sum(step[:i])) for i in range(len(step))))
        groups.append(tuple(layers))
        sizes.append(size if num_layers else 0)
    return KVMemory(rank, tuple(groups), regions or (b"",) * len(groups)), tuple(sizes)


def _page_of_layer(layout: KVLayout, group: KVGroup) -> int:
    """Bytes of one layer of a page, without padding."""
    return max(group.heads // layout.tp, 1) * group.page_size * (group.k_bytes + group.v_bytes)


class KVRequest(NamedTuple):
    """A move for one layer, as the engine takes it, but for the indices of its units.

    Row r of unit u lies at offset + u * move.shape.source_unit + r * source_row_stride.
    """

    move: KVMove
    layer: int  # the model's number
    source: Place
    target: Place


def resolve(plan: KVPlan, source: KVMemory, target: KVMemory) -> list[KVRequest]:
    """All requests between two ranks, ordered by layer: what is sent for every request after it."""
    source.check(plan.source)
    target.check(plan.target)
    found = []
    for move in plan.between(source.rank, target.rank):
        ours = _Layers(plan.source, source, move.group)
        theirs = _Layers(plan.target, target, move.group)
        numbers = ours.group.layers
        for layer in move.layers:
            found.append(
                KVRequest(
                    move,
                    numbers[layer],
                    ours.place(layer, move.shape.part, move.shape.source_offset),
                    theirs.place(layer, move.shape.part, move.shape.target_offset),
                )
            )
    found.sort(key=lambda request: request.layer)
    return found


class _Layers:
    """Places of one group's layers on one rank."""

    def __init__(self, layout: KVLayout, memory: KVMemory, name: str) -> None:
        self.group = layout.group(name)
        self.layers = memory.layers[layout.groups.index(self.group)]
        self.first = layout.layers_of(self.group, memory.rank // layout.tp).start

    def place(self, layer: int, part: str, offset: int) -> Place:
        places = self.layers[layer - self.first]
        region, begin = places[1 if part == "v" and len(places) > 1 else 0]
        return Place(region, begin + offset)


def layout_to_bytes(layout: KVLayout) -> bytes:
    return json.dumps(dataclasses.asdict(layout), separators=(",", ":")).encode()


def layout_from_bytes(data: bytes) -> KVLayout:
    """Raises ProtocolError for bytes that are not a layout, and what KVLayout raises."""
    try:
        fields: dict[str, Any] = json.loads(data)
        groups = tuple(
            KVGroup(**{**group, "layers": tuple(group["layers"])}) for group in fields["groups"]
        )
        stages = fields["stages"]
        return KVLayout(
            **{
                **fields,
                "groups": groups,
                "stages": None if stages is None else tuple(stages),
            }
        )
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise make(ProtocolError, f"these bytes are not a KVLayout: {error!r}") from error
