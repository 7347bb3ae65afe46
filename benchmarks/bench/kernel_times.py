"""Where the time of a call goes: kernels of this package, of NCCL and others; on CPUs ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

_NAME_WIDTH = 64


class KernelTimes(NamedTuple):
    """Milliseconds of each kind; `longest`, of others: name and milliseconds."""

    number: int
    ours: float
    collectives: float
    others: float
    longest: tuple[tuple[str, float], ...]

    def text(self) -> str:
        """Returns a line, and one for each of the longest others."""
        lines = [
            f"{self.number:4} kernels: ours {self.ours:.2f} ms, "
            f"collectives {self.collectives:.2f}, others {self.others:.2f}"
        ]
        lines += [f"{ms:14.2f} {name[:_NAME_WIDTH]}" for name, ms in self.longest]
        return "\n".join(lines)


def kernel_times(call: Callable[[], None], device: str, most: int = 5) -> KernelTimes:
    """Runs call() under torch's profiler; with the `most` longest of others."""
    on_gpu = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        call()
        if on_gpu:
            torch.cuda.synchronize()
    times, count = dict[str, float](), 0
    for each in found.key_averages():
        us = each.self_device_time_total if on_gpu else each.self_cpu_time_total
        if us > 0:
            times[each.key] = us / 1e3
            count += each.count
    ours = {name for name in times if "moe_p2p" in name}
    collectives = {name for name in times if "nccl" in name or "c10d" in name or "gloo" in name}
    others = sorted(set(times) - ours - collectives, key=lambda name: -times[name])

    def total(names: Iterable[str]) -> float:
        return sum((times[name] for name in names), 0.0)

    longest = tuple((name, times[name]) for name in others[:most])
    return KernelTimes(count, total(ours), total(collectives), total(others), longest)
