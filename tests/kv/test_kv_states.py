"""The protocol over a network where everything happens that may: each step drawn by hypothesis.

40 runs of up to 120 steps, the same ones each time. More, and others each time:

    MOE_P2P_KV_RUNS=3000 python -m pytest tests/kv/test_kv_states.py --timeout 1200
"""

from __future__ import annotations

import random

import pytest

pytest.importorskip("hypothesis", reason="hypothesis is missing: pip install hypothesis")

from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from moe_p2p import kv
from tests.support.drawn import drawn
from tests.support.kv_world import PACKED, Deal, World

SETTINGS = drawn("MOE_P2P_KV_RUNS", 40, suppressed=list(HealthCheck), stateful_step_count=120)
RANKS = st.integers(0, 1)
ANY = st.integers(0, 1 << 20)


class Machine(RuleBasedStateMachine):
    link: kv.KVLink | None = None
    fence = "key"

    def __init__(self) -> None:
        super().__init__()
        self.world = World(link=self.link, fence=self.fence)

    def _pick(self, at: int) -> Deal | None:
        deals = self.world.deals
        return deals[at % len(deals)] if deals else None

    @rule(count=st.integers(1, 3), pull=st.booleans(), again=st.booleans())
    def reserve(self, count: int, pull: bool, again: bool) -> None:
        self.world.call(lambda: self.world.reserve(count, pull=pull, reuse=again))

    @rule(at=ANY, ranks=st.sampled_from([(0,), (1,), (0, 1)]))
    def work(self, at: int, ranks: tuple[int, ...]) -> None:
        for deal in [self._pick(at)] if at % 2 else list(self.world.deals):
            for rank in ranks if deal else ():
                self.world.call(self.world.start, deal, rank)
                for _ in range(1 + at % 3):
                    self.world.call(self.world.layer, deal, rank)

    @rule(which=st.lists(ANY, min_size=1, max_size=12))
    def network(self, which: list[int]) -> None:
        for at in which:
            moves = self.world.net.moves()
            if moves:
                self.world.net.move(*moves[at % len(moves)])

    @rule(rank=RANKS, sender=RANKS, count=st.integers(1, 4), old=st.booleans())
    def deliver(self, rank: int, sender: int, count: int, old: bool) -> None:
        world = self.world
        link = world.links[rank]
        if old and world.old_links:
            link = world.old_links[rank % len(world.old_links)]
        if sender == 0 and world.stopped[rank]:
            return
        for _ in range(count):
            if link.can_deliver(sender):
                link.deliver(sender)

    @rule(seed=ANY)
    def calm(self, seed: int) -> None:
        """All messages arrive, and all that the network can do is done."""
        world, chance = self.world, random.Random(seed)
        for rank, link in enumerate(world.links):
            for sender in (0, 1):
                while link.can_deliver(sender) and not (sender == 0 and world.stopped[rank]):
                    link.deliver(sender)
        while moves := world.net.moves():
            world.net.move(*chance.choice(moves))

    @rule(at=ANY)
    def cancel_at_decode(self, at: int) -> None:
        if deal := self._pick(at):
            deal.reservation.cancel()

    @rule(at=ANY, rank=RANKS)
    def cancel_at_prefill(self, at: int, rank: int) -> None:
        deal = self._pick(at)
        if deal and (sending := deal.sendings[rank]):
            sending.cancel()

    @rule(seconds=st.sampled_from([0.1, 0.1, 0.6, 1.1, 25.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.clock.now += seconds
        self.world.step()

    @rule(rank=RANKS, rarely=ANY)
    def stop(self, rank: int, rarely: int) -> None:
        if rarely % 3 and not self.world.stopped[rank]:
            return
        self.world.stopped[rank] = not self.world.stopped[rank]

    @rule(rank=RANKS, rarely=ANY)
    def kill(self, rank: int, rarely: int) -> None:
        if rarely % 4:
            return
        self.world.kill(rank)

    @rule(rank=RANKS)
    def connect(self, rank: int) -> None:
        for each in (rank, 1 - rank):
            self.world.call(self.world.connect, each)

    @invariant()
    def users_take_pages_back(self) -> None:
        self.world.settle()

    def teardown(self) -> None:
        self.world.finish()


class PackedMachine(Machine):
    link = PACKED


class QueuePairMachine(Machine):
    fence = "queue_pair"


@pytest.mark.parametrize("machine", [Machine, PackedMachine, QueuePairMachine])
def test_no_order_of_events_breaks_a_promise(machine: type[Machine]) -> None:
    run_state_machine_as_test(machine, settings=SETTINGS)  # type: ignore[no-untyped-call]
