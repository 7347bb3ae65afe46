"""kernels/copy.cu by itself: what it copies, when it leaves, and that half a request is none."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import pytest
import torch

from moe_p2p.machine import driver, jit
from tests.support import gpu_ranks

pytestmark = pytest.mark.gpu
NUM_REQUESTS, WORD = 1024, (1 << 64) - 1  # kernels/abi/copy.h
IDLE_NS = 20_000_000


class Ring(ctypes.Structure):
    _fields_ = (
        ("request", (ctypes.c_uint64 * 4) * NUM_REQUESTS),
        ("done", ctypes.c_uint64),
        ("entered", ctypes.c_uint64),
        ("left", ctypes.c_uint64),
        ("padding", ctypes.c_uint64 * 13),
    )


class Params(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("ring", "first", "launch", "idle_ns"))


class Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class Kernel:
    """One ring, and launches of the kernel on it that end before the next."""

    def __init__(self) -> None:
        self._memory = torch.zeros(ctypes.sizeof(Ring), dtype=torch.uint8)
        if gpu_ranks.DEVICE == "cuda":
            self._memory = self._memory.pin_memory()
        self.ring = Ring.from_address(self._memory.data_ptr())
        self.num = self.launches = 0

    def post(self, to: torch.Tensor, source: torch.Tensor, *, whole: bool = True) -> None:
        """whole: else its check belongs to another request."""
        odd = 0x9E3779B97F4A7C15
        fields = [to.data_ptr(), source.data_ptr(), source.numel()]
        check = 0
        for field in (*fields, self.num + 1):
            check = (check * odd + field) & WORD
        self.ring.request[self.num % NUM_REQUESTS][:] = [*fields, check ^ (not whole)]
        self.num += 1

    def run(self, first: int) -> None:
        """Returns once the kernel has left."""
        self.launches += 1
        params = Params(self._memory.data_ptr(), first, self.launches, IDLE_NS)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        config = Launch((1, 1, 1), (512, 1, 1), 128)
        self._launch(config, arguments)
        end = time.monotonic() + 20
        while self.ring.left != self.launches:
            assert time.monotonic() < end, "the kernel did not leave"

    def _launch(self, config: Launch, arguments: Any) -> None:
        if gpu_ranks.DEVICE == "cpu":
            from tests.support import emulated_gpu

            machine = ctypes.CDLL(str(emulated_gpu.machine()))
            function = ctypes.c_void_p(emulated_gpu._function("copy.cu", ())[1])
            assert machine.cuLaunchKernelEx(ctypes.byref(config), function, arguments, None) == 0
            return
        function = jit.load(0, "copy.cu", "moe_p2p_copy", {})
        cuda = driver.module()
        torch.cuda.synchronize(0)  # what it copies is there
        with driver.primary_context(0):
            driver.call(
                "cuLaunchKernel",
                cuda.CUfunction(function),
                *(1, 1, 1),
                *(512, 1, 1),
                128,
                cuda.CUstream(torch.cuda.Stream().cuda_stream),
                ctypes.addressof(arguments),
                0,
            )


def bytes_on(device: str, num: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, (num,), dtype=torch.uint8, generator=generator).to(device)


def test_any_bytes_at_any_place() -> None:
    kernel, device = Kernel(), gpu_ranks.DEVICE
    source = bytes_on(device, 200_000)
    cases = [
        (at, to, num)
        for at, to in ((0, 0), (16, 32), (1, 0), (0, 3), (5, 5))
        for num in (1, 15, 16, 17, 4096, 65_536, 100_001)
    ]
    targets = [torch.zeros(110_000, dtype=torch.uint8, device=device) for _ in cases]
    for target, (at, to, num) in zip(targets, cases, strict=True):
        kernel.post(target[to : to + num], source[at : at + num])
    kernel.run(0)
    assert (kernel.ring.done, kernel.ring.entered) == (len(cases), 1)
    for target, (at, to, num) in zip(targets, cases, strict=True):
        wanted = torch.zeros(110_000, dtype=torch.uint8)
        wanted[to : to + num] = source[at : at + num].cpu()
        assert torch.equal(target.cpu(), wanted), (at, to, num)


def test_more_requests_than_there_are_places() -> None:
    kernel, device = Kernel(), gpu_ranks.DEVICE
    source = bytes_on(device, 1500)
    target = torch.zeros_like(source)
    for first in (0, 500, 1000):
        for i in range(first, first + 500):
            kernel.post(target[i : i + 1], source[i : i + 1])
        kernel.run(first)
        assert kernel.ring.done == first + 500
    assert torch.equal(target, source)


def test_a_request_that_is_being_written_is_none() -> None:
    kernel, device = Kernel(), gpu_ranks.DEVICE
    source = bytes_on(device, 4)
    target = torch.zeros_like(source)
    for i in range(4):
        kernel.post(target[i : i + 1], source[i : i + 1], whole=i != 2)
    kernel.run(0)
    assert kernel.ring.done == 2  # and not the one behind it
    assert target.tolist() == [*source.tolist()[:2], 0, 0]
