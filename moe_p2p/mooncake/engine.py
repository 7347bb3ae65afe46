"""TransferEngine with Mooncake's names, arguments and return codes. Serves `mooncake.engine`.

Calls do not raise: they log the error and return a negative number, because Mooncake's users look
at numbers. The wheel that was followed: mooncake-transfer-engine-non-cuda 0.3.13.post1.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from moe_p2p import env, errors
from moe_p2p.engine.config import EngineConfig
from moe_p2p.engine.engine import Engine
from moe_p2p.engine.transfers import Memory
from moe_p2p.fleet.member import new_id
from moe_p2p.machine import topology
from moe_p2p.mooncake import codes, handshake, memory, peers, transfer
from moe_p2p.mooncake.codes import TransferNotify, TransferOpcode, instead_of_errors

__all__ = ["Read", "TransferEngine", "TransferNotify", "TransferOpcode", "Write"]

SUPPORT_CUDA = torch.version.cuda is not None
SUPPORT_EFA = True
Read, Write = TransferOpcode.Read, TransferOpcode.Write
_TRANSPORTS = {"rdma": "auto", "tcp": "auto", "efa": "libfabric", "": "auto"}


class TransferEngine:
    """One-sided transfers between registered memory of processes, by address.

    A peer is named "host:port", port being its get_rpc_port(). Any thread may call.
    """

    TransferOpcode = codes.TransferOpcode

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._service: handshake.Service | None = None
        self._id = ""  # host:port and incarnation
        self._peers: peers.Peers | None = None
        self._batches: dict[int, transfer.Transfer] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()  # of what follows
        self._memory = memory.Table()  # values: Memory
        self._leaving: set[int] = set()  # addresses that a thread unregisters
        self._first: list[int] = []  # addresses in the order of their registration
        self._notifies: list[codes.TransferNotify] = []
        self._managed: dict[int, Any] = {}

    # --- set-up ---

    @instead_of_errors(codes.FAILED)
    def initialize(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str
    ) -> int:
        """Opens the NICs. 0; or a negative number. Calling it again changes nothing.

        local_hostname: by which peers reach this host; a port behind it is ignored.
        metadata_server: "P2PHANDSHAKE".
        protocol: "rdma" and "tcp" take the best that the machine has (MOE_P2P_TRANSPORT decides
            otherwise), "efa" libfabric.
        device_name: NICs, separated by commas; "": the nearest to the current GPU.
        """
        if self._engine is not None:
            return 0
        errors.require(
            metadata_server == "P2PHANDSHAKE",
            f"metadata_server is {metadata_server!r}, must be 'P2PHANDSHAKE': peers are found by "
            "host:port",
        )
        errors.require(
            protocol in _TRANSPORTS,
            f"protocol is {protocol!r}, must be one of {', '.join(map(repr, _TRANSPORTS))}",
        )
        config = EngineConfig(
            transport=_TRANSPORTS[protocol],
            nics=device_name.replace(" ", ""),
            timeout_s=env.mooncake_timeout_s(),
        )
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        gpu = torch.cuda.current_device() if on_gpu else None
        service = handshake.Service(_host_of(local_hostname), _answering(self))
        try:
            engine = Engine(config, label=f"mooncake engine of {local_hostname}", gpu=gpu)
        except BaseException:
            service.close()
            raise
        self._id = new_id(f"{_host_of(local_hostname)}:{service.port}")
        self._service, self._peers, self._engine = service, peers.Peers(engine), engine
        weakref.finalize(self, _close, engine, service)
        return 0

    def initialize_ext(
        self,
        local_hostname: str,
        metadata_server: str,
        protocol: str,
        device_name: str,
        metadata_type: str,
    ) -> int:
        """initialize; metadata_type is ignored, because there is no metadata server."""
        return self.initialize(local_hostname, metadata_server, protocol, device_name)

    def get_rpc_port(self) -> int:
        """The port by which peers name this engine."""
        if self._service is None:
            raise errors.make(errors.InvalidArgumentError, "call initialize() first")
        return self._service.port

    def get_local_topology(self, device_name: str | None = None) -> str:
        """JSON: the NICs that each place of memory prefers, and the rest."""
        names = [nic.name for nic in topology.read_host().nics if not nic.problem]
        if device_name:
            names = [name for name in names if name in device_name.split(",")]
        return json.dumps({"cpu:0": [names, []]})

    def get_engine(self) -> Any:
        """Raises: mooncake.store needs Mooncake's own engine object."""
        raise errors.make(
            errors.UnavailableError,
            "moe_p2p's TransferEngine has no C++ engine of Mooncake inside: let "
            "mooncake.store make an engine of its own (SGLANG_HICACHE_MOONCAKE_REUSE_TE=0)",
        )

    def get_engine_ptr(self) -> int:
        """Raises, as get_engine."""
        return int(self.get_engine())

    # --- memory ---

    @instead_of_errors(codes.FAILED)
    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        """Lets transfers from here use memory of the host or a GPU, and peers use it.

        0; -7 where it overlaps registered memory. location is ignored: the memory says where it is.
        """
        engine, _ = self._connections()
        errors.require(buffer_addr > 0, f"buffer_addr is {buffer_addr}, must be an address")
        errors.require(capacity > 0, f"capacity is {capacity}, must be positive")
        with self._lock:
            if self._memory.overlaps(buffer_addr, capacity):
                return codes.REGISTERED
            registered = engine.register(memory.tensor_at(buffer_addr, capacity))
            self._memory.add(buffer_addr, capacity, registered)
            self._first.append(buffer_addr)
        return 0

    @instead_of_errors(codes.FAILED)
    def unregister_memory(self, buffer_addr: int) -> int:
        """Nothing of a peer reaches the memory afterwards. 0; -3 where nothing begins there; -1
        where the NIC cannot promise it yet: it stays registered, and the call is to be repeated."""
        with self._lock:
            registered = self._memory.at(buffer_addr)
            if registered is None or buffer_addr in self._leaving:  # another thread's
                return codes.NOT_REGISTERED
            self._leaving.add(buffer_addr)
        try:
            registered.unregister()
            with self._lock:
                self._memory.take(buffer_addr)
                self._first.remove(buffer_addr)
        finally:
            with self._lock:
                self._leaving.discard(buffer_addr)
        return 0

    def batch_register_memory(
        self, buffer_addresses: Sequence[int], capacities: Sequence[int], location: str = "*"
    ) -> int:
        """register_memory of each, or of none: the code of the first that fails."""
        if len(buffer_addresses) != len(capacities):
            return codes.REGISTERED  # as the wheel
        for number, address in enumerate(buffer_addresses):
            if (code := self.register_memory(address, capacities[number], location)) != 0:
                self.batch_unregister_memory(buffer_addresses[:number])
                return code
        return 0

    def batch_unregister_memory(self, buffer_addresses: Sequence[int]) -> int:
        """unregister_memory of each; the first code that is not 0, after all of them."""
        codes = [self.unregister_memory(address) for address in buffer_addresses]
        return next((code for code in codes if code != 0), 0)

    @instead_of_errors(0)
    def get_first_buffer_address(self, segment_name: str) -> int:
        """Address of what the engine at host:port registered first; 0: nothing, or no engine."""
        with self._peer(segment_name) as remote:
            return remote.first

    @instead_of_errors(0)
    def allocate_managed_buffer(self, length: int) -> int:
        """Registers `length` bytes of new host memory; returns their address, 0 on failure."""
        errors.require(length > 0, f"length is {length}, must be positive")
        tensor = torch.zeros(length, dtype=torch.uint8, device="cpu")
        if self.register_memory(tensor.data_ptr(), length) != 0:
            return 0
        self._managed[tensor.data_ptr()] = tensor
        return tensor.data_ptr()

    def free_managed_buffer(self, address: int, length: int) -> int:
        """0; -1 where no managed buffer begins there."""
        if self._managed.get(address) is None or self.unregister_memory(address) != 0:
            return codes.FAILED
        del self._managed[address]
        return 0

    @instead_of_errors(codes.FAILED)
    def write_bytes_to_buffer(self, address: int, data: str | bytes, length: int) -> int:
        """Copies `length` bytes of data into registered host memory."""
        raw = data.encode() if isinstance(data, str) else bytes(data)
        errors.require(length <= len(raw), f"length is {length}, data has {len(raw)} bytes")
        ctypes.memmove(self._host_memory(address, length), raw, length)
        return 0

    def read_bytes_from_buffer(self, address: int, length: int) -> bytes:
        """Returns bytes of registered host memory. Raises InvalidArgumentError for other memory."""
        return ctypes.string_at(self._host_memory(address, length), length)

    # --- peers ---

    def get_notifies(self) -> list[codes.TransferNotify]:
        """What peers have sent since the last call."""
        with self._lock:
            found, self._notifies = self._notifies, []
        return found

    @instead_of_errors(codes.NO_PEER)
    def send_probe(self, peer_server_name: str) -> int:
        """0 when the engine at host:port answers."""
        handshake.ask(peer_server_name, {})
        return 0

    @instead_of_errors(codes.FAILED)
    def warmup_efa_segment(self, segment_name: str) -> int:
        """Connects to the engine at host:port before its first transfer."""
        with self._peer(segment_name):
            return 0

    # --- transfers that are waited for: 0, or a negative number ---

    @instead_of_errors(codes.FAILED)
    def transfer_sync_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Returns when the bytes are visible at the peer."""
        return self._sync(target_hostname, [buffer], [peer_buffer_address], [length], Write)

    @instead_of_errors(codes.FAILED)
    def transfer_sync_read(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Returns when the bytes are here."""
        return self._sync(target_hostname, [buffer], [peer_buffer_address], [length], Read)

    @instead_of_errors(codes.FAILED)
    def transfer_sync(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: codes.TransferOpcode,
        notify: codes.TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """notify: what the peer finds in get_notifies() when the bytes are there."""
        place = [buffer], [peer_buffer_address], [length]
        return self._sync(target_hostname, *place, opcode, notify)

    @instead_of_errors(codes.FAILED)
    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Writes lengths[i] bytes at buffers[i] to peer_buffer_addresses[i], for all i."""
        return self._sync(target_hostname, buffers, peer_buffer_addresses, lengths, Write)

    @instead_of_errors(codes.FAILED)
    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Reads lengths[i] bytes at peer_buffer_addresses[i] into buffers[i], for all i."""
        return self._sync(target_hostname, buffers, peer_buffer_addresses, lengths, Read)

    @instead_of_errors(codes.FAILED)
    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: codes.TransferOpcode,
        notify: codes.TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """Any number of pieces; runs that follow each other on both sides travel as one."""
        return self._sync(target_hostname, buffers, peer_buffer_addresses, lengths, opcode, notify)

    # --- transfers that are asked about later: a number, or 0 ---

    @instead_of_errors(0)
    def transfer_submit_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Returns a number for transfer_check_status; 0 on failure."""
        return self._async(target_hostname, [buffer], [peer_buffer_address], [length], Write)

    @instead_of_errors(0)
    def batch_transfer_async_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Returns a number for get_batch_transfer_status; 0 on failure."""
        return self._async(target_hostname, buffers, peer_buffer_addresses, lengths, Write)

    @instead_of_errors(0)
    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Returns a number for get_batch_transfer_status; 0 on failure."""
        return self._async(target_hostname, buffers, peer_buffer_addresses, lengths, Read)

    @instead_of_errors(0)
    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: codes.TransferOpcode,
        transport_hint: str = "",
    ) -> int:
        """Returns a number for get_batch_transfer_status; 0 on failure."""
        return self._async(target_hostname, buffers, peer_buffer_addresses, lengths, opcode)

    def get_batch_transfer_status(self, batch_ids: Sequence[int]) -> int:
        """Waits for all of them. 0; -1 when one failed or is not known. Each is asked for once."""
        codes = [self._wait_batch(number) for number in batch_ids]
        return min(codes, default=0)

    @instead_of_errors(codes.FAILED)
    def transfer_check_status(self, batch_id: int) -> int:
        """0: under way, 1: done, negative: failed. Asked again until it is not 0."""
        begun = self._batches.get(batch_id)
        if begun is not None and not begun.done():
            return codes.PENDING
        self._wait(batch_id)
        return codes.COMPLETED

    # --- inside ---

    def _host_memory(self, address: int, length: int) -> int:
        found = self._find(address, length)
        errors.require(
            found is not None and length >= 0 and not found[0].tensor.is_cuda,
            f"{length} bytes at {address:#x} are not registered host memory",
        )
        return address

    def _begin(
        self,
        session: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: codes.TransferOpcode,
    ) -> transfer.Transfer:
        engine, peers = self._connections()
        counts = len(buffers), len(peer_buffer_addresses), len(lengths)
        errors.require(
            len(set(counts)) == 1,
            "buffers, peer_buffer_addresses and lengths have {}, {} and {} entries, must have "
            "equally many".format(*counts),
        )
        for i, length in enumerate(lengths):
            if length < 0:
                text = f"lengths[{i}] is {length}, must be at least 0"
                raise errors.make(errors.InvalidArgumentError, text)
        pieces = map(transfer.Piece, buffers, peer_buffer_addresses, lengths)
        return transfer.Transfer(engine, peers, self._find, session, list(pieces), opcode)

    def _sync(
        self,
        session: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: codes.TransferOpcode,
        notify: codes.TransferNotify | None = None,
    ) -> int:
        self._begin(session, buffers, peer_buffer_addresses, lengths, opcode).wait()
        if notify is not None:
            handshake.ask(session, {"notify": [notify.name, notify.msg]})
        return 0

    def _async(
        self,
        session: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: codes.TransferOpcode,
    ) -> int:
        begun = self._begin(session, buffers, peer_buffer_addresses, lengths, opcode)
        number = next(self._numbers)
        self._batches[number] = begun
        return number

    @contextlib.contextmanager
    def _peer(self, session: str) -> Iterator[peers.Remote]:
        _, known = self._connections()
        remote = known.take(session, asks=True)
        try:
            yield remote
        finally:
            known.give_back(remote)

    def _connections(self) -> tuple[Engine, peers.Peers]:
        if self._engine is None or self._peers is None:
            raise errors.make(errors.InvalidArgumentError, "call initialize() first")
        return self._engine, self._peers

    def _find(self, address: int, nbytes: int) -> tuple[Memory, int] | None:
        with self._lock:
            return self._memory.find(address, nbytes)

    @instead_of_errors(codes.FAILED, "get_batch_transfer_status")
    def _wait_batch(self, number: int) -> int:
        return self._wait(number)

    def _wait(self, number: int) -> int:
        begun = self._batches.pop(number, None)
        errors.require(begun is not None, f"{number} is no transfer, or was asked for before")
        if begun is not None:
            begun.wait()
        return 0


def _host_of(name: str) -> str:
    """Returns the host of "host", "host:port" or "[host]:port"."""
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0] if name.count(":") == 1 else name


def _answering(engine: TransferEngine) -> handshake.Answer:
    """Returns what answers peers; it does not keep the engine alive."""
    known = weakref.ref(engine)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        self = known()
        if self is None or self._engine is None:
            return {}
        with self._lock:
            if "notify" in request:
                name, msg = request["notify"]
                self._notifies.append(codes.TransferNotify(str(name), str(msg)))
            if "memory" not in request:
                return {}
            there = [e for e in self._memory.entries() if e.address not in self._leaving]
            return {
                "id": self._id,
                "address": self._engine.address.hex(),
                "memory": memory.described(there),
                "first": self._first[0] if self._first else 0,
            }

    return answer


def _close(engine: Engine, service: handshake.Service) -> None:
    service.close()
    engine.close()
