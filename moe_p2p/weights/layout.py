"""What one side of a weight update holds: the input of `weight_plan`. Nothing here is an address.

A side is a `WeightLayout`: a list of `Param`s, each a parameter as some ranks hold it, in the names
of the checkpoint. A parameter may stand there several times: physical copies of an expert, tied
embeddings on two pipeline stages. Both sides name parameters alike; local tensors are their own.

    q_proj [4096, 2048] of FSDP:  Param("q_proj", (4096, 2048), "bfloat16", ranks=range(8),
                                        placements=(Shard(0),))
    its place in a fused qkv, TP 2:  Param("q_proj", (4096, 2048), "bfloat16", ranks=(0, 1),
                                        placements=(Shard(0),), tensor="qkv_proj")
    k_proj [512, 2048] behind it:    Param("k_proj", .., tensor="qkv_proj", offset=2048 * 2048)
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moe_p2p.errors import InvalidArgumentError, make, require, require_type

FP8 = "float8_e4m3fn"


class Shard(NamedTuple):
    """Dimension `dim` is cut as torch.chunk does. split_factor: of DTensor's _StridedShard: the
    dimension is cut into so many parts first, and a rank gets its chunk of each of them."""

    dim: int
    split_factor: int = 1


class Replicate(NamedTuple):
    """All ranks of this dimension of the mesh hold the same."""


Placement = Shard | Replicate


@dataclass(frozen=True)
class Blocks:
    """fp8 with one float32 scale for each block of `shape` in the last two dimensions.

    The grid of scales of a rank lies in its `tensor` from element `offset` on, outermost dimension
    first, or in `order`, or with `strides`. Scales are for dequantizing: weight_scale_inv.
    """

    tensor: str
    offset: int = 0
    shape: tuple[int, int] = (128, 128)
    order: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()


@dataclass(frozen=True)
class Param:
    """A parameter as ranks of one side hold it.

    name: the parameter's; both sides have the same.
    shape: of the tensor over all ranks; dtype: as torch names it.
    ranks: of the mesh, last dimension fastest. mesh: its shape; (): one dimension.
    placements: one for each dimension of the mesh; (): replicated.
    window: (first, size) in each dimension of `shape`, where the parameter is a part of the tensor
        (stacked experts, fused gate and up). (): the whole. Leading sizes of 1 do not count.
    tensor: name of the rank's own tensor. "": the parameter's. offset: its element where this
        parameter's begin; of a window of a sharded tensor: where that tensor's elements begin.
    order: dimensions, outermost first, where the rank's elements are stored in another order.
    strides: in elements of `tensor`, where they are not dense; the same on all ranks.
    blocks: a target that wants fp8; dtype is "float8_e4m3fn".
    part: a target whose ranks hold only this box of the parameter, (first, size) in each dimension
        of `shape`; then placements are all Replicate, and there is no window.
    finalize: a target that converts by itself at commit, and why: it gets what the source has,
        dense, in a tensor of the name `received`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    ranks: Sequence[int]
    mesh: tuple[int, ...] = ()
    placements: tuple[Placement, ...] = ()
    window: tuple[tuple[int, int], ...] = ()
    tensor: str = ""
    offset: int = 0
    order: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    blocks: Blocks | None = None
    finalize: str = ""
    part: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        put = functools.partial(object.__setattr__, self)
        self._check_types()
        if not isinstance(self.ranks, tuple):
            put("ranks", tuple(self.ranks))
        put("mesh", self.mesh or (len(self.ranks),))
        put("placements", self.placements or (Replicate(),) * len(self.mesh))
        put("tensor", self.tensor or self.name)
        self._check()
        self._check_memory()

    def _check_types(self) -> None:
        require(
            isinstance(self.name, str) and bool(self.name), f"Param.name is {self.name!r}, no name"
        )
        for field, value in (("tensor", self.tensor), ("finalize", self.finalize)):
            require_type(f"{self.name}: {field}", value, str, "a str")
        require_type(f"{self.name}: ranks", self.ranks, (Sequence, range), "a tuple of ints")
        try:
            wrong = _wrong_field(self.shape, self.mesh, self.order, self.strides, self.window,
                                 self.part, self.placements)  # fmt: skip
        except TypeError:  # a list
            wrong = "shape, mesh, order, strides, window, part or placements", "tuples"
        if wrong is not None:
            raise _wrong(f"{self.name}: {wrong[0]} must be {wrong[1]}, as in {self!r}")
        require_type(f"{self.name}: offset", self.offset, int, "an int")
        require_type(f"{self.name}: blocks", self.blocks, (Blocks, type(None)), "a Blocks or None")

    def _check(self) -> None:
        where, dims = f"{self.name}:", len(self.shape)
        if math.prod(self.mesh) != len(self.ranks) or not self.ranks:
            raise _wrong(f"{where} mesh {self.mesh} has not {len(self.ranks)} ranks")
        if not _distinct(self.ranks):
            raise _wrong(
                f"{where} ranks {self.ranks} name one twice, or what is no int; describe its "
                "tensors apart"
            )
        if len(self.placements) != len(self.mesh):
            raise _wrong(f"{where} {self.placements} must be one for each of mesh {self.mesh}")
        for each in self.placements:
            if isinstance(each, Shard) and not (0 <= each.dim < dims and each.split_factor > 0):
                raise _wrong(f"{where} {each} is no dimension of shape {self.shape}")

    def _check_memory(self) -> None:
        where, dims = f"{self.name}:", len(self.shape)
        if not isinstance(self.dtype, str) or not _is_dtype(self.dtype):
            raise _wrong(
                f"{where} torch has no dtype {self.dtype!r}; pass its name, as dtype_name gives it"
            )
        if self.window and not _fits(self.window, self.shape):
            raise _wrong(f"{where} window {self.window} is not inside shape {self.shape}")
        if self.part and (
            not _fits(self.part, self.shape)
            or self.window
            or any(isinstance(each, Shard) for each in self.placements)
        ):
            raise _wrong(
                f"{where} part {self.part} must be inside shape {self.shape}, without a window, "
                "and not sharded"
            )
        if self.order and sorted(self.order) != list(range(dims)):
            raise _wrong(f"{where} order {self.order} must name each of {dims} dimensions once")
        if self.strides and (len(self.strides) != dims or min(self.strides) < 0 or self.order):
            raise _wrong(f"{where} strides {self.strides} must be {dims} of 0 or more, no order")
        if self.offset < 0 or (self.blocks and self.blocks.offset < 0):
            raise _wrong(f"{where} an offset is below 0")
        if self.blocks and self.dtype != FP8:
            raise _wrong(f"{where} has blocks, so dtype must be {FP8}, not {self.dtype}")

    @property
    def elements(self) -> tuple[int, ...]:
        """Shape of the parameter itself; it has at least one dimension."""
        sizes = tuple(size for _, size in self.window) if self.window else self.shape
        first = next((i for i, size in enumerate(sizes[:-1]) if size != 1), len(sizes) - 1)
        return sizes[first:]

    def positions(self, rank: int) -> tuple[int, ...]:
        """Of a rank in the mesh."""
        return _positions(self.ranks, rank)

    @property
    def received(self) -> str:
        """The dense tensor of a target that converts by itself: one for each place it has."""
        name = f"{self.name}:received"
        return (
            name
            if (self.tensor, self.offset) == (self.name, 0)
            else (f"{name}:{self.tensor}:{self.offset}")
        )

    @property
    def how(self) -> tuple[object, ...]:
        """All but names, ranks and offsets: Params that are equal in it are planned once."""
        blocks = self.blocks
        kind = (blocks.shape, blocks.order, blocks.strides) if blocks else ()
        return (self.shape, self.dtype, self.mesh, self.placements, self.window, self.order,
                self.strides, self.part, kind, self.finalize)  # fmt: skip


# The same few kinds stand in 70,000 Params.
@functools.lru_cache(maxsize=1 << 12)
def _wrong_field(*fields: object) -> tuple[str, str] | None:
    names = ("shape", "mesh", "order", "strides", "window", "part", "placements")
    for name, value in zip(names, fields, strict=True):
        good: Callable[[object], bool] = _is_size
        wanted = "a tuple of ints of 0 or more"
        if name in ("window", "part"):
            good, wanted = _is_pair, "a tuple of (first, size)"
        elif name == "placements":
            good, wanted = _is_placement, "a tuple of Shard and Replicate"
        if not isinstance(value, tuple) or not all(good(each) for each in value):
            return name, wanted
    return None


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and [type(each) for each in value] == [int, int]


def _is_placement(value: object) -> bool:
    if isinstance(value, Shard):
        return type(value.dim) is type(value.split_factor) is int
    return isinstance(value, Replicate)


@functools.cache
def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)


@functools.lru_cache(maxsize=1 << 16)
def _positions(ranks: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return tuple(i for i, each in enumerate(ranks) if each == rank)


@functools.lru_cache(maxsize=1 << 12)
def _distinct(ranks: tuple[int, ...]) -> bool:
    return len(set(ranks)) == len(ranks) and all(type(rank) is int for rank in ranks)


def _wrong(message: str) -> Exception:
    return make(InvalidArgumentError, message)


def _fits(window: Sequence[tuple[int, int]], shape: Sequence[int]) -> bool:
    return len(window) == len(shape) and all(
        min(first, size - 1) >= 0 and first + size <= whole
        for (first, size), whole in zip(window, shape, strict=True)
    )


@functools.cache
def item_bytes(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def from_torch(placements: Iterable[object]) -> tuple[Placement, ...]:
    """The same placements; of torch.distributed.tensor, whichever torch names them."""
    found: list[Placement] = []
    for each in placements:
        kind = type(each).__name__
        if kind == "Replicate":
            found.append(Replicate())
        elif kind in ("Shard", "_StridedShard"):
            found.append(Shard(int(getattr(each, "dim")), int(getattr(each, "split_factor", 1))))  # noqa: B009
        else:
            raise make(
                InvalidArgumentError,
                f"placement {each!r} holds no elements of its own; redistribute to Shard or "
                "Replicate first",
            )
    return tuple(found)


def of_tensor(name: str, tensor: torch.Tensor, ranks: Sequence[int] = (0,)) -> Param:
    """A tensor of a trainer: a DTensor as it is sharded, any other as each of `ranks` holds it."""
    require_type(f"of_tensor: {name}", tensor, torch.Tensor)
    mesh = getattr(tensor, "device_mesh", None)
    shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
    if mesh is None:
        return Param(name, shape, dtype, ranks, strides=tensor.stride())
    try:
        placements = from_torch(getattr(tensor, "placements"))  # noqa: B009
    except InvalidArgumentError as error:
        raise make(InvalidArgumentError, f"{name}: {error}") from None
    return Param(
        name,
        shape,
        dtype,
        ranks=tuple(mesh.mesh.flatten().tolist()),
        mesh=tuple(mesh.mesh.shape),
        placements=placements,
    )


def layout_of(
    named: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    group: dist.ProcessGroup | None = None,
) -> WeightLayout:
    """The layout of all trainers, each of which passes its own `named_parameters()`, or a state
    dict: DTensors on any mesh, and tensors that a rank holds whole. Collective.

    group: a process group of all trainers; None: the default one.
    """
    pairs = list(named.items() if isinstance(named, Mapping) else named)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    params = [of_tensor(name, tensor, (rank,)) for name, tensor in pairs]
    parts = everyones(WeightLayout(tuple(params), world_size).to_bytes(), group)
    return WeightLayout.merged([WeightLayout.from_bytes(each) for each in parts])


def everyones(data: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """By rank. torch's own collective of objects needs numpy."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    size = torch.tensor([len(data)], device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group)
    mine = torch.zeros(max(int(each) for each in sizes), dtype=torch.uint8, device=device)
    if data:  # torch makes no tensor of an empty buffer
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    parts = [torch.zeros_like(mine) for _ in sizes]
    dist.all_gather(parts, mine, group)
    return [bytes(part[: int(n)].tolist()) for part, n in zip(parts, sizes, strict=True)]


@dataclass(frozen=True)
class WeightLayout:
    """One side: parameters of all ranks. world_size: ranks, those without parameters too."""

    params: tuple[Param, ...]
    world_size: int

    def __post_init__(self) -> None:
        require_type("WeightLayout.params", self.params, Sequence, "a list of Params")
        require(
            type(self.world_size) is int and self.world_size > 0,
            f"WeightLayout.world_size is {self.world_size!r}, must be an int of at least 1",
        )
        object.__setattr__(self, "params", tuple(self.params))
        for each in self.params:
            require_type("WeightLayout.params", each, Param, "a Param")
        for ranks, name in {each.ranks: each.name for each in self.params}.items():
            require(
                all(0 <= rank < self.world_size for rank in ranks),
                f"{name}: ranks {ranks} must be 0 to {self.world_size - 1}",
            )

    @functools.cached_property
    def by_name(self) -> dict[str, tuple[Param, ...]]:
        found: dict[str, list[Param]] = {}
        for each in self.params:
            found.setdefault(each.name, []).append(each)
        return {name: tuple(params) for name, params in found.items()}

    @classmethod
    def merged(cls, parts: Sequence[WeightLayout]) -> WeightLayout:
        """One layout of what each rank knows: parts by rank. DTensors on another sub-mesh for each
        rank, pipeline stages and experts stand in some parts only; a tensor that ranks hold whole
        is one Param of all of them.

        Raises InvalidArgumentError with the first parameter that parts describe otherwise.
        """
        whole: dict[Param, dict[int, None]] = {}
        for param in (each for part in parts for each in part.params):
            alone = len(param.ranks) == 1
            ranks = whole.setdefault(replaced(param, ranks=(0,)) if alone else param, {})
            ranks.update(dict.fromkeys(param.ranks))
        shapes: dict[str, Param] = {}
        for param in whole:
            first = shapes.setdefault(param.name, param)
            same = (first.elements, first.dtype) == (param.elements, param.dtype)
            require(
                same,
                f"{param.name}: a part describes it as {param.dtype} {list(param.elements)}, "
                f"another one as {first.dtype} {list(first.elements)}",
            )
        params = [
            replaced(param, ranks=tuple(ranks), mesh=(), placements=())
            if len(param.ranks) == 1 else param
            for param, ranks in whole.items()
        ]  # fmt: skip
        return cls(tuple(params), max((each.world_size for each in parts), default=1))

    def difference(self, other: WeightLayout) -> str:
        """The first parameter that another layout describes otherwise, and how; for errors."""
        for name in dict.fromkeys([*self.by_name, *other.by_name]):
            ours, theirs = self.by_name.get(name, ()), other.by_name.get(name, ())
            if ours != theirs:
                return f"{name}: {list(ours)} here, {list(theirs)} there"
        return f"parameters in another order, or ranks of {self.world_size}, {other.world_size}"

    def to_bytes(self) -> bytes:
        """Params of the same kind share a row: a model of 70,000 parameters is some 100 KB."""
        return self._packed

    @functools.cached_property
    def _packed(self) -> bytes:
        kinds: dict[tuple[object, ...], int] = {}
        rows = []
        for each in self.params:
            kind = (*each.how[:-2], each.ranks, each.blocks and each.blocks.shape,
                    each.blocks and each.blocks.order, each.blocks and each.blocks.strides,
                    each.finalize)  # fmt: skip
            place = [each.blocks.tensor, each.blocks.offset] if each.blocks else []
            number = kinds.setdefault(kind, len(kinds))
            rows.append([number, each.name, each.tensor, each.offset, *place])
        text = json.dumps([self.world_size, list(kinds), rows], separators=(",", ":"))
        return zlib.compress(text.encode(), 1)

    @functools.cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @classmethod
    def from_bytes(cls, data: bytes) -> WeightLayout:
        try:
            world_size, kinds, rows = json.loads(zlib.decompress(data))
            made = [_kind(*each) for each in kinds]
            params = tuple(_param(made[row[0]], *row[1:]) for row in rows)
        except (ValueError, TypeError, IndexError, zlib.error) as error:
            raise _wrong(f"these bytes are no WeightLayout: {error}") from error
        return cls(params, world_size)


def tuples(value: Any) -> Any:
    """Of JSON, which has lists."""
    return tuple(tuples(each) for each in value) if isinstance(value, list) else value


def _kind(*fields: Any) -> dict[str, Any]:
    names = ("shape", "dtype", "mesh", "placements", "window", "order", "strides", "part", "ranks")
    kind = dict(zip(names, tuples(list(fields[:9])), strict=True))
    kind["placements"] = tuple(Shard(*each) if each else Replicate() for each in fields[3])
    blocks = tuple(tuples(each) for each in fields[9:12])
    return {**kind, "blocks": blocks if blocks[0] else None, "finalize": fields[12]}


def _param(
    kind: dict[str, Any], name: str, tensor: str, offset: int, scales: str = "", at: int = 0
) -> Param:
    blocks = Blocks(scales, at, *kind["blocks"]) if kind["blocks"] else None
    return Param(name=name, tensor=tensor, offset=offset, **{**kind, "blocks": blocks})


def replaced(param: Param, **changes: object) -> Param:
    """A copy with these fields changed."""
    return dataclasses.replace(param, **changes)  # type: ignore[arg-type]
