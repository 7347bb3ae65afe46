"""Requests whose receiver is not known: opened later, declined, given up, never opened."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import pytest
import torch

from moe_p2p import AbortedError, errors, kv
from tests.support.kv_workers import QUICK, random_cache, some_pages, workers

LAYERS = 3
GROUP = kv.KVGroup("kv", tuple(range(LAYERS)), heads=4, k_bytes=16, v_bytes=16, page_size=4)
SAME = kv.KVLayout((GROUP,))
WIDE = SAME.replace(tp=2)
PAGES = {"kv": torch.arange(5, dtype=torch.int32)}


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("early", [False, True], ids=["opened later", "opened before"])
def test_a_request_goes_to_whoever_opens_it(early: bool) -> None:
    """To all ranks of the instance, though their messages come one after the other."""
    with workers(SAME, WIDE) as found:
        sender = found.senders[0]
        random_cache(sender.cache, 1)
        theirs = {"kv": some_pages(5, 32, 2)}

        def reserve() -> list[kv.KVReservation]:
            return [r.reserve("a", "prefill", theirs, total=18, begin=4) for r in found.receivers]

        opened = reserve() if early else []
        if early:
            wait_until(lambda: sender.begin_of("a") == 4)
        sending = sender.start("a", None, {"kv": PAGES["kv"][:2]}, total=18)
        for layer in range(LAYERS):
            sending.layer(layer, 8)
        sending.add_pages(PAGES)
        for layer in range(LAYERS):
            sending.layer(layer, 18)
        sending.commit()
        assert early or not sending.done()
        for reservation in opened or reserve():
            reservation.wait(20)  # bytes are checked
        sending.wait(20)
        assert len(sending.transfers) == 2
        assert sender.begin_of("a") is None


def test_a_declined_request_frees_its_pages_whenever_it_begins() -> None:
    with workers(SAME, SAME) as found:
        sender, receiver = found.senders[0], found.receivers[0]
        sending = sender.start("a", None, PAGES, total=18)
        receiver.decline("a", "prefill", "no room")
        with pytest.raises(AbortedError, match=r"request 'a': decode/0 declines it: no room"):
            sending.wait(20)
        assert sending.reusable
        receiver.decline("b", "prefill", "no room")
        late = sender.start("c", "decode", PAGES, total=18)
        receiver.decline("c", "prefill", "no room")
        with pytest.raises(AbortedError, match="declines it"):
            late.wait(20)  # so the message before it has come too
        before = sender.start("b", None, PAGES, total=18)
        with pytest.raises(AbortedError, match=r"request 'b': decode/0 declines it"):
            before.wait(20)
        assert not sender.sendings


@pytest.mark.parametrize("opened_first", [False, True])
@pytest.mark.parametrize("started", [False, True])
def test_what_was_given_up_is_said_to_whoever_opens_it(opened_first: bool, started: bool) -> None:
    with workers(SAME, SAME) as found:
        sender, receiver = found.senders[0], found.receivers[0]
        reservation = None
        if opened_first:
            reservation = receiver.reserve("a", "prefill", PAGES, total=18)
            wait_until(lambda: sender.begin_of("a") == 0)
        if started:
            sender.start("a", None, PAGES, total=18).cancel("aborted by its user")
        else:
            sender.give_up("a", "aborted by its user")
        reservation = reservation or receiver.reserve("a", "prefill", PAGES, total=18)
        with pytest.raises(AbortedError, match=r"prefill/0 gave up: .*aborted by its user"):
            reservation.wait(20)
        reservation.wait_reusable(20)


def test_pages_that_nobody_asks_for_come_back_after_open_s_from_commit_on() -> None:
    short = dataclasses.replace(QUICK, open_s=0.3)
    with workers(SAME, SAME, timeouts=short) as found:
        sender = found.senders[0]
        sending = sender.start("a", None, PAGES, total=18)
        time.sleep(0.5)  # a long prefill: the deadline does not count it
        for layer in range(LAYERS):
            sending.layer(layer)
        sending.commit()
        with pytest.raises(errors.TimeoutError, match=r"0.3 s in phase open for any receiver"):
            sending.wait(20)
        assert sending.reusable


@pytest.mark.parametrize("target", ["decode", None])
def test_what_a_receiver_gave_up_before_it_began_ends_at_once(target: str | None) -> None:
    """Unless it was opened anew."""
    with workers(SAME, SAME) as found:
        sender, receiver = found.senders[0], found.receivers[0]
        for request in ("a", "b"):
            reservation = receiver.reserve(request, "prefill", PAGES, total=18)
            reservation.cancel("its user left")
            reservation.wait_reusable(20)  # so the sender has heard
        sending = sender.start("a", target, PAGES, total=18)
        with pytest.raises(AbortedError, match=r"request 'a': .*its user left"):
            sending.wait(1)
        assert sending.reusable
        again = receiver.reserve("b", "prefill", PAGES, total=18)
        wait_until(lambda: sender.begin_of("b") == 0)
        sending = sender.start("b", target, PAGES, total=18)
        for layer in range(LAYERS):
            sending.layer(layer)
        sending.commit()
        again.wait(20)
        sending.wait(20)
