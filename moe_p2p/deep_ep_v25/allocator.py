"""BufferAllocator: a plan of tensors, made before the memory that they will share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_p2p import errors

ALLOCATION_ALIGNMENT = 2 << 20
_RDMA_ALIGNMENT, _TMA_ALIGNMENT = 64, 32


def get_num_allocation_alignment() -> int:
    """Of a plan's tensors, and of sizes that are given to buffers, in bytes."""
    return ALLOCATION_ALIGNMENT


def get_num_rdma_alignment() -> int:
    """As DeepEP's; nothing here needs it."""
    return _RDMA_ALIGNMENT


def get_num_tma_alignment() -> int:
    """Of an expert's bytes in DeepEP; nothing here needs it."""
    return _TMA_ALIGNMENT


class BufferAllocator:
    """Tensors one behind the other, each from a multiple of `alignment` bytes on.

    allocations: each tensor and its first byte. num_bytes: of all. materialized: they have memory.
    """

    def __init__(self) -> None:
        self.alignment = ALLOCATION_ALIGNMENT
        self.allocations: list[tuple[Tensor, int]] = []
        self.num_bytes = 0
        self.materialized = False

    def allocate(self, shape: Sequence[int] | int, dtype: torch.dtype) -> Tensor:
        """Returns a tensor of the device "meta", which will get memory behind the others."""
        errors.require(
            not self.materialized,
            "allocate: the plan has its memory already; allocate all tensors before the buffer is "
            "made",
        )
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self.allocations.append((tensor, self.num_bytes))
        self.num_bytes -= -tensor.nbytes // self.alignment * self.alignment
        return tensor

    def materialize(self, storage: Tensor) -> None:
        """Gives the tensors their memory, in place. EPBuffer calls it; once.

        storage: [num_bytes] uint8, contiguous, on any device.
        """
        errors.require(not self.materialized, "materialize: the plan has its memory already")
        errors.require_type("storage", storage, Tensor)
        errors.require(
            storage.dtype == torch.uint8
            and storage.is_contiguous()
            and storage.shape == (self.num_bytes,),
            f"storage is {list(storage.shape)} {storage.dtype}, must be the {self.num_bytes} bytes "
            "of the plan: contiguous uint8",
        )
        for tensor, first in self.allocations:
            memory = storage[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            torch.utils.swap_tensors(tensor, memory)  # type: ignore[no-untyped-call]
        self.materialized = True
