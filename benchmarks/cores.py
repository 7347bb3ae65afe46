"""Cores for processes whose host time is measured, each beside its GPU and one to itself.

Where a process's threads run decides what a launch costs: on the far NUMA node, or beside another
thread of the same core, a call took 1.4 times as long for a whole run.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

CPUS = Path("/sys/devices/system/cpu")
PCI = Path("/sys/bus/pci/devices")


def numbers(text: str) -> list[int]:
    """ "0-3,8" -> [0, 1, 2, 3, 8]"""
    ends = [part.split("-") for part in text.strip().split(",") if part]
    return [
        cpu for first, *last in ends for cpu in range(int(first), int((last or [first])[0]) + 1)
    ]


def pci_of(gpu: int) -> str:
    """The GPU's place in /sys/bus/pci/devices, as the driver knows it; empty without one."""
    name, device = ctypes.create_string_buffer(32), ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), gpu):
        return ""
    failed = driver.cuDeviceGetPCIBusId(name, len(name), device)
    return "" if failed else name.value.decode().lower()


def near(pci: str, allowed: Iterable[int]) -> list[int]:
    """CPUs beside that device, of those that are allowed; all of them where nobody knows."""
    known = PCI / pci / "local_cpulist"
    here = set(numbers(known.read_text())) if pci and known.is_file() else set()
    return sorted(here.intersection(allowed) or allowed)


def siblings(cpu: int) -> set[int]:
    """All CPUs of its core."""
    known = CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list"
    return set(numbers(known.read_text())) if known.is_file() else {cpu}


class Cores(NamedTuple):
    """own: where the calls are timed; -1: anywhere, as there are too few cores. others: of all
    other threads, of which none runs beside that one."""

    own: int
    others: frozenset[int]
    text: str

    def take(self) -> None:
        """Moves the calling thread to its own core."""
        if self.own >= 0:
            os.sched_setaffinity(0, {self.own})

    def leave(self) -> None:
        """Moves the calling thread, and what it starts, to the others."""
        os.sched_setaffinity(0, self.others)


def choose(place: int, count: int, gpu: int = 0) -> Cores:
    """Cores of process `place` of `count` that run side by side. Of two builds in turns, processes
    of one place share them, so both have the same."""
    pci, allowed = pci_of(gpu), sorted(os.sched_getaffinity(0))
    cpus = near(pci, allowed)
    cores = list(dict.fromkeys(frozenset(siblings(cpu).intersection(cpus)) for cpu in cpus))
    where = f"{len(cpus)} CPUs" + (f" near {pci}" if pci else "")
    if len(cores) < 2 * count:
        return Cores(-1, frozenset(cpus), f"not bound: {where} are too few")
    others = frozenset(cpus).difference(*cores[:count])
    return Cores(min(cores[place]), others, f"CPU {min(cores[place])} of {where}")
