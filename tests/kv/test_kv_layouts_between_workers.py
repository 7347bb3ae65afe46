"""Requests between workers whose layouts leave ranks, or layers of a rank, without anything to
send: each request ends with right bytes, and one that cannot be sent ends alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_p2p import AbortedError, ProtocolError, kv
from moe_p2p.kv.receiver_transfer import ReceiverTransfer
from tests.support.kv_workers import random_cache, some_pages, workers

GQA = kv.KVGroup("kv", (0, 1, 2, 3), heads=4, k_bytes=16, v_bytes=16, page_size=4)
MLA = kv.KVGroup("latent", (0, 2), heads=1, k_bytes=64, v_bytes=0, page_size=4)
ONE = kv.KVGroup("kv", (0,), heads=1, k_bytes=32, v_bytes=32, page_size=4)
STATE = kv.KVGroup("state", (1, 3), heads=4, k_bytes=32, v_bytes=0, page_size=1, kind="state")
LAYOUTS = {
    "decode pp": (kv.KVLayout((GQA,)), kv.KVLayout((GQA,), pp=2)),
    "both pp": (kv.KVLayout((GQA,), pp=2), kv.KVLayout((GQA,), pp=2)),
    "prefill pp, decode tp": (kv.KVLayout((GQA,), pp=2), kv.KVLayout((GQA,), tp=2)),
    "hybrid, decode dcp": (kv.KVLayout((MLA, STATE)), kv.KVLayout((MLA, STATE), tp=2, dcp=2)),
    "an idle stage": (
        kv.KVLayout((ONE,), pp=2, stages=(1, 1)),
        kv.KVLayout((ONE,)),
    ),
    "an idle stage of decode": (
        kv.KVLayout((ONE,)),
        kv.KVLayout((ONE,), pp=2, stages=(1, 1)),
    ),
    "hybrid, both tp": (
        kv.KVLayout((MLA, STATE), tp=2),
        kv.KVLayout((MLA, STATE), tp=4, dcp=2),
    ),
}


def pages_of(layout: kv.KVLayout, seed: int) -> dict[str, torch.Tensor]:
    return {group.name: some_pages(5, 32, seed) for group in layout.groups}


@pytest.mark.parametrize("named", [True, False], ids=["named target", "any target"])
@pytest.mark.parametrize("early", [True, False], ids=["opened first", "started first"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_gets_its_bytes(name: str, early: bool, named: bool) -> None:
    """Bytes are checked by sums (verify="always"); chunks of other sizes on the way."""
    prefill, decode = LAYOUTS[name]
    with workers(prefill, decode) as found:
        for rank, sender in enumerate(found.senders):
            random_cache(
                sender.cache, 1 if MLA in prefill.groups else rank
            )  # a latent is everywhere

        def reserve() -> list[kv.KVReservation]:
            pages = pages_of(decode, 2)
            return [each.reserve("a", "prefill", pages, total=18) for each in found.receivers]

        opened = reserve() if early else []
        target = "decode" if named else None
        sendings = [s.start("a", target, pages_of(prefill, 1), total=18) for s in found.senders]
        for end in (8, 18):
            for sending in sendings:
                for layer in sending.own_layers:
                    sending.layer(layer, end)
        for sending in sendings:
            sending.commit()
        for reservation in opened or reserve():
            reservation.wait(20)
        for sender, sending in zip(found.senders, sendings, strict=True):
            sending.wait(20)
            assert sending.reusable
            assert sending.layers == sorted({n for p in sender.pairs.values() for n in p.layers})


def test_a_request_that_cannot_be_opened_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = kv.KVLayout((GQA,))
    rows_of = ReceiverTransfer._rows_of

    def wrong(self: ReceiverTransfer, opened: Any, pages: Any) -> Any:
        if opened.request == "bad":
            raise KeyError(7)  # in the thread that reads messages
        return rows_of(self, opened, pages)

    monkeypatch.setattr(ReceiverTransfer, "_rows_of", wrong)
    with workers(layout, layout) as found:
        sender, receiver = found.senders[0], found.receivers[0]
        pair = receiver.pairs["prefill/0"]
        sendings, reservations = {}, {}
        for at, name in enumerate(("bad", "good")):
            sendings[name] = sender.start(name, "decode", {"kv": some_pages(5, 32, at)}, total=18)
            pages = {"kv": some_pages(5, 16, at) + 16 * at}
            reservations[name] = receiver.reserve(name, "prefill", pages, total=18)
        with pytest.raises(ProtocolError, match=r"request 'bad': cannot be sent .*KeyError\(7\)"):
            sendings["bad"].wait(20)
        for layer in GQA.layers:
            sendings["good"].layer(layer)
        sendings["good"].commit()
        reservations["good"].wait(20)
        with pytest.raises(AbortedError, match="prefill/0 gave up"):
            reservations["bad"].wait(20)
        assert receiver.pairs["prefill/0"] is pair
        reservations["bad"].wait_reusable(20)
