"""The same pages by others, in `bench --api kv`: one descriptor for each page of each layer.

`mooncake`: Mooncake's calls as moe_p2p.mooncake serves them. `nixl`: the wheel of that name, where
it is installed. Both sides make one; the sender's `send` returns when all bytes are at the peer.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from moe_p2p.mooncake import TransferEngine

LIMIT_S = 60.0


class System(Protocol):
    name: str

    def send(self, ours: list[int], theirs: list[int], nbytes: int) -> None:
        """Writes pages of `nbytes` at these offsets of the sender's memory."""

    def close(self) -> None: ...


class Mooncake:
    name = "mooncake shim"

    def __init__(self, memory: Tensor, exchange: Callable[[Any], list[Any]], rank: int) -> None:
        self.engine = TransferEngine()
        _must(self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", ""), "initialize")
        self.base = memory.data_ptr()
        size = memory.numel() * memory.element_size()
        _must(self.engine.register_memory(self.base, size), "register_memory")
        peers = exchange((f"127.0.0.1:{self.engine.get_rpc_port()}", self.base))
        self.peer, self.peer_base = peers[1 - rank]

    def send(self, ours: list[int], theirs: list[int], nbytes: int) -> None:
        base, peer = self.base, self.peer_base
        result = self.engine.batch_transfer_sync_write(
            self.peer,
            [base + at for at in ours],
            [peer + at for at in theirs],
            [nbytes] * len(ours),
        )
        _must(result, "batch_transfer_sync_write")

    def close(self) -> None:
        self.engine.unregister_memory(self.base)


def _must(code: int, call: str) -> None:
    if code:
        raise RuntimeError(f"mooncake: {call} returned {code}")


class Nixl:
    name = "nixl"

    def __init__(self, memory: Tensor, exchange: Callable[[Any], list[Any]], rank: int) -> None:
        from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found]

        self.kind = "VRAM" if memory.is_cuda else "DRAM"
        self.device = memory.get_device() if memory.is_cuda else 0
        self.agent = nixl_agent(f"rank{rank}-{os.getpid()}", nixl_agent_config(backends=["UCX"]))
        self.base = memory.data_ptr()
        size = memory.numel() * memory.element_size()
        self.registered = self.agent.register_memory(
            [(self.base, size, self.device, "")], self.kind
        )
        metadata = self.agent.get_agent_metadata()
        theirs, self.peer_base, self.peer_device = exchange((metadata, self.base, self.device))[
            1 - rank
        ]
        self.peer = self.agent.add_remote_agent(theirs)

    def send(self, ours: list[int], theirs: list[int], nbytes: int) -> None:
        local, remote = (
            self.agent.get_xfer_descs([(base + at, nbytes, device) for at in offsets], self.kind)
            for base, offsets, device in (
                (self.base, ours, self.device),
                (self.peer_base, theirs, self.peer_device),
            )
        )
        handle = self.agent.initialize_xfer("WRITE", local, remote, self.peer)
        state, until = self.agent.transfer(handle), time.monotonic() + LIMIT_S
        while state != "DONE":
            if state == "ERR" or time.monotonic() > until:
                raise RuntimeError(f"nixl: a transfer is in state {state}")
            state = self.agent.check_xfer_state(handle)
        self.agent.release_xfer_handle(handle)

    def close(self) -> None:
        self.agent.deregister_memory(self.registered)


NAMES: dict[str, type[Mooncake] | type[Nixl]] = {"mooncake": Mooncake, "nixl": Nixl}


def why_not(name: str) -> str:
    """The reason why a system cannot take part; empty: it can."""
    if name != "nixl":
        return ""
    try:
        importlib.import_module("nixl._api")
    except ImportError as error:  # not installed, or for another CUDA
        return f"nixl: {error} (pip install nixl)"
    return ""
