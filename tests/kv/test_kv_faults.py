"""One order of events for each part of the protocol that is there because of it.

Each passes as it stands, and breaks a promise where that part is left out.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moe_p2p import kv
from moe_p2p.kv.ring import HEADER_BYTES
from tests.support.kv_mutations import MUTATIONS, mutated
from tests.support.kv_world import LAYERS, PACKED, TIMEOUTS, Deal, FaultError, World

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
    for _ in range(2 if world.link else 0):
        messages(world)  # packed rows ask for parts of the ring, and get them


def post_all(world: World) -> None:
    for move in world.net.moves():
        if move[0] == "post":
            world.net.move(*move)


def a_write_comes_after_the_fence(world: World) -> None:
    """Prefill is stopped with posted writes; the pages go to the next request when it is fenced."""
    deal = opened(world)
    send(world, deal, LAYERS)
    post_all(world)
    world.stopped = [True, True]
    deal.reservation.cancel()
    world.clock.now += TIMEOUTS.drain_s
    world.step()
    assert deal.reservation.reusable
    world.settle()
    everything_lands(world)  # its rows, late, into pages that are free


def a_write_comes_while_it_drains(world: World) -> None:
    deal = opened(world)
    send(world, deal, LAYERS)
    post_all(world)
    deal.reservation.cancel()
    world.settle()
    everything_lands(world)


def immediates_come_after_their_request(world: World) -> None:
    """Counts of a cancelled request are not counts of the next one in its slot."""
    late = opened(world)
    send(world, late, LAYERS)
    everything_lands(world, without="imm")
    late.reservation.cancel()
    messages(world)
    world.step()
    messages(world)
    assert late.reservation.reusable
    between = opened(world)  # takes the other slots
    between.reservation.cancel()
    messages(world)
    assert between.reservation.reusable
    world.settle()
    deal = opened(world)
    send(world, deal)
    for move in world.net.moves():  # the tail comes first, and with it all late immediates
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


def the_tail_is_of_an_earlier_request(world: World) -> None:
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
    late = opened(world)
    send(world, late, 1)
    everything_lands(world, without="imm")
    late.reservation.cancel()
    messages(world)
    world.step()
    messages(world)
    assert late.reservation.reusable
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


SCENARIOS: dict[str, Callable[[World], None]] = {
    "no fence": a_write_comes_after_the_fence,
    "no nonce": the_tail_is_of_an_earlier_request,
    "no epoch": immediates_come_after_their_request,
    "reuse before drain": a_write_comes_while_it_drains,
}
PACKED_SCENARIOS = {  # the same for parts of the ring
    "no fence": a_write_comes_after_the_fence,
    "no epoch": an_immediate_of_a_ring_part_comes_late,
    "reuse before drain": a_write_comes_while_it_drains,
    "reuse before scatter": a_part_is_written_before_it_was_scattered,
}
ALL = [(name, None) for name in SCENARIOS] + [(name, PACKED) for name in PACKED_SCENARIOS]


def test_there_is_a_scenario_for_each() -> None:
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
        scenario(World(link=link))
