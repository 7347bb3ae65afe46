"""Workers move the bytes that the oracle says: any layout to any other, drawn, over real engines.

test_kv_property.py draws plans; here pages, chunks, footers, fences and threads are a user's.
250 cases in `make test-all`, some of them in `make test`; more, and others each time:

    MOE_P2P_KV_CASES=2000 python -m pytest --all-cells tests/kv/test_kv_workers_property.py \\
        --timeout 3000
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch

pytest.importorskip("hypothesis", reason="hypothesis is missing: pip install hypothesis")

from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

from moe_p2p import kv
from tests.support import cells
from tests.support.drawn import drawn
from tests.support.kv_oracle import UNTOUCHED, Cache, value_of
from tests.support.kv_strategies import transfers
from tests.support.kv_transfer import Transfer, pages_needed
from tests.support.kv_workers import Workers, workers

CASES = "MOE_P2P_KV_CASES"
MOST_RANKS = 10  # of both sides: an engine each
RING_BYTES = 1 << 16  # fewer parts than a request wants
DEADLINE_S = 30.0


@dataclasses.dataclass(frozen=True)
class Ways:
    pull: bool
    opened_first: bool
    named: bool  # the sender knows its target


ways = st.builds(Ways, pull=st.booleans(), opened_first=st.booleans(), named=st.booleans())


def cache_of(layout: kv.KVLayout, tokens: int, seed: int) -> Cache:
    """All groups have pools of one size, as an engine's."""
    needed = {group.name: pages_needed(layout, group, tokens) for group in layout.groups}
    size = max(needed.values()) + 2
    generator = torch.Generator().manual_seed(seed)
    pages = {
        name: torch.randperm(size, generator=generator)[:count].tolist()
        for name, count in needed.items()
    }
    return Cache(layout, pages, dict.fromkeys(needed, size))


def lend(cache: Cache, sides: list[Any]) -> None:
    for worker, memories in zip(sides, cache.memory, strict=True):
        for tensor, memory in zip(worker.cache.tensors, memories, strict=True):
            if memory:
                tensor.copy_(torch.frombuffer(memory, dtype=torch.uint8))


def lists(cache: Cache) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(pages, dtype=torch.int32) for name, pages in cache.pages.items()}


def send(found: Workers, transfer: Transfer, how: Ways, pages: Any, their_pages: Any) -> None:
    def reserve() -> list[kv.KVReservation]:
        return [
            each.reserve("a", "prefill", their_pages, total=transfer.tokens,
                         begin=transfer.prefix, pull=how.pull)
            for each in found.receivers
        ]  # fmt: skip

    opened = reserve() if how.opened_first else []
    target = "decode" if how.named else None
    sendings = [each.start("a", target, pages, total=transfer.tokens) for each in found.senders]
    ends = [transfer.tokens] if transfer.chunk is None else [transfer.chunk, transfer.tokens]
    for end in ends:
        for sending in sendings:
            for layer in sending.own_layers:
                sending.layer(layer, end)
    for sending in sendings:
        sending.commit()
    opened = opened or reserve()
    for reservation in opened:
        reservation.wait(DEADLINE_S)
    for sending in sendings:
        sending.wait(DEADLINE_S)
        assert sending.reusable
    for worker in (*found.senders, *found.receivers):
        assert not getattr(worker, "sendings", []), "a sending is kept"
        assert not getattr(worker, "reservations", []), "a reservation is kept"


def compare(target: Cache, receivers: list[Any], transfer: Transfer) -> None:
    """What the request has is there, and no other byte has changed, but behind the last token."""
    for rank, worker in enumerate(receivers):
        held = zip(target.layout.groups, worker.cache.tensors, target.memory[rank], strict=True)
        for group, tensor, before in held:
            state = group.kind == "state"
            page = 1 if state else target.layout.page_tokens(group)
            begin = 0 if state else transfer.prefix
            end = 1 if state else transfer.tokens
            if group.window is not None and not state:
                begin = max(begin, (end - group.window) // page * page)  # pages are sent whole
            memory = bytes(tensor.tolist())
            free = set()
            for what, at in target.each(rank, group, begin, -(-end // page) * page):
                needed = what.token < end and (
                    group.window is None or what.token >= end - group.window
                )
                if needed:
                    assert memory[at] == value_of(group.name, what), (worker.name, group.name, what)
                free.add(at)
            for at, byte in enumerate(memory[: len(before)]):
                if at not in free and byte != UNTOUCHED:
                    raise AssertionError(f"{worker.name}, {group.name}: byte {at} was overwritten")


def run(transfer: Transfer, how: Ways) -> None:
    assume(transfer.source.world_size + transfer.target.world_size <= MOST_RANKS)
    source = cache_of(transfer.source, transfer.tokens, transfer.seed)
    target = cache_of(transfer.target, transfer.tokens, transfer.seed + 1)
    source.fill({g.name: 1 if g.kind == "state" else transfer.tokens for g in source.layout.groups})
    link = dataclasses.replace(transfer.link, ring_bytes=RING_BYTES)
    sizes = tuple(next(iter(each.pool.values())) for each in (source, target))
    with workers(transfer.source, transfer.target, num_pages=sizes, link=link) as found:
        lend(source, found.senders)
        lend(target, found.receivers)
        send(found, transfer, how, lists(source), lists(target))
        compare(target, found.receivers, transfer)


@pytest.mark.timeout(3000 if CASES in os.environ else 1500)
@pytest.mark.parametrize("count", cells.few([30, 250], keep=[30]))
def test_bytes_equal_the_oracle(count: int) -> None:
    @drawn(CASES, count, suppressed=list(HealthCheck))
    @given(transfers(), ways)
    def draw(transfer: Transfer, how: Ways) -> None:
        run(transfer, how)

    draw()
