"""A receiver leaves as soon as it has all bytes, a sender as soon as it knows that: the other side
says complete, not lost."""

from __future__ import annotations

import queue
import time
from typing import Any

import pytest
import torch

from moe_p2p import PeerDeadError, kv
from moe_p2p.kv import channel
from tests.kv.test_kv_slots import Two
from tests.support.kv_workers import workers

GROUP = kv.KVGroup("kv", (0, 1), heads=1, k_bytes=8, v_bytes=8, page_size=2)
LAYOUT = kv.KVLayout((GROUP,))


def leave(two: Two, *, landed: bool) -> kv.KVSending:
    """All was posted, and the receiver leaves; no write has ended at the sender."""
    two.begin(1)
    while any(two.link.can_deliver(side) for side in (0, 1)):
        two.link.deliver(int(two.link.can_deliver(1)))
    two.send_all()
    while moves := [m for m in two.net.moves() if landed and m[0] != "complete"]:
        two.net.move(*moves[0])
    assert two.reservations[0].done() == landed
    for pair in list(two.receiver.pairs.values()):
        two.receiver.lose(pair, "this worker leaves")
    two.link.deliver(0)
    assert not two.sender.pairs
    return two.sendings[0]


def test_writes_that_ended_before_the_fence_count() -> None:
    two = Two(1, 1)
    sending = leave(two, landed=True)
    two.sender.step()
    assert not sending.done()
    while moves := two.net.moves():
        two.net.move(*moves[0])
    sending.wait(0)
    assert sending.reusable


@pytest.mark.parametrize("landed", [False, True])
def test_writes_that_did_not_end_fail_by_the_name_of_the_lost(landed: bool) -> None:
    two = Two(1, 1)
    sending = leave(two, landed=landed)
    two.clock.now += 0.9  # of drain_s, 1
    two.sender.step()
    assert not sending.done()
    two.clock.now += 0.2
    two.sender.step()
    with pytest.raises(PeerDeadError, match="lost d/0: its connection ended"):
        sending.wait(0)
    assert sending.reusable


class Late(queue.SimpleQueue[Any]):
    """What is sent leaves a moment later."""

    def get(self, *args: Any) -> Any:
        got = super().get(*args)
        time.sleep(0.02)
        return got


def test_the_last_word_of_a_pull_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel.queue, "SimpleQueue", Late)
    pages = {"kv": torch.arange(8, dtype=torch.int32)}
    with workers(LAYOUT, LAYOUT) as found:
        sender, receiver = found.senders[0], found.receivers[0]
        reservation = receiver.reserve("r", "prefill", pages, total=16, pull=True)
        sending = sender.start("r", "decode", pages, total=16)
        for layer in GROUP.layers:
            sending.layer(layer)
        sending.commit()
        reservation.wait(20)
        found.keepers["decode/0"].close()
        sending.wait(20)


def sender_leaves(two: Two, *, landed: bool) -> kv.KVReservation:
    """All was committed, and the sender leaves; the receiver has looked at nothing of it.
    landed: all of it has come. Else all but an immediate, which its NIC has not reported yet."""
    two.begin(1)
    while any(two.link.can_deliver(side) for side in (0, 1)):
        two.link.deliver(int(two.link.can_deliver(1)))
    two.send_all()
    late = None if landed else ("imm", two.net.operations[0], None)
    while moves := [m for m in two.net.moves() if m[0] != "complete" and m != late]:
        two.net.move(*moves[0])
    for pair in list(two.sender.pairs.values()):
        two.sender.lose(pair, "this worker leaves")
    two.link.deliver(1)
    assert not two.receiver.pairs
    return two.reservations[0]


@pytest.mark.parametrize("landed", [True, False])
def test_bytes_of_a_sender_that_left_count(landed: bool) -> None:
    two = Two(1, 1)
    reservation = sender_leaves(two, landed=landed)
    two.turn()
    assert reservation.wait(0) == b""
    two.clock.now += 2.0
    two.turn()
    assert reservation.reusable
    two.check()


def test_bytes_that_do_not_come_before_the_fence_fail_by_the_name_of_the_lost() -> None:
    two = Two(1, 1)
    reservation = sender_leaves(two, landed=False)
    two.clock.now += 0.9  # of drain_s, 1
    two.receiver.step()
    assert not reservation.done()
    two.clock.now += 0.2
    two.receiver.step()
    with pytest.raises(PeerDeadError, match="lost p/0: its connection ended"):
        reservation.wait(0)
    assert reservation.reusable
