"""Draws models, the two sides' layouts of them, and requests, for hypothesis."""

from __future__ import annotations

import dataclasses
import math

from hypothesis import strategies as st

from moe_p2p.kv import ORDERS, KVGroup, KVLayout, KVLink
from moe_p2p.kv.layout import KV_SPLITS
from tests.support.kv_transfer import DIRECT, Transfer

HEADS = (1, 2, 3, 4, 6, 8)


@dataclasses.dataclass(frozen=True)
class Ranks:
    tp: int
    pp: int
    dcp: int


@st.composite
def transfers(draw: st.DrawFn) -> Transfer:
    sides = [draw(ranks()) for _ in range(2)]
    num_layers = draw(st.integers(1, 3))
    names = draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=2, unique=True))
    groups = [draw(group(name, num_layers, sides)) for name in names]
    source, target = (draw(layout(groups, side)) for side in sides)
    pages = [target.page_tokens(each) for each in target.groups if each.kind != "state"]
    page = math.lcm(*pages)
    if page > 2000:  # pages of several groups that hardly fit each other: no prefix of this size
        page = 0
    tokens = draw(st.integers(1, 250))
    hits = st.integers(0, (tokens - 1) // page if page else 0)
    prefix = draw(hits) * page
    later = range(prefix + page, tokens, page) if page else range(0)
    chunk = draw(st.none() | st.sampled_from(later)) if later else None
    return Transfer(source, target, tokens, prefix, draw(st.integers(0, 1000)), chunk, draw(links))


# Most rows are packed. A rate of writes as high as that of bytes lets units land in pages.
links = st.just(DIRECT) | st.builds(
    KVLink,
    name=st.just("drawn"),
    bytes_per_s=st.just(1e9),
    writes_per_s=st.sampled_from((1e9, 1e8, 1e6)),
    packed_write_bytes=st.integers(1, 400),
    pack=st.sampled_from((True, "auto")),
)


@st.composite
def ranks(draw: st.DrawFn) -> Ranks:
    tp = draw(st.sampled_from((1, 2, 3, 4, 8)))
    dcp = draw(st.sampled_from([n for n in (1, 2, 3, 4, 8) if tp % n == 0]))
    return Ranks(tp, draw(st.integers(1, 2)), dcp)


@st.composite
def group(draw: st.DrawFn, name: str, num_layers: int, sides: list[Ranks]) -> KVGroup:
    chosen = draw(st.sets(st.integers(0, num_layers - 1), min_size=1))
    kind = draw(st.sampled_from(("attention", "attention", "window", "state")))
    of_state = kind == "state"

    def fits(heads: int, side: Ranks) -> bool:
        whole = heads % side.tp == 0 or side.tp % heads == 0
        return whole and (of_state or max(side.tp // heads, 1) % side.dcp == 0)

    return KVGroup(
        name=name,
        layers=tuple(sorted(chosen)),
        heads=draw(st.sampled_from([h for h in HEADS if all(fits(h, side) for side in sides)])),
        k_bytes=draw(st.integers(1, 3)),
        v_bytes=0 if of_state else draw(st.integers(0, 3)),
        page_size=1 if of_state else 16,
        kind=kind,
        window=draw(st.integers(1, 100)) if kind == "window" else None,
    )


@st.composite
def layout(draw: st.DrawFn, groups: list[KVGroup], side: Ranks) -> KVLayout:
    interleave = draw(st.sampled_from((1, 2, 4, 16))) if side.dcp > 1 else 1
    usual = st.sampled_from((16, 16, 32, 64))
    sizes = usual | st.integers(16, 64).filter(lambda size: size % interleave == 0)
    of_side = [
        each if each.kind == "state" else dataclasses.replace(each, page_size=draw(sizes))
        for each in groups
    ]
    order = draw(st.sampled_from(ORDERS))
    num_layers = 1 + max(each.layers[-1] for each in groups)
    if side.pp == 1:
        stages = draw(st.none() | st.just((num_layers,)))
    else:
        first = draw(st.integers(0, num_layers))
        stages = (first, num_layers - first)
    plain = KVLayout(
        groups=tuple(of_side),
        order=order,
        tp=side.tp,
        pp=side.pp,
        dcp=side.dcp,
        dcp_interleave=interleave,
        stages=stages,
    )
    if plain.keeps_kv_apart:
        plain = plain.replace(kv_split=draw(st.sampled_from(KV_SPLITS)))
    return plain.replace(groups=tuple(draw(padded(plain, each)) for each in of_side))


@st.composite
def padded(draw: st.DrawFn, plain: KVLayout, each: KVGroup) -> KVGroup:
    if draw(st.booleans()):
        return each
    per_stage = [len(plain.layers_of(each, stage)) for stage in range(plain.pp)]
    least = max(part.page_stride for n in per_stage for part in plain.parts(each, n))
    return dataclasses.replace(each, page_stride=least + draw(st.integers(0, 9)))
