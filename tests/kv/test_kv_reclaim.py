"""Pages come back in bounded time, and only when no write can land in them any more."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from moe_p2p import PeerDeadError, RemoteAccessError, errors, kv
from moe_p2p.kv.channel import Message
from moe_p2p.kv.pair import Pair
from tests.support.kv_mutations import mutated
from tests.support.kv_workers import PACKED, QUICK, Workers, random_cache, some_pages, workers

LAYERS = 3
GROUP = kv.KVGroup("kv", tuple(range(LAYERS)), heads=4, k_bytes=16, v_bytes=16, page_size=4)
LAYOUT, TURNED = kv.KVLayout((GROUP,)), kv.KVLayout((GROUP,), "HND")  # rows of 16 B between them
PAGES = {"kv": some_pages(4, 32, 1)}
LATE_US = 800_000  # of every write: later than drain_s
FREE = 0xCC


class StoppedSender(kv.KVSender):
    """Its process is stopped: it hears nothing. Its NIC goes on with what was posted."""

    stopped = False

    def on_message(self, pair: Pair, message: Message) -> None:
        if not self.stopped:
            super().on_message(pair, message)

    def _lose(self, pair: Pair, why: str) -> None:
        if not self.stopped:
            super()._lose(pair, why)

    def step(self) -> float:
        return 0.01 if self.stopped else super().step()


def late_writes(*, fenced: bool, link: kv.KVLink | None = None) -> None:
    """Cancels while writes are on their way, gives pages away, and looks when they have come."""
    with workers(
        LAYOUT,
        TURNED if link else LAYOUT,
        settings=f"latency_us={LATE_US}",
        kinds=(StoppedSender, kv.KVReceiver),
        link=link,
    ) as found:
        sender, receiver = found.senders[0], found.receivers[0]
        random_cache(sender.cache, 1)
        reservation = receiver.reserve("r", "prefill", PAGES, total=16)
        sending = sender.start("r", "decode", PAGES, total=16)
        while sending.transfers[0].state != "open":
            time.sleep(0.001)
        for layer in range(LAYERS):
            sending.layer(layer)
        while link and not sending.transfers[0].requests:
            time.sleep(0.001)  # until parts of the ring are granted
        assert bool(sending.transfers[0].packed_writes) == bool(link)
        sender.stopped = True
        requests = sending.transfers[0].requests.copy()
        sending.transfers[0].requests.clear()  # waited for here
        began = time.monotonic()
        reservation.cancel()
        reservation.wait_reusable(20)
        took = time.monotonic() - began
        view = receiver.cache.tensors[0].view(LAYERS, 32, -1)[:, PAGES["kv"].long()]
        receiver.cache.tensors[0].fill_(FREE)
        receiver.ring.tensor.fill_(FREE)
        for request in requests:
            if fenced:
                with pytest.raises(RemoteAccessError):
                    request.wait(20)
            else:
                request.wait(20)
        view = receiver.cache.tensors[0].view(LAYERS, 32, -1)[:, PAGES["kv"].long()]
        assert bool((view == FREE).all()), "a write landed in pages that were free"
        assert bool((receiver.ring.tensor == FREE).all()), "a write landed in a ring part"
        assert took >= QUICK.drain_s
        sender.stopped = False


@pytest.mark.parametrize("link", [None, PACKED], ids=["direct", "packed"])
def test_a_write_that_comes_after_the_fence_is_refused(link: kv.KVLink | None) -> None:
    late_writes(fenced=True, link=link)


@pytest.mark.parametrize(
    ("link", "where"), [(None, "pages that were free"), (PACKED, "a ring part")]
)
def test_without_the_fence_it_lands_in_memory_of_somebody_else(
    link: kv.KVLink | None, where: str
) -> None:
    """On a busy machine a write may come before the memory is anybody else's: it is tried again."""

    def ten_times() -> None:
        for _ in range(10):
            late_writes(fenced=False, link=link)

    with mutated("no fence"), pytest.raises(AssertionError, match=f"landed in {where}"):
        ten_times()


def some_requests(found: Workers, sender: int) -> tuple[kv.KVReservation, kv.KVSending]:
    names = [each.worker.instance for each in found.senders]
    reservation = found.receivers[0].reserve(f"r{sender}", names[sender], PAGES, total=16)
    return reservation, found.senders[sender].start(f"r{sender}", "decode", PAGES, total=16)


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_a_healthy_cancel_takes_a_round_trip(side: str) -> None:
    """Not drain_s: the best of five, since other tests take the CPU."""
    best = float("inf")
    slow = kv.KVTimeouts(drain_s=20, lease_s=20)
    with workers(LAYOUT, LAYOUT, settings="", timeouts=slow) as found:
        for _ in range(5):
            reservation, sending = some_requests(found, 0)
            sending.layer(0)
            ends: list[Any] = [reservation, sending]
            began = time.monotonic()
            (ends[0] if side == "decode" else ends[1]).cancel()
            (ends[0] if side == "decode" else ends[1]).wait_reusable(10)
            best = min(best, time.monotonic() - began)
            for each in ends:
                each.wait_reusable(10)
    assert best < 2


def test_other_requests_of_the_pair_fail_by_name_and_it_connects_anew() -> None:
    with workers(LAYOUT, LAYOUT, kinds=(StoppedSender, kv.KVReceiver)) as found:
        sender, receiver = found.senders[0], found.receivers[0]
        pages = torch.arange(8, dtype=torch.int32)
        first = receiver.reserve("first", "prefill", {"kv": pages[:4]}, total=16)
        other = receiver.reserve("other", "prefill", {"kv": pages[4:]}, total=16)
        before = receiver.pairs["prefill/0"]
        sender.stopped = True
        first.cancel()
        with pytest.raises(
            PeerDeadError,
            match=r"request 'other', .* lost prefill/0: it did not drain request 'first' within",
        ):
            other.wait(20)
        for each in (first, other):
            each.wait_reusable(20)
        sender.stopped = False
        for pair in list(sender.pairs.values()):  # as it notices when it goes on
            sender.lose(pair, "its connection ended")
        deadline = time.monotonic() + 20
        while receiver.pairs.get("prefill/0") in (None, before) or not sender.pairs:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        again = receiver.reserve("again", "prefill", {"kv": pages[:4]}, total=16)
        sending = sender.start("again", "decode", {"kv": pages[:4]}, total=16)
        for layer in range(LAYERS):
            sending.layer(layer)
        sending.commit()
        again.wait(20)
        sending.wait(20)


@pytest.mark.parametrize(
    "error",
    [errors.make(errors.TimeoutError, "a peer may still answer a read"), OSError("of a library")],
)
def test_pages_that_cannot_be_fenced_stay_held(error: Exception) -> None:
    """The NIC cannot take a read back yet, say: the next look tries again."""
    tries = []

    class Receiver(kv.KVReceiver):
        def fence(self, pair: Pair) -> None:
            tries.append(pair)
            if len(tries) < 3:
                raise error
            super().fence(pair)

    with workers(LAYOUT, LAYOUT, kinds=(StoppedSender, Receiver)) as found:
        found.senders[0].stopped = True
        reservation = found.receivers[0].reserve("r", "prefill", PAGES, total=16)
        reservation.cancel()
        reservation.wait_reusable(20)
        assert len(tries) == 3
        found.senders[0].stopped = False
