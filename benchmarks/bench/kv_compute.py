"""What a layer of prefill takes in `bench --api kv`, and when its bytes are there.

On a GPU the layer is on a stream, and its end is an event. Events have the GPU's clock; `match`
finds what it shows at moments of the host's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_p2p.bench.harness import finish
from moe_p2p.errors import require

# Qwen3-235B-A22B, one of four ranks of tensor parallelism: 64 query and 4 KV heads of 128, 128
# experts of 1536, 8 of them for each token.
HIDDEN, Q_HEADS, HEAD, EXPERTS, TOPK, FFN = 4096, 16, 128, 128, 8, 384
NARROWER = 8  # on CPUs: hidden, heads, experts
MATCHES = 20  # exchanges; the narrowest counts
LIMIT_S = 60.0
CLOCK_ERRORS: list[float] = []  # of this process, one a run on a GPU


class Compute:
    """ms: slept for each layer; 0: matmuls of one layer."""

    def __init__(self, tokens: int, ms: float, device: torch.device) -> None:
        self.ms, self.device = ms, device
        self.on_gpu = device.type == "cuda"
        if not ms:
            self._make(tokens, 1 if self.on_gpu else NARROWER)

    def _make(self, tokens: int, narrower: int) -> None:
        dtype = torch.bfloat16 if self.on_gpu else torch.float32
        hidden, heads, experts = HIDDEN // narrower, Q_HEADS // narrower, EXPERTS // narrower

        def some(*shape: int) -> Tensor:
            values = torch.randn(*shape, device=self.device, dtype=dtype)
            return values.mul_(shape[-2] ** -0.5)

        self.heads, self.rows = heads, -(-tokens * TOPK // experts)
        self.x = some(tokens, hidden)
        self.qkv, self.o = some(hidden, (heads + 2) * HEAD), some(heads * HEAD, hidden)
        self.up, self.down = some(experts, hidden, 2 * FFN), some(experts, FFN, hidden)
        self.routed = some(experts, self.rows, hidden)

    def layer(self) -> None:
        """Returns when the CPU is done with it; on a GPU it is on the current stream then."""
        if self.ms and self.on_gpu:
            cycles = int(self.ms * 1e6)  # of a GPU of 1 GHz
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        elif self.ms:
            time.sleep(self.ms / 1e3)
        else:
            self._matmuls()

    def _matmuls(self) -> None:
        tokens = len(self.x)
        heads = (self.x @ self.qkv).view(1, tokens, -1, HEAD).transpose(1, 2)
        q, k, v = heads[:, :-2], heads[:, -2:-1], heads[:, -1:]
        wide = (k.expand_as(q), v.expand_as(q))
        seen = torch.nn.functional.scaled_dot_product_attention(q, *wide, is_causal=True)
        seen.transpose(1, 2).reshape(tokens, -1) @ self.o
        gate, up = torch.bmm(self.routed, self.up).chunk(2, dim=-1)
        torch.bmm(torch.nn.functional.silu(gate) * up, self.down)


class Match(NamedTuple):
    """Seconds to add to a time of the GPU, and by how much that may be wrong."""

    offset_s: float
    error_s: float


def narrowest(exchanges: Iterable[tuple[float, float, float]]) -> Match:
    """Each: the host's time before, the GPU's time, the host's time after it."""
    low = high = None
    for before, at_gpu, after in exchanges:
        low = before - at_gpu if low is None else max(low, before - at_gpu)
        high = after - at_gpu if high is None else min(high, after - at_gpu)
    require(low is not None, "clocks cannot be matched without an exchange")
    assert low is not None
    assert high is not None
    return Match((low + high) / 2, abs(high - low) / 2)


def between(before: Match, after: Match) -> Match:
    """Of times between two matches: clocks may have drifted apart."""
    middle = (before.offset_s + after.offset_s) / 2
    apart = abs(after.offset_s - before.offset_s) / 2
    return Match(middle, apart + max(before.error_s, after.error_s))


def event(*, external: bool = False) -> Any:
    """external: also of a captured graph, where each replay records it anew."""
    more = {"external": True} if external else {}
    return torch.cuda.Event(enable_timing=True, **more)  # type: ignore[no-untyped-call]


class GpuClock:
    """Times of events of one stream since `base`, in the host's clock once `match` was called."""

    def __init__(self) -> None:
        self.base = event()
        self.base.record()
        self.base.synchronize()

    def seconds(self, event: Any) -> float:
        return float(self.base.elapsed_time(event)) / 1e3

    def match(self) -> Match:
        exchanges = []
        for _ in range(MATCHES):
            word, before = event(), time.monotonic()
            word.record()
            word.synchronize()
            after = time.monotonic()
            exchanges.append((before, self.seconds(word), after))
        return narrowest(exchanges)


def computed(
    compute: Compute | None, num_layers: int, signal: Callable[[int], None] | None = None
) -> Iterator[tuple[float, float]]:
    """Yields after each layer: when its bytes were there, and when `signal` of it had returned. On
    a GPU `signal` is a kernel behind the layer's, so the two are one."""
    if compute is not None and compute.on_gpu:
        yield from _on_gpu(compute, num_layers, signal)
        return
    for layer in range(num_layers):
        if compute is not None:
            compute.layer()
        ready = time.monotonic()
        if signal is not None:
            signal(layer)
        yield ready, time.monotonic()


def _on_gpu(
    compute: Compute, num_layers: int, signal: Callable[[int], None] | None
) -> Iterator[tuple[float, float]]:
    """With `signal` this thread launches all, as a forward pass does, and times are read when it is
    over. Without, another thread launches, and the caller gets each layer when it is computed."""
    clock, events = GpuClock(), [event() for _ in range(num_layers)]
    launched = [threading.Event() for _ in events]
    before = clock.match()

    def launch_all() -> None:
        torch.cuda.set_device(compute.device)  # each thread has a device of its own
        for layer, end in enumerate(events):
            compute.layer()
            end.record()
            if signal is not None:
                signal(layer)
            launched[layer].set()

    thread = threading.Thread(target=launch_all)
    if signal is not None:
        launch_all()
    else:
        thread.start()
    for end, flag in zip(events, launched, strict=True):
        require(flag.wait(LIMIT_S), f"a layer was not launched within {LIMIT_S} s")
        end.synchronize()  # without Python's lock, which the launching thread needs
        at = clock.seconds(end) + before.offset_s
        yield at, at
    if signal is None:
        thread.join()
    CLOCK_ERRORS.append(between(before, clock.match()).error_s)


class Captured:
    """A pass of all layers with their signals, as one CUDA graph. Its events are of the graph."""

    def __init__(self, compute: Compute, num_layers: int, signal: Callable[[int], None]) -> None:
        self.compute = compute
        self.events = [event(external=True) for _ in range(num_layers)]
        compute.layer()  # libraries set themselves up
        finish(compute.device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            for layer, end in enumerate(self.events):
                compute.layer()
                end.record()
                signal(layer)
        self.graph.replay()  # outside of a step: sends nothing
        finish(compute.device)

    def replayed(self) -> Iterator[tuple[float, float]]:
        clock = GpuClock()
        before = clock.match()
        self.graph.replay()
        # An event that a replay records is not to be asked before it: it shows the one before.
        finish(self.compute.device)
        for end in self.events:
            at = clock.seconds(end) + before.offset_s
            yield at, at
        CLOCK_ERRORS.append(between(before, clock.match()).error_s)
