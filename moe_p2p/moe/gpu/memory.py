"""Memory that processes share: of a GPU (CUDA VMM), and of the host for GPUs (pinned pages).

Control path only: the C++ side and the kernels get addresses. Plain pinned device memory: neither
managed nor multicast. Before memory is closed, its owner makes sure that no kernel and no NIC uses
it any more; the memory itself lives until the last process has unmapped it.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from moe_p2p import errors
from moe_p2p.machine.driver import attribute, call, module, primary_context
from moe_p2p.moe.gpu.fd_exchange import exchange_fds

if TYPE_CHECKING:
    from typing_extensions import Self

    from moe_p2p.fleet.bootstrap import Bootstrap

__all__ = [
    "DeviceMemory",
    "PinnedPages",
    "SharedDeviceMemory",
    "exchange_fds",
    "share_memory",
    "share_node_memory",
]


class _Owner:
    """A stack of clean-ups, run once, in reverse order, with the device's context current."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmaps and frees. A second call does nothing."""
        with primary_context(self.device):
            self._undo.close()


class DeviceMemory(_Owner):
    """Memory of a GPU, mapped for `device`: allocated here, or imported from another process.

    address: of `device`. size: bytes, a multiple of the allocation granularity, 2 MiB.

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
        """Allocates at least `size_bytes` of zeros on `device`, writable by NICs if supported.

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
                _clear(memory.address, size)
            except BaseException:
                memory.close()
                raise
        return memory

    @classmethod
    def import_fd(cls, fd: int, size_bytes: int, device: int) -> Self:
        """Maps a peer's memory for `device`. The descriptor may be closed afterwards.

        fd, size_bytes: the peer's `export_fd()` and `size`.
        """
        with primary_context(device):
            handle = call("cuMemImportFromShareableHandle", fd, _handle_type(fabric=False))
        return cls(device, handle, size_bytes, fabric=False)

    @classmethod
    def import_fabric(cls, exported: bytes, size_bytes: int, device: int) -> Self:
        """Maps a peer's memory for `device`. exported: the peer's `export_fabric()`."""
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
        """Returns a new file descriptor of this memory; the caller closes it."""
        errors.require(not self._fabric, "this memory is shared by fabric handle")
        return int(self._export())

    def export_fabric(self) -> bytes:
        """Returns the fabric handle, 64 bytes."""
        errors.require(self._fabric, "this memory is shared by file descriptor")
        return bytes(self._export().data)

    def _export(self) -> Any:
        with primary_context(self.device):
            return call(
                "cuMemExportToShareableHandle", self._handle, _handle_type(fabric=self._fabric), 0
            )


def _clear(address: int, size: int) -> None:
    """Not in the order of any other stream: an epoch is made while kernels of another one wait."""
    stream = call("cuStreamCreate", module().CUstream_flags.CU_STREAM_NON_BLOCKING)
    try:
        call("cuMemsetD8Async", address, 0, size, stream)
        call("cuStreamSynchronize", stream)
    finally:
        call("cuStreamDestroy", stream)


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
    """Adds to the driver's bare refusal what fabric handles need."""
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


class PinnedPages(_Owner):
    """Host memory of this process that `device` may use while this object is open.

    host_address, size_bytes: whole pages, mapped until this object is closed; other processes may
    map them too. device_address: the pages' address in kernels of `device`.
    """

    def __init__(self, device: int, host_address: int, size_bytes: int) -> None:
        super().__init__(device)
        flags = module().CU_MEMHOSTREGISTER_PORTABLE | module().CU_MEMHOSTREGISTER_DEVICEMAP
        with primary_context(device), ExitStack() as undo:
            call("cuMemHostRegister", host_address, size_bytes, flags)
            undo.callback(call, "cuMemHostUnregister", host_address)
            self.device_address = int(call("cuMemHostGetDevicePointer", host_address, 0))
            self._undo = undo.pop_all()


class SharedDeviceMemory(_Owner):
    """The memory of several ranks, each one's own, mapped for `device`.

    own: this rank's memory. addresses: of each rank's memory, in rank order, on `device`.
    """

    def __init__(
        self, device: int, own: DeviceMemory, addresses: list[int], undo: ExitStack
    ) -> None:
        super().__init__(device)
        self.own, self.addresses = own, addresses
        self._undo = undo


def share_node_memory(
    local: int,
    num_local: int,
    *,
    key: str,
    device: int,
    size_bytes: int,
    deadline: float,
    meeting: Bootstrap | None = None,
    exchange: Callable[[bytes], list[bytes]] | None = None,
) -> SharedDeviceMemory:
    """Allocates `size_bytes` of zeros on `device` and maps the memory of all ranks of the node.

    size_bytes: equal on all ranks. Other arguments and errors: see exchange_fds and DeviceMemory.
    A rank that fails before it has shared its memory is noticed by the others, at the deadline or
    when its process ends; a later failure is not: let ranks meet again before they use the memory.

    exchange: an all-gather of bytes in the node. With it memory is shared by fabric handle, through
        `exchange`, instead of by file descriptor.
    """
    with ExitStack() as undo:
        own = undo.enter_context(
            DeviceMemory.allocate(device, size_bytes, fabric=exchange is not None)
        )
        if exchange is None:
            shared = share_memory(
                own, local, num_local, key=key, deadline=deadline, meeting=meeting
            )
            addresses = undo.enter_context(shared).addresses
        else:
            handles = exchange(own.export_fabric())
            addresses = _map_others(
                own,
                local,
                [functools.partial(DeviceMemory.import_fabric, handle) for handle in handles],
                undo,
            )
        return SharedDeviceMemory(device, own, addresses, undo.pop_all())


def share_memory(
    own: DeviceMemory,
    place: int,
    count: int,
    *,
    key: str,
    deadline: float,
    meeting: Bootstrap | None = None,
) -> SharedDeviceMemory:
    """Maps the memory of `count` ranks of this host, this one at `place`, each of own.size bytes.

    `own` stays open when the result is closed. Otherwise like share_node_memory.
    """
    with ExitStack() as undo, ExitStack() as descriptors:
        fd = own.export_fd()
        descriptors.callback(os.close, fd)
        received = exchange_fds(place, count, key=key, fds=[fd], deadline=deadline, meeting=meeting)
        for group in received:
            for copy in group:
                descriptors.callback(os.close, copy)
        imports = [functools.partial(DeviceMemory.import_fd, group[0]) for group in received]
        addresses = _map_others(own, place, imports, undo)
        return SharedDeviceMemory(own.device, own, addresses, undo.pop_all())


def _map_others(
    own: DeviceMemory,
    place: int,
    imports: Sequence[Callable[[int, int], DeviceMemory]],
    undo: ExitStack,
) -> list[int]:
    """Returns all addresses; imports[i](size_bytes, device) maps the memory of rank i."""
    addresses = []
    for rank, import_it in enumerate(imports):
        if rank == place:
            addresses.append(own.address)
            continue
        try:
            addresses.append(undo.enter_context(import_it(own.size, own.device)).address)
        except errors.MoeP2pError as error:
            raise errors.make(
                type(error),
                f"device {own.device} cannot map the memory of local rank {rank}: {error}",
            ) from None
    return addresses
