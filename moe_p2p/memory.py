"""Memory that the processes of a node share: of a GPU (CUDA VMM) and of the host (pinned words).

Control path only: what stays is addresses, which the C++ side and the kernels are given. Plain
pinned device memory: neither managed nor multicast. Whoever closes memory has made sure that no
kernel and no NIC uses it any more; the memory itself lives until the last process has unmapped it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import types
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from moe_p2p import cuda_driver, errors
from moe_p2p.cuda_driver import call, primary_context
from moe_p2p.fd_exchange import exchange_fds

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "DeviceMemory",
    "NodeDeviceMemory",
    "PinnedWords",
    "exchange_fds",
    "share_node_memory",
]

_HANDLE_TYPES = {
    False: "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR",
    True: "CU_MEM_HANDLE_TYPE_FABRIC",
}
_FABRIC_REFUSED = (
    "device {device} cannot share memory by fabric handle: that needs GPUs of one NVLink domain "
    "and permission for an IMEX channel (/dev/nvidia-caps-imex-channels). Ranks of one host share "
    "memory by file descriptor. {reason}"
)


class _Closing:
    """Undoes in reverse order what was done, once, in the context of the device."""

    def __init__(self, device: int | None) -> None:
        self._device = device
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: Any
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmaps and frees. A second call does nothing."""
        undo = self._undo.pop_all()
        with undo, contextlib.nullcontext() if self._device is None else _current(self._device):
            pass


def _current(device: int) -> Any:
    return primary_context(device)
