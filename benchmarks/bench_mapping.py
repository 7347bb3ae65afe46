"""How long calls of the CUDA driver take that make and drop an epoch's memory (docs/elastic.md,
section 9), on a thread beside a captured graph whose kernel waits for a word, and without one.

    PYTHONPATH=. python benchmarks/bench_mapping.py [--mib 64] [--devices 0 1] [--times 5]

One line per call: medians in milliseconds with an idle GPU, and while the kernel waits. "waits for
the kernel": the call returned only after that had been let go, `--hold-s` later. Memory is of each
device, mapped for the first, on which the kernel runs, with torch's launches beside it: `launch` is
the longest time that a launch on another stream took meanwhile.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from moe_p2p.machine import driver, jit
from moe_p2p.machine.driver import call, module

_KERNEL = """
extern "C" __global__ void wait_for(volatile unsigned* word, volatile unsigned* begun) {
  *begun = 1;
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  while (*word == 0 && now - start < 20000000000ull);
}
"""
_MIB = 1 << 20


class Waiting:
    """A graph whose kernel waits until it is let go."""

    def __init__(self) -> None:
        self._words = torch.zeros(2, dtype=torch.int32, pin_memory=True)
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._graph = torch.cuda.CUDAGraph()
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "wait_for.cu"
            source.write_text(_KERNEL)
            function = jit.load(torch.cuda.current_device(), source, "wait_for", {})
        word = self._words.data_ptr()
        arguments = ((word, word + 4), (ctypes.c_void_p, ctypes.c_void_p))
        with torch.cuda.graph(self._graph, stream=self._stream):
            stream = torch.cuda.current_stream().cuda_stream
            call("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, stream, arguments, 0)

    def begin(self) -> None:
        self._words.zero_()
        with torch.cuda.stream(self._stream):
            self._graph.replay()
        while self._words[1] == 0:
            time.sleep(0.001)

    def let_go(self) -> None:
        self._words[0] = 1
        self._stream.synchronize()


def steps(device: int, reader: int, size: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Each call once, in the order in which an epoch's memory comes and goes."""
    had: dict[str, Any] = {}
    properties = module().CUmemAllocationProp()
    properties.type = module().CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = module().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device
    kind = module().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    properties.requestedHandleTypes = kind
    access = module().CUmemAccessDesc()
    access.location.type = module().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = reader
    access.flags = module().CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    pages = mmap.mmap(-1, _MIB)
    host = ctypes.addressof(ctypes.c_char.from_buffer(pages))

    def clear() -> None:
        stream = call("cuStreamCreate", module().CUstream_flags.CU_STREAM_NON_BLOCKING)
        call("cuMemsetD8Async", had["at"], 0, size, stream)
        call("cuStreamSynchronize", stream)
        call("cuStreamDestroy", stream)

    def keep(name: str, made: Callable[[], Any]) -> Callable[[], None]:
        def step() -> None:
            had[name] = made()

        return step

    yield "cuMemCreate", keep("own", lambda: call("cuMemCreate", size, properties, 0))
    yield (
        "cuMemExportToShareableHandle",
        keep("fd", lambda: call("cuMemExportToShareableHandle", had["own"], kind, 0)),
    )
    yield (
        "cuMemImportFromShareableHandle",
        keep("other", lambda: call("cuMemImportFromShareableHandle", had["fd"], kind)),
    )
    os.close(had["fd"])
    yield "cuMemAddressReserve", keep("at", lambda: call("cuMemAddressReserve", size, 0, 0, 0))
    yield "cuMemMap", lambda: call("cuMemMap", had["at"], size, 0, had["other"], 0)
    yield "cuMemSetAccess", lambda: call("cuMemSetAccess", had["at"], size, [access], 1)
    yield "cuMemsetD8Async, another stream", clear
    flags = module().CU_MEMHOSTREGISTER_PORTABLE | module().CU_MEMHOSTREGISTER_DEVICEMAP
    yield "cuMemHostRegister 1 MiB", lambda: call("cuMemHostRegister", host, _MIB, flags)
    yield "cuMemHostUnregister", lambda: call("cuMemHostUnregister", host)
    yield "cuMemUnmap", lambda: call("cuMemUnmap", had["at"], size)
    yield "cuMemRelease of the import", lambda: call("cuMemRelease", had["other"])
    yield "cuMemRelease", lambda: call("cuMemRelease", had["own"])
    yield "cuMemAddressFree", lambda: call("cuMemAddressFree", had["at"], size)


class Launches:
    """Launches small kernels on a stream of its own, and knows how long the longest took."""

    def __init__(self) -> None:
        self.longest_s, self._stop = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            value = torch.zeros(1, device="cuda")
            while not self._stop.wait(0.001):
                began = time.perf_counter()
                value.add_(1)
                self.longest_s = max(self.longest_s, time.perf_counter() - began)

    def end(self) -> float:
        self._stop.set()
        self._thread.join()
        return self.longest_s


def timed(step: Callable[[], None], reader: int, waiting: Waiting | None, hold_s: float) -> float:
    """Returns how long it took, on a thread of its own; hold_s at most beside the kernel."""
    took = list[float]()

    def run() -> None:
        with driver.primary_context(reader):
            began = time.perf_counter()
            step()
            took.append(time.perf_counter() - began)

    if waiting is not None:
        waiting.begin()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(hold_s)
    if waiting is not None:
        waiting.let_go()
    thread.join()
    return took[0] if took else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--devices", type=int, nargs="+", default=[0])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--hold-s", type=float, default=2.0)
    given = parser.parse_args()
    reader, size = given.devices[0], given.mib * _MIB
    torch.cuda.set_device(reader)
    waiting = Waiting()
    for device in given.devices:
        print(f"{given.mib} MiB of GPU {device}, for GPU {reader}: {torch.cuda.get_device_name()}")
        found: dict[str, tuple[list[float], list[float]]] = {}
        longest = [0.0, 0.0]
        for beside in (False, True):
            for _ in range(given.times):
                for name, step in steps(device, reader, size):
                    launches = Launches()
                    took = timed(step, reader, waiting if beside else None, given.hold_s)
                    longest[beside] = max(longest[beside], launches.end())
                    found.setdefault(name, ([], []))[beside].append(took)
        for name, (idle, busy) in found.items():
            waits = "   waits for the kernel" if max(busy) >= given.hold_s else ""
            pair = "".join(f"{1e3 * statistics.median(each):12.3f}" for each in (idle, busy))
            print(f"  {name:32}{pair}{1e3 * max(busy):12.3f} at most{waits}", flush=True)
        print(f"  {'launch':32}{1e3 * longest[0]:12.3f}{1e3 * longest[1]:12.3f}", flush=True)


if __name__ == "__main__":
    main()
