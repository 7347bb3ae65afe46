"""Calls of a Mooncake TransferEngine and what they return, as JSON: the same with any package.

python tests/support/mooncake_calls.py     with mooncake.engine on the path
"""

from __future__ import annotations

import ctypes
import json
import time
from typing import Any

KIB = 4096


def calls(module: Any) -> dict[str, Any]:
    """Two engines of one process; numbers of transfers become whether they are positive."""
    opcode, notify = module.TransferOpcode, module.TransferNotify
    engines = [module.TransferEngine() for _ in range(2)]
    a, b = engines
    got: dict[str, Any] = {}
    got["initialize"] = [e.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") for e in engines]
    got["initialize again"] = a.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    peer = f"127.0.0.1:{b.get_rpc_port()}"
    source = (ctypes.c_ubyte * KIB)(*[i % 251 for i in range(KIB)])
    target, other = (ctypes.c_ubyte * KIB)(), (ctypes.c_ubyte * KIB)()
    here, there, late = map(ctypes.addressof, (source, target, other))
    got["register"] = [a.register_memory(here, KIB), b.register_memory(there, KIB)]
    got["register again"] = a.register_memory(here, KIB)
    got["register within"] = a.register_memory(here + 8, 16)
    got["register nothing"] = a.register_memory(here + KIB, 0)
    got["write"] = [a.transfer_sync_write(peer, here, there, KIB), bytes(target) == bytes(source)]
    ctypes.memset(here, 0, 100)
    got["read"] = [a.transfer_sync_read(peer, here, there + 50, 50), list(source[:51])]
    got["batch"] = a.batch_transfer_sync_write(
        peer, [here, here + 64, here + 300], [there + 7, there + 71, there], [64, 64, 1]
    )
    got["batch bytes"] = bytes(target[:140]).hex()
    got["batch read"] = a.batch_transfer_sync_read(peer, [here], [there], [10])
    got["batch of none"] = a.batch_transfer_sync_write(peer, [], [], [])
    got["batch uneven"] = a.batch_transfer_sync_write(peer, [here], [there, there], [1])
    got["no bytes"] = a.transfer_sync_write(peer, here, there, 0)
    got["beyond the peer's"] = a.transfer_sync_write(peer, here, there + KIB - 96, 200)
    got["unknown to the peer"] = a.transfer_sync_write(peer, here, 1 << 40, 200)
    got["registered later"] = [
        b.register_memory(late, KIB),
        a.transfer_sync_write(peer, here, late, 8),
    ]
    got["registered anew"] = [
        b.unregister_memory(late),
        b.register_memory(late, KIB),
        a.transfer_sync_write(peer, here, late, 8),
        a.transfer_sync_read(peer, here, late, 8),
    ]
    got["nobody there"] = a.transfer_sync_write("127.0.0.1:1", here, there, 20)
    got["no peer's name"] = a.transfer_sync_write("nonsense", here, there, 20)
    number = a.batch_transfer_async_write(peer, [here], [there], [64])
    got["status"] = [number > 0, a.get_batch_transfer_status([number])]
    got["status of none"] = a.get_batch_transfer_status([])
    got["asynchronous to nobody"] = a.batch_transfer_async_write(
        "127.0.0.1:1", [here], [there], [1]
    )
    number = a.transfer_submit_write(peer, here, there, 64)
    state, deadline = 0, time.monotonic() + 30
    while state == 0 and time.monotonic() < deadline:
        state = a.transfer_check_status(number)
    got["submit"] = [number > 0, state]
    got["first"] = [e.get_first_buffer_address(peer) == there for e in engines]
    got["first of nobody"] = a.get_first_buffer_address("127.0.0.1:1")
    got["probe"] = [a.send_probe(peer), a.send_probe("127.0.0.1:1")]
    got["notify"] = a.transfer_sync(peer, here, there, 64, opcode.Write, notify("name", "text"))
    found: list[Any] = []
    while not found and time.monotonic() < deadline:
        found = b.get_notifies()
    got["notifies"] = [[(n.name, n.msg) for n in found], b.get_notifies()]
    managed = a.allocate_managed_buffer(100)
    got["managed"] = [
        managed > 0,
        a.write_bytes_to_buffer(managed, "hello", 5),
        a.read_bytes_from_buffer(managed, 5).decode(),
        a.free_managed_buffer(managed, 100),
    ]
    got["unregister"] = [a.unregister_memory(here), a.unregister_memory(here)]
    got["batch that fails"] = [
        a.batch_register_memory([here, here], [KIB, KIB]),
        a.unregister_memory(here),
    ]
    got["batch of memory"] = [
        a.batch_register_memory([here], [KIB]),
        a.batch_register_memory([here], [1, 2]),
        a.batch_unregister_memory([here]),
        a.batch_unregister_memory([1234]),
        b.batch_unregister_memory([there, late]),
    ]
    return got


if __name__ == "__main__":
    import importlib

    module = importlib.import_module("mooncake.engine")
    print("RESULT " + json.dumps(calls(module)), flush=True)
