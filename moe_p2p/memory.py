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
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from moe_p2p import errors
from moe_p2p.cuda_driver import attribute, call, module, primary_context
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


class _Owner:
    """Something that is undone in reverse order, once, with the device's context current."""

    def __init__(self, device: int | None) -> None:
        self.device = device
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmaps and frees. A second call does nothing."""
        with _context(self.device):
            self._undo.close()


def _context(device: int | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if device is None else primary_context(device)


class DeviceMemory(_Owner):
    """Memory of a GPU, mapped for `device`: allocated here, or imported from another process.

    address: where `device` finds it. size: bytes, a multiple of the allocation granularity, 2 MiB.

    Made by `allocate`, `import_fd` or `import_fabric`. All raise ResourceExhaustedError when memory
    is short and UnavailableError when the device cannot.
    """

    def __init__(self, device: int, handle: Any, size_bytes: int, *, fabric: bool) -> None:
        super().__init__(device)
        self.size = size_bytes
        self._handle, self._fabric = handle, fabric
        access = module().CUmemAccessDesc()
        _set_location(access, device)
        access.flags = module().CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        with ExitStack() as undo:
            undo.callback(call, "cuMemRelease", handle)
            with primary_context(device), ExitStack() as mapping:
                reserved = call("cuMemAddressReserve", size_bytes, 0, 0, 0)
                mapping.callback(call, "cuMemAddressFree", reserved, size_bytes)
                call("cuMemMap", reserved, size_bytes, 0, handle, 0)
                mapping.callback(call, "cuMemUnmap", reserved, size_bytes)
                call("cuMemSetAccess", reserved, size_bytes, [access], 1)
                undo.push(mapping.pop_all())
            self.address = int(reserved)
            self._undo = undo.pop_all()

    @classmethod
    def allocate(cls, device: int, size_bytes: int, *, fabric: bool = False) -> Self:
        """At least `size_bytes` of zeros on `device`, which NICs may write where it supports that.

        fabric: shared by fabric handle, across the hosts of one NVLink domain, instead of by file
            descriptor. Raises UnavailableError where that is not permitted.
        """
        errors.require(size_bytes > 0, f"size_bytes is {size_bytes}, must be positive")
        properties = _allocation_properties(device, fabric)
        with primary_context(device):
            minimum = module().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
            granularity = int(call("cuMemGetAllocationGranularity", properties, minimum))
            size = -(-size_bytes // granularity) * granularity
            with _fabric_explained(device, fabric):
                handle = call("cuMemCreate", size, properties, 0)
            memory = cls(device, handle, size, fabric=fabric)
            try:
                call("cuMemsetD8", memory.address, 0, size)
                call("cuCtxSynchronize")
            except BaseException:
                memory.close()
                raise
        return memory

    @classmethod
    def import_fd(cls, fd: int, size_bytes: int, device: int) -> Self:
        """A peer's memory, mapped for `device`. The descriptor may be closed afterwards.

        fd, size_bytes: what `export_fd` and `size` of the peer said.
        """
        with primary_context(device):
            handle = call("cuMemImportFromShareableHandle", fd, _handle_type(fabric=False))
        return cls(device, handle, size_bytes, fabric=False)

    @classmethod
    def import_fabric(cls, exported: bytes, size_bytes: int, device: int) -> Self:
        """A peer's memory, mapped for `device`, by what its `export_fabric` said."""
        fabric_handle = module().CUmemFabricHandle()
        fabric_handle.data = exported
        with primary_context(device), _fabric_explained(device, True):
            handle = call(
                "cuMemImportFromShareableHandle",
                fabric_handle.getPtr(),
                _handle_type(fabric=True),
            )
        return cls(device, handle, size_bytes, fabric=True)

    def export_fd(self) -> int:
        """A new file descriptor of this memory; the caller closes it."""
        errors.require(not self._fabric, "this memory is shared by fabric handle")
        return int(self._export())

    def export_fabric(self) -> bytes:
        """The fabric handle, 64 bytes."""
        errors.require(self._fabric, "this memory is shared by file descriptor")
        return bytes(self._export().data)

    def _export(self) -> Any:
        with _context(self.device):
            return call(
                "cuMemExportToShareableHandle", self._handle, _handle_type(fabric=self._fabric), 0
            )


def _handle_type(*, fabric: bool) -> Any:
    types = module().CUmemAllocationHandleType
    if fabric:
        return types.CU_MEM_HANDLE_TYPE_FABRIC
    return types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _set_location(struct: Any, device: int) -> None:
    struct.location.type = module().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    struct.location.id = device


def _allocation_properties(device: int, fabric: bool) -> Any:
    properties = module().CUmemAllocationProp()
    properties.type = module().CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    _set_location(properties, device)
    properties.requestedHandleTypes = _handle_type(fabric=fabric)
    if attribute(device, "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"):
        properties.allocFlags.gpuDirectRDMACapable = 1
    return properties


@contextlib.contextmanager
def _fabric_explained(device: int, fabric: bool) -> Any:
    """Says what fabric handles need when the driver only says that it refuses."""
    try:
        yield
    except errors.ResourceExhaustedError:
        raise
    except errors.MoeP2pError as error:
        if not fabric:
            raise
        raise errors.make(
            errors.UnavailableError,
            f"device {device} cannot share memory by fabric handle, which needs GPUs of one NVLink "
            "domain and permission for an IMEX channel (/dev/nvidia-caps-imex-channels); within a "
            f"host, share by file descriptor ({error})",
        ) from None


class PinnedWords(_Owner):
    """Host memory that all processes of a node and all their GPUs see: doorbells and arrivals.

    host_address: where this process finds it. device_address: where kernels of `device` find it, 0
    without a device. size: bytes, a multiple of the page. fd: the memory as an open file, passed on
    with `exchange_fds`; it belongs to this object. Zeros at first.

    device: its GPU may use the words. None: only the host does.
    """

    def __init__(self, fd: int, size_bytes: int, device: int | None) -> None:
        super().__init__(device)
        self.size = _pages(size_bytes)
        errors.require(
            os.fstat(fd).st_size >= self.size,
            f"the file of the words has {os.fstat(fd).st_size} bytes, not {self.size}",
        )
        with _context(device), ExitStack() as undo:
            self.fd = os.dup(fd)
            undo.callback(os.close, self.fd)
            memory = mmap.mmap(self.fd, self.size)
            undo.callback(memory.close)
            self.host_address = _address_of(memory)
            self.device_address = 0
            if device is not None:
                flags = module().CU_MEMHOSTREGISTER_PORTABLE | module().CU_MEMHOSTREGISTER_DEVICEMAP
                call("cuMemHostRegister", self.host_address, self.size, flags)
                undo.callback(call, "cuMemHostUnregister", self.host_address)
                self.device_address = int(call("cuMemHostGetDevicePointer", self.host_address, 0))
            self._undo = undo.pop_all()

    @classmethod
    def create(cls, device: int | None, size_bytes: int) -> Self:
        """New words, at least `size_bytes`. Raises ResourceExhaustedError when memory is short."""
        errors.require(size_bytes > 0, f"size_bytes is {size_bytes}, must be positive")
        fd = os.memfd_create("moe_p2p_words", os.MFD_CLOEXEC)
        try:
            # Not ftruncate: a page that is missing later would be a bus error.
            os.posix_fallocate(fd, 0, _pages(size_bytes))
            return cls(fd, size_bytes, device)
        except OSError as error:
            raise errors.make(
                errors.ResourceExhaustedError, f"{size_bytes} bytes of shared memory: {error}"
            ) from None
        finally:
            os.close(fd)

    @classmethod
    def open(cls, fd: int, size_bytes: int, device: int | None) -> Self:
        """The words behind a peer's `fd`, which may be closed afterwards."""
        return cls(fd, size_bytes, device)


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _address_of(memory: mmap.mmap) -> int:
    # The ctypes object goes away at once: while it lives, the mapping cannot be closed.
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class NodeDeviceMemory(_Owner):
    """One allocation per local rank, all of them mapped for `device`.

    own: this rank's. addresses: of each local rank's memory, in order, as `device` sees it.
    """

    def __init__(
        self, device: int, own: DeviceMemory, addresses: list[int], undo: ExitStack
    ) -> None:
        super().__init__(device)
        self.own, self.addresses = own, addresses
        self._undo = undo


def share_node_memory(
    local: int, num_local: int, *, key: str, device: int, size_bytes: int, deadline: float
) -> NodeDeviceMemory:
    """Allocates `size_bytes` of zeros on `device` and maps those of all ranks of the node.

    size_bytes: equal on all ranks. The other arguments and the errors are those of exchange_fds
    and DeviceMemory. A rank that fails before it has passed its memory on is missed by the others
    at the deadline; one that fails later is not: let ranks meet again before they use the memory.
    """
    with ExitStack() as undo, ExitStack() as descriptors:
        own = undo.enter_context(DeviceMemory.allocate(device, size_bytes))
        fd = own.export_fd()
        descriptors.callback(os.close, fd)
        received = exchange_fds(local, num_local, key=key, fds=[fd], deadline=deadline)
        for group in received:
            for copy in group:
                descriptors.callback(os.close, copy)
        addresses = []
        for rank, group in enumerate(received):
            if rank != local:
                addresses.append(
                    undo.enter_context(_import_of(rank, group, own.size, device)).address
                )
            else:
                addresses.append(own.address)
        return NodeDeviceMemory(device, own, addresses, undo.pop_all())


def _import_of(rank: int, fds: list[int], size_bytes: int, device: int) -> DeviceMemory:
    try:
        return DeviceMemory.import_fd(fds[0], size_bytes, device)
    except errors.MoeP2pError as error:
        raise errors.make(
            type(error), f"device {device} cannot map the memory of local rank {rank}: {error}"
        ) from None
