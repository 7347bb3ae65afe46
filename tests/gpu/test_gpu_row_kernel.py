"""kernels/rows.cu by itself: rows of any size at any place, by any number of blocks; its words."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from moe_p2p.machine import driver, jit
from tests.gpu.test_gpu_copy_kernel import Launch, bytes_on
from tests.support import gpu_ranks

pytestmark = pytest.mark.gpu
NUM_ROWS, ROW_BYTES, THREADS, BLOCKS = 8192, 16 << 10, 512, 16  # kernels/abi/rows.h


class Words(ctypes.Structure):
    _fields_ = (
        ("begun", ctypes.c_uint64 * 16),
        ("rows_done", ctypes.c_uint64 * BLOCKS),
        ("engine_done", ctypes.c_uint64 * 16),
    )


class Params(ctypes.Structure):
    names = ("rows", "words", "first", "count", "batch")
    _fields_ = tuple((name, ctypes.c_uint64) for name in names)


class Kernel:
    """One ring of rows, and launches that end before the next."""

    def __init__(self) -> None:
        size = NUM_ROWS * 32
        self._memory = torch.zeros(size + ctypes.sizeof(Words), dtype=torch.uint8)
        if gpu_ranks.DEVICE == "cuda":
            self._memory = self._memory.pin_memory()
        self._rows = (ctypes.c_uint64 * (4 * NUM_ROWS)).from_address(self._memory.data_ptr())
        self.words = Words.from_address(self._memory.data_ptr() + size)
        self._num = self.batch = 0

    def run(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], blocks: int) -> None:
        """pairs: target and source, of at most ROW_BYTES."""
        for i, (to, source) in enumerate(pairs):
            assert source.numel() <= ROW_BYTES
            at = 4 * ((self._num + i) % NUM_ROWS)
            self._rows[at : at + 4] = [to.data_ptr(), source.data_ptr(), source.numel(), 0]
        self.batch += 1
        address = self._memory.data_ptr()
        words = ctypes.addressof(self.words)
        params = Params(address, words, self._num, len(pairs), self.batch)
        self._num += len(pairs)
        self._launch(blocks, (ctypes.c_void_p * 1)(ctypes.addressof(params)))

    def _launch(self, blocks: int, arguments: Any) -> None:
        if gpu_ranks.DEVICE == "cpu":
            from tests.support import emulated_gpu

            machine = ctypes.CDLL(str(emulated_gpu.machine()))
            function = ctypes.c_void_p(emulated_gpu._function("rows.cu", ())[1])
            config = Launch((blocks, 1, 1), (THREADS, 1, 1), 0)
            assert machine.cuLaunchKernelEx(ctypes.byref(config), function, arguments, None) == 0
            return
        function = jit.load(0, "rows.cu", "moe_p2p_rows", {})
        cuda = driver.module()
        torch.cuda.synchronize(0)
        with driver.primary_context(0):
            driver.call(
                "cuLaunchKernel",
                cuda.CUfunction(function),
                *(blocks, 1, 1),
                *(THREADS, 1, 1),
                0,
                cuda.CUstream(torch.cuda.current_stream(0).cuda_stream),
                ctypes.addressof(arguments),
                0,
            )
        torch.cuda.synchronize(0)


@pytest.mark.parametrize("blocks", [1, 3, BLOCKS])
def test_any_bytes_at_any_place(blocks: int) -> None:
    kernel, device = Kernel(), gpu_ranks.DEVICE
    source = bytes_on(device, 20_000)
    places = ((0, 0), (16, 32), (8, 0), (0, 24), (4, 0), (3, 3), (17, 1), (9, 1), (2, 0), (0, 1))
    sizes = (1, 7, 15, 16, 17, 31, 33, 511, 513, 576, 4608, ROW_BYTES)
    cases = [(at, to, num) for at, to in places for num in sizes]
    length = ROW_BYTES + 64
    target = torch.zeros(len(cases) * length, dtype=torch.uint8, device=device)
    views = [target[i * length :][to : to + num] for i, (_, to, num) in enumerate(cases)]
    kernel.run(
        [(view, source[at : at + num]) for view, (at, _, num) in zip(views, cases, strict=True)],
        blocks,
    )
    assert list(kernel.words.rows_done) == [1] * BLOCKS
    assert not any(kernel.words.begun)
    assert not any(kernel.words.engine_done)
    wanted = torch.zeros(len(cases) * length, dtype=torch.uint8)
    given = source.cpu()
    for i, (at, to, num) in enumerate(cases):
        wanted[i * length + to : i * length + to + num] = given[at : at + num]
    assert torch.equal(target.cpu(), wanted)


def test_more_rows_than_warps_and_a_ring_that_goes_round() -> None:
    kernel, device = Kernel(), gpu_ranks.DEVICE
    counts = (5000, 5000, 1, 700)  # the second batch begins before the ring's end, and goes on
    source = bytes_on(device, max(counts) * 3)
    for batch, count in enumerate(counts, 1):
        target = torch.zeros(count * 3, dtype=torch.uint8, device=device)
        kernel.run(
            [(target[3 * i : 3 * i + 3], source[3 * i : 3 * i + 3]) for i in range(count)], 2
        )
        assert torch.equal(target, source[: 3 * count])
        assert list(kernel.words.rows_done) == [batch] * BLOCKS
