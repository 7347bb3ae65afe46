"""Layers that are sent when they are signalled: what is sent, what is not, and errors."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_p2p import AbortedError, ClosedError, InvalidArgumentError, errors, kv
from moe_p2p.kv.signals import signal
from tests.support.kv_workers import PACKED, QUICK, Workers, some_pages, workers

LAYERS, PAGES, TOKENS = 3, 32, 18
GROUP = kv.KVGroup("kv", tuple(range(LAYERS)), heads=4, k_bytes=16, v_bytes=16, page_size=4)
SAME = kv.KVLayout((GROUP,))
OURS, THEIRS = some_pages(5, PAGES, 1), some_pages(5, PAGES, 2)


@pytest.fixture
def found() -> Iterator[Workers]:
    with workers(SAME, SAME) as made:
        yield made


def layers_of(worker: kv.KVSender | kv.KVReceiver, pages: Tensor) -> Tensor:
    return worker.cache.tensors[0].view(LAYERS, PAGES, -1)[:, pages.long()]


def start(found: Workers, name: str = "r") -> tuple[kv.KVSending, kv.KVReservation]:
    reservation = found.receivers[0].reserve(name, "prefill", {"kv": THEIRS}, total=TOKENS)
    sending = found.senders[0].start(name, "decode", {"kv": OURS}, total=TOKENS)
    return sending, reservation


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.0005)


def written(found: Workers) -> int:
    """Bytes, once the engine's thread has looked at all words that were stored before."""
    pair = next(iter(found.senders[0].pairs.values()))
    found.engines["prefill/0"].send_imm(pair.peer, 5).wait(20)
    return sum(nic["bytes_written"] for nic in found.engines["prefill/0"].counters())


def in_flight(sending: kv.KVSending) -> int:
    sending.done()
    return len(sending.transfers[0].requests)


class Model:
    """Writes each layer of its pages, from page `first` of the request on, and signals it."""

    def __init__(self, signals: kv.KVSignals) -> None:
        self.signals, self.seed, self.first = signals, 0, 0
        self.cache = signals.sender.cache.tensors[0].view(LAYERS, PAGES, -1)

    def layer(self, layer: int) -> None:
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        pages = OURS[self.first :].long()
        shape = (len(pages), self.cache.shape[2])
        rows = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
        self.cache[layer, pages] = rows
        self.signals.signal(layer, self.cache[layer])

    def forward(self) -> None:
        for layer in range(LAYERS):
            self.layer(layer)


def test_a_layer_travels_when_it_is_signalled_and_not_before(found: Workers) -> None:
    sender, receiver = found.senders[0], found.receivers[0]
    with kv.KVSignals(sender) as signals:
        model = Model(signals)
        sending, reservation = start(found)
        until(lambda: sending.transfers[0].state == "open")
        with signals.step([(sending, None)]) as step:
            assert step == 1
            for layer in range(LAYERS):
                done = [request.done() for request in sending.transfers[0].requests]
                assert done == [False] * (LAYERS - layer)
                model.layer(layer)
                left = LAYERS - layer - 1
                until(lambda: in_flight(sending) == left)  # noqa: B023
                assert torch.equal(
                    layers_of(receiver, THEIRS)[layer], layers_of(sender, OURS)[layer]
                )
        sending.commit(b"token")
        assert reservation.wait(20) == b"token"  # with the checksums of what was computed
        sending.wait(20)


def test_packed_rows_of_a_layer_are_gathered_when_it_is_signalled() -> None:
    turned = dataclasses.replace(SAME, order="HND")
    with workers(SAME, turned, link=PACKED) as found, kv.KVSignals(found.senders[0]) as signals:
        model = Model(signals)
        sending, reservation = start(found)
        until(lambda: sending.transfers[0].state == "open")
        packing = sending.transfers[0].packing
        assert packing is not None
        with signals.step([(sending, None)]):
            for layer in range(LAYERS):
                each = -(-len(packing.pending) // (LAYERS - layer))  # writes of a layer
                until(lambda: in_flight(sending) == 0)
                assert len(packing.pending) == each * (LAYERS - layer) > 0
                assert f"signal of layer {layer}" in packing.text()
                model.layer(layer)
                left = each * (LAYERS - layer - 1)
                until(lambda: sending.done() or len(packing.pending) == left)  # noqa: B023
        sending.commit(b"token")
        assert reservation.wait(20) == b"token"  # with the checksums of what was computed
        sending.wait(20)
        assert sending.stats.packed > 0


def test_a_footer_that_cannot_be_sent_fails_its_request(
    found: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for sums of the last layer; whoever polls then, an engine's loop say, goes on."""
    sender = found.senders[0]
    with kv.KVSignals(sender) as signals:
        model = Model(signals)
        sending, reservation = start(found)
        until(lambda: sending.transfers[0].state == "open")

        def fails(*_: Any, **__: Any) -> Any:
            raise errors.make(errors.TransportError, "the queue is broken")

        with signals.step([(sending, None)]):
            sending.commit(b"token")
            assert sending.transfers[0].footer_due
            monkeypatch.setattr(sender.engine, "write", fails)
            model.forward()
        until(sending.done)
        with pytest.raises(errors.TransportError, match="the queue is broken"):
            sending.wait(20)
        with pytest.raises(AbortedError, match="gave up"):
            reservation.wait(20)
        reservation.wait_reusable(20)


def test_a_close_that_fails_is_called_again(
    found: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals = kv.KVSignals(found.senders[0])
    sending, _ = start(found)
    signals.begin_step([(sending, None)])
    with monkeypatch.context() as patch:
        patch.setattr(signals, "_set_step", lambda number: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            signals.close()
    signals.close()
    with pytest.raises(AbortedError, match="KVSignals was closed while step 1 waited"):
        sending.wait(20)


def test_replays_outside_of_a_step_send_nothing_and_shift_no_step(found: Workers) -> None:
    """Warm-up and capture before a step, dummy batches after it, steps without requests."""
    with kv.KVSignals(found.senders[0]) as signals:
        model = Model(signals)
        model.forward()
        for number in (1, 2):
            sending, reservation = start(found, f"r{number}")
            before = written(found)
            model.forward()  # after requests exist, before their step
            with signals.step([]) as step:
                assert step == 0
                model.forward()
            assert written(found) == before
            with signals.step([(sending, None)]) as step:
                assert step == number
                model.forward()
            sending.commit()
            reservation.wait(20)
            sending.wait(20)
            assert torch.equal(
                layers_of(found.receivers[0], THEIRS), layers_of(found.senders[0], OURS)
            )
            before = written(found)
            model.forward()
            assert written(found) == before


def test_a_step_without_its_forward_pass_is_not_signalled_by_the_next_replay(
    found: Workers,
) -> None:
    with kv.KVSignals(found.senders[0]) as signals:
        sending, _ = start(found)
        until(lambda: sending.transfers[0].state == "open")
        with signals.step([(sending, None)]):
            pass
        Model(signals).forward()
        assert written(found) == 0
        assert in_flight(sending) == LAYERS


def test_a_receiver_may_open_after_a_dummy_batch(found: Workers) -> None:
    """What was signalled stays signalled."""
    with kv.KVSignals(found.senders[0]) as signals:
        model = Model(signals)
        sending = start_alone(found, "r")
        with signals.step([(sending, None)]):
            model.forward()
        model.forward()
        pages = {"kv": THEIRS}
        reservation = found.receivers[0].reserve("r", "prefill", pages, total=TOKENS)
        sending.commit()
        reservation.wait(20)


def test_chunks_of_several_steps_and_a_receiver_that_opens_late(found: Workers) -> None:
    sender, receiver = found.senders[0], found.receivers[0]
    with kv.KVSignals(sender) as signals:
        model = Model(signals)
        for pull in (False, True):
            name = f"pull {pull}"
            sending = sender.start(name, "decode", {"kv": OURS}, total=TOKENS)
            model.first = 0
            with signals.step([(sending, 7)]):
                model.forward()
            model.first = 1  # one whole page was sent
            with signals.step([(sending, TOKENS)]):
                model.layer(0)
                reservation = receiver.reserve(
                    name, "prefill", {"kv": THEIRS}, total=TOKENS, pull=pull
                )
                until(lambda: sending.transfers[0].state == "open")  # noqa: B023
                model.layer(1)
                sending.commit(b"x")  # before the last layer: its sums and offers wait for it
                sending.done()
                assert sending.transfers[0].footer_due
                assert not sending.transfers[0].committed
                model.layer(2)
            assert reservation.wait(20) == b"x"
            sending.wait(20)


def test_many_steps_wait_and_one_too_many_is_an_error_by_name(found: Workers) -> None:
    with kv.KVSignals(found.senders[0], max_steps=2) as signals:
        sendings = [start_alone(found, f"r{i}") for i in range(4)]
        model = Model(signals)
        signals.begin_step([(sendings[0], None)])
        signals.begin_step([(sendings[1], None)])
        with pytest.raises(
            errors.ResourceExhaustedError,
            match=r"prefill/0: 2 steps wait for signals \(max_steps\), the oldest, step 1, for "
            r"layer 0 of request 'r0'",
        ):
            signals.begin_step([(sendings[2], None)])
        assert sendings[2].calls == []
        sendings[0].cancel()  # gives its place back, as its signals would
        assert signals.begin_step([(sendings[2], None)]) == 3
        model.forward()  # of step 3; steps come one after the other, so 2 was computed
        assert signals.begin_step([(sendings[3], None)]) == 4


def start_alone(found: Workers, name: str) -> kv.KVSending:
    return found.senders[0].start(name, "decode", {"kv": OURS}, total=TOKENS)


def test_a_forward_pass_that_fails_cancels_its_requests(found: Workers) -> None:
    with kv.KVSignals(found.senders[0]) as signals:
        model = Model(signals)
        sending, reservation = start(found, "first")
        with signals.step([(sending, None)]):
            model.forward()
        sending.commit()
        reservation.wait(20)
        sending.wait(20)
        each = written(found)
        sending, reservation = start(found)
        until(lambda: sending.transfers[0].state == "open")
        with pytest.raises(ZeroDivisionError), signals.step([(sending, None)]):
            raise ZeroDivisionError
        with pytest.raises(AbortedError, match=r"the forward pass failed: ZeroDivisionError"):
            sending.wait(20)
        sending.wait_reusable(20)
        with pytest.raises(AbortedError, match="the forward pass failed"):
            reservation.wait(20)
        other, reservation = start(found, "other")
        with signals.step([(other, None)]):  # its words are beyond those of the failed step
            model.forward()
        other.commit()
        reservation.wait(20)
        other.wait(20)
        assert written(found) == 2 * each  # nothing of the failed one


def test_what_ends_a_request_reaches_its_wait(found: Workers) -> None:
    """At its gate, and when its writes fail."""
    with kv.KVSignals(found.senders[0]) as signals:
        model = Model(signals)
        sending, _ = start(found)
        until(lambda: sending.transfers[0].state == "open")
        signals.begin_step([(sending, None)])
        pair = sending.transfers[0].pair
        pair.peer.disconnect()  # what is held fails by name
        with pytest.raises(errors.PeerDeadError, match=r"request 'r': a write to decode/0 failed"):
            sending.wait(20)
        model.forward()
        signals.end_step()
        assert signals.begin_step([(sending, None)]) == 2  # a failed one is left out
        sending.wait_reusable(20)


def test_a_layer_that_is_never_signalled_is_named() -> None:
    short = dataclasses.replace(QUICK, layers_s=0.2)
    with (
        workers(SAME, SAME, timeouts=short, settings="") as found,
        kv.KVSignals(found.senders[0]) as signals,
    ):
        sending = start_alone(found, "r")
        with signals.step([(sending, None)]):
            Model(signals).layer(0)
            with pytest.raises(
                errors.TimeoutError,
                match=r"prefill/0: request 'r': waited 0.2 s in phase signal for layer 1 of step 1",
            ):
                sending.wait(20)


def test_wrong_use_is_refused_by_name(found: Workers) -> None:
    sender = found.senders[0]
    with pytest.raises(InvalidArgumentError, match=r"max_steps is 0, must be at least 1"):
        kv.KVSignals(sender, max_steps=0)
    signals = kv.KVSignals(sender)
    cache = sender.cache.tensors[0]
    with pytest.raises(InvalidArgumentError, match=r"layer is 3, must be from 0 to 2"):
        signals.signal(3, cache)
    with pytest.raises(InvalidArgumentError, match=r"outside of the tensors of the KVCache"):
        signals.signal(0, cache.clone())
    sending = start_alone(found, "r")
    sending.layer(0, 8)
    with pytest.raises(InvalidArgumentError, match=r"layer 0 up to token 4 of 18, after 8"):
        signals.begin_step([(sending, 4)])
    with pytest.raises(AbortedError, match=r"step 1 was not begun"):
        sending.wait(20)
    waiting = start_alone(found, "s")
    signals.begin_step([(waiting, None)])
    signals.close()
    signals.close()
    with pytest.raises(AbortedError, match=r"KVSignals was closed while step 2 waited"):
        waiting.wait(20)
    with pytest.raises(ClosedError, match=r"prefill/0: KVSignals is closed"):
        signals.begin_step([])
    with pytest.raises(ClosedError, match=r"prefill/0: KVSignals is closed"):
        signals.__enter__()
    with pytest.raises(ClosedError, match=r"signals \d+ is closed"):
        signal(signals.number, 0, cache)


@pytest.mark.timeout(300)  # of g++, which has seconds of work and may share its core with others
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_compilers_keep_the_call_and_its_place(found: Workers, backend: str) -> None:
    """Behind the write, and on the cache itself: a backend that copies it is refused."""
    sender = found.senders[0]
    torch._dynamo.reset()
    with kv.KVSignals(sender) as signals:
        number = signals.number

        def layer(cache: Tensor, pages: Tensor, rows: Tensor) -> None:
            cache[pages] = rows * 2
            signal(number, 1, cache)

        # Without vectors: else it compiles three programs first, to find out what this CPU has.
        options: dict[str, Any] = {"cpp.vec_isa_ok": False}
        more = {"options": options} if backend == "inductor" else {}
        compiled = torch.compile(layer, fullgraph=True, backend=backend, **more)
        cache, pages = Model(signals).cache[1], OURS.long()
        rows = torch.ones((len(OURS), cache.shape[1]), dtype=torch.uint8)
        if backend == "aot_eager":
            with pytest.raises(RuntimeError, match=r"outside of the tensors of the KVCache"):
                compiled(cache, pages, rows)
            return
        compiled(cache, pages, rows)  # compiles before a request has deadlines; sends nothing
        sending, _ = start(found)
        until(lambda: sending.transfers[0].state == "open")
        with signals.step([(sending, None)]):
            compiled(cache, pages, rows + 1)
        until(lambda: in_flight(sending) == LAYERS - 1)
        assert bool((layers_of(found.receivers[0], THEIRS)[1] == 4).all())
