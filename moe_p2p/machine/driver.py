"""The CUDA driver through cuda-bindings, opened at the first call. For jit.py and memory.py.

Importing this imports nothing of CUDA, so it loads on a machine without a GPU. Every call goes
through `call`, which turns a result code into an error that names the function.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from moe_p2p import errors

_EXHAUSTED = ("CUDA_ERROR_OUT_OF_MEMORY",)
_UNAVAILABLE = (
    "CUDA_ERROR_INVALID_DEVICE",
    "CUDA_ERROR_NOT_PERMITTED",
    "CUDA_ERROR_NOT_SUPPORTED",
    "CUDA_ERROR_NO_DEVICE",
    "CUDA_ERROR_NO_BINARY_FOR_GPU",
    "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
    "CUDA_ERROR_STUB_LIBRARY",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
)
_lock = threading.Lock()


def current_gpu() -> int:
    """torch's. Raises UnavailableError where it finds none."""
    try:
        return torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:  # torch for CPUs alone, or no driver
        text = f"device is 'cuda', but torch {torch.__version__} finds no GPU ({error})"
        text += "; see python -m moe_p2p doctor"
        raise errors.make(errors.UnavailableError, text) from None


def bindings(name: str) -> Any:
    """The module cuda.bindings.`name`. Raises UnavailableError naming the package to install."""
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise errors.make(
            errors.UnavailableError,
            f"cuda.bindings.{name} cannot be imported ({error}): pip install cuda-bindings, of the "
            "same major version as the CUDA driver",
        ) from None


@functools.cache
def module() -> Any:
    """cuda.bindings.driver, initialised. Raises UnavailableError where no driver is installed."""
    driver = bindings("driver")
    try:
        (result,) = driver.cuInit(0)
    except RuntimeError as error:  # libcuda.so.1 was not found
        raise errors.make(
            errors.UnavailableError, f"the CUDA driver cannot be opened: {error}"
        ) from None
    if result != driver.CUresult.CUDA_SUCCESS:
        raise errors.make(errors.UnavailableError, f"cuInit failed: {result.name}")
    return driver


def call(name: str, *args: Any) -> Any:
    """Calls the driver function `name`; returns its value (or values, or None).

    Raises ResourceExhaustedError when memory is short, UnavailableError when the device or the
    driver cannot do it, TransportError for every other failure.
    """
    driver = module()
    result, *values = getattr(driver, name)(*args)
    if result != driver.CUresult.CUDA_SUCCESS:
        raise errors.make(_kind(result.name), f"{name} failed: {_describe(driver, result)}")
    return values[0] if len(values) == 1 else tuple(values) or None


def _kind(result: str) -> type[errors.MoeP2pError]:
    if result in _EXHAUSTED:
        return errors.ResourceExhaustedError
    return errors.UnavailableError if result in _UNAVAILABLE else errors.TransportError


def _describe(driver: Any, result: Any) -> str:
    status, text = driver.cuGetErrorString(result)
    known = status == driver.CUresult.CUDA_SUCCESS and text
    return f"{result.name} ({text.decode()})" if known else str(result.name)


@functools.cache
def _retain(device: int) -> Any:
    return call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", device))


@contextlib.contextmanager
def relaxed_captures() -> Iterator[None]:
    """Lets this thread allocate and ask for events while another thread captures a CUDA graph.

    Such a call would fail otherwise, and break the capture (CU_STREAM_CAPTURE_MODE_GLOBAL, which is
    what torch.cuda.graph takes). Does nothing where cuda-bindings is not installed.
    """
    try:
        driver = module()
    except errors.UnavailableError:
        yield
        return
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    _, before = driver.cuThreadExchangeStreamCaptureMode(relaxed)
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)


@contextlib.contextmanager
def primary_context(device: int) -> Iterator[None]:
    """Makes the primary context of `device`, the one torch uses, current inside the block.

    It is retained once and never released: kernels and memory of this process live in it. Captures
    of other threads go on meanwhile.
    """
    with _lock:
        context = _retain(device)
    call("cuCtxPushCurrent", context)
    try:
        with relaxed_captures():
            yield
    finally:
        call("cuCtxPopCurrent")


def attribute(device: int, name: str) -> int:
    """Value of CU_DEVICE_ATTRIBUTE_`name`."""
    number = getattr(module().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(call("cuDeviceGetAttribute", number, call("cuDeviceGet", device)))


def capability(device: int) -> tuple[int, int]:
    """Compute capability of `device`, (9, 0) for an H200."""
    return (
        attribute(device, "COMPUTE_CAPABILITY_MAJOR"),
        attribute(device, "COMPUTE_CAPABILITY_MINOR"),
    )


def max_resident_blocks(device: int, kernel: int, num_threads: int, shared_bytes: int) -> int:
    """Returns how many blocks of a loaded kernel (jit.load) fit on `device` at once."""
    with primary_context(device):
        per_multiprocessor = call(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
            module().CUfunction(kernel),
            num_threads,
            shared_bytes,
        )
    return int(per_multiprocessor) * attribute(device, "MULTIPROCESSOR_COUNT")
