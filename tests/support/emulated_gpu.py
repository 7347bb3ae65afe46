"""GPUs for tests where there are none: kernels/ compiled for the CPU, run by tests/emulation.

Communicators of CPU tensors then call the device kernels, through the whole package except the
driver. As a pytest plugin it runs GPU tests whose ranks are threads (gpu_ranks.run):

    pytest -p tests.support.emulated_gpu tests/gpu/test_gpu_bulk.py

MOE_P2P_EMULATED_BLOCKS is the most blocks of a kernel that are resident at once.
MOE_P2P_EMULATED_ORDERED is a file, in which a run leaves the lines that ordered memory.
x86-64 only.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from moe_p2p.fleet.bootstrap import Bootstrap
from moe_p2p.kv import ring, signals
from moe_p2p.machine import transport
from moe_p2p.moe import communicator, expert_map, routing_counts, row_counts
from moe_p2p.moe.gpu import prepared
from moe_p2p.moe.gpu.epoch_memory import EpochMemory, Sharers
from moe_p2p.moe.gpu.kernel import Kernel
from moe_p2p.moe.gpu.kernels import DeviceSide

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "emulation"
FLAGS = ["-std=c++20", "-O2", "-w", "-ffp-contract=off", "-fPIC"]
INCLUDED = (ROOT / "tests" / "emulation", ROOT)  # the first hides kernels/device/ptx.cuh
# The machine is called before each access to memory (tests/emulation/order.h), and at no other
# place. -Og: compiling takes longer than running.
WATCHED = ("-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0", "-g1", "-Og")
# Functions of libraries are those that the machine uses, not those of a sanitizer.
WATCHED += ("-fno-exceptions", "-nodefaultlibs")
WATCHED += ("-fsanitize=alignment", "-fno-sanitize-recover=alignment")  # misaligned: a GPU faults
# Most of the time of a run is the machine's.
FAST = ("-O3", "-march=x86-64-v2", "-ftls-model=initial-exec", "-fno-semantic-interposition")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
MACHINE = ("order", "machine", "instructions", "driver")
_PAGE = 65536  # of memory that GDRCopy maps
RESIDENT_BLOCKS = 8  # of a kernel; more would only take longer
_ops = torch.ops.moe_p2p
_compiling = threading.Lock()
_meeting = threading.Condition()
_regions: dict[tuple[str, int], int] = {}  # address by (key of the node, local rank)


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "g++"))


def why_not() -> str:
    """Returns why it cannot run here; empty when it can."""
    if torch.cuda.is_available():
        return "there is a GPU, which runs the kernels itself"
    if platform.machine() != "x86_64":
        return "the emulated GPU runs on x86-64 only"
    compiler = _compiler()[0]
    return "" if shutil.which(compiler) else f"no C++ compiler: {compiler} is not installed"


def build(source: str, *options: str) -> Path:
    """Returns a library of this text, built once for it, the options and what it includes."""
    with _made_once(".so", source, *options) as (library, unfinished):
        if unfinished:
            made = unfinished.with_suffix(".cpp")
            made.write_text(source)
            _run_compiler("-shared", str(made), *options, "-o", str(unfinished))
            made.unlink()
    return library


@functools.cache
def _ahead() -> tuple[str, str]:
    """Options that include what is compiled ahead of kernels."""
    source = '#include "tests/emulation/ahead.h"\n'
    with _made_once(".h.gch", source, *WATCHED) as (compiled, unfinished):
        if unfinished:
            made = unfinished.with_suffix("")
            made.write_text(source)
            _run_compiler(*WATCHED, "-x", "c++-header", str(made), "-o", str(unfinished))
            made.unlink()
    return "-include", str(compiled.with_suffix(""))


@contextmanager
def _made_once(suffix: str, source: str, *options: str) -> Iterator[tuple[Path, Path | None]]:
    """Yields a file's path and, unless it exists, where to make it."""
    key = repr((_version(), source, FLAGS, options, _included(source)))
    file = FOLDER / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}{suffix}"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with _compiling, open(file.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other processes want the same at the same time
        if file.exists():
            yield file, None
        else:
            unfinished = file.with_name(f"{os.getpid()}.{file.name}")
            yield file, unfinished
            unfinished.rename(file)


def _included(source: str) -> dict[str, str]:
    """Returns hashes of all files of this repository that a text includes, by their names."""
    found: dict[str, str] = {}
    queue = _INCLUDE.findall(source)
    while queue:
        if (name := queue.pop()) not in found:
            found[name], names = _read(name)
            queue += names
    return dict(sorted(found.items()))


@functools.cache
def _read(name: str) -> tuple[str, list[str]]:
    """Returns an included file's hash, and what it includes."""
    text = next(path for folder in INCLUDED if (path := folder / name).is_file()).read_text()
    return hashlib.sha256(text.encode()).hexdigest(), _INCLUDE.findall(text)


@functools.cache
def _version() -> str:
    """Of the compiler: another one cannot read what this one has compiled ahead."""
    return subprocess.run(
        [*_compiler(), "--version"], capture_output=True, text=True, check=True
    ).stdout


def _run_compiler(*arguments: str) -> None:
    include = [f"-I{folder}" for folder in INCLUDED]
    command = [*_compiler(), *FLAGS, *include, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def few_cpus() -> dict[str, str]:
    """Environment of a process whose threads yield the CPU while they wait."""
    naps = build((ROOT / "tests" / "emulation" / "yield.cpp").read_text())
    return {"LD_PRELOAD": str(naps), "OMP_NUM_THREADS": "1"}


def machine_library() -> Path:
    """The emulator's library, under the driver's name."""
    source = "".join(f'#include "tests/emulation/{part}.cpp"\n' for part in MACHINE)
    return build(source, "-Wl,-soname,libcuda.so.1", *FAST)


def kernel_library(source: str) -> Path:
    """A library of kernels from this text, which calls the machine's: load that before."""
    return build(source, *WATCHED, *_ahead(), "-lubsan")


@functools.cache
def machine() -> Path:
    """The machine's library, loaded in this process."""
    library = machine_library()
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return library


@functools.cache
def gdrcopy() -> None:
    """Loads a stand-in for GDRCopy's library under its name."""
    source = (ROOT / "tests" / "emulation" / "gdrapi.cpp").read_text()
    library = build(source, "-Wl,-soname,libgdrapi.so.2", "-pthread")
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def _machine() -> ctypes.CDLL:
    library = ctypes.CDLL(str(machine()))
    library.moe_p2p_compile_by(_compile)
    library.moe_p2p_begin_capture.restype = ctypes.c_void_p
    library.moe_p2p_num_captured.restype = ctypes.c_size_t
    return library


class Graph:
    """Replaces torch.cuda.CUDAGraph: kernels, which are replayed without the host."""

    def __init__(self) -> None:
        self._driver, self._graph, self._length = _machine(), ctypes.c_void_p(), 0
        self._between: list[tuple[int, Callable[[], object]]] = []  # launches before it, a step

    def __del__(self) -> None:
        self._driver.moe_p2p_drop_graph(self._graph)

    def record(self, body: Callable[[], Any]) -> Any:
        self._graph = ctypes.c_void_p(self._driver.moe_p2p_begin_capture())
        _capturing.graph = self
        try:
            result = body()
            self._length = self._driver.moe_p2p_num_captured()
            return result
        finally:
            _capturing.graph = None
            self._driver.moe_p2p_end_capture()

    def add(self, step: Callable[[], object]) -> None:
        """Adds a step that is no kernel of the package."""
        self._between.append((self._driver.moe_p2p_num_captured(), step))

    def replay(self) -> None:
        done = 0
        for until, step in self._between:
            self._run(done, until)
            step()
            done = until
        self._run(done, self._length)

    def _run(self, first: int, last: int) -> None:
        self._driver.moe_p2p_replay(self._graph, ctypes.c_size_t(first), ctypes.c_size_t(last))


class Stream:
    """Replaces torch.cuda.Stream: a thread, so that kernels of several streams run concurrently."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._last: Future[Any] | None = None

    def run(self, step: Callable[[], object]) -> Future[Any]:
        """Runs step() after all earlier steps. The result also serves as an event."""
        self._last = self._thread.submit(step)
        return self._last

    def wait_event(self, event: Future[Any]) -> None:
        if "MOE_P2P_EMULATED_WITHOUT_EVENTS" not in os.environ:  # set: a fault to test the tests
            self._thread.submit(event.result)

    def synchronize(self) -> None:
        if self._last is not None:
            self._last.result()


_capturing = threading.local()


def compute(step: Callable[[], object]) -> None:
    """Runs step(), which writes into existing tensors; in a captured body, at each replay."""
    graph = getattr(_capturing, "graph", None)
    if graph is None:
        step()
    else:
        graph.add(step)


@functools.cache
def _function(source: str, macros: tuple[tuple[str, int], ...]) -> tuple[ctypes.CDLL, int]:
    name = source.removesuffix(".cu")
    of_communicators = ("dispatch", "combine", "clean", "enter")
    entry = f"moe_p2p::{name}" if name in of_communicators else f"moe_p2p_{name}"
    defines = "".join(f"#define {macro} {value}\n" for macro, value in macros)
    text = (
        f'{defines}#include "kernels/{source}"\n'
        'extern "C" void moe_p2p_emulated(const void* params) {\n'
        f"  using Params = moe_p2p::abi::{name.capitalize()}Params;\n"
        f"  {entry}(*static_cast<const Params*>(params));\n}}\n"
        f"size_t moe_p2p_params_bytes = sizeof(moe_p2p::abi::{name.capitalize()}Params);\n"
    )
    machine()
    library = ctypes.CDLL(str(kernel_library(text)))
    address = ctypes.cast(library.moe_p2p_emulated, ctypes.c_void_p).value
    assert address is not None
    size = ctypes.c_size_t.in_dll(library, "moe_p2p_params_bytes")
    _machine().moe_p2p_set_params_bytes(ctypes.c_void_p(address), size)
    return library, address


_numbered: list[tuple[str, tuple[tuple[str, int], ...]]] = []  # kernels, from number 1 on


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint64)
def _compile(number: int) -> int:
    """Called at each launch: most kernels that a communicator prepares are never launched."""
    try:
        return _function(*_numbered[number - 1])[1]
    except Exception:  # without a value the caller would jump anywhere
        traceback.print_exc()
        return 0


def _meet(key: str, local: int, count: int, address: int, deadline: float) -> list[int]:
    """Exchanges addresses among `count` ranks with the same key."""
    with _meeting:
        _regions[key, local] = address
        _meeting.notify_all()
        came = _meeting.wait_for(
            lambda: all((key, other) in _regions for other in range(count)),
            timeout=deadline - time.monotonic(),
        )
        assert came, "ranks of an emulated GPU are threads of one process; some did not come"
        return [_regions[key, other] for other in range(count)]


class Room:
    """Memory that ranks share: there until the last of them has unmapped it, as a GPU's."""

    at: ClassVar[dict[int, Room]] = {}

    def __init__(self, size: int, arrivals: int) -> None:
        room = torch.zeros(size + _PAGE, dtype=torch.uint8)
        self.memory = room[-room.data_ptr() % _PAGE :][:size]
        self._mapped, begin = 0, self.memory.data_ptr()
        self._shared = ctypes.c_void_p(begin), ctypes.c_size_t(size)
        _machine().moe_p2p_shared_memory(*self._shared)
        # The last of the regions: stored by NICs or the proxy.
        self._arrivals = (ctypes.c_void_p(begin + size - arrivals), ctypes.c_size_t(arrivals))
        if arrivals:
            _machine().moe_p2p_host_memory(*self._arrivals)
        self.at[begin] = self

    def map(self) -> Callable[[], None]:
        with _meeting:
            self._mapped += 1
        return self._unmap

    def _unmap(self) -> None:
        with _meeting:
            self._mapped -= 1
            if self._mapped:
                return
            if self._arrivals[1].value:
                _machine().moe_p2p_no_host_memory(self._arrivals[0])
            _machine().moe_p2p_no_shared_memory(*self._shared)
            del self.at[self.memory.data_ptr()]


class EmulatedDevice(DeviceSide):
    def _on_device(self) -> torch.device:
        return torch.device("cpu")

    def _share(
        self, undo: ExitStack, meeting: Bootstrap, sharers: Sharers, deadline: float
    ) -> tuple[list[int], list[int]]:
        sharing, _, partners, _ = sharers
        size = self._region_bytes
        self._memory_made = made = Room(size, self._plan["arrivals"]).memory
        own = made.data_ptr()
        met = _meet(sharing.key, sharing.place, sharing.num_places, own, deadline)
        addresses, peers = sharing.as_ranks(met), [0] * self._num_nodes
        if partners is not None:
            far = _meet(partners.key, partners.place, len(partners.nodes), own, deadline)
            peers = partners.by_node(far)
            met = [*met, *far]
        for address in {own, *met}:
            undo.callback(Room.at[address].map())
        return addresses, peers

    def _use(self, made: EpochMemory, addresses: list[int], peers: list[int]) -> None:
        self._share_with_host(made.undo, self._fault.data_ptr(), self._fault.nbytes)
        super()._use(made, addresses, peers)

    def begin(self, memory: EpochMemory) -> None:
        self._memory_bytes = self._memory_made
        super().begin(memory)

    def enter(self, memory: EpochMemory) -> Callable[[], None]:
        leave = super().enter(memory)
        self._memory_bytes = self._memory_made
        return leave

    def _share_with_host(self, undo: ExitStack, address: int, size: int) -> None:
        _machine().moe_p2p_host_memory(ctypes.c_void_p(address), ctypes.c_size_t(size))
        undo.callback(_machine().moe_p2p_no_host_memory, ctypes.c_void_p(address))

    def _map_signals(self, undo: ExitStack, host: int, size: int) -> int:
        self._share_with_host(undo, host, size)
        return host

    def _mark(self) -> Callable[[], None]:
        return lambda: None  # launches have ended when they return

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def _load(self, kernel: Kernel) -> str:
        half = RESIDENT_BLOCKS // 2
        few = kernel._replace(
            max_send_blocks=min(kernel.max_send_blocks, half),
            max_recv_blocks=min(kernel.max_recv_blocks, half),
            max_copy_blocks=min(kernel.max_copy_blocks, half),
            max_away_blocks=min(kernel.max_away_blocks, half),
        )
        return super()._load(few)

    def _open(self, kernel: Kernel) -> tuple[int, int]:
        key = kernel.source, tuple(kernel.macros.items())
        with _meeting:
            if key not in _numbered:
                _numbered.append(key)
            return _numbered.index(key) + 1, RESIDENT_BLOCKS

    def _wait(self) -> None:
        """Launches have ended when they return."""


def install(patch: pytest.MonkeyPatch) -> None:
    """Gives communicators of CPU tensors an emulated GPU from now on."""
    patch.setattr(communicator, "DeviceSide", EmulatedDevice)
    patch.setattr(communicator.Communicator, "_on_gpu", True)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(prepared, "is_captured", lambda: getattr(_capturing, "graph", None) is not None)
    count = lambda *_: _function("count.cu", ())[1]  # noqa: E731
    patch.setattr(routing_counts, "count_kernel", count)
    patch.setattr(row_counts, "count_kernel", count)
    patch.setattr(expert_map, "map_kernel", lambda _: _function("map.cu", ())[1])
    patch.setattr(ring, "pack_kernel", lambda _: _function("pack.cu", ())[1])
    patch.setattr(signals, "kernel_for", lambda _: _function("signal.cu", ())[1])
    # Its memory is host memory, which the software NIC copies by itself.
    patch.setattr(transport, "with_copy_kernel", lambda provider, settings, device: settings)


def pytest_configure(config: pytest.Config) -> None:
    os.environ["MOE_P2P_EMULATED_GPU"] = "1"
    from tests.support import gpu_ranks

    install(pytest.MonkeyPatch())
    gpu_ranks.DEVICE = "cpu"


def pytest_unconfigure() -> None:
    if file := os.environ.get("MOE_P2P_EMULATED_ORDERED"):
        _machine().moe_p2p_write_ordered(file.encode())
