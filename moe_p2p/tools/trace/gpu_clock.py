"""A GPU's clock (%globaltimer, which stamps have) beside this host's: kernels/clock.cu."""

from __future__ import annotations

import ctypes
import time

import torch

from moe_p2p import errors
from moe_p2p.machine import driver, jit
from moe_p2p.tools.trace.hub import Bounds, bounds_of

LAUNCHES = 200
_LATE_S = 10.0


def match(device: int) -> Bounds:
    """Returns how the GPU's clock stands to time.monotonic_ns(); waits for the GPU's work.

    A kernel that stores the GPU's time runs between its launch and the look that finds the time.
    """
    torch.cuda.synchronize(device)
    pinned = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=True)
    shown = (ctypes.c_uint64 * 1).from_address(pinned.data_ptr())
    function = driver.module().CUfunction(jit.load(device, "clock.cu", "moe_p2p_clock", {}))
    given = (ctypes.c_uint64 * 1)(pinned.data_ptr())
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(given))
    pings = []
    with driver.primary_context(device):
        for _ in range(LAUNCHES):
            shown[0] = 0
            before = time.monotonic_ns()
            shape = (1, 1, 1, 1, 1, 1, 0)
            stream = driver.module().CUstream(torch.cuda.current_stream(device).cuda_stream)
            driver.call("cuLaunchKernel", function, *shape, stream, ctypes.addressof(arguments), 0)
            while not shown[0]:
                if time.monotonic_ns() - before > _LATE_S * 1e9:
                    text = f"GPU {device} did not show its clock within {_LATE_S} s"
                    raise errors.make(errors.TimeoutError, text)
            pings.append((before, int(shown[0]), time.monotonic_ns()))
            torch.cuda.synchronize(device)
    return bounds_of(pings)
