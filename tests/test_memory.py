"""moe_p2p.memory: pinned words and device memory shared by the ranks of a node."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

import ranks
from cases import memfd
from moe_p2p import cuda_driver, errors, jit, memory

WORD = ctypes.c_uint64


def _barrier(rank: ranks.Rank, name: str) -> None:
    rank.store.add(name, 1)
    ends = time.monotonic() + ranks.DEADLINE_S
    while rank.store.add(name, 0) < rank.world_size:
        assert time.monotonic() < ends, f"{name}: not all ranks came"


def _share_words(rank: ranks.Rank, key: str, device: int | None) -> memory.PinnedWords:
    """One block of words of rank 0, opened by the others."""
    words = memory.PinnedWords.create(device, 100) if rank.rank == 0 else None
    received = memory.exchange_fds(
        rank.rank,
        rank.world_size,
        key=key,
        fds=[words.fd] if words else [],
        deadline=time.monotonic() + 20,
    )
    if words is None:
        words = memory.PinnedWords.open(received[0][0], 100, device)
    for group in received:
        for fd in group:
            os.close(fd)
    return words


def _write_and_read_words(rank: ranks.Rank, key: str) -> list[int]:
    with _share_words(rank, key, None) as words:
        assert words.size == os.sysconf("SC_PAGE_SIZE")
        values = (WORD * rank.world_size).from_address(words.host_address)
        values[rank.rank] += 10 + rank.rank
        _barrier(rank, "written")
        return list(values)


def test_processes_see_the_same_words() -> None:
    key = f"test-{uuid.uuid4()}"
    assert ranks.run_processes(3, _write_and_read_words, key) == [[10, 11, 12]] * 3


def test_threads_see_the_same_words(key: str) -> None:
    assert ranks.run_threads(3, _write_and_read_words, key) == [[10, 11, 12]] * 3


def test_words_are_closed_once(key: str) -> None:
    words = memory.PinnedWords.create(None, 8)
    words.close()
    words.close()


def test_a_file_that_is_too_short_for_the_words_is_refused(key: str) -> None:
    fd = memfd("short")
    with pytest.raises(errors.InvalidArgumentError, match="has 5 bytes"):
        memory.PinnedWords.open(fd, 8, None)
    os.close(fd)


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
    with (
        memory.share_node_memory(
            0, 1, key=key, device=0, size_bytes=3, deadline=time.monotonic() + 20
        ) as shared,
        memory.PinnedWords.create(0, 8) as words,
        memory.DeviceMemory.import_fd(words.fd, shared.own.size, 0) as peer,
    ):
        assert (shared.own.size, shared.addresses) == (2 << 20, [1 << 40])
        assert (words.device_address, peer.address) == (1 << 41, 1 << 40)


def test_what_was_done_is_undone_wherever_it_fails(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_driver, "_retain", lambda device: device)
    for failing in range(1, 100):
        fake = _FakeDriver(failing)
        monkeypatch.setattr(cuda_driver, "module", lambda fake=fake: fake)
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


def _words_through_gpu(rank: ranks.Rank, key: str, source: str, num_devices: int) -> list[int]:
    device = rank.rank % num_devices
    function = jit.load(device, Path(source), "store_word", {})
    with _share_words(rank, key, device) as words:
        values = (WORD * (2 * rank.world_size)).from_address(words.host_address)
        values[rank.rank] = rank.rank + 1
        _barrier(rank, "written")
        # The GPU of each rank reads the word of the next rank's host and answers beside it.
        at = rank.world_size + rank.rank
        kinds = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
        arguments = (words.device_address, at, (rank.rank + 1) % rank.world_size)
        with cuda_driver.primary_context(device):
            shape = (1, 1, 1, 1, 1, 1)
            cuda_driver.call("cuLaunchKernel", function, *shape, 0, 0, (arguments, kinds), 0)
            cuda_driver.call("cuCtxSynchronize")
        _barrier(rank, "answered")
        return list(values)


@pytest.mark.gpu
def test_gpus_and_hosts_see_the_same_words(tmp_path: Path) -> None:
    source = tmp_path / "store_word.cu"
    source.write_text(STORE_WORD)
    key, devices = f"test-{uuid.uuid4()}", torch.cuda.device_count()
    results = ranks.run_processes(2, _words_through_gpu, key, str(source), devices)
    assert results == [[1, 2, 102, 101]] * 2


def _copy_out(address: int, size: int) -> bytes:
    data = ctypes.create_string_buffer(size)
    cuda_driver.call("cuMemcpyDtoH", ctypes.addressof(data), address, size)
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
        with cuda_driver.primary_context(device):
            assert not any(_copy_out(shared.own.address, shared.own.size))
            _barrier(rank, "looked")
            for address in shared.addresses:
                cuda_driver.call("cuMemsetD8", address + rank.rank, rank.rank + 1, 1)
            cuda_driver.call("cuCtxSynchronize")
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


@pytest.mark.gpu
def test_fabric_handles_work_or_say_what_they_need() -> None:
    try:
        own = memory.DeviceMemory.allocate(0, 1 << 20, fabric=True)
    except errors.UnavailableError as error:
        text = str(error)
    else:
        with own, memory.DeviceMemory.import_fabric(own.export_fabric(), own.size, 0) as peer:
            assert peer.address != own.address
            return
    assert "share by file descriptor" in text
