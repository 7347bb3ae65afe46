"""Bytes of a plan against the oracle: named cases. tests/kv/test_kv_property.py draws them."""

from __future__ import annotations

import pytest

from moe_p2p import kv
from moe_p2p.kv import KVGroup, KVLayout, KVLink, kv_plan
from tests.support.kv_transfer import Transfer, run

GQA = KVGroup("attention", layers=(0, 1), heads=4, k_bytes=2, v_bytes=2, page_size=16)
MLA = KVGroup("latent", layers=(0, 1), heads=1, k_bytes=3, v_bytes=0, page_size=16)
ORDERS = [*kv.ORDERS, "NHD layer", "HND layer"]


def layout(group: KVGroup, order: str = "NHD", **fields: int) -> KVLayout:
    name, _, split = order.partition(" ")
    return KVLayout((group,), name, split or "page", **fields)


def paged(group: KVGroup, page_size: int) -> KVGroup:
    return KVGroup(group.name, group.layers, group.heads, group.k_bytes, group.v_bytes, page_size)


@pytest.mark.parametrize("target_order", ORDERS)
@pytest.mark.parametrize("source_order", ORDERS)
def test_every_order_to_every_other(source_order: str, target_order: str) -> None:
    run(Transfer(layout(GQA, source_order, tp=2), layout(GQA, target_order, tp=4), 40, 16))


@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 8), (2, 4), (4, 2), (8, 1), (16, 2)])
def test_tensor_parallelism_differs(source_tp: int, target_tp: int) -> None:
    run(Transfer(layout(GQA, tp=source_tp), layout(GQA, "HND", tp=target_tp), 40, 0))


@pytest.mark.parametrize("dcp", [1, 2, 4, 8])
@pytest.mark.parametrize("to_source", [False, True])
def test_tokens_dealt_to_up_to_eight_ranks(dcp: int, to_source: bool) -> None:
    dealt, whole = layout(MLA, tp=8, dcp=dcp), layout(MLA, tp=2)
    source, target = (dealt, whole) if to_source else (whole, dealt)
    run(Transfer(source, target, 300, 128))


@pytest.mark.parametrize(("ours", "theirs"), [(16, 64), (64, 16), (48, 32), (17, 16)])
@pytest.mark.parametrize("order", ["NHD", "LBHNC"])
def test_page_sizes_differ(ours: int, theirs: int, order: str) -> None:
    source, target = layout(paged(GQA, ours), order), layout(paged(GQA, theirs), "HND", tp=2)
    run(Transfer(source, target, 150, theirs))


@pytest.mark.parametrize("lands", [True, False])
@pytest.mark.parametrize("write_bytes", [50, 100])
def test_packed_rows_take_several_writes(write_bytes: int, lands: bool) -> None:
    """16 tokens of a head are a run of 32 bytes in HND pages: 100 bytes hold 3 runs, or 50 rows."""
    link = KVLink("test", 1e9, 1e9 if lands else 1, write_bytes, pack=True)
    sides = layout(GQA), layout(GQA, "HND")
    moves = kv_plan(*sides, link=link).moves
    assert all((move.lands, move.shape.num_rows) == (lands, 16) for move in moves)
    run(Transfer(*sides, 150, 16, link=link))
