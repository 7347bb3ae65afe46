"""Layers signalled by kernels/signal.cu, also by replays of a graph: what of them is sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_p2p import InvalidArgumentError, errors, kv
from tests.support import gpu_ranks
from tests.support.kv_workers import Workers, some_pages, workers

pytestmark = pytest.mark.gpu
LAYERS, PAGES, TOKENS = 3, 32, 18
GROUP = kv.KVGroup("kv", tuple(range(LAYERS)), heads=4, k_bytes=16, v_bytes=16, page_size=4)
SAME = kv.KVLayout((GROUP,))
OURS, THEIRS = some_pages(5, PAGES, 1), some_pages(5, PAGES, 2)


def compute(step: Callable[[], object]) -> None:
    """Work of torch's own: part of a captured graph."""
    if gpu_ranks.DEVICE == "cpu":
        from tests.support import emulated_gpu

        emulated_gpu.compute(step)
    else:
        step()


class Model:
    """Each layer adds 1 to the pages of a request, and signals."""

    def __init__(self, signals: kv.KVSignals) -> None:
        self.signals = signals
        self.cache = signals.sender.cache.tensors[0].view(LAYERS, PAGES, -1)
        self.pages = OURS.long().to(self.cache.device)
        self.one = torch.ones(
            (len(OURS), self.cache.shape[2]), dtype=torch.uint8, device=self.cache.device
        )

    def layer(self, layer: int) -> None:
        compute(lambda: self.cache[layer].index_add_(0, self.pages, self.one))
        self.signals.signal(layer, self.cache[layer])

    def forward(self) -> None:
        for layer in range(LAYERS):
            self.layer(layer)

    def capture(self) -> Any:
        self.forward()  # warms up
        if gpu_ranks.DEVICE == "cpu":
            from tests.support import emulated_gpu

            emulated = emulated_gpu.Graph()
            emulated.record(self.forward)
            return emulated
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.forward()
        return graph


@pytest.fixture
def found() -> Iterator[Workers]:
    with workers(SAME, SAME, devices=(gpu_ranks.DEVICE, gpu_ranks.DEVICE)) as made:
        yield made


def start(found: Workers, name: str) -> tuple[kv.KVSending, kv.KVReservation]:
    reservation = found.receivers[0].reserve(name, "prefill", {"kv": THEIRS}, total=TOKENS)
    sending = found.senders[0].start(name, "decode", {"kv": OURS}, total=TOKENS)
    return sending, reservation


def finish(sending: kv.KVSending, reservation: kv.KVReservation) -> None:
    sending.commit(b"token")
    assert reservation.wait(20) == b"token"
    sending.wait(20)


def received(found: Workers) -> Tensor:
    """[LAYERS] the value of all bytes of a layer's pages."""
    rows = found.receivers[0].cache.tensors[0].view(LAYERS, PAGES, -1).cpu()[:, THEIRS.long()]
    assert bool((rows == rows[:, :1, :1]).all())
    return rows[:, 0, 0]


def synchronize() -> None:
    if gpu_ranks.DEVICE == "cuda":
        torch.cuda.synchronize()


def written(found: Workers) -> int:
    """Bytes, once the engine's thread has looked at all words that were stored before."""
    pair = next(iter(found.senders[0].pairs.values()))
    found.engines["prefill/0"].send_imm(pair.peer, 5).wait(20)
    return sum(nic["bytes_written"] for nic in found.engines["prefill/0"].counters())


def test_replays_send_their_step_and_nothing_else(found: Workers) -> None:
    """Warm-up, capture, dummy batches and steps without requests shift no later step."""
    with kv.KVSignals(found.senders[0]) as signals:
        model = Model(signals)
        graph = model.capture()
        num_forward = 1  # the warm-up
        for number in (1, 2, 3):
            sending, reservation = start(found, f"r{number}")
            before = written(found)
            graph.replay()  # a dummy batch
            with signals.step([]):
                graph.replay()
            synchronize()
            assert written(found) == before
            with signals.step([(sending, None)]) as step:
                assert step == number
                graph.replay()
            num_forward += 3
            finish(sending, reservation)
            assert received(found).tolist() == [num_forward] * LAYERS
            assert written(found) > before


def test_a_layer_travels_before_later_ones_are_computed(found: Workers) -> None:
    with kv.KVSignals(found.senders[0]) as signals:
        model = Model(signals)
        sending, reservation = start(found, "r")
        with signals.step([(sending, None)]):
            for layer in range(LAYERS):
                model.layer(layer)
                deadline = time.monotonic() + 20
                while not sending.done() and len(sending.transfers[0].requests) >= LAYERS - layer:
                    assert time.monotonic() < deadline, "the layer was not sent"
        finish(sending, reservation)
        assert received(found).tolist() == [1] * LAYERS


def test_a_receiver_may_open_after_a_dummy_batch(found: Workers) -> None:
    """What was signalled stays signalled."""
    with kv.KVSignals(found.senders[0]) as signals:
        graph = Model(signals).capture()
        sending = found.senders[0].start("r", "decode", {"kv": OURS}, total=TOKENS)
        with signals.step([(sending, None)]):
            graph.replay()
        graph.replay()
        synchronize()
        pages = {"kv": THEIRS}
        reservation = found.receivers[0].reserve("r", "prefill", pages, total=TOKENS)
        finish(sending, reservation)


def test_a_full_ring_is_an_error_by_name(found: Workers) -> None:
    with kv.KVSignals(found.senders[0], max_steps=1) as signals:
        model = Model(signals)
        first, reservation = start(found, "first")
        second = found.senders[0].start("second", "decode", {"kv": OURS}, total=TOKENS)
        signals.begin_step([(first, None)])
        with pytest.raises(errors.ResourceExhaustedError, match=r"1 steps wait .* step 1, for lay"):
            signals.begin_step([(second, None)])
        model.forward()
        finish(first, reservation)
        assert signals.begin_step([(second, None)]) == 2


def test_a_graph_that_is_replayed_after_the_end_sends_nothing(found: Workers) -> None:
    signals = kv.KVSignals(found.senders[0])
    graph = Model(signals).capture()
    sending, _ = start(found, "r")
    signals.begin_step([(sending, None)])
    signals.close()
    sending.wait_reusable(20)
    before = written(found)
    graph.replay()
    synchronize()
    assert written(found) == before


@pytest.mark.skipif(gpu_ranks.DEVICE == "cpu", reason="asks torch whether a stream captures")
def test_a_step_is_not_begun_in_a_graph(found: Workers) -> None:
    with kv.KVSignals(found.senders[0]) as signals:
        sending, _ = start(found, "r")
        with (
            torch.cuda.graph(torch.cuda.CUDAGraph()),
            pytest.raises(InvalidArgumentError, match=r"while a graph is captured"),
        ):
            signals.begin_step([(sending, None)])
