"""Layers that are sent when the device says that they are computed, also in a replayed CUDA graph.

    signals = kv.KVSignals(sender)
    signals.signal(layer, cache_of_layer)        after each layer of the model: eager, or captured

    with signals.step([(sending, end)]):         on the stream of the forward pass
        graph.replay()                           instead of sending.layer(...) for each layer
    sending.commit()

A step's requests are made before its forward pass and held by the engine, whose thread posts those
of a layer when it sees the layer's word. Warm-up, capture, dummy batches and steps without requests
run outside of `step`: their signals carry the number 0, and send nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from moe_p2p import errors
from moe_p2p.errors import make, require, require_type
from moe_p2p.kv.sender import KVSender, KVSending
from moe_p2p.kv.stats import RequestState
from moe_p2p.library import call
from moe_p2p.machine import jit

_ops = torch.ops.moe_p2p
# A graph that captured signals may be replayed after close(): what its kernels use is kept, a few
# hundred bytes.
_kept: list[tuple[Tensor, Tensor]] = []


def kernel_for(device: torch.device) -> int:
    """Returns kernels/signal.cu for a GPU; 0 for host memory."""
    if device.type != "cuda":
        return 0
    return jit.load(device.index or 0, "signal.cu", "moe_p2p_signal", {})


class _Step(NamedTuple):
    number: int
    sends: tuple[tuple[KVSending, int], ...]

    def over(self) -> bool:
        return not any(
            sending.state is RequestState.OPEN and sending.shut_gates() for sending, _ in self.sends
        )


def signal(signals: int, layer: int, kv: Tensor) -> None:
    """Says that a layer is computed, behind all earlier work of the current stream.

    For code that runs after each layer, eager or captured in a CUDA graph; the engine's thread then
    posts the layer's pages of the requests of this step (`kv.KVSignals.begin_step`). The step's
    number is read on the device, so replays that belong to no step send nothing.

    signals: `KVSignals.number`. layer: number of the layer in the model. kv: the layer's part of
    the cache, any tensor within the tensors of the sender's `KVCache`. It is marked as mutated:
    compilers keep the call behind what wrote the layer, and do not drop it. Its bytes are not
    touched.

    Raises InvalidArgumentError for another layer or memory, ClosedError after `KVSignals.close`.
    """
    call(_ops.signal.default, signals, layer, kv)


class KVSignals:
    """Signals of one model whose KV cache is the sender's.

    max_steps: how many steps may wait for their signals. A step takes its place until all of its
    layers were signalled or its requests have ended.

    One thread at a time calls begin_step and end_step, in the order of the forward passes, which
    run one after the other. Close it before the sender's engine.
    """

    def __init__(self, sender: KVSender, *, max_steps: int = 8) -> None:
        require(getattr(sender, "role", "") == "sender", f"KVSignals: {sender!r} is no KVSender")
        require(
            isinstance(max_steps, int) and max_steps > 0,
            f"KVSignals: max_steps is {max_steps!r}, must be at least 1",
        )
        self.sender, self.max_steps = sender, max_steps
        tensors = sender.cache.tensors
        device = tensors[0].device
        kernel = kernel_for(device)
        layers = [layer for group in sender.cache.layout.groups for layer in group.layers]
        with torch.inference_mode(False):
            words = torch.zeros(
                max(layers) + 1, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda"
            )
            self._step = torch.zeros(1, dtype=torch.int64, device=device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        self.number = int(
            call(
                _ops.signals_create.default,
                sender.engine.number,
                words,
                self._step,
                list(tensors),
                kernel,
            )
        )
        if kernel:
            _kept.append((words, self._step))
        self._last = 0  # steps are counted from 1: here, and not by a graph
        self._set = False  # the device has a step's number
        self._steps: deque[_Step] = deque()
        self._closed = False
        self._lock = threading.Lock()

    def signal(self, layer: int, kv: Tensor) -> None:
        """Says that number `layer` of the model is computed: `signal`."""
        signal(self.number, layer, kv)

    def capturing(self) -> bool:
        """Whether the current stream is captured: vLLM's connectors then ask for `save_kv_layer`
        (docs/kv.md)."""
        if not self._step.is_cuda:
            return False
        with torch.cuda.device_of(self._step):  # type: ignore[no-untyped-call]
            return torch.cuda.is_current_stream_capturing()

    def begin_step(self, sends: Sequence[tuple[KVSending, int | None]]) -> int:
        """Before a forward pass, on its stream: what its signals send. Returns the step's number.

        sends: requests, each with the tokens that are there after this step (None: all), as `end`
        of `KVSending.layer`. Layers of a request that has failed are left out; its `wait` says why.
        An empty list: the step sends nothing.

        Raises ResourceExhaustedError while max_steps steps wait for signals.
        """
        _check_sends(f"{self.sender.name}: begin_step", sends)
        with self._lock:
            self._check()
            if not sends:
                self._set_step(0)
                return 0
            self._make_room()
            number = self._last + 1
            step = _Step(
                number,
                tuple((each, each.total if end is None else end) for each, end in sends),
            )
            self._last = number
            try:
                for sending, end in step.sends:
                    self._prepare(sending, end, number)
            except BaseException as error:
                _cancel(step, f"step {number} was not begun: {error}")
                raise
            self._steps.append(step)
            self._set_step(number)
            return number

    def end_step(self) -> None:
        """After the forward pass, on its stream: signals that follow send nothing."""
        with self._lock:
            self._set_step(0)

    @contextmanager
    def step(self, sends: Sequence[tuple[KVSending, int | None]]) -> Iterator[int]:
        """begin_step and end_step; a forward pass that raises cancels the step's requests."""
        number = self.begin_step(sends)
        try:
            yield number
        except BaseException as error:
            for sending, _ in sends:
                sending.cancel(f"the forward pass failed: {error!r}")
            raise
        finally:
            self.end_step()

    def close(self) -> None:
        """Cancels requests of steps that wait for signals. Idempotent. Graphs that hold signals may
        be replayed, and send nothing."""
        with self._lock:
            if self._closed:
                return
            self._set_step(0)
            for step in self._steps:
                if not step.over():
                    _cancel(step, f"KVSignals was closed while step {step.number} waited")
            self._steps.clear()
            call(_ops.signals_close.default, self.number)
            self._closed = True

    def __enter__(self) -> KVSignals:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise make(errors.ClosedError, f"{self.sender.name}: KVSignals is closed")

    def _check(self) -> None:
        self._check_open()
        require(
            not self.capturing(),
            f"{self.sender.name}: a step is begun while a graph is captured, which would repeat "
            "its number; begin it before each replay",
        )

    def _make_room(self) -> None:
        while self._steps and self._steps[0].over():
            self._steps.popleft()
        if len(self._steps) < self.max_steps:
            return
        oldest = self._steps[0]
        sending, gate = next((s, s.shut_gates()[0]) for s, _ in oldest.sends if s.shut_gates())
        raise make(
            errors.ResourceExhaustedError,
            f"{self.sender.name}: {self.max_steps} steps wait for signals (max_steps), the oldest, "
            f"step {oldest.number}, for layer {gate.layer} of request {sending.request!r}",
        )

    def _prepare(self, sending: KVSending, end: int, number: int) -> None:
        """Layers that this rank has; the engine holds their requests."""
        if sending.error is None:
            sending.send_layers(tuple(sending.layers), end, (self.number, number))

    def _set_step(self, number: int) -> None:
        """By a kernel that has the number as an argument: nothing must outlive this call."""
        if number or self._set:
            self._step.fill_(number)
        self._set = number != 0


def _cancel(step: _Step, why: str) -> None:
    for sending, _ in step.sends:
        sending.cancel(why)


def _check_sends(name: str, sends: Sequence[tuple[KVSending, int | None]]) -> None:
    require_type(f"{name}: sends", sends, (list, tuple), "a list of (request, end)")
    for each in sends:
        require(
            isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], KVSending),
            f"{name}: sends has {each!r}, must be (KVSending, end or None)",
        )
