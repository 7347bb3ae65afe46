"""Learns where a receiver's own loader puts each element, from values, not from its operations.

The loader runs on parameters that are filled with digits of element numbers, in as many passes as
their type needs, so that every element of its tensors says where it came from. A last pass with
random values must be reproduced byte for byte. A tensor that is not, because the loader quantizes
or repacks, is *derived*: the parameters that it is made from are sent in checkpoint layout, and the
receiver recomputes it at commit. One layer at a time is enough, and costs least memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_p2p.errors import require
from moe_p2p.weights.layout import Param, dtype_name

# Runs the receiver's loader on these parameters; returns its tensors, as its kernels read them.
Loader = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]

# Integers from 0 to here are exact in these types; in others, to 2^15.
_EXACT_BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float8_e4m3fn: 4, torch.float8_e5m2: 3,
               torch.int8: 7, torch.uint8: 8}  # fmt: skip


@dataclass(frozen=True)
class Recording:
    """params: where parameters land. derived: by tensor, the parameters it is made from."""

    params: tuple[Param, ...]
    derived: Mapping[str, tuple[str, ...]]
    fallback: Mapping[str, int]  # bytes of parameters that are sent in checkpoint layout

    def report(self) -> str:
        """What fell back, with bytes; for a log."""
        if not self.fallback:
            return "all parameters are written in place"
        lines = [f"{sum(self.fallback.values()):,} B are received in checkpoint layout:"]
        lines += [f"  {name}: {nbytes:,} B" for name, nbytes in self.fallback.items()]
        lines += [f"  {name} is recomputed from {', '.join(names)}"
                  for name, names in self.derived.items()]  # fmt: skip
        return "\n".join(lines)


def record(load: Loader, shapes: Shapes, *, rank: int) -> Recording:
    """Describes what `load` does with parameters of these shapes and types, as Params of `rank`.

    load must not depend on values, and return the same tensors each time, in the same shapes.
    """
    require(callable(load), f"record: load is {load!r}, must be a function")
    runs = _Runs(load, shapes)
    numbers, draws = runs.numbers(), [runs.random(seed) for seed in range(2)]
    made = [runs.run(values) for values in draws]
    derived: dict[str, tuple[str, ...]] = {}
    params: list[Param] = []
    for name, tensor in made[0].items():
        first, second = ((values, got[name]) for values, got in zip(draws, made, strict=True))
        moved = _moved(numbers[name], first, second)
        if moved is None:
            derived[name] = runs.inputs(name)
        else:
            params += _places(name, dtype_name(tensor.dtype), moved, runs, rank)
    used = dict.fromkeys(itertools.chain(*derived.values()))
    for name in used:
        shape, dtype = shapes[name]
        makes = ", ".join(tensor for tensor, names in derived.items() if name in names)
        why = f"the loader makes {makes} of it otherwise than by moving elements"
        params.append(Param(name, shape, dtype_name(dtype), (rank,), finalize=why))
    fallback = {name: math.prod(shapes[name][0]) * shapes[name][1].itemsize for name in used}
    return Recording(tuple(params), derived, fallback)


class _Runs:
    """Runs of one loader. Elements of all parameters are numbered from 1, one after the other."""

    def __init__(self, load: Loader, shapes: Shapes) -> None:
        self.load, self.shapes = load, shapes
        sizes = [math.prod(shape) for shape, _ in shapes.values()]
        self.first = dict(zip(shapes, itertools.accumulate(sizes, initial=1), strict=False))
        self.count = sum(sizes)
        bits = [_EXACT_BITS.get(dtype, 15) for _, dtype in shapes.values()]
        self.bits = min(bits, default=1)
        self.layout: dict[str, tuple[torch.Size, torch.dtype]] = {}

    def numbers(self) -> dict[str, Tensor]:
        """Of the element in each place, in the order of memory; -1 where there is none."""
        found: dict[str, Tensor] = {}
        for shift in range(0, self.count.bit_length(), self.bits):
            digits = (torch.arange(self.count + 1, device="cpu") >> shift) & ((1 << self.bits) - 1)
            for name, tensor in self.run(digits.to(torch.float64)).items():
                digit = tensor.flatten().to(torch.float64)
                valid = (digit >= 0) & (digit < 1 << self.bits) & (digit == digit.floor())
                digit = torch.where(valid, digit, 0).to(torch.int64) << shift
                before = found.get(name, torch.zeros_like(digit))
                found[name] = torch.where(valid & (before >= 0), before + digit, -1)
        return found

    def random(self, seed: int = 0) -> Tensor:
        """A value for each element, of both signs, exact in its type."""
        generator = torch.Generator().manual_seed(seed)
        values = torch.zeros(self.count + 1, dtype=torch.float64, device="cpu")
        for name, (shape, dtype) in self.shapes.items():
            count, first = math.prod(shape), self.first[name]
            if dtype.is_floating_point:
                drawn = (
                    torch.randn(count, generator=generator, dtype=torch.float64, device="cpu") * 50
                )
            else:
                info = torch.iinfo(dtype)
                low, high = max(info.min, -(1 << 15)), min(info.max, 1 << 15)
                drawn = torch.randint(low, high, (count,), generator=generator, device="cpu")
            values[first : first + count] = drawn.to(dtype).to(torch.float64)
        return values

    def inputs(self, tensor: str) -> tuple[str, ...]:
        """Parameters that change a tensor."""
        values, others = self.random(), self.random(1)
        before = _bytes(self.run(values)[tensor])
        found = []
        for name, (shape, _) in self.shapes.items():
            part = slice(self.first[name], self.first[name] + math.prod(shape))
            mixed = values.clone()
            mixed[part] = others[part]
            if not torch.equal(before, _bytes(self.run(mixed)[tensor])):
                found.append(name)
        return tuple(found)

    def run(self, values: Tensor) -> dict[str, Tensor]:
        """The loader's tensors when elements have these values, by number."""
        given = {}
        for name, (shape, dtype) in self.shapes.items():
            first = self.first[name]
            given[name] = values[first : first + math.prod(shape)].to(dtype).view(shape)
        got = {name: tensor.detach().clone() for name, tensor in self.load(given).items()}
        layout = {name: (tensor.shape, tensor.dtype) for name, tensor in got.items()}
        require(
            self.layout in ({}, layout),
            f"the loader returned other tensors than before: {layout}, not {self.layout}",
        )
        self.layout = layout
        return got


def _bytes(tensor: Tensor) -> Tensor:
    """[elements, bytes of one]"""
    flat = tensor.contiguous().view(-1)
    return flat.view(torch.uint8).view(flat.numel(), tensor.element_size())


def _moved(
    numbers: Tensor, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]
) -> Tensor | None:
    """Numbers, 0 where the loader puts a constant; None where they do not say what it made of
    random values. first, second: values, and the tensor that the loader made of them."""
    usable = (numbers >= 0) & (numbers < len(first[0]))
    numbers = torch.where(usable, numbers, 0)
    for values, tensor in (first, second):
        usable &= (_bytes(values[numbers].to(tensor.dtype)) == _bytes(tensor)).all(dim=1)
    constant = (_bytes(first[1]) == _bytes(second[1])).all(dim=1)
    return torch.where(usable, numbers, 0) if bool((usable | constant).all()) else None


def _places(tensor: str, dtype: str, numbers: Tensor, runs: _Runs, rank: int) -> Iterator[Param]:
    """Boxes of parameters in a tensor, each with its strides."""
    for name, (shape, _) in runs.shapes.items():
        first = runs.first[name]
        at = ((numbers >= first) & (numbers < first + math.prod(shape))).nonzero().flatten()
        elements, order = torch.sort(numbers[at] - first, stable=True)
        at = at[order]
        for copy in _copies(elements):
            for part, offset, strides in _boxes(shape, elements[copy], at[copy]):
                yield Param(name, shape, dtype, (rank,), tensor=tensor, offset=offset,
                            strides=strides, part=part)  # fmt: skip


def _copies(elements: Tensor) -> Iterator[Tensor]:
    """The first place of each element, the second where there is one, and so on."""
    begins = torch.searchsorted(elements, elements)
    number = torch.arange(len(elements), device=begins.device) - begins
    for k in range(int(number.max()) + 1 if len(number) else 0):
        yield (number == k).nonzero().flatten()


_Box = tuple[tuple[tuple[int, int], ...], int, tuple[int, ...]]  # part, offset, strides


def _boxes(shape: tuple[int, ...], elements: Tensor, at: Tensor) -> Iterator[_Box]:
    """Elements, ascending, and their places, as boxes in which each dimension has one stride.

    What has no such order, a block-wise shuffle, say, becomes rows, or single elements.
    """
    indices = torch.unravel_index(elements, shape)
    axes = [torch.unique(index) for index in indices]
    sizes = [len(axis) for axis in axes]
    grid = at.view(sizes) if math.prod(sizes) == len(at) else None
    steps = [_along(grid, dim) for dim in range(len(sizes))] if grid is not None else []
    if grid is None or not torch.equal(sum(steps, start=grid.flatten()[0].clone()), grid):
        dim = next(d for d, size in enumerate(sizes) if size > 1)
        for index in axes[dim]:
            mine = (indices[dim] == index).nonzero().flatten()
            yield from _boxes(shape, elements[mine], at[mine])
        return
    runs = [_runs(axis, step.flatten()) for axis, step in zip(axes, steps, strict=True)]
    for chosen in itertools.product(*runs):
        offset = int(grid[tuple(begin for begin, _, _, _ in chosen)])
        part = tuple((first, size) for _, first, size, _ in chosen)
        yield part, offset, tuple(stride for _, _, _, stride in chosen)


def _along(grid: Tensor, dim: int) -> Tensor:
    """How far places move along one dimension, as a tensor that broadcasts over the others."""
    where: list[int | slice] = [0] * grid.dim()
    where[dim] = slice(None)
    line = grid[tuple(where)] - grid.flatten()[0]
    return line.view([-1 if d == dim else 1 for d in range(grid.dim())])


def _runs(axis: Tensor, steps: Tensor) -> list[tuple[int, int, int, int]]:
    """(place in the axis, first index, size, stride) of runs of neighbours at one distance."""
    indices, offsets = axis.tolist(), steps.tolist()
    found, begin = [], 0
    while begin < len(indices):
        end, stride = begin + 1, 1
        while end < len(indices) and indices[end] == indices[end - 1] + 1:
            step = offsets[end] - offsets[end - 1]
            if step < 0 or (end > begin + 1 and step != stride):
                break
            end, stride = end + 1, step
        found.append((begin, indices[begin], end - begin, stride))
        begin = end
    return found
