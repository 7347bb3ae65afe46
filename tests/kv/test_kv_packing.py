"""Packed rows between workers: who gets parts of the ring, what is refused, what errors say."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch

from moe_p2p import InvalidArgumentError, errors, kv
from moe_p2p.kv.channel import Message
from moe_p2p.kv.footer import Slots
from moe_p2p.kv.ring import HEADER_BYTES, Ring
from moe_p2p.kv.worker import SLOW_S
from tests.support.kv_fakes import FakeCopier, FakeEngine, FakeNet, Link, cache_of
from tests.support.kv_workers import (
    IN_PAIRS,
    PACKED,
    QUICK,
    random_cache,
    some_pages,
    workers,
)
from tests.support.kv_world import DECODE, PAGES, PREFILL, Deal, World
from tests.support.kv_world import PACKED as IN_WORLD

LAYERS = 3
GROUP = kv.KVGroup("kv", tuple(range(LAYERS)), heads=4, k_bytes=16, v_bytes=16, page_size=4)
LAYOUT = kv.KVLayout((GROUP,))
TURNED = kv.KVLayout((GROUP,), "HND")
ALL = {"kv": some_pages(30, 32, 1)}


def test_a_link_decides_which_rows_are_packed_and_which_land() -> None:
    rate = kv.KVLink("test", 1e9, 1e7, packed_write_bytes=1000)  # 100 B
    assert rate.why_packed(99)
    assert not rate.why_packed(100)
    always = dataclasses.replace(rate, pack=True)
    assert "because pack is True" in always.why_packed(1000)
    assert not always.why_packed(1001)
    assert not dataclasses.replace(rate, pack=False).why_packed(1)
    moves = {
        size: kv.kv_plan(LAYOUT, TURNED, link=dataclasses.replace(rate, writes_per_s=1e9 / size))
        for size in (64, 65)
    }  # 4 tokens of a head are 64 B in HND pages
    assert all(move.lands and move.rows_per_write == 60 for move in moves[64].moves)
    assert all(not move.lands and move.rows_per_write == 62 for move in moves[65].moves)
    for field, value in (("pack", "sometimes"), ("ring_bytes", 0), ("num_sms", 1.5)):
        with pytest.raises(InvalidArgumentError, match=f"KVLink.{field} is"):
            dataclasses.replace(rate, **{field: value})
    with pytest.raises(InvalidArgumentError, match="ring_bytes is 512, must hold a packed write"):
        Ring(dataclasses.replace(rate, ring_bytes=512), torch.device("cpu"), 4)


def test_only_nics_that_are_bound_by_writes_pack_by_themselves() -> None:
    for provider, settings, pack in (
        ("verbs", "", "auto"),
        ("libfabric", "provider=efa", "auto"),
        ("libfabric", "provider=tcp", False),
        ("loopback", "", False),
    ):
        engine = FakeEngine(FakeNet())
        engine.provider, engine.opening = provider, engine.opening._replace(settings=settings)
        assert kv.link_of(engine).pack == pack


def test_sides_that_do_not_fit_are_refused_by_name() -> None:
    def meet(sends: kv.KVLink, receives: kv.KVLink) -> Link:
        net = FakeNet()
        found = [
            kind(FakeEngine(net), cache_of(layout, 0, PAGES), instance=name, link=link)
            for kind, layout, name, link in (
                (kv.KVReceiver, DECODE, "decode", receives),
                (kv.KVSender, PREFILL, "prefill", sends),
            )
        ]
        return Link(*found)

    none = dataclasses.replace(IN_WORLD, pack=False)
    with pytest.raises(InvalidArgumentError, match="decode/0 has no ring for them: its KVLink has"):
        meet(IN_WORLD, none)
    by_rate = dataclasses.replace(IN_WORLD, pack="auto")
    for sends, receives in ((by_rate, none), (none, IN_WORLD)):
        assert not any(pair.packs for pair in meet(sends, receives).pairs)
    larger = dataclasses.replace(IN_WORLD, packed_write_bytes=257, ring_bytes=1024)
    with pytest.raises(InvalidArgumentError, match="packs 257 bytes in a write, the ring of dec"):
        meet(larger, IN_WORLD)
    assert all(pair.packs for pair in meet(IN_WORLD, larger).pairs)


def test_a_sender_that_keeps_its_parts_leaves_some_to_others() -> None:
    """Rank 0 wants all and writes nothing; rank 1 is served to the end."""
    world = World(link=dataclasses.replace(IN_WORLD, ring_bytes=4 * 256))
    deal = world.reserve(3)
    assert deal is not None
    ranks = {each.pair.worker.rank: each for each in deal.reservation.transfers}
    for rank, most in ((0, 2), (1, 1)):
        message = Message("want", {"nonce": ranks[rank].nonce, "parts": [6], "most": 1})
        world.receiver.on_message(ranks[rank].pair, message)
        assert len(ranks[rank].unpacking.grants) == most
    assert world.receiver.ring.num_free == 1
    deal.reservation.cancel("enough")
    assert [len(each.unpacking.grants) for each in ranks.values()] == [
        2,
        1,
    ]  # a write may land in them
    world.finish()


def test_parts_that_are_missing_are_named() -> None:
    short = dataclasses.replace(QUICK, open_s=0.4, tail_s=0.4)
    with workers(LAYOUT, TURNED, timeouts=short, link=PACKED) as found:
        sender, receiver = found.senders[0], found.receivers[0]
        receiver.unpacker.want = lambda unpacking: None  # type: ignore[method-assign]
        reservation = receiver.reserve("r", "prefill", ALL, total=120)
        sending = sender.start("r", "decode", ALL, total=120)
        for layer in range(LAYERS):
            sending.layer(layer)
        sending.commit()
        while sending.transfers[0].state == "waiting":
            time.sleep(0.001)
        with pytest.raises(
            errors.TimeoutError,
            match=r"waited 0 s; .* packed rows from layer 0 on wait for parts of the ring of the",
        ):
            sending.wait(0)
        with pytest.raises(errors.TimeoutError, match=r"0.4 s in phase \w+; .* \(about layer 0"):
            reservation.wait(20)
        with pytest.raises(errors.AbortedError):
            sending.wait(20)
        reservation.wait_reusable(20)
        sending.wait_reusable(20)
        assert receiver.ring.num_free == receiver.ring.num_parts


@pytest.mark.parametrize("link", [PACKED, IN_PAIRS], ids=["one part", "two parts"])
def test_requests_share_a_small_ring(link: kv.KVLink) -> None:
    """Six at a time want ten times what there is; all bytes arrive, and all parts come back."""
    with workers(LAYOUT, TURNED, num_pages=(32, 32), link=link) as found:
        sender, receiver = found.senders[0], found.receivers[0]
        random_cache(sender.cache, 1)
        pages = [{"kv": part.clone()} for part in ALL["kv"].split(5)]
        reservations = [
            receiver.reserve(f"r{i}", "prefill", each, total=20) for i, each in enumerate(pages)
        ]
        sendings = [sender.start(f"r{i}", "decode", each, total=20) for i, each in enumerate(pages)]
        for layer in range(LAYERS):
            for sending in sendings:
                sending.layer(layer)
        for sending in sendings:
            sending.commit()
        for each in (*reservations, *sendings):
            each.wait(30)
        sent, got = (
            worker.cache.tensors[0].view(LAYERS, 32, -1)[:, ALL["kv"].long()]
            for worker in (sender, receiver)
        )
        tokens = sent.view(LAYERS, 30, 2, 4, 4, 16).transpose(3, 4)  # K and V, tokens, heads
        assert torch.equal(tokens.flatten(2), got)
        for worker in (sender, receiver):
            assert worker.ring.num_free == worker.ring.num_parts
        parts = len(sendings) * LAYERS * 6  # of 160 rows of 16 B, 31 in each
        written = sum(sending.transfers[0].packed_writes for sending in sendings)
        assert written == parts if link is PACKED else parts / 2 <= written < parts


def test_places_that_follow_each_other_are_taken_at_once() -> None:
    slots = Slots(6)
    assert [slot.number for slot in slots.take_run(4)] == [0, 1, 2, 3]
    last = slots.take_run(4)  # up to the end
    assert [slot.number for slot in last] == [4, 5]
    assert not slots.take_run(1)
    slots.give_back(last[1])
    assert not slots.take_run(2, least=2)
    slots.give_back(last[0])
    again = slots.take_run(2, least=2)
    assert [slot.number for slot in again] == [4, 5]
    assert all(one.imm != other.imm for one, other in zip(last, again, strict=True))
    slots.give_back_run(again)
    assert slots.num_taken == 4


def wide_world() -> tuple[World, Deal]:
    """A layer of each rank is 8 parts, a ring 32. Opened; nothing was sent."""
    world = World(link=dataclasses.replace(IN_WORLD, packed_write_bytes=8, ring_bytes=32 * 256))
    deal = world.reserve(4)
    assert deal is not None
    for rank, link in enumerate(world.links):
        world.start(deal, rank)
        link.deliver(0)
    return world, deal


def lengths(deal: Deal, rank: int) -> list[int]:
    """Of the writes that were granted to a rank."""
    mine = (each for each in deal.reservation.transfers if each.pair.worker.rank == rank)
    return [len(grant.slots) for each in mine for grant in each.unpacking.grants]


def test_a_grant_is_as_long_as_an_eighth_of_the_ring() -> None:
    """A short one at the end of a layer is not followed by short ones."""
    world, deal = wide_world()
    receiver, unpacking = world.receiver, deal.reservation.transfers[0].unpacking
    pair, nonce = unpacking.pair, unpacking.nonce
    message = Message("want", {"nonce": nonce, "parts": [5, 8, 8], "most": 4})
    receiver.on_message(pair, message)
    assert [len(grant.slots) for grant in unpacking.grants] == [4, 1, 4, 4]
    receiver.unpacker.give_back(pair, unpacking.grants.pop(1).slots)  # as if it were scattered
    receiver.unpacker.serve()
    assert [len(grant.slots) for grant in unpacking.grants] == [4, 4, 4, 4]
    assert unpacking.wants == [4]
    for bad in ([0], [3, -1]):
        message = Message("want", {"nonce": nonce, "parts": bad, "most": 4})
        with pytest.raises(InvalidArgumentError, match=r"wants .* parts of the ring"):
            receiver.on_message(pair, message)
    deal.reservation.cancel("enough")
    world.finish()


def test_rows_are_gathered_while_those_before_are_written() -> None:
    world, deal = wide_world()
    events: list[str] = []
    sender = world.senders[0]
    copier, write = sender.packer.copier, sender.engine.write

    def copy(*what: Any, gather: bool) -> Any:
        events.append("gather")
        return FakeCopier.copy(copier, *what, gather=gather)

    def noted(memory: Any, region: Any, **how: Any) -> Any:
        events.extend(["write"] if how["nbytes"] != HEADER_BYTES else [])
        return write(memory, region, **how)

    sender.packer.copier.copy = copy  # type: ignore[method-assign]
    sender.engine.write = noted
    for _ in range(2):
        world.layer(deal, 0)
    assert not events
    world.links[0].deliver(1)  # what it wants
    world.links[0].deliver(0)
    assert lengths(deal, 0) == [4, 4]
    assert events == ["gather", "gather", "write", "write"]
    world.finish()


def test_a_sender_that_waits_for_parts_does_not_look_for_them() -> None:
    """The grant starts what it can; the looks would keep Python's lock from the other threads."""
    world, deal = wide_world()
    world.layer(deal, 0)
    assert world.senders[0].step() == SLOW_S
    for sender in (1, 0):
        world.links[0].deliver(sender)
    assert deal.sendings[0] is not None
    packing = deal.sendings[0].transfers[0].packing
    assert packing is not None
    assert not packing.left
    world.finish()


def test_an_arrival_ends_the_pause_of_the_receiver() -> None:
    world, deal = wide_world()
    waits: list[tuple[int, int, float]] = []
    engine, receiver = world.receiver.engine, world.receiver
    engine.wait_imm = lambda *what: waits.append(what)
    receiver.pause(0.0)  # nothing is granted
    assert not waits
    world.layer(deal, 0)
    world.links[0].deliver(1)
    receiver.wake.clear()
    first = deal.reservation.transfers[0].unpacking.grants[0]
    receiver.pause(5.0)
    assert waits == [(first.imm, 2, 5.0)]
    receiver.wake.set()
    receiver.pause(5.0)
    assert len(waits) == 1  # somebody has woken it before
    world.finish()


def test_a_packed_write_of_another_layer_is_refused() -> None:
    with workers(LAYOUT, TURNED, link=PACKED) as found:
        sender, receiver = found.senders[0], found.receivers[0]
        for each in sender.pairs.values():
            each.requests[7] = each.requests[0]  # what the receiver does not know
        reservation = receiver.reserve("r", "prefill", ALL, total=120)
        sending = sender.start("r", "decode", ALL, total=120)
        sending.layer(7)
        with pytest.raises(errors.ProtocolError, match=r"from prefill/0: a packed write of Piece"):
            reservation.wait(20)
        reservation.wait_reusable(20)
        sending.wait_reusable(20)
