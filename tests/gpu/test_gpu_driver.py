"""What CUDA's driver does where the stand-ins of other tests do the same (tests/cpp/fake_driver*).

Where one of these fails, GPU memory of engines goes through the host on this machine, or the
stand-in is wrong: `pytest -s tests/gpu/test_gpu_driver.py` prints what was seen.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
import select
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from typing import IO, Any

import pytest
import torch
from torch import Tensor

from moe_p2p.machine import driver, jit
from moe_p2p.moe.gpu import memory
from tests.support.ranks import Rank, run_processes

pytestmark = pytest.mark.gpu
MIB = 1 << 20
ALREADY_MAPPED = 208
END_OF_GPU_WORK_S = 0.1  # kEndOfGpuWorkNs of csrc/provider/loopback/channel.h


class IpcHandle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


class Driver:
    """The calls that are made of C++ (csrc/platform/cuda_driver.h), with a context that is current:
    each returns the driver's number."""

    def __init__(self, device: int = 0) -> None:
        torch.cuda.set_device(device)
        torch.zeros(1, device="cuda")
        self.library = ctypes.CDLL("libcuda.so.1")
        self.library.cuIpcOpenMemHandle_v2.argtypes = (
            ctypes.POINTER(ctypes.c_uint64),
            IpcHandle,
            ctypes.c_uint,
        )

    def __getattr__(self, name: str) -> Callable[..., int]:
        function: Callable[..., int] = getattr(self.library, name)
        return function

    def allocate(self, nbytes: int, value: int) -> int:
        address = ctypes.c_uint64()
        assert self.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(nbytes)) == 0
        assert self.cuMemsetD8_v2(address, ctypes.c_ubyte(value), ctypes.c_size_t(nbytes)) == 0
        assert self.cuCtxSynchronize() == 0
        return address.value

    def free(self, address: int) -> None:
        assert self.cuMemFree_v2(ctypes.c_uint64(address)) == 0

    def handle(self, address: int) -> tuple[int, IpcHandle]:
        found = IpcHandle()
        return self.cuIpcGetMemHandle(ctypes.byref(found), ctypes.c_uint64(address)), found

    def open(self, handle: IpcHandle) -> tuple[int, int]:
        address = ctypes.c_uint64()
        return self.cuIpcOpenMemHandle_v2(ctypes.byref(address), handle, 1), address.value

    def close(self, address: int) -> int:
        return self.cuIpcCloseMemHandle(ctypes.c_uint64(address))

    def byte(self, address: int) -> int:
        found = ctypes.c_ubyte()
        at = ctypes.c_uint64(address)
        assert self.cuMemcpyDtoH_v2(ctypes.byref(found), at, ctypes.c_size_t(1)) == 0
        return found.value


def lend(rank: Rank, device: int) -> dict[str, int]:
    """Rank 0 lends memory to rank 1, takes it back while it is mapped, and lends other memory."""
    cuda, store = Driver(device * rank.rank), rank.store
    if rank.rank == 0:
        address = cuda.allocate(4 * MIB, 1)
        error, handle = cuda.handle(address)
        store.set("first", bytes(handle.bytes).hex())
        if error:
            return {"asking for a handle": error}
        store.wait(["opened"])
        cuda.free(address)
        again = cuda.allocate(4 * MIB, 2)
        _, other = cuda.handle(again)
        store.set("same place", str(int(again == address)))
        store.set("second", bytes(other.bytes).hex())
        store.wait(["done"])
        return {"a handle of its own": int(bytes(other.bytes) != bytes(handle.bytes))}

    def opened(key: str) -> tuple[int, int]:
        return cuda.open(IpcHandle.from_buffer_copy(bytes.fromhex(store.get(key).decode())))

    found: dict[str, int] = {}
    found["opening"], first = opened("first")
    if not found["opening"]:
        found["opening again"], second = opened("first")
        found["same address"] = int(first == second)
        found["closing once"] = cuda.close(second)
        found["byte"] = cuda.byte(first)
    store.set("opened", "")
    if found["opening"]:
        store.set("done", "")
        return found
    found["same place"] = int(store.get("same place"))
    found["opening another at its place"], place = opened("second")
    if not found["opening another at its place"]:
        cuda.close(place)
    found["closing"] = cuda.close(first)
    found["opening another"], place = opened("second")
    if not found["opening another"]:
        found["its byte"] = cuda.byte(place)
        cuda.close(place)
    store.set("done", "")
    return found


@functools.cache
def why_not_lent() -> str:
    """Why the driver does not map memory of GPU 0 in another process; empty: it does."""
    owner, peer = run_processes(2, lend, 0, deadline_s=60)
    failed = {**owner, **peer}
    error = failed.get("asking for a handle", 0) or failed.get("opening", 0)
    return f"the driver shares no memory between processes here (error {error})" if error else ""


@pytest.mark.parametrize("device", [0, pytest.param(1, marks=pytest.mark.multi_gpu)])
def test_memory_is_mapped_by_another_process_as_often_as_it_is_opened(device: int) -> None:
    owner, peer = run_processes(2, lend, device, deadline_s=60)
    print(f"\nowner: {owner}, peer on GPU {device}: {peer}")
    if owner.get("asking for a handle") or peer["opening"]:
        pytest.skip(f"no memory is shared between processes here: {owner} {peer}")
    assert owner == {"a handle of its own": 1}
    refused = peer.pop("opening another at its place")
    assert refused in (0, ALREADY_MAPPED)
    same = peer.pop("same place")
    print(f"memory at the place of freed memory that is mapped (same place {same}): {refused}")
    assert peer == {
        "opening": 0,
        "opening again": 0,
        "same address": 1,
        "closing once": 0,
        "byte": 1,
        "closing": 0,
        "opening another": 0,
        "its byte": 2,
    }


def test_virtual_memory_and_pools_have_no_handles() -> None:
    cuda = Driver()
    with memory.DeviceMemory.allocate(0, 2 * MIB) as virtual:
        error, _ = cuda.handle(virtual.address)
        print(f"\nvirtual memory: {error}")
        assert error
    address = ctypes.c_uint64()
    size = ctypes.c_size_t(2 * MIB)
    assert cuda.cuMemAllocAsync(ctypes.byref(address), size, None) == 0
    error, _ = cuda.handle(address.value)
    print(f"memory of a pool: {error}")
    assert error
    assert cuda.cuMemFreeAsync(address, None) == 0


def unsafe_calls(cuda: Driver, page: int, shared: int) -> dict[str, int]:
    """What threads of ours call while another one may capture, by name."""
    stream, event, pinned = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    on_device, size = ctypes.c_uint64(), ctypes.c_size_t(4096)
    host = ctypes.create_string_buffer(4096)
    found = {
        "stream": cuda.cuStreamCreateWithPriority(ctypes.byref(stream), 1, 0),
        "event": cuda.cuEventCreate(ctypes.byref(event), 2),
        "pin": cuda.cuMemHostAlloc(ctypes.byref(pinned), size, 3),
        "register": cuda.cuMemHostRegister_v2(ctypes.c_void_p(page), size, 3),
        "pointer": cuda.cuMemHostGetDevicePointer_v2(
            ctypes.byref(on_device), ctypes.c_void_p(page), 0
        ),
        "handle": cuda.handle(shared)[0],
        "flush": cuda.cuFlushGPUDirectRDMAWrites(0, 100),
        "copy from the host": cuda.cuMemcpyAsync(
            ctypes.c_uint64(shared), ctypes.c_uint64(ctypes.addressof(host)), size, stream
        ),
        "copy to the host": cuda.cuMemcpyAsync(
            ctypes.c_uint64(ctypes.addressof(host)), ctypes.c_uint64(shared), size, stream
        ),
        "copy": cuda.cuMemcpyDtoDAsync_v2(
            ctypes.c_uint64(shared + 4096), ctypes.c_uint64(shared), size, stream
        ),
        "word": cuda.cuStreamWriteValue64_v2(stream, on_device, ctypes.c_uint64(7), 0),
        "record": cuda.cuEventRecord(event, stream),
    }
    deadline = time.monotonic() + 10
    while (ended := cuda.cuEventQuery(event)) == 600 and time.monotonic() < deadline:
        pass
    found["query"] = ended
    found["the word"] = int(ctypes.c_uint64.from_address(page).value != 7)
    found["unregister"] = cuda.cuMemHostUnregister(ctypes.c_void_p(page))
    found["unpin"] = cuda.cuMemFreeHost(pinned)
    found["end of event"] = cuda.cuEventDestroy_v2(event)
    found["end of stream"] = cuda.cuStreamDestroy_v2(stream)
    return found


def test_calls_of_a_relaxed_thread_break_no_capture() -> None:
    """The capture is torch's own, in mode "global"; also loads a kernel, as an Engine does."""
    cuda = Driver()
    shared = cuda.allocate(2 * MIB, 0)
    found: dict[str, int] = {}
    with mmap.mmap(-1, mmap.PAGESIZE) as pages:
        page = ctypes.addressof(ctypes.c_char.from_buffer(pages))

        def calls() -> None:
            with driver.primary_context(0):
                found.update(unsafe_calls(cuda, page, shared))
            jit.load(0, "rows.cu", "moe_p2p_rows", {})

        x, graph = torch.zeros(1024, device="cuda:0"), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            x.add_(1)
            thread = threading.Thread(target=calls)
            thread.start()
            thread.join(60)
            x.add_(1)
        graph.replay()
        torch.cuda.synchronize()
    cuda.free(shared)
    print(f"\n{found}")
    assert found
    assert not any(found.values()), found
    assert x.tolist() == [2.0] * 1024


class Poller:
    """A thread that asks for an event all the time, as an engine's does. longest: between two
    answers, since it was set to 0."""

    def __init__(self, cuda: Driver) -> None:
        self.longest, self._over = 0.0, threading.Event()
        self._cuda, self._thread = cuda, threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        cuda, stream, event = self._cuda, ctypes.c_void_p(), ctypes.c_void_p()
        with driver.primary_context(0):
            assert cuda.cuStreamCreateWithPriority(ctypes.byref(stream), 1, 0) == 0
            assert cuda.cuEventCreate(ctypes.byref(event), 2) == 0
            last = time.monotonic()
            while not self._over.is_set():
                assert cuda.cuEventRecord(event, stream) == 0
                assert cuda.cuEventQuery(event) in (0, 600)
                now = time.monotonic()
                self.longest, last = max(self.longest, now - last), now

    def stop(self) -> None:
        self._over.set()
        self._thread.join(30)


BUSY_S = 0.3


def map_while_busy(rank: Rank) -> dict[str, tuple[float, float]]:
    """Seconds that each call takes while a kernel runs, and for how long it stops the poller."""
    cuda, store = Driver(), rank.store
    if rank.rank == 0:
        _, handle = cuda.handle(cuda.allocate(4 * MIB, 1))
        store.set("handle", bytes(handle.bytes).hex())
        store.wait(["done"])
        return {}
    handle = IpcHandle.from_buffer_copy(bytes.fromhex(store.get("handle").decode()))
    pinned, size = ctypes.c_void_p(), ctypes.c_size_t(1 << 18)
    opened: list[int] = []
    poller, found = Poller(cuda), {}
    with mmap.mmap(-1, mmap.PAGESIZE) as pages:
        page = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(pages)))
        calls: dict[str, Callable[[], object]] = {
            "open": lambda: opened.append(cuda.open(handle)[1]),
            "register": lambda: cuda.cuMemHostRegister_v2(page, ctypes.c_size_t(4096), 3),
            "pin": lambda: cuda.cuMemHostAlloc(ctypes.byref(pinned), size, 3),
            "unpin": lambda: cuda.cuMemFreeHost(pinned),
            "unregister": lambda: cuda.cuMemHostUnregister(page),
            "close": lambda: cuda.close(opened[0]),
        }
        for name, call in calls.items():
            torch.cuda._sleep(int(BUSY_S * 2e9))  # type: ignore[no-untyped-call]
            time.sleep(0.02)
            poller.longest, began = 0.0, time.monotonic()
            call()
            found[name] = time.monotonic() - began, poller.longest
            torch.cuda.synchronize()
    poller.stop()
    store.set("done", "")
    return found


def test_mapping_memory_stops_no_thread_that_polls() -> None:
    """Where a call waits for the device, an engine connects and disconnects that much later; where
    it keeps the driver's lock meanwhile, nothing is sent."""
    if reason := why_not_lent():
        pytest.skip(reason)
    _, found = run_processes(2, map_while_busy, deadline_s=60)
    for name, (took, stopped) in found.items():
        print(
            f"\n{name}: {took * 1e3:.1f} ms, the poller is stopped for {stopped * 1e3:.1f} ms",
            end="",
        )
    print()
    for name, (_, stopped) in found.items():
        assert stopped < BUSY_S / 3, name


def test_a_kernel_is_on_the_device_before_its_first_launch() -> None:
    function = jit.load(0, "rows.cu", "moe_p2p_rows", {})
    cuda = driver.module()
    with driver.primary_context(0):
        state = driver.call("cuFuncIsLoaded", cuda.CUfunction(function))
    assert state == cuda.CUfunctionLoadingState.CU_FUNCTION_LOADING_STATE_LOADED


def add_forever(handle: bytes, nbytes: int, lock: IO[bytes]) -> None:
    fcntl.flock(lock, fcntl.LOCK_EX)
    cuda = Driver()
    error, address = cuda.open(IpcHandle.from_buffer_copy(handle))
    assert error == 0
    shared = _as_tensor(address, nbytes)
    while True:
        shared.add_(1)


def _as_tensor(address: int, nbytes: int) -> Tensor:
    class Memory:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": (nbytes // 4,),
            "typestr": "<i4",
            "data": (address, False),
            "version": 3,
        }

    return torch.as_tensor(Memory(), device="cuda:0")


def test_a_killed_process_writes_no_more_soon_after_its_lock_is_gone() -> None:
    """Its GPU has up to a thousand kernels left when it is killed."""
    if reason := why_not_lent():
        pytest.skip(reason)
    cuda, nbytes = Driver(), 256 * MIB
    address = cuda.allocate(nbytes, 0)
    _, handle = cuda.handle(address)
    mine = _as_tensor(address, nbytes)
    context: Any = get_context("spawn")
    with tempfile.NamedTemporaryFile() as lock, open(lock.name, "rb") as ours:
        peer = context.Process(target=_add, args=(bytes(handle.bytes), nbytes, lock.name))
        peer.start()
        deadline = time.monotonic() + 60
        while int(mine[-1]) < 2000:
            assert time.monotonic() < deadline, "the other process adds nothing"
        ended = os.pidfd_open(peer.pid)
        os.kill(peer.pid, signal.SIGKILL)
        while not _locked(ours):
            assert time.monotonic() < deadline
        unlocked, last, changed, gone = time.monotonic(), int(mine[-1]), 0.0, 0.0
        while time.monotonic() < unlocked + 1:
            now, value = time.monotonic(), int(mine[-1])
            if value != last:
                last, changed = value, now - unlocked
            if not gone and select.select([ended], [], [], 0)[0]:
                gone = time.monotonic() - unlocked
        os.close(ended)
        peer.join(30)
    torch.cuda.synchronize()
    cuda.free(address)
    print(f"\nafter its lock: last write {changed * 1e3:.1f} ms, end {gone * 1e3:.1f} ms")
    assert gone, "the process has not ended within a second"
    assert changed < END_OF_GPU_WORK_S
    assert changed <= gone + 0.02  # a read of its memory may take so long beside it


def _add(handle: bytes, nbytes: int, lock: str) -> None:
    with open(lock, "rb") as file:
        add_forever(handle, nbytes, file)


def _locked(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
