"""A sender that is stopped in the middle of a write: once pages are reusable, nothing of it lands
in them any more, also when it goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest
import torch
from torch.distributed import TCPStore

from moe_p2p import Engine, EngineConfig, kv
from tests.support import warm
from tests.support.kv_fakes import cache_of

NBYTES = 64 << 20  # of the write; sockets hold some of it, never all
OVER = {
    "loopback": ("loopback", ""),
    "tcp": ("libfabric", "provider=tcp,interfaces=lo,timeout_ms=2000"),
}
GROUP = kv.KVGroup("kv", (0,), heads=1, k_bytes=NBYTES, v_bytes=0, page_size=1)
LAYOUT = kv.KVLayout((GROUP,))
TIMEOUTS = kv.KVTimeouts(open_s=60, layers_s=60, drain_s=0.1, lease_s=60)
PAGE = {"kv": torch.zeros(1, dtype=torch.int32)}

SENDER = """
import sys
from torch.distributed import TCPStore
from moe_p2p import kv
from tests.kv import test_kv_stopped_sender as t

sender = kv.KVSender(t.engine(sys.argv[1]), t.cache_of(t.LAYOUT, 0, 1), instance="p",
                     timeouts=t.TIMEOUTS)
sender.cache.tensors[0].fill_(7)
leases = kv.TorchLeases(TCPStore("127.0.0.1", int(sys.argv[2]), is_master=False), 60)
with kv.Membership(sender, leases):
    print("ready", flush=True)
    for request in sys.stdin:
        sender.wait_for("d", 30)
        sending = sender.start(request.strip(), "d", t.PAGE, total=1)
        try:
            sending.layer(0)
            sending.commit()
            sending.wait(30)
            print("done", flush=True)
        except Exception:
            print("failed", flush=True)
"""


def engine(over: str) -> Engine:
    transport, settings = OVER[over]
    return Engine(EngineConfig(transport=transport, transport_settings=settings))


def cut_in_two(child: subprocess.Popen[str], memory: torch.Tensor) -> bool:
    """Stops the child while its write lands. Returns whether it was in time."""
    bytes_ = memory.numpy()
    deadline = time.monotonic() + 30
    while not bytes_[: NBYTES : 1 << 20].any():
        assert time.monotonic() < deadline
    os.kill(child.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 0.3  # what is in the sockets
    while time.monotonic() < deadline and not bytes_[NBYTES - 1]:
        time.sleep(0.01)
    return not bytes_[NBYTES - 1]


@pytest.mark.parametrize("over", OVER)
def test_a_stopped_sender_writes_nothing_later(over: str) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    receiver = kv.KVReceiver(
        engine(over), cache_of(LAYOUT, 0, 1), instance="d", timeouts=TIMEOUTS, verify="off"
    )
    memory = receiver.cache.tensors[0]
    child = warm.popen(
        *("-c", SENDER, over, str(store.port)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        with kv.Membership(receiver, kv.TorchLeases(store, 60)):
            assert child.stdout.readline() == "ready\n"
            halves = 0
            for at in range(4):
                receiver.wait_for("p", 30)
                memory.zero_()
                reservation = receiver.reserve(f"r{at}", "p", PAGE, total=1)
                child.stdin.write(f"r{at}\n")
                child.stdin.flush()
                halves += cut_in_two(child, memory)
                reservation.cancel("the user left")
                reservation.wait_reusable(30)
                memory.fill_(99)
                os.kill(child.pid, signal.SIGCONT)
                child.stdout.readline()  # it has ended there
                receiver.wait_for("p", 30)
                assert int((memory != 99).sum()) == 0, f"late bytes in round {at}"
                if halves == 2:
                    break
            assert halves, "no write was cut in two"
    finally:
        os.kill(child.pid, signal.SIGCONT)
        child.kill()
        child.wait()
        receiver.engine.close()
