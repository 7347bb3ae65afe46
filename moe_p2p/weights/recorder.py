"""Learns where a receiver's own loader puts each element, from values, not from its operations.

The loader runs on parameters that are filled with digits of element numbers, in as many passes as
types of both sides need, so that every element of its tensors says where it came from. Passes with
values as of weights, large ones and special ones (-0, infinite, NaN) must be reproduced byte for
byte. A tensor that is not, because the loader quantizes or repacks, is *derived*: the parameters
that it is made from are sent in checkpoint layout, and the receiver recomputes it at commit. One
layer at a time is enough, and costs least memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_p2p.errors import InvalidArgumentError, make, require
from moe_p2p.weights.layout import Param, dtype_name

# Runs the receiver's loader on these parameters; returns its tensors, as its kernels read them.
Loader = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]

# Integers from 0 to here are exact in these types; in others, to 2^15.
_EXACT_BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float8_e4m3fn: 4, torch.float8_e5m2: 3,
               torch.int8: 7, torch.uint8: 8, torch.bool: 1}  # fmt: skip
# Types without arithmetic: elements are bytes.
_OPAQUE = {getattr(torch, name) for name in ("bool", "float8_e8m0fnu", "float4_e2m1fn_x2")
           if hasattr(torch, name)}  # fmt: skip
_INTEGERS = {getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)}
_SCALES = (50.0, 0.02)  # of random values: large ones, and as of weights
_SPECIAL = (0.0, -0.0, 1.0, -1.0, 448.0, -449.0, 1e-3, 1e-8, 3e4, -3e4, 1e38, float("inf"),
            float("-inf"), float("nan"))  # fmt: skip


@dataclass(frozen=True)
class Recording:
    """params: where parameters land. derived: by tensor, the parameters it is made from. unused:
    parameters that land nowhere. padding: tensors of which a part belongs to no parameter."""

    params: tuple[Param, ...]
    derived: Mapping[str, tuple[str, ...]]
    fallback: Mapping[str, int]  # bytes of parameters that are sent in checkpoint layout
    unused: tuple[str, ...] = ()
    padding: tuple[str, ...] = ()

    def report(self) -> str:
        """What fell back, with bytes, and what landed nowhere; for a log."""
        lines = ["all parameters are written in place"]
        if self.fallback:
            lines = [f"{sum(self.fallback.values()):,} B are received in checkpoint layout:"]
        lines += [f"  {name}: {nbytes:,} B" for name, nbytes in self.fallback.items()]
        lines += [f"  {name} is recomputed from {', '.join(names)}"
                  for name, names in self.derived.items()]  # fmt: skip
        if self.unused:
            lines.append(f"{', '.join(self.unused)} land nowhere")
        return "\n".join(lines)


def record(load: Loader, shapes: Shapes, *, rank: int) -> Recording:
    """Describes what `load` does with parameters of these shapes and types, as Params of `rank`.

    load must not depend on values, and return the same tensors each time, in the same shapes.
    """
    require(callable(load), f"record: load is {load!r}, must be a function")
    runs = _Runs(load, shapes)
    draws = [runs.random(seed, scale) for scale in _SCALES for seed in range(2)]
    draws += [runs.special(turn) for turn in range(2)]
    made = [runs.run(values) for values in draws]  # first: it shows types of what is made
    numbers = runs.numbers()
    derived: dict[str, tuple[str, ...]] = {}
    params: list[Param] = []
    padding: list[str] = []
    for name, tensor in made[0].items():
        moved = _moved(numbers[name], draws, [got[name] for got in made])
        if moved is None or not runs.convertible(moved, tensor.dtype):
            derived[name] = runs.inputs(name)
            continue
        params += _places(name, dtype_name(tensor.dtype), moved, runs, rank)
        if bool((moved == 0).any()) and bool(moved.any()):
            padding.append(name)
    used = dict.fromkeys(itertools.chain(*derived.values()))
    for name in used:
        shape, dtype = shapes[name]
        makes = ", ".join(tensor for tensor, names in derived.items() if name in names)
        why = f"the loader makes {makes} of it otherwise than by moving elements"
        params.append(Param(name, shape, dtype_name(dtype), (rank,), finalize=why))
    fallback = {name: math.prod(shapes[name][0]) * shapes[name][1].itemsize for name in used}
    there = {each.name for each in params}
    unused = tuple(name for name, (shape, _) in shapes.items()
                   if name not in there and torch.Size(shape).numel())  # fmt: skip
    return Recording(tuple(params), derived, fallback, unused, tuple(padding))


class _Runs:
    """Runs of one loader. Elements of all parameters are numbered from 1, one after the other."""

    def __init__(self, load: Loader, shapes: Shapes) -> None:
        self.load, self.shapes = load, shapes
        for name, (_, dtype) in shapes.items():
            known = _carrier(dtype)
            require(
                known.is_floating_point or known in _INTEGERS,
                f"record: {name} is {dtype_name(dtype)}, which is not learned; describe it by hand",
            )
        sizes = [math.prod(shape) for shape, _ in shapes.values()]
        self.first = dict(zip(shapes, itertools.accumulate(sizes, initial=1), strict=False))
        self.count = sum(sizes)
        self.layout: dict[str, tuple[torch.Size, torch.dtype]] = {}

    def numbers(self) -> dict[str, Tensor]:
        """Of the element in each place, in the order of memory; -1 where there is none."""
        found: dict[str, Tensor] = {}
        types = [dtype for _, dtype in (*self.shapes.values(), *self.layout.values())]
        bits = min((_EXACT_BITS.get(dtype, 8 if dtype in _OPAQUE else 15) for dtype in types),
                   default=1)  # fmt: skip
        for shift in range(0, self.count.bit_length(), bits):
            digits = (torch.arange(self.count + 1, device="cpu") >> shift) & ((1 << bits) - 1)
            for name, tensor in self.run(digits.to(torch.float64)).items():
                digit = _seen(tensor).flatten().to(torch.float64)
                valid = (digit >= 0) & (digit < 1 << bits) & (digit == digit.floor())
                digit = torch.where(valid, digit, 0).to(torch.int64) << shift
                before = found.get(name, torch.zeros_like(digit))
                found[name] = torch.where(valid & (before >= 0), before + digit, -1)
        return found

    def random(self, seed: int = 0, scale: float = _SCALES[0]) -> Tensor:
        """A value for each element, of both signs, exact in its type."""
        generator = torch.Generator().manual_seed(seed)
        values = torch.zeros(self.count + 1, dtype=torch.float64, device="cpu")
        for name, (shape, dtype) in self.shapes.items():
            count, first = math.prod(shape), self.first[name]
            if _carrier(dtype).is_floating_point:
                drawn = torch.randn(count, generator=generator, dtype=torch.float64, device="cpu")
                drawn *= scale
            else:
                low, high = _limits(dtype)
                drawn = torch.randint(low, high, (count,), generator=generator, device="cpu")
            values[first : first + count] = drawn.to(_carrier(dtype)).to(torch.float64)
        return values

    def special(self, turn: int) -> Tensor:
        """Values in which thresholds, signs of zero and NaN show, many of them equal. turn: each
        element has another one in each."""
        values = torch.zeros(self.count + 1, dtype=torch.float64, device="cpu")
        for name, (shape, dtype) in self.shapes.items():
            count, first = math.prod(shape), self.first[name]
            chosen = torch.tensor(_SPECIAL, dtype=torch.float64, device="cpu")
            if not _carrier(dtype).is_floating_point:
                low, high = _limits(dtype)
                chosen = torch.tensor([low, high - 1, 0, 1], dtype=torch.float64, device="cpu")
            at = (torch.arange(count, device="cpu") + 5 * turn) % len(chosen)
            values[first : first + count] = chosen[at].to(_carrier(dtype)).to(torch.float64)
        return values

    def convertible(self, numbers: Tensor, made: torch.dtype) -> bool:
        """Whether trainers make this type of all that lands in a tensor."""
        kinds = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        for name, (shape, dtype) in self.shapes.items():
            first = self.first[name]
            lands = bool(((numbers >= first) & (numbers < first + math.prod(shape))).any())
            if lands and dtype != made and not (dtype in kinds and made in kinds):
                return False
        return True

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
            part = values[first : first + math.prod(shape)].to(_carrier(dtype))
            given[name] = (part.view(dtype) if dtype in _OPAQUE else part).view(shape)
        got = {name: tensor.detach().clone() for name, tensor in self._loaded(given).items()}
        layout = {name: (tensor.shape, tensor.dtype) for name, tensor in got.items()}
        require(
            self.layout in ({}, layout),
            f"the loader returned other tensors than before: {layout}, not {self.layout}",
        )
        self.layout = layout
        return got

    def _loaded(self, given: dict[str, Tensor]) -> Mapping[str, Tensor]:
        """Of types without arithmetic torch lacks most operations."""
        try:
            return self.load(given)
        except NotImplementedError as error:
            kinds = [f"{name} ({dtype_name(dtype)})" for name, (_, dtype) in self.shapes.items()
                     if dtype in _OPAQUE]  # fmt: skip
            if not kinds:
                raise
            text = f"record: torch cannot do what the loader does with {', '.join(kinds[:3])}"
            hint = "move it there as a view of uint8, or leave it out"
            raise make(InvalidArgumentError, f"{text}: {error}; {hint}") from error


def _bytes(tensor: Tensor) -> Tensor:
    """[elements, bytes of one]"""
    flat = tensor.contiguous().view(-1)
    return flat.view(torch.uint8).view(flat.numel(), tensor.element_size())


def _carrier(dtype: torch.dtype) -> torch.dtype:
    return torch.uint8 if dtype in _OPAQUE else dtype


def _seen(tensor: Tensor) -> Tensor:
    """Types without arithmetic as bytes."""
    return tensor.contiguous().view(torch.uint8) if tensor.dtype in _OPAQUE else tensor


def _limits(dtype: torch.dtype) -> tuple[int, int]:
    """(least, most + 1) of integers that are drawn."""
    if dtype is torch.bool:
        return 0, 2
    info = torch.iinfo(_carrier(dtype))
    return max(info.min, -(1 << 15)), min(info.max + 1, 1 << 15)


def _moved(numbers: Tensor, draws: list[Tensor], made: list[Tensor]) -> Tensor | None:
    """Numbers, 0 where the loader puts a constant; None where they do not say what it made of
    `draws`. made: the tensor, of each."""
    usable = (numbers >= 0) & (numbers < len(draws[0]))
    numbers = torch.where(usable, numbers, 0)
    constant = torch.ones_like(usable)
    for values, tensor in zip(draws, made, strict=True):
        wanted, got = values[numbers].to(_carrier(tensor.dtype)), _seen(tensor).reshape(-1)
        alike = (_bytes(wanted) == _bytes(got)).all(dim=1)
        if wanted.is_floating_point():
            alike |= wanted.isnan() & got.isnan()  # of whatever bits
        usable &= alike
        constant &= (_bytes(got) == _bytes(_seen(made[0]))).all(dim=1)
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
