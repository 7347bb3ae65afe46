"""Time on GPUs, by events. Every span begins when all GPUs have met; the slowest rank counts.

Collective: all ranks of the default process group (gloo) make the same calls.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

HEAD_START_CYCLES = 4_000_000  # about 2 ms: the host queues everything before the GPU begins
CHAIN_US = 10_000.0  # of pairs between two events
MIN_CHAIN, MAX_CHAIN = 2, 20
MIN_ROUNDS, MAX_ROUNDS = 10, 400
FLUSH_BYTES = 256 << 20  # more than the second-level cache holds

cuda: Any = torch.cuda  # events and graphs have no types there
T = TypeVar("T")
Align = Callable[[], None]  # queues a meeting of all GPUs on the current stream


def timed_us(run: Callable[[], object], align: Align, *, repeats: int = 1) -> float:
    """Microseconds of run() on this rank, mean of a chain of `repeats`."""
    begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
    cuda._sleep(HEAD_START_CYCLES)
    align()
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / repeats


def host_us(
    run: Callable[[], object], waited_s: Callable[[], float], align: Align, *, repeats: int
) -> float:
    """Microseconds of host work in run(), mean of a chain, on the slowest rank.

    waited_s: seconds that the host has waited for the GPU in such runs so far; not counted.
    """
    spans = []
    for _ in range(MIN_ROUNDS):
        cuda.synchronize()
        align()
        waited, began = waited_s(), time.perf_counter()
        for _ in range(repeats):
            run()
        worked = time.perf_counter() - began - (waited_s() - waited)
        spans.append(worked * 1e6 / repeats)
    cuda.synchronize()
    return agreed_max(statistics.median(spans))


def apart_us(
    parts: Iterable[Callable[[], object]], align: Align, *, flushed: Tensor | None
) -> tuple[float, ...]:
    """Runs each part once on this rank, after all GPUs met.

    flushed: memory that is zeroed before each part, to clear the caches.
    """
    spans = []
    for run in parts:
        if flushed is not None:
            flushed.zero_()
        spans.append(timed_us(run, align))
    return tuple(spans)


def captured(run: Callable[[], object], *, repeats: int) -> Callable[[], None]:
    """Captures `repeats` calls in a CUDA graph; returns a function that replays it."""
    cuda.synchronize()
    dist.barrier()
    graph = cuda.CUDAGraph()
    with cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(repeats):
            run()
    cuda.synchronize()
    dist.barrier()
    replay: Callable[[], None] = graph.replay
    return replay


def chain_length(run: Callable[[], object], align: Align) -> int:
    """Returns how often to run it between two events, for about CHAIN_US."""
    timed_us(run, align)
    once = agreed_max(timed_us(run, align, repeats=2))
    return max(MIN_CHAIN, min(MAX_CHAIN, int(CHAIN_US / max(once, 1.0))))


def interleaved(
    runs: Mapping[T, Callable[[], tuple[float, ...]]],
    *,
    seconds: float,
    before: Callable[[], None] = lambda: None,
) -> dict[T, Tensor]:
    """Returns the same keys -> [rounds, values], the slowest rank of each round; runs take turns.

    seconds: for each run. before: called before each round, not timed. The order is reversed
    from one round to the next.
    """
    names = list(runs)
    if not names:
        return {}
    started = time.perf_counter()
    for name in names:
        runs[name]()
    each = agreed_max(time.perf_counter() - started)
    rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(seconds * len(names) / each)))
    spans: dict[T, list[tuple[float, ...]]] = {name: [] for name in names}
    for i in range(rounds):
        before()
        for name in names if i % 2 == 0 else names[::-1]:
            spans[name].append(runs[name]())
    result = {}
    for name in names:
        mine = torch.tensor(spans[name], dtype=torch.float64)
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        result[name] = mine
    return result


def agreed_max(value: float) -> float:
    """Returns the largest value of any rank."""
    shared = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return float(shared)
