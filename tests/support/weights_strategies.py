"""Draws parameters and both sides' layouts of them, for hypothesis."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from moe_p2p.weights import Blocks, Param, Placement, Replicate, Shard, WeightLayout

KINDS = ("bfloat16", "float32", "int8")


@st.composite
def updates(draw: st.DrawFn) -> tuple[WeightLayout, WeightLayout]:
    """A source and a target of the same parameters."""
    worlds = draw(st.integers(1, 8)), draw(st.integers(1, 6))
    source: list[Param] = []
    target: list[Param] = []
    for number in range(draw(st.integers(1, 2))):
        elements = tuple(draw(st.lists(st.integers(1, 13), min_size=1, max_size=3)))
        name, dtype = f"w{number}", draw(st.sampled_from(KINDS))
        first = draw(params(name, elements, dtype, worlds[0]))
        source.append(first)
        if draw(st.booleans()) and len(first.ranks) * 2 <= worlds[0]:  # also on other ranks
            free = [rank for rank in range(worlds[0]) if rank not in first.ranks]
            if len(free) >= len(first.ranks):
                source.append(changed(first, ranks=tuple(free[: len(first.ranks)])))
        for copy in range(draw(st.integers(1, 2))):
            param = draw(params(name, elements, dtype, worlds[1]))
            target.append(draw(as_target(param, f"{name}.{copy}")))
    return WeightLayout(tuple(source), worlds[0]), WeightLayout(tuple(target), worlds[1])


def changed(param: Param, **changes: object) -> Param:
    fields = {field: getattr(param, field) for field in param.__dataclass_fields__}
    return Param(**{**fields, **changes})  # type: ignore[arg-type]


@st.composite
def meshes(draw: st.DrawFn, dims: int, world: int) -> tuple[tuple[int, ...], tuple[Placement, ...]]:
    mesh: list[int] = []
    placements: list[Placement] = []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, max(world // math.prod(mesh), 1)))
        kind = draw(st.sampled_from(("replicate", "shard", "shard", "strided")))
        dim = draw(st.integers(0, dims - 1))
        mesh.append(size)
        if kind == "replicate":
            placements.append(Replicate())
        else:
            placements.append(Shard(dim, draw(st.integers(2, 3)) if kind == "strided" else 1))
    return tuple(mesh), tuple(placements)


@st.composite
def params(draw: st.DrawFn, name: str, elements: tuple[int, ...], dtype: str, world: int) -> Param:
    """A Param of this parameter: the whole of a tensor, or a window of it."""
    shape, window = elements, ()
    if draw(st.booleans()):
        outer = draw(st.lists(st.integers(1, 3), max_size=1))
        sizes = [1] * len(outer) + list(elements)
        before = [draw(st.integers(0, 2)) for _ in sizes]
        shape = tuple(
            max(a + n, a + draw(st.integers(n, n + 2))) for a, n in zip(before, sizes, strict=True)
        )
        window = tuple(zip(before, sizes, strict=True))
    mesh, placements = draw(meshes(len(shape), world))
    ranks = draw(st.permutations(range(world)))[: math.prod(mesh)]
    order: tuple[int, ...] = ()
    if draw(st.booleans()):
        order = tuple(draw(st.permutations(range(len(shape)))))
    strides: tuple[int, ...] = ()
    if not order and draw(st.booleans()):  # padded: no rank holds more than the whole
        step, found = draw(st.integers(1, 2)), []
        for size in reversed(shape):
            found.append(step)
            step = step * size + draw(st.integers(0, 2))
        strides = tuple(reversed(found))
    offset = draw(st.integers(0, 4))
    return Param(name, shape, dtype, ranks, mesh, placements, window, name, offset, order, strides)


@st.composite
def as_target(draw: st.DrawFn, param: Param, tensor: str) -> Param:
    """The Param in another type, or with blocks, or only a part, in a tensor of its own."""
    if not param.window and draw(st.booleans()):
        firsts = [draw(st.integers(0, size - 1)) for size in param.shape]
        part = tuple(
            (first, draw(st.integers(1, size - first)))
            for first, size in zip(firsts, param.shape, strict=True)
        )
        param = changed(param, part=part, placements=(), offset=param.offset)
    if param.dtype == "int8":
        return changed(param, tensor=tensor)
    if len(param.shape) < 2 or draw(st.booleans()):
        dtype = draw(st.sampled_from(("bfloat16", "float32")))
        return changed(param, tensor=tensor, dtype=dtype)
    shape = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    order = tuple(draw(st.permutations(range(len(param.elements)))))
    blocks = Blocks(f"{tensor}.scale", draw(st.integers(0, 3)), shape, order)
    return changed(param, tensor=tensor, dtype="float8_e4m3fn", blocks=blocks)
