"""Deadlines of a request count from when something of it last arrived, not from when it began."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moe_p2p import InvalidArgumentError, errors, kv
from moe_p2p.integrations.kv.worker import timeouts_of
from tests.support.kv_fakes import FakeEngine, FakeNet, Link, cache_of
from tests.support.kv_workers import random_cache, some_pages, workers
from tests.support.kv_world import LAYERS, PACKED, PAGE_TOKENS, TIMEOUTS, Deal, World

WAYS = ["push", "packed", "pull"]
COUNT = 5  # pages, a chunk each


def opened(way: str) -> tuple[World, Deal]:
    world = World(link=PACKED if way == "packed" else None)
    deal = world.reserve(COUNT, pull=way == "pull")
    assert deal is not None
    messages(world)
    for rank in (0, 1):
        world.start(deal, rank)
    return world, deal


def messages(world: World) -> None:
    for link in world.links:
        for sender in (0, 1):
            while link.can_deliver(sender):
                link.deliver(sender)


def everything_moves(world: World, *, asleep: bool = False) -> None:
    """asleep: the receiver."""
    for _ in range(2 * COUNT):
        messages(world)
        while moves := world.net.moves():
            world.net.move(*moves[0])
        for worker in (*world.senders, *([] if asleep else [world.receiver])):
            worker.step()


def chunks(deal: Deal, first: int, last: int) -> None:
    for end in range(first + 1, last + 1):
        for layer in range(LAYERS):
            for sending in deal.sendings:
                assert sending is not None
                sending.layer(layer, end * PAGE_TOKENS)


def commit(deal: Deal) -> None:
    for sending in deal.sendings:
        assert sending is not None
        sending.commit()


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_goes_through_as_long_as_it_moves(way: str) -> None:
    """Nobody polls; each chunk takes nearly tail_s, and waits in a queue for nearly open_s."""
    world, deal = opened(way)
    world.clock.now += 0.95 * TIMEOUTS.open_s
    world.step()
    for at in range(COUNT):
        chunks(deal, at, at + 1)
        everything_moves(world)
        world.step()
        world.clock.now += 0.95 * TIMEOUTS.tail_s
        world.step()
        assert deal.reservation.error is None
    commit(deal)
    for _ in range(LAYERS):  # a pull reads the nonce last
        everything_moves(world)
        assert deal.reservation.error is None
        deal.reservation.done()
    assert deal.reservation.done()
    assert deal.reservation.error is None
    world.settle()
    assert deal.checked
    world.finish()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stopped_after", [1, COUNT])
def test_a_prompt_that_stops_fails_tail_s_later(way: str, stopped_after: int) -> None:
    """Also where all layers are there and the footer is not; nobody polls, pages are back."""
    world, deal = opened(way)
    chunks(deal, 0, stopped_after)
    everything_moves(world)
    world.step()
    began = world.clock.now
    while deal.reservation.error is None:
        assert world.clock.now - began <= 1.2 * TIMEOUTS.tail_s
        world.clock.now += 0.02 * TIMEOUTS.tail_s
        world.step()
    assert world.clock.now - began > TIMEOUTS.tail_s
    assert "waited 20 s in phase tail" in str(deal.reservation.error)
    everything_moves(world)
    world.step()
    assert deal.reservation.reusable
    world.finish()


@pytest.mark.parametrize("arrived", [1, COUNT])
def test_a_receiver_that_slept_looks_before_it_judges(arrived: int) -> None:
    world, deal = opened("push")
    chunks(deal, 0, arrived)
    if arrived == COUNT:
        commit(deal)
    everything_moves(world, asleep=True)
    world.clock.now += 1000
    world.receiver.step()
    assert deal.reservation.error is None
    if arrived < COUNT:
        chunks(deal, arrived, COUNT)
        commit(deal)
        everything_moves(world)
        world.clock.now += TIMEOUTS.tail_s / 2
        world.receiver.step()
    assert deal.reservation.state == "complete"  # and nobody has polled
    assert deal.reservation.reusable
    world.settle()
    assert deal.checked


def test_chunks_that_send_nothing_are_progress_too() -> None:
    """Of a window its last tokens travel alone: the receiver sees nothing of a long prompt."""
    group = kv.KVGroup("w", (0,), 1, 8, 0, page_size=2, kind="window", window=4)
    layout, net = kv.KVLayout((group,)), FakeNet()
    clock = World().clock
    made = [
        kind(
            FakeEngine(net), cache_of(layout, 0, 32), instance=name, timeouts=TIMEOUTS, clock=clock
        )
        for kind, name in ((kv.KVReceiver, "d"), (kv.KVSender, "p"))
    ]
    receiver, sender = made
    link = Link(receiver, sender)
    pages = {"w": torch.arange(16, dtype=torch.int32)}
    reservation = receiver.reserve("r", "p", pages, total=32)
    sending = sender.start("r", "d", pages, total=32)
    for end in range(4, 33, 4):
        for side in (0, 1):
            while link.can_deliver(side):
                link.deliver(side)
        clock.now += 0.9 * TIMEOUTS.tail_s
        for worker in made:
            worker.step()
        assert reservation.error is None, end
        sending.layer(0, end)
        while moves := net.moves():
            net.move(*moves[0])
    sending.commit()
    while moves := net.moves():
        net.move(*moves[0])
    assert reservation.done()
    assert reservation.error is None


@pytest.mark.parametrize("pull", [False, True])
def test_a_prompt_has_any_number_of_chunks(pull: bool) -> None:
    """More than the 64 that a footer had room for; checksums do not depend on them."""
    group = kv.KVGroup("kv", (0, 1), heads=2, k_bytes=16, v_bytes=16, page_size=2)
    ours, theirs = kv.KVLayout((group,), kv_split="layer"), kv.KVLayout((group,), tp=2)
    with workers(ours, theirs, num_pages=(100, 100)) as found:
        sender = found.senders[0]
        random_cache(sender.cache, 1)
        pages = {"kv": some_pages(100, 100, 1)}
        reservations = [
            receiver.reserve("r", "prefill", pages, total=200, pull=pull)
            for receiver in found.receivers
        ]
        sending = sender.start("r", "decode", pages, total=200)
        for end in range(2, 201, 2):
            for layer in group.layers:
                sending.layer(layer, end)
        sending.commit(b"first")
        for reservation in reservations:
            assert reservation.wait(20) == b"first"
        sending.wait(20)


def test_engines_limits_are_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timeouts_of({}, None) == kv.KVTimeouts()
    assert timeouts_of({}, 480.0) == kv.KVTimeouts(open_s=480, tail_s=480)
    monkeypatch.setenv("MOE_P2P_KV_TIMEOUTS", "tail_s=60, drain_s=1")
    assert timeouts_of({}, 300.0) == kv.KVTimeouts(open_s=300, tail_s=60, drain_s=1)
    found = timeouts_of({"tail_s": 5, "verify": "off"}, 300.0)
    assert found == kv.KVTimeouts(open_s=300, tail_s=5, drain_s=1)
    for wrong, text in (
        ("tails=3", r"tails=3.*must be like open_s"),
        ("tail_s=x", "tail_s is 'x'"),
    ):
        monkeypatch.setenv("MOE_P2P_KV_TIMEOUTS", wrong)
        with pytest.raises(InvalidArgumentError, match=text):
            timeouts_of({}, None)


def test_a_request_that_nobody_polls_is_named_with_its_chunks() -> None:
    short = kv.KVTimeouts(tail_s=0.3)
    group = kv.KVGroup("kv", (0,), heads=1, k_bytes=16, v_bytes=16, page_size=2)
    layout = kv.KVLayout((group,))
    with workers(layout, layout, timeouts=dataclasses.replace(short, open_s=20)) as found:
        pages = {"kv": some_pages(8, 32, 1)}
        reservation = found.receivers[0].reserve("r", "prefill", pages, total=16)
        sending = found.senders[0].start("r", "decode", pages, total=16)
        for end in range(2, 17, 2):  # K and V are rows of their own
            sending.layer(0, end)
        reservation.wait_reusable(20)
        text = r"in phase tail; arrived from prefill/0 16 immediates, of more than one chunk"
        with pytest.raises(errors.TimeoutError, match=text):
            reservation.wait(0)
