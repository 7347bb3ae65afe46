"""More requests than max_requests: they wait in their order, and fail by their own deadlines."""

from __future__ import annotations

import pytest
import torch

from moe_p2p import AbortedError, InvalidArgumentError, PeerDeadError, errors, kv
from tests.support.kv_fakes import Clock, FakeEngine, FakeNet, Link, cache_of

PAGES = 64
GROUP = kv.KVGroup("kv", (0, 1), heads=1, k_bytes=8, v_bytes=8, page_size=2)
LAYOUT = kv.KVLayout((GROUP,))
TIMEOUTS = kv.KVTimeouts(open_s=20, tail_s=20, drain_s=1)


class Two:
    """A receiver and a sender that take so many requests at a time."""

    def __init__(self, receives: int, sends: int) -> None:
        self.net, self.clock = FakeNet(), Clock()
        self.receiver, self.sender = (
            kind(
                FakeEngine(self.net),
                cache_of(LAYOUT, 0, PAGES),
                instance=name,
                timeouts=TIMEOUTS,
                clock=self.clock,
                max_requests=most,
            )
            for kind, name, most in ((kv.KVReceiver, "d", receives), (kv.KVSender, "p", sends))
        )
        self.link = Link(self.receiver, self.sender)
        self.reservations: list[kv.KVReservation] = []
        self.sendings: list[kv.KVSending] = []

    def begin(self, count: int, *, pull: bool = False) -> None:
        for number in range(len(self.sendings), len(self.sendings) + count):
            pages = {"kv": torch.tensor([number], dtype=torch.int32)}
            self.reservations.append(
                self.receiver.reserve(f"r{number}", "p", pages, total=2, pull=pull)
            )
            self.sender.cache.tensors[0].view(2, PAGES, -1)[:, number] = number + 1
            self.sendings.append(self.sender.start(f"r{number}", "d", pages, total=2))

    def turn(self) -> None:
        for side in (0, 1):
            while self.link.can_deliver(side):
                self.link.deliver(side)
        while moves := self.net.moves():
            self.net.move(*moves[0])
        for worker in (self.receiver, self.sender):
            worker.step()

    def send_all(self) -> None:
        for sending in self.sendings:
            for layer in (0, 1):
                sending.layer(layer)
            sending.commit()

    def check(self) -> None:
        memory = self.receiver.cache.tensors[0].view(2, PAGES, -1)
        for number, reservation in enumerate(self.reservations):
            if reservation.state == "complete":
                assert bool((memory[:, number] == number + 1).all())
        for worker in (self.receiver, self.sender):
            assert not worker.slots.num_taken
            assert not worker._waiting


@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize(("receives", "sends"), [(2, 8), (8, 2), (1, 1)])
def test_more_requests_than_slots_wait(receives: int, sends: int, pull: bool) -> None:
    two = Two(receives, sends)
    two.begin(PAGES, pull=pull)
    two.send_all()
    for _ in range(4 * PAGES):
        two.turn()
        for each in two.reservations:
            each.done()
    assert [each.state for each in two.reservations] == ["complete"] * PAGES
    assert [each.state for each in two.sendings] == ["complete"] * PAGES
    two.check()


def test_a_request_that_waits_in_vain_names_what_it_waits_for() -> None:
    two = Two(1, 1)
    two.begin(2)
    two.turn()
    two.clock.now += TIMEOUTS.open_s + 1
    two.turn()
    with pytest.raises(errors.TimeoutError, match=r"phase open; max_requests=1 are under way"):
        two.reservations[1].wait(0)
    for _ in range(4):
        two.turn()
    assert all(each.reusable for each in (*two.reservations, *two.sendings))
    two.check()


@pytest.mark.parametrize(("receives", "sends"), [(1, 8), (8, 1)])
@pytest.mark.parametrize("side", ["receiver", "sender"])
def test_a_request_that_waits_is_cancelled(receives: int, sends: int, side: str) -> None:
    two = Two(receives, sends)
    two.begin(3)
    two.turn()
    (two.reservations if side == "receiver" else two.sendings)[1].cancel("the user left")
    for number in (0, 2):
        for layer in (0, 1):
            two.sendings[number].layer(layer)
        two.sendings[number].commit()
    for _ in range(12):
        two.turn()
        for each in two.reservations:
            each.done()
    assert [each.state for each in two.reservations] == ["complete", "failed", "complete"]
    with pytest.raises(AbortedError, match="the user left"):
        two.reservations[1].wait(0)
    assert two.reservations[1].reusable
    two.clock.now += TIMEOUTS.open_s + 1  # of a request that its receiver never opened
    two.turn()
    assert two.sendings[1].reusable
    two.check()


@pytest.mark.parametrize(("receives", "sends"), [(1, 8), (8, 1)])
def test_a_lost_pair_fails_those_that_wait(receives: int, sends: int) -> None:
    two = Two(receives, sends)
    two.begin(3)
    two.turn()
    for pair in two.receiver.pairs.copy().values():
        two.receiver.lose(pair, "it ended")
    for pair in two.sender.pairs.copy().values():
        two.sender.lose(pair, "it ended")
    for _ in range(3):
        two.turn()
    for each in (*two.reservations, *two.sendings):
        assert isinstance(each.error, PeerDeadError)
        assert each.reusable
    two.check()


def test_a_name_that_waits_is_taken() -> None:
    two = Two(1, 1)
    two.begin(2)
    pages = {"kv": torch.tensor([9], dtype=torch.int32)}
    with pytest.raises(InvalidArgumentError, match=r"'r1' is reserved; a retry takes another"):
        two.receiver.reserve("r1", "p", pages, total=2)
