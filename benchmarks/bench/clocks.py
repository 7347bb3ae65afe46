"""Clocks for calls: the host's on CPUs, events on GPUs, and the host's work alone.

Collective: all ranks of the default process group (gloo) make the same calls.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from moe_p2p.bench.gpu_calls import Calls, Layer
from moe_p2p.bench.gpu_measure import Timed, Watch, measure
from moe_p2p.bench.options import Options
from moe_p2p.tools.gpu_timing import FLUSH_BYTES, interleaved
from moe_p2p.tools.meeting import Meeting
from moe_p2p.tools.probe import Links

# Seconds of timing the host alone, for each system; a round begins on an idle device.
HOST_SECONDS = 0.4
# Pairs in a row: before the clock starts, and timed. More might fill the queue of launches, and the
# host would wait for the device.
WARM_PAIRS, TIMED_PAIRS = 4, 16


class HostTime(NamedTuple):
    """Time until the calls of an eager pair return; None on CPUs, where the calls do the work."""

    us: float | None = None  # of pairs in a row, as an engine issues them
    adds_us: float | None = None  # of two bare launches in their turns, of the same process
    alone_us: float | None = None  # of one pair after the ranks met: caches are cold, the CPU slept


def make_clock(options: Options) -> CpuClock | GpuClock:
    return GpuClock(options) if options.device == "cuda" else CpuClock(options)


class CpuClock:
    links = Links()

    def __init__(self, options: Options) -> None:
        self._seconds = options.seconds

    def measure(self, systems: Sequence[Calls], watch: Watch) -> list[Timed]:
        spans = interleaved(
            {calls: functools.partial(_wall_us, calls) for calls in systems},
            seconds=self._seconds / len(systems),
            before=watch.change,
        )
        for calls in systems:
            watch.look(calls, "pair eager", calls.pair)
        timed = [
            Timed(calls=calls, what=what, chain=1, spans_us=values[:, i])
            for calls, values in spans.items()
            for i, what in enumerate(("pair eager", "dispatch", "combine"))
        ]
        return timed + self._layers(systems, watch)

    def _layers(self, systems: Sequence[Calls], watch: Watch) -> list[Timed]:
        keys = [(calls, layer) for calls in systems for layer in calls.layers]
        spans = interleaved(
            {key: functools.partial(_layer_us, key[1]) for key in keys},
            seconds=self._seconds / max(len(keys), 1),
            before=watch.change,
        )
        for calls, layer in keys:
            watch.look(calls, "layer eager", layer.run, layer)
        return [
            Timed(calls=calls, what=what, layer=layer, chain=1, spans_us=values[:, i])
            for (calls, layer), values in spans.items()
            for i, what in enumerate(("layer eager", "experts eager"))
            if i == 0 or layer.experts is not None
        ]

    def host_times(self, systems: Sequence[Calls]) -> dict[Calls, HostTime]:
        return dict.fromkeys(systems, HostTime())

    def close(self) -> None:
        pass


def _wall_us(calls: Calls) -> tuple[float, ...]:
    return _span_us(calls.pair), _span_us(calls.dispatch), _span_us(calls.combine)


def _layer_us(layer: Layer) -> tuple[float, ...]:
    return _span_us(layer.run), _span_us(layer.experts or (lambda: None))


def _span_us(call: Callable[[], object]) -> float:
    dist.barrier()  # ranks leave the first barrier after other work milliseconds apart
    dist.barrier()
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e6


class GpuClock(Meeting):
    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._options = options
        self._flushed = (
            torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda") if options.flush else None
        )

    def measure(self, systems: Sequence[Calls], watch: Watch) -> list[Timed]:
        seconds, flushed = self._options.seconds, self._flushed
        timed = measure(systems, self.align, seconds=seconds, flushed=flushed, watch=watch)
        self.check()
        return timed

    def host_times(self, systems: Sequence[Calls]) -> dict[Calls, HostTime]:
        return host_times(systems)


def host_times(systems: Sequence[Calls]) -> dict[Calls, HostTime]:
    """Times in turns: hosts have tenths of a second in which everything takes twice as long."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    one = torch.zeros(1, dtype=torch.float32, device=device)

    def two_adds() -> None:
        one.add_(1)
        one.add_(1)

    pairs: dict[Calls | None, Callable[[], object]] = {calls: calls.pair for calls in systems}
    rows = _until_issued({**pairs, None: two_adds}, warm=WARM_PAIRS, timed=TIMED_PAIRS)
    alone = _until_issued(pairs, warm=0, timed=1)
    return {
        calls: HostTime(us=rows[calls], adds_us=rows[None], alone_us=alone[calls])
        for calls in systems
    }


def _until_issued(
    pairs: Mapping[Calls | None, Callable[[], object]], *, warm: int, timed: int
) -> dict[Calls | None, float]:
    """Microseconds until each returns: median, slowest rank of each round."""

    def span(pair: Callable[[], object]) -> tuple[float]:
        torch.cuda.synchronize()
        dist.barrier()
        for _ in range(warm):
            pair()
        started = time.perf_counter()
        for _ in range(timed):
            pair()
        return ((time.perf_counter() - started) / timed * 1e6,)

    runs = {calls: functools.partial(span, pair) for calls, pair in pairs.items()}
    spans = interleaved(runs, seconds=HOST_SECONDS)
    torch.cuda.synchronize()
    return {calls: round(float(values.median()), 1) for calls, values in spans.items()}
