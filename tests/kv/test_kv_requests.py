"""What a plan says before anything is sent: counts, balance, ways, sizes and time."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

from moe_p2p import Engine, EngineConfig, kv
from moe_p2p.errors import InvalidArgumentError

LAYERS = 61
PAGES = 4096
MLA = kv.KVGroup("latent", tuple(range(LAYERS)), heads=1, k_bytes=576, v_bytes=0, page_size=64)
GQA = kv.KVGroup("kv", tuple(range(LAYERS)), heads=8, k_bytes=256, v_bytes=256, page_size=16)


def pages(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32)


@pytest.mark.parametrize(
    ("source", "target"),
    [((8, 1), (8, 8)), ((8, 1), (2, 1)), ((8, 1), (1, 1)), ((8, 2), (4, 4)), ((2, 1), (8, 4))],
)
def test_sources_with_the_same_latent_send_equal_shares(
    source: tuple[int, int], target: tuple[int, int]
) -> None:
    ours = kv.KVLayout((MLA,), tp=source[0], dcp=source[1])
    theirs = kv.KVLayout((MLA,), tp=target[0], dcp=target[1])
    plan = kv.kv_plan(ours, theirs)
    tokens = 64 * 512  # whole periods, a multiple of every share
    sent = [0] * ours.world_size
    for rank in range(theirs.world_size):
        arrived = kv.counts(plan, rank, 0, tokens)
        kept = tokens // theirs.dcp * MLA.k_bytes * LAYERS
        assert sum(each.nbytes for each in arrived.values()) == kept
        for source_rank, each in arrived.items():
            sent[source_rank] += each.nbytes
    assert len(set(sent)) == 1
    assert sent[0] > 0


def test_shares_do_not_move_with_the_prefix() -> None:
    """Page i comes from the same source with and without a prefix, so chunks fit each other."""
    plan = kv.kv_plan(kv.KVLayout((MLA,), tp=8), kv.KVLayout((MLA,)))
    for move in plan.moves:
        found, _ = kv.indices(move, kv.span_of(plan, MLA, 64 * 3, 64 * 20), pages(20), pages(20))
        assert found.tolist() == [page for page in range(3, 20) if page % 8 == move.source_rank]


def test_equal_sides_pair_up() -> None:
    """Eight copies for eight dealt parts: one peer each, not eight."""
    plan = kv.kv_plan(kv.KVLayout((MLA,), tp=8), kv.KVLayout((MLA,), tp=8, dcp=8))
    assert [(m.source_rank, m.target_rank) for m in plan.moves] == [(i, i) for i in range(8)]


def test_a_page_is_one_row_where_both_sides_are_alike() -> None:
    for order in kv.ORDERS:
        layout = kv.KVLayout((GQA,), order, tp=2)
        (move,) = kv.kv_plan(layout, layout, source_rank=0).moves
        page = 4 * 16 * 512
        assert (move.shape.row_bytes, move.shape.num_rows) == (page, 1)
        assert move.shape.part == "kv"


def test_a_slice_of_heads_is_rows_of_one_unit_a_page() -> None:
    source, target = kv.KVLayout((GQA,), tp=2), kv.KVLayout((GQA,), tp=4)
    move = kv.kv_plan(source, target).moves[1]
    shape = move.shape
    assert move.heads == (2, 4)
    assert (shape.row_bytes, shape.num_rows) == (2 * 256, 2 * 16)  # K and V of 16 tokens
    assert (shape.source_row_stride, shape.target_row_stride) == (4 * 256, 2 * 256)
    assert len(shape.phases) == 1


def test_units_are_in_the_order_of_tokens() -> None:
    """`indices` and `counts` cut a span off by it."""
    for page_size in (16, 24, 64):
        theirs = kv.KVLayout((dataclasses.replace(MLA, page_size=page_size),), tp=4, dcp=4)
        for move in kv.kv_plan(kv.KVLayout((MLA,), tp=8, dcp=2), theirs).moves:
            tokens = [phase.first_token for phase in move.shape.phases]
            assert tokens == sorted(tokens)


def test_a_plan_does_not_grow_with_layers_or_pages() -> None:
    few = dataclasses.replace(GQA, layers=(0, 1))
    for group in (few, GQA):
        plan = kv.kv_plan(kv.KVLayout((group,), tp=2), kv.KVLayout((group,), "HND", tp=4))
        assert len(plan.moves) == 4


def test_stages_send_their_layers_only() -> None:
    ours = kv.KVLayout((GQA,), pp=2, stages=(31, 30))
    plan = kv.kv_plan(ours, kv.KVLayout((GQA,)))
    assert [(m.source_rank, m.layers) for m in plan.moves] == [(0, range(31)), (1, range(31, 61))]


@pytest.mark.parametrize(
    ("link", "row_bytes", "via"),
    [
        (kv.CX7, 4504, "pack"),
        (kv.CX7, 4505, "direct"),
        (kv.EFA, 23809, "pack"),
        (kv.EFA, 23810, "direct"),
        (kv.KVLink("NIC", 50e9, 50e6), 1000, "direct"),
        (kv.KVLink("NIC", 50e9, 50e6), 999, "pack"),
    ],
)
def test_rows_below_what_the_nic_needs_are_packed(
    link: kv.KVLink, row_bytes: int, via: str
) -> None:
    group = kv.KVGroup("kv", (0,), heads=2, k_bytes=row_bytes, v_bytes=0, page_size=16)
    source, target = kv.KVLayout((group,), "NHD"), kv.KVLayout((group,), "NHD", tp=2)
    for move in kv.kv_plan(source, target, link=link).moves:
        assert move.shape.row_bytes == row_bytes
        assert move.via == via
        assert (f"rows of {row_bytes:,} B reach" in move.why_packed) == (via == "pack")


def test_immediates_are_known_on_both_sides() -> None:
    layout = kv.KVLayout((GQA,))
    direct = kv.kv_plan(layout, layout)
    (counted,) = kv.counts(direct, 0, 0, 100).values()
    assert (counted.immediates, counted.units) == (LAYERS, LAYERS * 7)  # pages of 16 tokens
    (counted,) = kv.counts(direct, 0, 0, 100, source_nics=2).values()
    assert (counted.immediates, counted.units) == (2 * LAYERS, LAYERS * 7)
    # Pages are rows of 64 KiB: three of them in a write.
    link = kv.KVLink("slow", 50e9, 1e3, packed_write_bytes=200_000)
    (counted,) = kv.counts(kv.kv_plan(layout, layout, link=link), 0, 0, 100).values()
    assert counted.immediates == LAYERS * 3
    with pytest.raises(InvalidArgumentError, match="source_nics is 0, must be at least 1"):
        kv.counts(direct, 0, 0, 100, source_nics=0)


def test_a_prefix_at_the_target_is_neither_read_nor_written() -> None:
    small = dataclasses.replace(GQA, page_size=16)
    large = dataclasses.replace(GQA, page_size=64)
    plan = kv.kv_plan(kv.KVLayout((small,)), kv.KVLayout((large,)))
    (move,) = plan.moves
    ours, theirs = kv.indices(move, kv.span_of(plan, small, 128, 300), pages(19), pages(5))
    assert set((ours // move.shape.source_units).tolist()) == set(range(8, 19))
    assert set((theirs // move.shape.target_units).tolist()) == {2, 3, 4}
    assert ours.dtype == theirs.dtype == torch.int32
    assert kv.aligned_begin(plan.target, 300) == 256
    with pytest.raises(InvalidArgumentError, match=r"begin=100 lies within a page .*; pass 64"):
        kv.span_of(plan, small, 100, 300)


@pytest.mark.parametrize("begin", [0, 64, 128 * 1000])
def test_long_lists_keep_the_order_of_tokens(begin: int) -> None:
    """More units than one piece (`_PIECE`), each with its page."""
    small, large = GQA, dataclasses.replace(GQA, page_size=64)
    plan = kv.kv_plan(kv.KVLayout((small,)), kv.KVLayout((large,)))
    generator = torch.Generator().manual_seed(3)
    end = 16 * 40_000
    ours, theirs = (torch.randperm(n, generator=generator).int() for n in (end // 16, end // 64))
    (move,) = plan.moves
    found = kv.indices(move, kv.span_of(plan, small, begin, end), ours, theirs)
    places = range(begin // 16, end // 16)
    per_page = move.shape.target_units
    assert per_page % 4 == 0
    assert found[0].tolist() == [int(ours[i]) * move.shape.source_units for i in places]
    quarter = [phase.target_index for phase in move.shape.phases]
    assert found[1].tolist() == [int(theirs[i // 4]) * per_page + quarter[i % 4] for i in places]


def test_a_window_and_a_state_send_what_is_needed() -> None:
    window = dataclasses.replace(GQA, name="swa", kind="window", window=100)
    state = kv.KVGroup("ssm", (0,), heads=8, k_bytes=64, v_bytes=0, page_size=1, kind="state")
    layout = kv.KVLayout((GQA, window, state))
    plan = kv.kv_plan(layout, layout)
    assert kv.span_of(plan, GQA, 0, 512, 1000) == (0, 512)
    assert kv.span_of(plan, window, 0, 512, 1000) == (512, 512)
    assert kv.span_of(plan, window, 512, 1000, 1000) == (896, 1000)
    assert kv.span_of(plan, state, 0, 512, 1000) == (0, 0)
    assert kv.span_of(plan, state, 512, 1000, 1000) == (0, 1)


@pytest.mark.parametrize("span", [(-16, 0, 16), (32, 16, 32), (0, 32, 16)])
def test_spans_that_do_not_ascend_are_refused(span: tuple[int, int, int]) -> None:
    layout = kv.KVLayout((GQA,))
    with pytest.raises(InvalidArgumentError, match="must be 0 or more and ascend"):
        kv.span_of(kv.kv_plan(layout, layout), GQA, *span)


@pytest.mark.parametrize(
    "wrong", [pages(6), pages(7).to(torch.int64), pages(7)[None]], ids=["short", "int64", "2-d"]
)
def test_bad_lists_of_pages_are_named(wrong: torch.Tensor) -> None:
    layout = kv.KVLayout((GQA,))
    plan = kv.kv_plan(layout, layout)
    span = kv.Span(0, 100)
    with pytest.raises(InvalidArgumentError, match=r"source_pages is .* n at least 7: its pages"):
        kv.indices(plan.moves[0], span, wrong, pages(7))
    with pytest.raises(InvalidArgumentError, match=r"target_pages is"):
        kv.indices(plan.moves[0], span, pages(7), wrong)


def test_pools_too_large_for_int32_are_refused() -> None:
    plan = kv.kv_plan(kv.KVLayout((GQA,), tp=2), kv.KVLayout((GQA,), "HND", tp=4))
    units = plan.moves[0].shape.source_units
    most = ((1 << 31) - 1) // units
    kv.check_pages(plan, most, 1)
    with pytest.raises(InvalidArgumentError, match=f"at most {most} pages"):
        kv.check_pages(plan, most + 1, 1)


SIDES = [
    (kv.KVLayout((MLA,), tp=8), kv.KVLayout((MLA,), tp=8, dcp=8)),
    (kv.KVLayout((MLA,), tp=8, dcp=8), kv.KVLayout((MLA,), tp=8)),
    (kv.KVLayout((GQA,), tp=2), kv.KVLayout((GQA,), "HND", tp=4)),
]


@pytest.mark.parametrize(("source", "target"), SIDES, ids=["to dcp", "from dcp", "tp"])
def test_a_new_pair_costs_milliseconds(source: kv.KVLayout, target: kv.KVLayout) -> None:
    """5 ms of this thread's CPU time: the best of 20, since others take the machine too."""
    ours, _ = kv.dense_memory(source, 0, PAGES)
    theirs, _ = kv.dense_memory(target, 0, PAGES)
    best = float("inf")
    for _ in range(20):
        kv.forget_periods()
        began = time.thread_time()
        requests = kv.resolve(kv.kv_plan(source, target, source_rank=0), ours, theirs)
        best = min(best, time.thread_time() - began)
        assert len(requests) == LAYERS
    assert best <= 5e-3


def test_metadata_of_a_new_pair_is_small() -> None:
    """A tensor of its own for each layer, and 4,096 page indices on both sides."""
    layout = kv.KVLayout((MLA,), tp=8)
    with Engine(EngineConfig(transport="loopback")) as engine:
        descriptors = tuple(engine.register(torch.zeros(64)).descriptor for _ in range(LAYERS))
    layers = tuple((kv.Place(region, 0),) for region in range(LAYERS))
    memory = kv.KVMemory(0, (layers,), descriptors)
    memory.check(layout)
    indices = 2 * pages(PAGES).nbytes
    assert len(memory.to_bytes()) + len(kv.layout_to_bytes(layout)) + indices < 64 << 10
