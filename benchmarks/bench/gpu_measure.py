"""Ways of timing on a GPU; all systems take turns in each way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moe_p2p.bench.gpu_calls import Calls, Layer
from moe_p2p.tools.gpu_timing import (
    Align,
    apart_us,
    captured,
    chain_length,
    host_us,
    interleaved,
    timed_us,
)

Run = Callable[[], object]
Runs = Mapping[tuple[Calls, Layer | None], Run]


@dataclass(frozen=True, kw_only=True)
class Timed:
    calls: Calls
    what: str  # report.WAYS
    layer: Layer | None = None
    chain: int  # runs between two events
    spans_us: Tensor  # [rounds]
    host_us: float | None = None  # gpu_timing.host_us, of eager chains


class Watch(Protocol):
    def change(self) -> None:
        """Sets other inputs, before a round."""

    def look(self, calls: Calls, what: str, again: Run, layer: Layer | None = None) -> None:
        """Called after the last round. again: repeats the timed run. Collective."""


def measure(
    systems: Sequence[Calls], align: Align, *, seconds: float, flushed: Tensor | None, watch: Watch
) -> list[Timed]:
    """Measures graphs last, so that a capture that fails does not spoil the other figures."""
    pairs: Runs = {(c, None): c.pair for c in systems}
    timed = _chained("pair", pairs, align, watch, seconds=seconds, replayed=False)
    for parts in (
        {c: {"dispatch": c.dispatch, "combine": c.combine} for c in systems},
        {c: c.halves for c in systems if c.halves},
    ):
        timed += _apart(parts, align, watch, seconds=seconds, flushed=flushed)
    layers: Runs = {(c, layer): layer.run for c in systems for layer in c.layers}
    timed += _chained("layer", layers, align, watch, seconds=seconds, replayed=False)
    experts: Runs = {
        (c, layer): layer.experts for c in systems for layer in c.layers if layer.experts
    }
    for what, runs in {"pair": pairs, "layer": layers, "experts": experts}.items():
        capturable = {key: run for key, run in runs.items() if key[0].capturable}
        timed += _chained(what, capturable, align, watch, seconds=seconds, replayed=True)
    return timed


def _chained(
    what: str,
    runs: Runs,
    align: Align,
    watch: Watch,
    *,
    seconds: float,
    replayed: bool,
) -> list[Timed]:
    """Measures the period of back-to-back runs."""
    chains = {key: chain_length(run, align) for key, run in runs.items()}

    def eager(run: Run, chain: int) -> Callable[[], tuple[float]]:
        return lambda: (timed_us(run, align, repeats=chain),)

    def graph(run: Run, chain: int) -> Callable[[], tuple[float]]:
        replay = captured(run, repeats=chain)
        return lambda: (timed_us(replay, align) / chain,)

    way = graph if replayed else eager
    timing = {key: way(run, chains[key]) for key, run in runs.items()}
    spans = interleaved(timing, seconds=seconds, before=watch.change)
    hosts = {
        key: host_us(run, key[0].waited_s, align, repeats=chains[key])
        for key, run in runs.items()
        if key[0].waited_s is not None and not replayed
    }
    name = f"{what} {'graph' if replayed else 'eager'}"
    for (calls, layer), again in timing.items():
        watch.look(calls, name, again, layer)
    return [
        Timed(
            calls=key[0],
            what=name,
            layer=key[1],
            chain=chains[key],
            spans_us=values[:, 0],
            host_us=hosts.get(key),
        )
        for key, values in spans.items()
    ]


def _apart(
    parts: Mapping[Calls, Mapping[str, Run]],
    align: Align,
    watch: Watch,
    *,
    seconds: float,
    flushed: Tensor | None,
) -> list[Timed]:
    """Measures parts of a pair, by name, in the order of the pair."""

    def run(calls: Calls) -> Callable[[], tuple[float, ...]]:
        return lambda: apart_us(parts[calls].values(), align, flushed=flushed)

    timing = {calls: run(calls) for calls in parts}
    spans = interleaved(timing, seconds=seconds, before=watch.change)
    for calls, again in timing.items():
        watch.look(calls, next(iter(parts[calls])), again)
    return [
        Timed(calls=calls, what=what, chain=1, spans_us=values[:, i])
        for calls, values in spans.items()
        for i, what in enumerate(parts[calls])
    ]
