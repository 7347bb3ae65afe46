"""moe_p2p.moe.gpu.memory: device memory shared by ranks, and pages of the host that GPUs use."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_p2p import errors
from moe_p2p.machine import driver, jit
from moe_p2p.moe.gpu import memory
from tests.support import ranks
from tests.support.cases import memfd


def _barrier(rank: ranks.Rank, name: str) -> None:
    rank.store.add(name, 1)
    ends = time.monotonic() + ranks.DEADLINE_S
    while rank.store.add(name, 0) < rank.world_size:
        assert time.monotonic() < ends, f"{name}: not all ranks came"


OPENS = {  # of the driver's calls: what takes something, and what gives it back
    "cuMemCreate": "cuMemRelease",
    "cuMemImportFromShareableHandle": "cuMemRelease",
    "cuMemAddressReserve": "cuMemAddressFree",
    "cuMemMap": "cuMemUnmap",
    "cuMemHostRegister": "cuMemHostUnregister",
    "cuCtxPushCurrent": "cuCtxPopCurrent",
}
VALUES = {
    "cuMemGetAllocationGranularity": 2 << 20,
    "cuDeviceGetAttribute": 1,
    "cuMemAddressReserve": 1 << 40,
    "cuMemHostGetDevicePointer": 1 << 41,
    "cuGetErrorString": b"as the test wants",
}
SILENT = ("cuMemMap", "cuMemSetAccess", "cuMemsetD8", "cuCtxSynchronize", "cuMemHostRegister")


class _FakeDriver:
    """Records calls in place of the driver; the one numbered `failing` runs out of memory."""

    def __init__(self, failing: int) -> None:
        self.real = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
        self.failing, self.calls = failing, 0
        self.held: list[str] = []
        self.log: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self._call, name) if name[:2] == "cu" else getattr(self.real, name)

    def _call(self, name: str, *_: object) -> tuple[Any, ...]:
        results = self.real.CUresult
        self.log.append(name)
        if name in OPENS.values():
            self.held.remove(name)
            return (results.CUDA_SUCCESS,)
        may_fail = name not in ("cuGetErrorString", "cuCtxPushCurrent")
        self.calls += may_fail
        if may_fail and self.calls == self.failing:
            return results.CUDA_ERROR_OUT_OF_MEMORY, None
        if name in OPENS:
            self.held.append(OPENS[name])
        if name == "cuMemExportToShareableHandle":
            return results.CUDA_SUCCESS, memfd("device memory")
        value = () if name in SILENT else (VALUES.get(name, 7),)
        return (results.CUDA_SUCCESS, *value)


def _open_all(key: str) -> None:
    deadline = time.monotonic() + 20
    fd = memfd("device memory")
    with (
        contextlib.closing(open(fd, "rb")),
        memory.share_node_memory(
            0, 1, key=key, device=0, size_bytes=3, deadline=deadline
        ) as shared,
        memory.share_memory(shared.own, 0, 1, key=key, deadline=deadline) as windows,
        memory.PinnedPages(0, 4096, 8192) as pages,
        memory.DeviceMemory.import_fd(fd, shared.own.size, 0) as peer,
    ):
        assert (shared.own.size, shared.addresses) == (2 << 20, [1 << 40])
        assert windows.addresses == shared.addresses
        assert (pages.device_address, peer.address) == (1 << 41, 1 << 40)


def test_what_was_done_is_undone_wherever_it_fails(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_retain", lambda device: device)
    for failing in range(1, 100):
        fake = _FakeDriver(failing)
        monkeypatch.setattr(driver, "module", lambda fake=fake: fake)
        monkeypatch.setattr(memory, "module", lambda fake=fake: fake)
        with contextlib.suppress(errors.ResourceExhaustedError):
            _open_all(key)
        assert fake.held == [], f"call {failing} failed: {fake.log}"
        if fake.calls < failing:
            return  # there were fewer calls than that: this time nothing failed
    raise AssertionError("the calls have no end")


STORE_WORD = """
extern "C" __global__ void store_word(unsigned long long* words, int at, int from) {
  words[at] = words[from] + 100;
}
"""


@pytest.mark.gpu
def test_gpu_and_host_see_the_same_pages(tmp_path: Path) -> None:
    source = tmp_path / "store_word.cu"
    source.write_text(STORE_WORD)
    function = jit.load(0, source, "store_word", {})
    with mmap.mmap(-1, mmap.PAGESIZE) as pages:
        # The ctypes object goes away at once: while it lives, the mapping cannot be closed.
        host = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        with memory.PinnedPages(0, host, mmap.PAGESIZE) as pinned:
            pages[:8] = (7).to_bytes(8, "little")
            kinds = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
            with driver.primary_context(0):
                shape = (1, 1, 1, 1, 1, 1)
                arguments = ((pinned.device_address, 1, 0), kinds)
                driver.call("cuLaunchKernel", function, *shape, 0, 0, arguments, 0)
                driver.call("cuCtxSynchronize")
            assert int.from_bytes(pages[8:16], "little") == 107


def _copy_out(address: int, size: int) -> bytes:
    data = ctypes.create_string_buffer(size)
    driver.call("cuMemcpyDtoH", ctypes.addressof(data), address, size)
    return data.raw


def _write_to_peers(rank: ranks.Rank, key: str, size_bytes: int, num_devices: int) -> bytes:
    """Every rank writes its number + 1 into place r of every rank's memory; returns its own."""
    device = rank.rank % num_devices
    with memory.share_node_memory(
        rank.rank,
        rank.world_size,
        key=key,
        device=device,
        size_bytes=size_bytes,
        deadline=time.monotonic() + 60,
    ) as shared:
        assert shared.own.size >= size_bytes
        assert shared.addresses[rank.rank] == shared.own.address
        with driver.primary_context(device):
            assert not any(_copy_out(shared.own.address, shared.own.size))
            _barrier(rank, "looked")
            for address in shared.addresses:
                driver.call("cuMemsetD8", address + rank.rank, rank.rank + 1, 1)
            driver.call("cuCtxSynchronize")
            _barrier(rank, "written")
            found = _copy_out(shared.own.address, rank.world_size + 1)
        _barrier(rank, "read")
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("size_bytes", [1, 5 << 20])
def test_processes_write_into_each_others_device_memory(size_bytes: int) -> None:
    key = f"test-{uuid.uuid4()}"
    assert ranks.run_processes(2, _write_to_peers, key, size_bytes, 1) == [b"\1\2\0"] * 2


@pytest.mark.gpu
def test_threads_write_into_each_others_device_memory() -> None:
    key = f"test-{uuid.uuid4()}"
    assert ranks.run_threads(2, _write_to_peers, key, 1 << 20, 1) == [b"\1\2\0"] * 2


@pytest.mark.multi_gpu
def test_gpus_write_into_each_others_memory() -> None:
    count, key = torch.cuda.device_count(), f"test-{uuid.uuid4()}"
    expected = bytes(range(1, count + 1)) + b"\0"
    assert ranks.run_processes(count, _write_to_peers, key, 4 << 20, count) == [expected] * count


@pytest.mark.gpu
def test_device_memory_is_given_back() -> None:
    size = 256 << 20
    with memory.DeviceMemory.allocate(0, size):
        pass
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info(0)
    for _ in range(3):
        with memory.DeviceMemory.allocate(0, size) as one:
            os.close(one.export_fd())
    assert torch.cuda.mem_get_info(0)[0] > free - size


@pytest.mark.gpu
def test_more_memory_than_there_is_is_refused() -> None:
    with pytest.raises(errors.ResourceExhaustedError, match="cuMemCreate"):
        memory.DeviceMemory.allocate(0, 1 << 44)


def _fabric_exchange(rank: ranks.Rank, data: bytes) -> list[bytes]:
    rank.store.set(f"fabric {rank.rank}", data)
    return [bytes(rank.store.get(f"fabric {other}")) for other in range(rank.world_size)]


def _share_by_fabric(rank: ranks.Rank) -> list[bytes]:
    """What each rank finds in the memory of the others."""
    with memory.share_node_memory(
        rank.rank,
        rank.world_size,
        key="unused",
        device=0,
        size_bytes=1 << 20,
        deadline=time.monotonic() + 60,
        exchange=functools.partial(_fabric_exchange, rank),
    ) as shared:
        with driver.primary_context(0):
            driver.call("cuMemsetD8", shared.own.address, rank.rank + 1, 1)
            driver.call("cuCtxSynchronize")
            _barrier(rank, "written")
            found = [_copy_out(address, 1) for address in shared.addresses]
        _barrier(rank, "read")
    return found


@pytest.mark.gpu
def test_fabric_handles_work_or_name_what_they_need() -> None:
    try:
        memory.DeviceMemory.allocate(0, 1 << 20, fabric=True).close()
    except errors.UnavailableError as error:
        refused = str(error)
    else:
        assert ranks.run_threads(2, _share_by_fabric) == [[b"\1", b"\2"]] * 2
        return
    assert "share by file descriptor" in refused
