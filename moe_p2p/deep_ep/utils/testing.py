"""deep_ep.utils.testing: timing as DeepEP's scripts do it, on a GPU."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_FLUSHED_BYTES = 256 << 20  # more than any second-level cache holds
_LONG_CYCLES = 20_000_000  # about 10 ms, in which hosts issue what follows


def flush_l2_cache(enabled: bool = True) -> None:
    """Writes more memory than the second-level cache holds."""
    if enabled:
        torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device="cuda").zero_()


def bench(
    fn: Callable[[], Any],
    num_warmups: int = 50,
    num_tests: int = 50,
    post_fn: Callable[[], Any] | None = None,
    flush_l2: bool = True,
) -> tuple[float, float, float]:
    """Returns mean, least and most seconds of fn() by events of the GPU, without the first run."""
    for _ in range(num_warmups):
        fn()
    torch.cuda.synchronize()
    times: list[list[torch.cuda.Event]] = []
    for _ in range(num_tests):
        flush_l2_cache(flush_l2)
        times.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])  # type: ignore[no-untyped-call]
        times[-1][0].record()
        fn()
        times[-1][1].record()
        if post_fn is not None:
            post_fn()
    torch.cuda.synchronize()
    seconds = [begin.elapsed_time(end) / 1e3 for begin, end in times[1:] or times]
    return sum(seconds) / len(seconds), min(seconds), max(seconds)


def bench_kineto(
    fn: Callable[[], Any],
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    barrier_comm_profiling: bool = False,
    num_kernels_per_period: int = 1,
    barrier: Callable[[], Any] | None = None,
) -> Any:
    """Returns the mean seconds of each kernel whose name contains one of kernel_names.

    kernel_names: of ours; DeepEP's `dispatch_impl` and `combine_impl` are dispatch and combine. NaN
        where there is no such kernel, as of DeepEP's epilogues.
    num_kernels_per_period: launches of it in one fn(): then a list, by their order in it.
    barrier_comm_profiling: ranks line up first, by barrier() or an all-reduce.
    """
    names = (kernel_names,) if isinstance(kernel_names, str) else kernel_names
    fn()
    torch.cuda.synchronize()
    quiet = suppress_stdout_stderr() if suppress_kineto_output else contextlib.nullcontext()
    with quiet, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        for _ in range(num_tests):
            flush_l2_cache(flush_l2)
            if barrier_comm_profiling:
                torch.cuda._sleep(_LONG_CYCLES)  # type: ignore[no-untyped-call]
                (barrier or _all_reduce)()
            fn()
        torch.cuda.synchronize()
    if trace_path is not None:
        prof.export_chrome_trace(trace_path)
    found = [mean_seconds(prof.events(), name, num_kernels_per_period) for name in names]
    return found if isinstance(kernel_names, tuple) else found[0]


def mean_seconds(events: Any, name: str, per_period: int) -> float | list[float]:
    """Returns what bench_kineto does for one name."""
    name = name.removesuffix("_impl")
    kernels: list[Any] = sorted(
        (event for event in events if name in event.name), key=lambda event: event.time_range.start
    )
    assert len(kernels) % per_period == 0, (
        f"{len(kernels)} kernels have {name!r} in their names, no multiple of {per_period}, which "
        "one call was said to launch"
    )
    seconds = [kernel.time_range.elapsed_us() / 1e6 for kernel in kernels]
    count = len(seconds) // per_period
    means = [
        sum(seconds[first::per_period]) / count if count else math.nan
        for first in range(per_period)
    ]
    return means if per_period > 1 else means[0]


def _all_reduce() -> None:
    dist.all_reduce(torch.ones(1, dtype=torch.float32, device="cuda"))


@contextlib.contextmanager
def suppress_stdout_stderr() -> Any:
    """Sends what this process prints to nowhere, output of C++ too."""
    kept = [os.dup(number) for number in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nowhere, number)
        yield
    finally:
        for number, before in zip((1, 2), kept, strict=True):
            os.dup2(before, number)
            os.close(before)
        os.close(nowhere)


empty_suppress = contextlib.nullcontext
_SIZE = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*([kmgt]?)(?:i?b)?\s*", re.IGNORECASE)


def parse_num_bytes(text: str) -> int:
    """Returns what a size as "512k", "64MiB" or "1.5G" says, above 0, in bytes; units are powers of
    1024. Raises ValueError."""
    found = _SIZE.fullmatch(text)
    size = (
        0
        if found is None
        else int(float(found[1]) * 1024 ** " kmgt".index(found[2].lower() or " "))
    )
    if size <= 0:
        raise ValueError(f"{text!r} is no size above 0, as 1G, 64M, 512k or 1048576")
    return size
