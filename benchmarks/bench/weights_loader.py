"""Values of a model's parameters, and the receiver's loader, for `bench --api weights`.

The loader is what engines do with whole tensors: copy each parameter into a fused bf16 tensor, and
quantize that once it is complete, with plain torch. It makes what updates are compared with, and it
runs behind the broadcast that they are timed against.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_p2p.errors import require
from moe_p2p.weights import Param, Shard, WeightLayout

BLOCK = 128
FP8 = torch.float8_e4m3fn


def value(param: Param, version: int, device: torch.device) -> Tensor:
    """A whole parameter at a version: the same on all ranks of one kind of device."""
    seed = zlib.crc32(f"{param.name} {version}".encode())
    generator = torch.Generator(device).manual_seed(seed)
    made = torch.empty(param.shape, dtype=torch.bfloat16, device=device)
    return made.normal_(0.0, 0.05, generator=generator)


def shard(param: Param, rank: int, whole: Tensor) -> Tensor:
    """What a rank has of it: dimensions cut one after the other, by the mesh's coordinates."""
    at, found = list(param.ranks).index(rank), whole
    places = []
    for size in reversed(param.mesh):
        at, place = divmod(at, size)
        places.append(place)
    for size, place, how in zip(param.mesh, reversed(places), param.placements, strict=True):
        if isinstance(how, Shard):
            require(how.split_factor == 1, "the benchmark has no strided shards")
            found = found.chunk(size, how.dim)[place]
    return found


def of_rank(layout: WeightLayout, rank: int) -> list[Param]:
    return [param for param in layout.params if rank in param.ranks]


def shards(layout: WeightLayout, rank: int, device: torch.device) -> dict[str, Tensor]:
    """A trainer's tensors, at version 0."""
    return {
        param.tensor: shard(param, rank, value(param, 0, device)).contiguous()
        for param in of_rank(layout, rank)
    }


def fill(tensors: Mapping[str, Tensor], layout: WeightLayout, rank: int, version: int) -> None:
    for param in of_rank(layout, rank):
        mine = tensors[param.tensor]
        mine.copy_(shard(param, rank, value(param, version, mine.device)))


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """[n, k] in fp8, and a scale for each block of 128 x 128."""
    n, k = x.shape
    rows, columns = -(-n // BLOCK), -(-k // BLOCK)
    whole = pad(x, (0, columns * BLOCK - k, 0, rows * BLOCK - n))
    blocks = whole.view(rows, BLOCK, columns, BLOCK).float()
    amax = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(min=1e-4)
    multiplier = torch.full_like(amax, 448.0) / amax  # 448.0 / amax is amax.reciprocal() * 448.0
    values = (blocks * multiplier).to(FP8)
    return values.view_as(whole)[:n, :k].contiguous(), (amax / torch.full_like(amax, 448.0)).view(
        rows, columns
    )


class Loader:
    """tensors: what the kernels of an engine rank read, by the layout's names."""

    def __init__(self, layout: WeightLayout, rank: int, device: torch.device) -> None:
        self.device, self._rank = device, rank
        self._places: dict[str, list[Param]] = {}
        self._sizes: Counter[str] = Counter()
        self._parts: Counter[str] = Counter()
        self._columns: dict[str, int] = {}
        self._scales: dict[str, str] = {}
        for param in of_rank(layout, rank):
            local = shard(param, rank, torch.empty(param.shape, device="meta")).shape
            self._places.setdefault(param.name, []).append(param)
            self._sizes[param.tensor] += math.prod(local)
            self._parts[param.tensor] += 1
            self._columns[param.tensor] = local[-1]
            if param.blocks is not None:
                self._scales[param.tensor] = param.blocks.tensor
        self._left = Counter(self._parts)
        self._staged: dict[str, Tensor] = {}
        self.tensors: dict[str, Tensor] = {}
        for tensor, size in self._sizes.items():
            quantizes = tensor in self._scales
            shape = (size // self._columns[tensor], self._columns[tensor])
            dtype = FP8 if quantizes else torch.bfloat16
            self.tensors[tensor] = torch.zeros(shape, dtype=dtype, device=device)
            if quantizes:
                blocks = [-(-n // BLOCK) for n in shape]
                self.tensors[self._scales[tensor]] = torch.zeros(blocks, device=device)

    def load(self, name: str, whole: Tensor) -> None:
        for param in self._places.get(name, ()):
            tensor = param.tensor
            into = self._into(tensor)
            local = shard(param, self._rank, whole)
            into.view(-1)[param.offset : param.offset + local.numel()].view_as(local).copy_(local)
            self._left[tensor] -= 1
            if not self._left[tensor]:
                self._finish(tensor)

    def _into(self, tensor: str) -> Tensor:
        if tensor not in self._scales:
            return self.tensors[tensor]
        if tensor not in self._staged:
            like = self.tensors[tensor]
            self._staged[tensor] = torch.empty_like(like, dtype=torch.bfloat16)
        return self._staged[tensor]

    def _finish(self, tensor: str) -> None:
        self._left[tensor] = self._parts[tensor]
        if tensor in self._scales:
            values, scales = quantized(self._staged.pop(tensor))
            self.tensors[tensor].copy_(values)
            self.tensors[self._scales[tensor]].copy_(scales)

    def load_all(self, params: Iterable[Param], version: int) -> Mapping[str, Tensor]:
        """Returns the tensors at a version, from values made here."""
        for param in params:
            self.load(param.name, value(param, version, self.device))
        return self.tensors


def buckets(params: Iterable[Param], nbytes: int) -> Iterator[list[Param]]:
    """Parameters in bf16 that fit into `nbytes` together, or one that does not."""
    found: list[Param] = []
    used = 0
    for param in params:
        size = 2 * math.prod(param.shape)
        if found and used + size > nbytes:
            yield found
            found, used = [], 0
        found.append(param)
        used += size
    if found:
        yield found
