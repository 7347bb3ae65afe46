"""Memory that is known by its address: registered, found again, and described to peers."""

from __future__ import annotations

import bisect
import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_p2p.engine.transfers import Memory
from moe_p2p.library import without_default_device
from moe_p2p.machine import driver


def tensor_at(address: int, nbytes: int) -> Tensor:
    """uint8 [nbytes] of host memory or of the GPU that the address belongs to; owns nothing."""
    if on_gpu(address):
        # torch finds the GPU. cuda-bindings says 0 of memory of any (DEVICE_ORDINAL, 13.0), and a
        # device that is named, or is the default, would have a copy made.
        return without_default_device(torch.as_tensor)(_GpuMemory(address, nbytes))
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)


def on_gpu(address: int) -> bool:
    if not torch.cuda.is_available():
        return False
    cuda = driver.module()
    kind = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    result, value = cuda.cuPointerGetAttribute(kind, address)
    return bool(result == 0 and int(value) == int(cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE))


class _GpuMemory:
    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class _Entry(NamedTuple):
    address: int
    nbytes: int
    value: Any


class Table:
    """Ranges of addresses that do not overlap, each with a value."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    def _behind(self, address: int) -> int:
        """Returns the number of entries that begin at or before the address."""
        return bisect.bisect_right(self._entries, address, key=lambda entry: entry.address)

    def overlaps(self, address: int, nbytes: int) -> bool:
        i = self._behind(address + nbytes - 1)
        return i > 0 and self._entries[i - 1].address + self._entries[i - 1].nbytes > address

    def add(self, address: int, nbytes: int, value: Any) -> None:
        self._entries.insert(self._behind(address), _Entry(address, nbytes, value))

    def at(self, address: int) -> Any:
        """Returns the value of what begins at the address; None: nothing does."""
        i = self._behind(address) - 1
        found = self._entries[i] if i >= 0 else None
        return found.value if found is not None and found.address == address else None

    def take(self, address: int) -> Any:
        """Removes what begins at the address and returns its value; None: nothing does."""
        i = self._behind(address) - 1
        if i < 0 or self._entries[i].address != address:
            return None
        return self._entries.pop(i).value

    def find(self, address: int, nbytes: int) -> tuple[Any, int] | None:
        """Returns the value that holds the whole range and where it begins there, or None."""
        entry = self._entries[i - 1] if (i := self._behind(address)) else None
        if entry is None or address + nbytes > entry.address + entry.nbytes:
            return None
        return entry.value, address - entry.address

    def entries(self) -> list[_Entry]:
        return list(self._entries)


def described(entries: list[_Entry]) -> list[tuple[int, int, str]]:
    """The description of this side's memory that peers get."""
    made = []
    for entry in entries:
        memory: Memory = entry.value
        made.append((entry.address, entry.nbytes, memory.descriptor.hex()))
    return made
