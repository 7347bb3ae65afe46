"""Where the layers of one rank lie, and the requests that follow from it and a plan.

What two workers tell each other when they meet is one `KVMemory` and one `KVLayout` per rank, as
bytes; each then makes the plan and resolves it by itself.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

from moe_p2p.errors import ProtocolError, make, require, require_type
from moe_p2p.kv.layout import KVGroup, KVLayout
from moe_p2p.kv.plan import KVMove, KVPlan

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
