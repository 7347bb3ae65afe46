"""Requests between real engines over the software NIC that reorders: bytes, chunks, errors."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch

from moe_p2p import AbortedError, InvalidArgumentError, UnavailableError, errors, kv
from tests.support.kv_oracle import Cache, value_of
from tests.support.kv_transfer import make_cache
from tests.support.kv_workers import (
    PACKED,
    QUICK,
    Workers,
    random_bytes,
    random_cache,
    some_pages,
    workers,
)

LAYERS = 3
GROUP = kv.KVGroup("kv", tuple(range(LAYERS)), heads=4, k_bytes=16, v_bytes=16, page_size=4)
LARGE = dataclasses.replace(GROUP, page_size=8)
SAME = kv.KVLayout((GROUP,))


def send(sending: kv.KVSending, ends: tuple[int, ...], layers: int = LAYERS) -> None:
    for end in ends:
        for layer in range(layers):
            sending.layer(layer, end)
    sending.commit(b"first token")


def oracle_of(found: Workers, tokens: int) -> tuple[Cache, Cache]:
    """The two sides byte by byte, the source's also put into the senders' memory."""
    layouts = found.senders[0].cache.layout, found.receivers[0].cache.layout
    source, target = (make_cache(layout, tokens, seed) for seed, layout in enumerate(layouts))
    source.fill({group.name: tokens for group in layouts[0].groups})
    for sender in found.senders:
        for tensor, data in zip(
            sender.cache.tensors, source.memory[sender.cache.rank], strict=True
        ):
            tensor[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
    return source, target


@pytest.mark.parametrize("how", ["push", "pull", "pack"])
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (SAME, SAME),
        (kv.KVLayout((GROUP,), tp=2), kv.KVLayout((LARGE,), "HND", tp=4)),
        (kv.KVLayout((GROUP,), tp=4), kv.KVLayout((LARGE,), "LBHNC", tp=1)),
        (kv.KVLayout((GROUP,), tp=1), kv.KVLayout((GROUP,), tp=8, dcp=2)),
    ],
    ids=["alike", "tp 2 to 4", "tp 4 to 1", "dcp 1 to 2"],
)
def test_bytes_equal_the_oracle(prefill: kv.KVLayout, decode: kv.KVLayout, how: str) -> None:
    pull, link = how == "pull", PACKED if how == "pack" else None
    tokens, page = 37, max(decode.page_tokens(decode.groups[0]), prefill.groups[0].page_size)
    sizes = tuple(-(-tokens // side.page_tokens(side.groups[0])) + 2 for side in (prefill, decode))
    with workers(prefill, decode, num_pages=(sizes[0], sizes[1]), link=link) as found:
        source, target = oracle_of(found, tokens)
        lists = [
            {name: torch.tensor(pages, dtype=torch.int32) for name, pages in side.pages.items()}
            for side in (source, target)
        ]
        reservations = [
            each.reserve("r", "prefill", lists[1], total=tokens, begin=page, pull=pull)
            for each in found.receivers
        ]
        sendings = [each.start("r", "decode", lists[0], total=tokens) for each in found.senders]
        for sending in sendings:
            send(sending, (page + 3, tokens))
        for reservation in reservations:
            assert reservation.wait(20) == b"first token"
        for sending in sendings:
            sending.wait(20)
            for each in sending.transfers:  # rows of layouts that are alike are too large for it
                assert bool(each.packed_writes) == each.pair.packs
                assert each.pair.packs == (how == "pack" and prefill is not decode)
        for receiver in found.receivers:
            assert not receiver.ring.slots.num_taken
            rank = receiver.cache.rank
            for number, group in enumerate(decode.groups):
                memory = receiver.cache.tensors[number]
                wanted = list(target.each(rank, group, page, tokens))
                assert wanted
                assert all(int(memory[at]) == value_of(group.name, what) for what, at in wanted)
                before = list(target.each(rank, group, 0, page))
                assert not any(int(memory[at]) for _, at in before)  # the prefix is left alone


def test_layers_may_come_before_the_receiver_has_opened() -> None:
    with workers(SAME, SAME) as found:
        sender, receiver = found.senders[0], found.receivers[0]
        random_cache(sender.cache, 1)
        ours, theirs = some_pages(5, 32, 1), some_pages(5, 32, 2)
        sending = sender.start("early", "decode", {"kv": ours}, total=18)
        send(sending, (7, 18))
        assert not sending.done()
        reservation = receiver.reserve("early", "prefill", {"kv": theirs}, total=18)
        reservation.wait(20)
        sending.wait(20)
        got, sent = (
            worker.cache.tensors[0].view(LAYERS, 32, -1)[:, pages.long()]
            for worker, pages in ((receiver, theirs), (sender, ours))
        )
        assert torch.equal(got, sent)


@pytest.mark.parametrize("way", ["push", "packed", "pull"])
def test_lists_of_pages_may_change_after_the_call(way: str) -> None:
    """Engines reuse them: bytes would land in pages that nobody has reserved."""
    link = PACKED if way == "packed" else None
    with workers(SAME, SAME, link=link) as found:
        sender, receiver = found.senders[0], found.receivers[0]
        random_cache(sender.cache, 1)
        ours, theirs = some_pages(5, 32, 1), some_pages(5, 32, 2)
        first, second = ours.clone(), theirs.clone()
        more = ours[:2].clone()
        reservation = receiver.reserve("r", "prefill", {"kv": second}, total=18, pull=way == "pull")
        second.zero_()
        sending = sender.start("r", "decode", {"kv": more}, total=18)
        more.zero_()
        sending.add_pages({"kv": first})
        first.zero_()
        send(sending, (18,))
        reservation.wait(20)
        sending.wait(20)
        got = receiver.cache.tensors[0].view(LAYERS, 32, -1)
        sent = sender.cache.tensors[0].view(LAYERS, 32, -1)
        assert torch.equal(got[:, theirs.long()], sent[:, ours.long()])
        others = sorted(set(range(32)) - set(theirs.tolist()))
        assert not got[:, others].any()


def test_pages_are_reusable_after_all_that_held_them_has_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with workers(SAME, SAME) as found:
        receiver = found.receivers[0]
        reservation = receiver.reserve("r", "prefill", {"kv": some_pages(3, 32, 1)}, total=12)
        seen: list[bool] = []
        parts = reservation.transfers[0].unpacking
        for holder, name in ((parts, "settle"), (receiver.holds, "give_back")):
            let_go = getattr(holder, name)

            def watched(*each: Any, let_go: Any = let_go) -> None:
                seen.append(reservation.reusable)
                let_go(*each)

            monkeypatch.setattr(holder, name, watched)
        reservation.cancel()
        reservation.wait_reusable(20)
        assert seen == [False, False]


def test_pages_that_are_held_are_refused_by_name() -> None:
    with workers(SAME, SAME) as found:
        receiver = found.receivers[0]
        first = receiver.reserve("first", "prefill", {"kv": some_pages(3, 32, 1)}, total=12)
        with pytest.raises(InvalidArgumentError, match=r"still held by request 'first' \(open\)"):
            receiver.reserve("second", "prefill", {"kv": some_pages(3, 32, 1)}, total=12)
        first.cancel()
        first.wait_reusable(20)
        receiver.reserve("second", "prefill", {"kv": some_pages(3, 32, 1)}, total=12).cancel()


def test_a_cancel_at_either_side_ends_both_by_name() -> None:
    freed = []
    with workers(SAME, SAME) as found:
        sender, receiver = found.senders[0], found.receivers[0]
        pages = {"kv": some_pages(4, 32, 1)}
        for pull in (False, True):
            reservation = receiver.reserve(
                "a", "prefill", pages, total=16, pull=pull, on_free=lambda: freed.append(1)
            )
            sending = sender.start("a", "decode", pages, total=16)
            sending.layer(0)
            reservation.cancel("the user left")
            with pytest.raises(AbortedError, match=r"decode/0: request 'a', .* the user left"):
                reservation.wait(20)
            reservation.wait_reusable(20)
            with pytest.raises(
                AbortedError, match=r"prefill/0: request 'a': decode/0: .*user left"
            ):
                sending.wait(20)
            sending.wait_reusable(20)
            reservation = receiver.reserve("b", "prefill", pages, total=16, pull=pull)
            sending = sender.start("b", "decode", pages, total=16)
            sending.layer(0)
            sending.cancel("preempted")
            sending.wait_reusable(20)
            with pytest.raises(AbortedError, match=r"prefill/0 gave up: .*preempted"):
                reservation.wait(20)
            reservation.wait_reusable(20)
        assert len(freed) == 2
        assert receiver.slots.num_taken == sender.slots.num_taken == 0
        assert found.engines["decode/0"].discarded_imms == 0


@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
def test_bytes_that_changed_on_the_way_fail_the_request(pull: bool) -> None:
    """A byte of the source changes after its checksum was taken."""
    with workers(SAME, SAME) as found:
        sender, receiver = found.senders[0], found.receivers[0]
        random_cache(sender.cache, 1)
        pages = {"kv": some_pages(4, 32, 1)}
        reservation = receiver.reserve("r", "prefill", pages, total=16, pull=pull)
        sending = sender.start("r", "decode", pages, total=16)
        send(sending, (16,))
        _wait_until_arrived(reservation)
        view = receiver.cache.tensors[0].view(LAYERS, 32, -1)
        view[1, int(pages["kv"][2]), 5] ^= 1
        with pytest.raises(errors.ProtocolError, match=r"checksum of layer 1 from prefill/0"):
            reservation.wait(20)
        reservation.wait_reusable(20)


def _wait_until_arrived(reservation: kv.KVReservation) -> None:
    """All bytes are there, and nobody has looked at them: poll() would."""
    transfer = reservation.transfers[0]
    deadline = time.monotonic() + 20
    receiver = reservation.receiver
    while time.monotonic() < deadline:
        with receiver.lock:
            if reservation.pull:
                reads = transfer.reads
                if transfer.footer is not None and reads and all(read.done() for read in reads):
                    return
            elif receiver.engine.imm_value(transfer.slot.imm) >= transfer.least:
                return
        time.sleep(0.001)
    raise AssertionError("nothing arrived")


def test_a_reader_notices_that_pages_were_taken_back() -> None:
    """By the nonce, and not by luck: the reads themselves succeed."""
    with workers(SAME, SAME, verify="off") as found:
        sender, receiver = found.senders[0], found.receivers[0]
        pages = {"kv": some_pages(4, 32, 1)}
        with receiver.lock:  # offers and "drained" wait
            reservation = receiver.reserve("r", "prefill", pages, total=16, pull=True)
            sending = sender.start("r", "decode", pages, total=16)
            send(sending, (16,))
            deadline = time.monotonic() + 20
            while sending.transfers[0].state != "open" or not sending.transfers[0].committed:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            sending.transfers[0].withdraw_offer()
        with pytest.raises(AbortedError, match=r"gave the pages to another request while"):
            reservation.wait(20)
        reservation.wait_reusable(20)
        sending.wait_reusable(20)


def test_deadlines_name_worker_request_phase_and_counts() -> None:
    short = dataclasses.replace(QUICK, open_s=0.3, tail_s=0.3)
    with workers(SAME, SAME, timeouts=short, settings="") as found:
        sender, receiver = found.senders[0], found.receivers[0]
        pages = {"kv": some_pages(4, 32, 1)}
        reservation = receiver.reserve("r", "prefill", pages, total=16)
        with pytest.raises(
            errors.TimeoutError,
            match=r"decode/0: request 'r', tokens 0 to 16: waited 0.3 s in phase open; arrived "
            r"from prefill/0 0 of 8 immediates \(about layer 0 of 3\)",
        ):
            reservation.wait(20)
        reservation.wait_reusable(20)
        reservation = receiver.reserve("s", "prefill", pages, total=16)
        sending = sender.start("s", "decode", pages, total=16)
        sending.layer(0)
        with pytest.raises(
            errors.TimeoutError, match=r"waited 0.3 s in phase tail; .* 2 of 8 immediates \(about"
        ):
            reservation.wait(20)
        sending = sender.start("t", "decode", pages, total=16)
        with pytest.raises(
            errors.TimeoutError,
            match=r"prefill/0: request 't': waited 0.3 s in phase open for deco",
        ):
            sending.wait(20)


def test_wrong_use_is_refused_by_name() -> None:
    with workers(SAME, SAME) as found:
        sender, receiver = found.senders[0], found.receivers[0]
        pages = {"kv": some_pages(4, 32, 1)}
        with pytest.raises(
            UnavailableError, match=r"decode/0: not connected to other/0; connected"
        ):
            receiver.reserve("r", "other", pages, total=16)
        with pytest.raises(InvalidArgumentError, match=r"needs 5 pages for 17 tokens, here are 4"):
            receiver.reserve("r", "prefill", pages, total=17)
        with pytest.raises(InvalidArgumentError, match=r"has 32 pages, not \[32\]"):
            receiver.reserve("r", "prefill", {"kv": torch.tensor([32]).int()}, total=4)
        sending = sender.start("r", "decode", pages, total=16)
        with pytest.raises(InvalidArgumentError, match=r"layer 7 up to token 16 of 16"):
            sending.layer(7)
        sending.layer(0)
        with pytest.raises(InvalidArgumentError, match=r"commit without layers \[1, 2\] of tokens"):
            sending.commit()
        sending.layer(0)
        sending.layer(1)
        sending.layer(2)
        with pytest.raises(InvalidArgumentError, match=r"layers up to token 16 were sent twice"):
            sending.commit()
        sending.cancel()
        with pytest.raises(AbortedError, match="cancelled"):
            sending.layer(1)
        with pytest.raises(InvalidArgumentError, match=r"verify is 'sometimes', must"):
            kv.KVReceiver(receiver.engine, receiver.cache, instance="x", verify="sometimes")
        with pytest.raises(
            InvalidArgumentError, match=r"KVTimeouts.drain_s is 0, must be a positi"
        ):
            kv.KVTimeouts(drain_s=0)


def test_different_totals_are_refused() -> None:
    with workers(SAME, SAME) as found:
        pages = {"kv": some_pages(4, 32, 1)}
        reservation = found.receivers[0].reserve("r", "prefill", pages, total=16)
        sending = found.senders[0].start("r", "decode", pages, total=15)
        with pytest.raises(errors.ProtocolError, match=r"decode/0 expects 16 tokens, here are 15"):
            sending.wait(20)
        with pytest.raises(AbortedError, match=r"gave up: .* expects 16 tokens"):
            reservation.wait(20)


@pytest.mark.parametrize("link", [None, PACKED], ids=["direct", "packed"])
@pytest.mark.parametrize("mode", ["inference", "requires grad"])
def test_a_cache_of_any_mode_of_torch(mode: str, link: kv.KVLink | None) -> None:
    """vLLM allocates its own in inference mode; threads of ours that write to it have none."""
    group = kv.KVGroup("kv", (0, 1), heads=2, k_bytes=16, v_bytes=16, page_size=4)
    order = {} if link is None else {"order": "HND"}
    ours, theirs = kv.KVLayout((group,)), kv.KVLayout((group,), **order)  # type: ignore[arg-type]

    def of(kind: type[Any]) -> Any:
        def made(engine: Any, cache: kv.KVCache, **more: Any) -> Any:
            with torch.inference_mode(mode == "inference"):
                tensors = tuple(torch.zeros(len(each) // 4) for each in cache.tensors)
            if mode != "inference":
                tensors = tuple(each.requires_grad_() for each in tensors)
            return kind(engine, dataclasses.replace(cache, tensors=tensors), **more)

        return made

    with workers(ours, theirs, link=link, kinds=(of(kv.KVSender), of(kv.KVReceiver))) as found:
        sender, receiver = found.senders[0], found.receivers[0]
        with torch.inference_mode(mode == "inference"):
            for number, each in enumerate(sender.cache.tensors):
                flat = each.detach().view(torch.uint8)
                flat.copy_(random_bytes(flat.shape, number))
        pages = {"kv": some_pages(4, 32, 1)}
        reservation = receiver.reserve("a", "prefill", pages, total=16)
        sending = sender.start("a", "decode", pages, total=16)
        for layer in group.layers:
            sending.layer(layer)
        sending.commit()
        reservation.wait(20)  # with checksums
        sending.wait(20)
        assert (sending.stats.packed > 0) == (link is not None)
