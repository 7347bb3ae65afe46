"""Layouts refuse what does not fit, by name, and travel as bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from moe_p2p import kv
from moe_p2p.errors import InvalidArgumentError, ProtocolError

GROUP = kv.KVGroup("kv", layers=(0, 1, 2, 3), heads=4, k_bytes=8, v_bytes=8, page_size=16)
STATE = kv.KVGroup("ssm", (1,), heads=8, k_bytes=32, v_bytes=0, page_size=1, kind="state")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layers": [0, 1]}, r"layers is of type list, must be a tuple of ints; pass tuple"),
        ({"layers": ()}, r"'kv': layers must be .* at least one, .* not \(\)"),
        ({"layers": (1, 0)}, r"ascending, not \(1, 0\)"),
        ({"heads": 0}, r"'kv': heads is 0, must be at least 1"),
        ({"heads": 2.0}, r"'kv': heads is 2.0, must be an int"),
        ({"heads": True}, r"'kv': heads is True, must be an int"),
        ({"k_bytes": 0}, r"k_bytes is 0"),
        ({"v_bytes": -1}, r"v_bytes is -1, must be at least 0"),
        ({"page_size": 0}, r"page_size is 0"),
        ({"kind": "mamba"}, r"kind is 'mamba', must be one of attention, window, state"),
        ({"kind": "window"}, r"window is None, must be an int"),
        ({"window": 8}, r'window is 8, but kind is "attention"; pass kind="window"'),
        ({"kind": "state"}, r"page_size must be 1, not 16, v_bytes must be 0, not 8"),
        ({"page_stride": 0}, r"page_stride is 0"),
    ],
)
def test_bad_fields_of_a_group_are_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        dataclasses.replace(GROUP, **changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"groups": ()}, r"at least one group"),
        ({"groups": [GROUP]}, r"groups is of type list, must be a tuple of KVGroups"),
        ({"groups": (GROUP, GROUP)}, r"a name of its own, not \['kv', 'kv'\]"),
        ({"order": "HDN"}, r"order is 'HDN', must be one of NHD, HND, LBNHC"),
        ({"kv_split": "token"}, r"kv_split is 'token'"),
        ({"kv_split": "layer", "order": "LBHNC"}, r"LBHNC keeps K and V side by side; pass order="),
        ({"tp": 0}, r"KVLayout.tp is 0"),
        ({"tp": 3}, r"4 heads do not fit tp=3: one must divide the other"),
        ({"pp": 3}, r"4 layers do not divide into 3 equal stages; pass stages"),
        ({"pp": 2, "stages": (3,)}, r"stages is \(3,\): .* each of 2 stages"),
        ({"pp": 2, "stages": (1, 2)}, r"all 4 layers must be in one"),
        ({"tp": 8, "dcp": 4}, r"tp=8 has 2 for each of 4 heads; dcp must divide 2"),
        ({"tp": 8, "dcp": 2, "dcp_interleave": 3}, r"page_size=16 must be a multiple of dcp_int"),
        (
            {"groups": (dataclasses.replace(GROUP, page_stride=100),)},
            r"page_stride=100 is less than a page, which has 1024 bytes on a rank",
        ),
    ],
)
def test_bad_fields_of_a_layout_are_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        kv.KVLayout(**{"groups": (GROUP,), **changes})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"name": "other"}, r"source has groups \['kv'\], the target \['other'\]"),
        ({"heads": 2}, r"group 'kv': heads is 4 at the source and 2 at the target"),
        ({"v_bytes": 4}, r"v_bytes is 8 at the source and 4"),
        ({"layers": (0,)}, r"layers is \(0, 1, 2, 3\) at the source and \(0,\)"),
    ],
)
def test_sides_of_different_models_are_refused(changes: dict[str, Any], text: str) -> None:
    source = kv.KVLayout((GROUP,))
    target = kv.KVLayout((dataclasses.replace(GROUP, **changes),))
    with pytest.raises(InvalidArgumentError, match=text):
        kv.kv_plan(source, target)


def test_a_rank_outside_is_refused() -> None:
    layout = kv.KVLayout((GROUP,), tp=2)
    with pytest.raises(InvalidArgumentError, match="source_rank is 2, must be None or 0 to 1"):
        kv.kv_plan(layout, layout, source_rank=2)


def test_bad_links_are_named() -> None:
    with pytest.raises(InvalidArgumentError, match="writes_per_s is 0, must be above 0"):
        kv.KVLink("NIC", 50e9, 0)


def test_states_are_not_dealt_to_dcp_ranks() -> None:
    mla = kv.KVGroup("latent", (0,), heads=1, k_bytes=4, v_bytes=0, page_size=16)
    layout = kv.KVLayout((mla, STATE), tp=8, dcp=8)
    assert layout.page_tokens(mla) == 128
    assert layout.page_tokens(STATE) == 1
    assert [layout.holding(STATE, rank).first_head for rank in range(8)] == list(range(8))


def test_layouts_travel_as_bytes() -> None:
    hybrid = kv.KVLayout((GROUP, STATE), "HND", "layer", tp=2, pp=2, stages=(3, 1))
    assert kv.layout_from_bytes(kv.layout_to_bytes(hybrid)) == hybrid


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"[]", b"{}", b'{"groups": [{}], "stages": null}', b'{"groups": 1}']
)
def test_bytes_that_are_no_layout_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="these bytes are not a KVLayout"):
        kv.layout_from_bytes(data)


def test_memory_travels_as_bytes() -> None:
    layout = kv.KVLayout((GROUP, STATE), "HND", "layer", tp=2)
    memory, _ = kv.dense_memory(layout, 1, num_pages=8, regions=(b"one", b""))
    data = memory.to_bytes()
    assert kv.KVMemory.from_bytes(data) == memory
    for size in range(len(data)):
        with pytest.raises(ProtocolError, match="cut short"):
            kv.KVMemory.from_bytes(data[:size])
    with pytest.raises(ProtocolError, match="1 bytes too many"):
        kv.KVMemory.from_bytes(data + b"x")
    with pytest.raises(ProtocolError, match="format 258, this build reads 1"):
        kv.KVMemory.from_bytes(b"\x02\x01" + data[2:])


def test_memory_of_another_layout_is_refused() -> None:
    layout = kv.KVLayout((GROUP,), pp=2)
    plan = kv.kv_plan(layout, layout)
    memory, _ = kv.dense_memory(layout, 0, num_pages=8)
    for wrong, text in (
        (dataclasses.replace(memory, rank=2), "rank 2 with 1 groups is not of a layout with 2"),
        (dataclasses.replace(memory, layers=(memory.layers[0][:1],)), "2 layers with 1 places"),
        (dataclasses.replace(memory, regions=()), "is outside of its 0 regions"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            kv.resolve(plan, memory, wrong)
