"""A sender that is stopped in the middle of a write: once pages are reusable, nothing of it lands
in them any more, also when it goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from moe_p2p import Engine, EngineConfig, UnavailableError, kv
from tests.support import cells, warm
from tests.support.kv_fakes import cache_of
from tests.support.kv_mutations import mutated

PAGE_BYTES, PAGES = 2 << 20, 32  # a write each; sockets and rings hold some of them, never all
OVER = {
    "loopback": ("loopback", ""),
    "tcp": ("libfabric", "provider=tcp,interfaces=lo,timeout_ms=2000"),
    # The receiver copies by itself what a stopped sender has posted, so not all may be posted.
    "shm": ("libfabric", "provider=shm,max_in_flight=4,timeout_ms=300"),
}
# On a GPU all of it would be there before this process can look: a link of 8 Gbit/s.
GPU = {"gpu": ("loopback", "gbps=8")}
ROCE = {"roce": ("verbs", "devices=rxe0,timeout=16")}  # tests/engine/test_rdma.py
# Refused by name: half a write is finished there after the fence.
UNFENCED = {"net": ("libfabric", "provider=net,interfaces=lo,timeout_ms=2000")}
GROUP = kv.KVGroup("kv", (0,), heads=1, k_bytes=PAGE_BYTES, v_bytes=0, page_size=1)
LAYOUT = kv.KVLayout((GROUP,))
# Leases are renewed each second, and last a minute.
TIMEOUTS = kv.KVTimeouts(open_s=60, drain_s=0.1, lease_s=4)
# Neighbours would travel as one write.
ALL = {"kv": torch.tensor([*range(0, PAGES, 2), *range(1, PAGES, 2)], dtype=torch.int32)}

SENDER = """
import sys
from torch.distributed import TCPStore
from moe_p2p import kv
from tests.kv import test_kv_stopped_sender as t

sender = kv.KVSender(t.engine(sys.argv[1]), t.cache(sys.argv[1]), instance=sys.argv[3],
                     timeouts=t.TIMEOUTS)
sender.cache.tensors[0].fill_(7)
leases = kv.TorchLeases(TCPStore("127.0.0.1", int(sys.argv[2]), is_master=False), 60)
with kv.LeaseKeeper(sender, leases):
    print("ready", flush=True)
    for request in sys.stdin:
        sender.wait_for("d", 30)
        sending = sender.start(request.strip(), "d", t.ALL, total=t.PAGES)
        try:
            sending.layer(0)
            sending.commit()
            sending.wait(30)
            print("done", flush=True)
        except Exception as error:
            print(f"failed: {error!r}", flush=True)
"""


def engine(over: str) -> Engine:
    transport, settings = (OVER | GPU | ROCE | UNFENCED)[over]
    given = EngineConfig(transport=transport, transport_settings=settings)
    made = Engine(given, gpu=0 if over in GPU else None)
    if over in UNFENCED:
        made.why_no_fence = lambda: ""  # type: ignore[method-assign]
    return made


def cache(over: str) -> kv.KVCache:
    return cache_of(LAYOUT, 0, PAGES, "cuda" if over in GPU else "cpu")


class Stops:
    """A receiver here, and a sender that is stopped in the middle of requests."""

    def __init__(self, over: str) -> None:
        self.over = over
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.receiver = kv.KVReceiver(
            engine(over), cache(over), instance="d", timeouts=TIMEOUTS, verify="off"
        )
        self.memory = self.receiver.cache.tensors[0]
        self.child: subprocess.Popen[str] | None = None
        self.children = 0
        self.rounds = self.halves = self.late = self.locked = 0

    def run(self, halves: int, rounds: int, *, until_late: bool = False) -> None:
        """Until so many requests were cut in two; over each round bytes are looked for that land
        after the pages were given back."""
        with kv.LeaseKeeper(self.receiver, kv.TorchLeases(self.store, 60)):
            try:
                while self.halves < halves and self.rounds < rounds:
                    self.round()
                    if until_late and self.late:
                        return
            finally:
                self.end()
                self.receiver.engine.close()

    def round(self) -> None:
        child = self.child or self.start()
        assert child.stdin is not None
        assert child.stdout is not None
        instance = f"p{self.children}"
        self.receiver.wait_for(instance, 30)
        self.memory.zero_()
        self.rounds += 1
        name = f"r{self.rounds}"
        reservation = self.receiver.reserve(name, instance, ALL, total=PAGES)
        child.stdin.write(name + "\n")
        child.stdin.flush()
        half = self.cut_in_two(child.pid)
        self.halves += half
        reservation.cancel("the user left")
        try:
            reservation.wait_reusable(20)
        except TimeoutError:
            # libfabric 1.17's writer holds a lock in the receiver's memory while it posts. Stopped
            # there, it stops the receiver's polls too.
            if self.over != "shm":
                raise
            self.locked += 1
            os.kill(child.pid, signal.SIGCONT)
            reservation.wait_reusable(30)
        self.memory.fill_(99)
        os.kill(child.pid, signal.SIGCONT)
        child.stdout.readline()  # it has ended there
        if self.over == "shm":  # a write that was refused never completes there (libfabric 1.17)
            self.end()
        else:
            self.receiver.wait_for(instance, 30)
        eight = self.memory.view(torch.int64)  # byte by byte takes longer in the RDMA machine
        self.late += bool((eight != int.from_bytes([99] * 8, "little")).any())

    def cut_in_two(self, child: int) -> bool:
        """Stops the child while its writes land. Returns whether it was in time."""
        some = self.memory[:: 1 << 18]
        deadline = time.monotonic() + 30
        while not some.any():
            assert time.monotonic() < deadline, "no byte has come"
        os.kill(child, signal.SIGSTOP)
        deadline = time.monotonic() + 0.2  # what is in the sockets
        while time.monotonic() < deadline and not some.all():
            time.sleep(0.01)
        return not bool(some.all())

    def start(self) -> subprocess.Popen[str]:
        self.children += 1
        command = ("-c", SENDER, self.over, str(self.store.port), f"p{self.children}")
        self.child = warm.popen(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.child.stdout is not None
        assert self.child.stdout.readline() == "ready\n"
        return self.child

    def end(self) -> None:
        if self.child is not None:
            os.kill(self.child.pid, signal.SIGCONT)
            self.child.kill()
            self.child.communicate()
            # libfabric's, of a process that was killed: the next one of its number could not begin.
            for left in Path("/dev/shm").glob(f"{self.child.pid}:*"):
                left.unlink()
            self.child = None


STOPS = [
    pytest.param(
        over, stops, marks=[pytest.mark.more, pytest.mark.timeout(600)] if stops == 50 else []
    )
    for over in OVER
    for stops in (3, 50)
]
UNTIL_LATE = 60, 80  # over shm a missing fence shows in every third round
OVER_ROCE = [pytest.mark.more, pytest.mark.timeout(600)]
STOPS.append(pytest.param("roce", 20, marks=OVER_ROCE))
STOPS.append(pytest.param("gpu", 3, marks=pytest.mark.gpu))


def need(over: str) -> None:
    if over in ROCE:
        try:
            engine(over).close()
        except UnavailableError as error:
            pytest.skip(str(error))


@pytest.mark.parametrize(("over", "stops"), STOPS)
def test_a_stopped_sender_writes_nothing_later(over: str, stops: int) -> None:
    need(over)
    found = Stops(over)
    found.run(stops, 2 * stops + 3)
    assert found.halves > found.locked, "no request was cut in two"
    assert found.locked <= 1 + found.halves // 10, "it is the fence that takes too long"
    assert not found.late, f"late bytes in {found.late} of {found.rounds} rounds"


@pytest.mark.parametrize(
    ("over", "fault"),
    [
        *cells.few(
            [(over, fault) for over in OVER for fault in ("no fence", "fence that only polls")],
            keep=[("loopback", "no fence"), ("tcp", "fence that only polls")],
        ),
        pytest.param("roce", "no fence", marks=OVER_ROCE),
    ],
)
def test_a_fence_that_is_missing_is_seen(over: str, fault: str) -> None:
    need(over)
    with mutated(fault):
        found = Stops(over)
        found.run(*UNTIL_LATE, until_late=True)
    assert found.late, f"none of {found.rounds} rounds, of which {found.halves} were cut in two"


@pytest.mark.more
@pytest.mark.parametrize("over", UNFENCED)
def test_what_has_no_fence_has_late_bytes(over: str) -> None:
    found = Stops(over)
    found.run(*UNTIL_LATE, until_late=True)
    assert found.late, f"none of {found.rounds} rounds, of which {found.halves} were cut in two"


@pytest.mark.parametrize("provider", ["net", "sockets", "shm"])
def test_what_has_no_fence_is_refused(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FI_SHM_DISABLE_CMA", "1")
    settings = f"provider={provider}"
    made = Engine(EngineConfig(transport="libfabric", transport_settings=settings))
    try:
        with pytest.raises(UnavailableError, match=rf"libfabric's {provider} .* in the middle"):
            kv.KVReceiver(made, cache_of(LAYOUT, 0, PAGES), instance="d")
    finally:
        made.close()
