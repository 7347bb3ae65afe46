"""One order of events for each part of the protocol that is there because of it.

Each passes as it stands, and breaks a promise where that part is left out.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import HashStore

from moe_p2p import InvalidArgumentError, UnavailableError, kv
from moe_p2p.errors import TimeoutError as LateError
from moe_p2p.kv.ring import HEADER_BYTES
from tests.support.kv_fakes import FakeEngine, FakeMemory, FakeNet, FakePeer, cache_of
from tests.support.kv_mutations import MUTATIONS, QUEUE_PAIR_MUTATIONS, mutated
from tests.support.kv_world import (
    DECODE,
    LAYERS,
    PACKED,
    PAGE_TOKENS,
    PAGES,
    TIMEOUTS,
    Deal,
    FaultError,
    World,
)

RANKS = (0, 1)


def everything_lands(world: World, *, without: str = "") -> None:
    """All moves of the network but one kind."""
    while moves := [move for move in world.net.moves() if move[0] != without]:
        world.net.move(*moves[0])


def messages(world: World) -> None:
    for link in world.links:
        for sender in RANKS:
            while link.can_deliver(sender):
                link.deliver(sender)


def opened(world: World, count: int = 1, **how: bool) -> Deal:
    deal = world.reserve(count, **how)
    assert deal is not None
    messages(world)
    for rank in RANKS:
        world.start(deal, rank)
    return deal


def send(world: World, deal: Deal, calls: int = LAYERS + 1) -> None:
    for rank in RANKS:
        for _ in range(calls):
            world.layer(deal, rank)
    for _ in range(2 if world.link is PACKED else 0):
        messages(world)  # packed rows ask for parts of the ring, and get them


def post_all(world: World) -> None:
    for move in world.net.moves():
        if move[0] == "post":
            world.net.move(*move)


def cancelled_before_immediates(world: World, calls: int) -> None:
    """A request whose rows land, and which is cancelled while its immediates are on their way."""
    late = opened(world)
    send(world, late, calls)
    everything_lands(world, without="imm")
    late.reservation.cancel()
    messages(world)
    world.step()
    messages(world)
    assert late.reservation.reusable


def cancel_at_stopped_senders(world: World, deal: Deal) -> None:
    """Who do not answer; pages come back by a fence."""
    world.stopped = [True, True]
    deal.reservation.cancel()
    world.clock.now += TIMEOUTS.drain_s
    world.step()
    assert deal.reservation.reusable


def a_write_comes_after_the_fence(world: World) -> None:
    """Prefill is stopped with posted writes; the pages go to the next request when it is fenced."""
    deal = opened(world)
    send(world, deal, LAYERS)
    post_all(world)
    cancel_at_stopped_senders(world, deal)
    world.settle()
    everything_lands(world)  # its rows, late, into pages that are free


def an_accepted_write_comes_after_the_fence(world: World) -> None:
    """As above, but the receiver's NIC has taken the rows already."""
    deal = opened(world)
    send(world, deal, LAYERS)
    post_all(world)
    for move in world.net.moves():
        if move[0] == "accept":
            world.net.move(*move)
    cancel_at_stopped_senders(world, deal)
    world.settle()
    everything_lands(world)


def own_writes_come_after_the_sender_has_fenced(world: World) -> None:
    """Decode does not answer; prefill gives its pages to the next request when it has fenced."""
    deal = opened(world)
    send(world, deal, LAYERS)
    post_all(world)
    for sending in deal.sendings:
        assert sending is not None
        sending.cancel()
    world.clock.now += TIMEOUTS.drain_s
    world.step()
    for sending in deal.sendings:
        assert sending is not None
        assert sending.reusable
    world.settle()
    for rank in RANKS:
        world.fill(rank, deal.source_pages, deal.number + 1)
    everything_lands(world)


def a_write_comes_while_it_drains(world: World) -> None:
    deal = opened(world)
    send(world, deal, LAYERS)
    post_all(world)
    deal.reservation.cancel()
    world.settle()
    everything_lands(world)


def immediates_come_after_their_request(world: World) -> None:
    """Counts of a cancelled request are not counts of the next one in its slot."""
    cancelled_before_immediates(world, LAYERS)
    between = opened(world)  # takes the other slots
    between.reservation.cancel()
    messages(world)
    assert between.reservation.reusable
    world.settle()
    deal = opened(world)
    send(world, deal)
    for move in world.net.moves():  # the footer comes first, and with it all late immediates
        what, operation, row = move
        if what == "imm" or (row is not None and row.nbytes > 16):
            world.net.move(what, operation, row)
    for move in world.net.moves():
        if move[0] == "land" or move[0] == "imm":
            world.net.move(*move)
    for move in world.net.moves():
        if move[0] == "imm":
            world.net.move(*move)
    world.settle()  # complete, without its layers?


def the_footer_is_of_an_earlier_request(world: World) -> None:
    """It still lies in the row of the slot, and the count it speaks of is reached too early."""
    before = opened(world, 2)
    send(world, before)
    everything_lands(world)
    world.settle()
    assert before.checked
    between = opened(world)  # takes the other slots
    between.reservation.cancel()
    messages(world)
    world.settle()
    deal = opened(world, 2)
    for sending in deal.sendings:
        assert sending is not None
        for layer, end in ((0, 2), (1, 2), (0, 4)):  # and layer 1 of the second chunk is missing
            sending.layer(layer, end)
    everything_lands(world)
    world.settle()
    for sending in deal.sendings:
        assert sending is not None
        sending.layer(1, 4)
        sending.commit()
    everything_lands(world)
    world.settle()
    assert deal.checked


def an_immediate_of_a_ring_part_comes_late(world: World) -> None:
    """Of a cancelled request; the next one that has the part has sent its header only."""
    cancelled_before_immediates(world, 1)
    world.settle()
    old = world.net.operations.copy()
    assert old
    deal = opened(world)
    send(world, deal, 1)
    for operation in world.net.operations:
        if operation not in old and operation.rows[0].nbytes == HEADER_BYTES:
            for what in ("post", "land"):
                world.net.move(what, operation, operation.rows[0])
            world.net.move("imm", operation, None)
    for operation in old:
        if operation.imm is not None and operation.peer.engine is world.senders[0].engine:
            world.net.move("imm", operation, None)
            break
    world.settle()
    everything_lands(world)  # a scatter of what lies in the part?


def a_part_is_written_before_it_was_scattered(world: World) -> None:
    one, two = opened(world), opened(world)
    send(world, one, 1)
    everything_lands(world, without="copy")
    world.settle()
    assert world.net.copies  # its scatter has begun
    send(world, two, 1)
    everything_lands(world, without="copy")
    everything_lands(world)


def the_first_fence_fails(world: World) -> None:
    """A NIC that cannot promise it yet; meanwhile all lands that was posted."""

    def unregister(self: object) -> None:
        raise LateError("a peer may still answer a read")

    deal = opened(world)
    send(world, deal, LAYERS)
    post_all(world)
    world.stopped = [True, True]
    deal.reservation.cancel()
    world.clock.now += TIMEOUTS.drain_s
    with mock.patch.object(FakeMemory, "unregister", unregister):
        world.step()
    world.settle()
    everything_lands(world)


def a_prompt_takes_longer_than_tail_s(world: World) -> None:
    deal = opened(world, PAGES - 1)
    for end in range(1, PAGES):
        for sending in deal.sendings:
            assert sending is not None
            for layer in range(LAYERS):
                sending.layer(layer, end * PAGE_TOKENS)
        everything_lands(world)
        world.step()
        world.clock.now += 0.9 * TIMEOUTS.tail_s
        world.step()
        if deal.reservation.error is not None:
            raise FaultError(f"it moved all the time: {deal.reservation.error}")
    deal.reservation.cancel()


def lists_change_after_the_call(world: World) -> None:
    """Engines use theirs again; nobody has opened the request yet."""
    deal = world.reserve(1)
    assert deal is not None
    for rank, sender in enumerate(world.senders):
        pages = torch.tensor(deal.source_pages, dtype=torch.int32)
        deal.sendings[rank] = sender.start(
            deal.reservation.request, "decode", {"kv": pages}, total=deal.total
        )
        pages.fill_(PAGES - 1)
    messages(world)
    send(world, deal)
    everything_lands(world)
    world.settle()
    assert deal.checked


def a_worker_is_started_anew_on_another_host(world: World) -> None:
    """The one before is gone with its host: its lease is not over yet, and its connection is open.
    Nothing of the world but its network."""
    timeouts = dataclasses.replace(TIMEOUTS, lease_s=0.4, connect_s=20)
    store, many = HashStore(), 60.0
    made = [
        kind(FakeEngine(world.net), cache_of(DECODE, 0, 4), instance=name, timeouts=timeouts)
        for kind, name in ((kv.KVReceiver, "d"), (kv.KVSender, "p"), (kv.KVSender, "p"))
    ]
    receiver, looks = made[0], list[object]()
    with ExitStack() as stack:

        def begin(worker: Any) -> kv.LeaseKeeper:
            return stack.enter_context(kv.LeaseKeeper(worker, kv.TorchLeases(store, many)))

        look = kv.LeaseKeeper._look

        def counted(self: kv.LeaseKeeper, member: Any) -> None:
            look(self, member)
            looks.append(self)

        stack.enter_context(mock.patch.object(kv.LeaseKeeper, "_look", counted))
        of_receiver, before = begin(receiver), begin(made[1])
        receiver.wait_for("p", 20)
        before._member._beat.stopped.set()
        pair = receiver.pairs["p/0"]
        after = begin(made[2])
        deadline = time.monotonic() + 20
        while after not in looks or looks[looks.index(after) :].count(of_receiver) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if not pair.lost:
            raise FaultError("requests go to a process that is gone")


SCENARIOS: dict[str, Callable[[World], None]] = {
    "no fence": a_write_comes_after_the_fence,
    "no nonce": the_footer_is_of_an_earlier_request,
    "no epoch": immediates_come_after_their_request,
    "reuse before drain": a_write_comes_while_it_drains,
    "fence that only polls": a_write_comes_after_the_fence,
    "free before fenced": the_first_fence_fails,
    "deadline of the whole": a_prompt_takes_longer_than_tail_s,
    "lists not copied": lists_change_after_the_call,
    "no incarnation in the record": a_worker_is_started_anew_on_another_host,
}
PACKED_SCENARIOS = {  # the same for parts of the ring
    "no fence": a_write_comes_after_the_fence,
    "no epoch": an_immediate_of_a_ring_part_comes_late,
    "reuse before drain": a_write_comes_while_it_drains,
    "reuse before scatter": a_part_is_written_before_it_was_scattered,
}
QUEUE_PAIR_SCENARIOS = {
    "no fence": [a_write_comes_after_the_fence, own_writes_come_after_the_sender_has_fenced],
    "no loop-back read": [an_accepted_write_comes_after_the_fence],
    "no reset": [a_write_comes_after_the_fence, own_writes_come_after_the_sender_has_fenced],
    "relaxed order": [an_accepted_write_comes_after_the_fence],
}
ALL = [(name, None) for name in SCENARIOS] + [(name, PACKED) for name in PACKED_SCENARIOS]


def often(scenario: Callable[[World], None], link: kv.KVLink | None) -> None:
    """Without its part a world may be lucky once: it reads a lease while that is replaced."""
    for _ in range(3):
        scenario(World(link=link))


def test_there_is_a_scenario_for_each() -> None:
    assert QUEUE_PAIR_SCENARIOS.keys() == QUEUE_PAIR_MUTATIONS.keys()
    assert SCENARIOS.keys() | PACKED_SCENARIOS.keys() == MUTATIONS.keys()


@pytest.mark.parametrize(
    ("name", "link"), ALL, ids=[f"{name}{', packed' if link else ''}" for name, link in ALL]
)
def test_a_part_is_needed(name: str, link: kv.KVLink | None) -> None:
    scenario = (PACKED_SCENARIOS if link else SCENARIOS)[name]
    world = World(link=link)
    scenario(world)
    world.finish()
    with mutated(name), pytest.raises(FaultError, match="in part|scattered" if link else None):
        often(scenario, link)


@pytest.mark.parametrize(
    ("name", "scenario"),
    [(name, each) for name, all_ in QUEUE_PAIR_SCENARIOS.items() for each in all_],
)
def test_a_part_of_the_fence_by_queue_pair_is_needed(
    name: str, scenario: Callable[[World], None]
) -> None:
    world = World(fence="queue_pair")
    scenario(world)
    assert sum(worker.totals.queue_pair for worker in (world.receiver, *world.senders))
    world.finish()
    with mutated(name, fence="queue_pair"), pytest.raises(FaultError):
        scenario(World(fence="queue_pair"))


def test_the_key_is_withdrawn_where_queue_pairs_do_not_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def sever(self: object, tag: int, memories: object, *, timeout_s: float) -> None:
        raise LateError("the queue pairs of a peer have not ended")

    with mock.patch.object(FakeEngine, "sever", sever):
        world = World(fence="queue_pair")
        deal = opened(world)
        send(world, deal, LAYERS)
        post_all(world)
        cancel_at_stopped_senders(world, deal)
        assert deal.reservation.stats.fence == "key"
        world.settle()
        everything_lands(world)
        world.finish()


@pytest.mark.parametrize("fence", ["key", "queue_pair"])
def test_a_fence_goes_on_where_a_peer_cannot_be_disconnected(fence: str) -> None:
    """The engine forgets it all the same: a second try is refused, and pages stayed held."""

    def disconnect(self: object) -> None:
        raise LateError("the engine's thread does not answer")

    world = World(fence=fence)
    deal = opened(world)
    send(world, deal, LAYERS)
    post_all(world)
    with mock.patch.object(FakePeer, "disconnect", disconnect):
        world.stopped = [True, True]
        deal.reservation.cancel()
        for _ in range(2):
            world.clock.now += TIMEOUTS.drain_s
            world.step()
    assert deal.reservation.reusable
    world.settle()
    everything_lands(world)
    world.finish()


def test_a_fence_by_queue_pair_wants_verbs() -> None:
    with pytest.raises(UnavailableError, match="is of verbs, the transport is fake"):
        kv.KVReceiver(
            FakeEngine(FakeNet()), cache_of(DECODE, 0, 4), instance="d", fence="queue_pair"
        )
    with pytest.raises(InvalidArgumentError, match="must be 'key' or 'queue_pair'"):
        kv.KVReceiver(FakeEngine(FakeNet()), cache_of(DECODE, 0, 4), instance="d", fence="none")
