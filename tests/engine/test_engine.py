"""The transfer engine as users see it, over the software NIC, between threads and processes."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import moe_p2p
from moe_p2p import Engine, EngineConfig, PageRows
from moe_p2p.engine.transfers import Memory, Region, Slice
from tests.support.ranks import Rank, run_processes


def loopback(num_nics: int = 2, timeout_s: float = 10, **more: Any) -> EngineConfig:
    return EngineConfig(transport="loopback", nics_per_rank=num_nics, timeout_s=timeout_s, **more)


def pair(num_nics: int = 2, settings: str = "") -> tuple[Engine, Engine]:
    config = loopback(num_nics, transport_settings=settings)
    return Engine(config, label="sender"), Engine(config, label="receiver")


def ends(sender: Engine, receiver: Engine, nbytes: int = 64) -> tuple[Memory, Memory, Region]:
    """Ones at the sender, zeros at the receiver, and these as the sender writes to them."""
    theirs = receiver.register(torch.zeros(nbytes, dtype=torch.uint8))
    memory = sender.register(torch.ones(nbytes, dtype=torch.uint8))
    return memory, theirs, sender.resolve(theirs.descriptor)


@pytest.mark.parametrize("settings", ["", "seed=5"])
@pytest.mark.parametrize("num_nics", [1, 3])
def test_write_arrives_before_its_immediate(settings: str, num_nics: int) -> None:
    sender, receiver = pair(num_nics, settings)
    with sender, receiver:
        data = torch.randint(0, 255, (10_000,), dtype=torch.uint8)
        inbox = torch.zeros(12_000, dtype=torch.uint8)
        source = sender.register(data)
        region = sender.resolve(receiver.register(inbox).descriptor)
        assert region.nbytes == 12_000
        request = sender.write(source, region, offset=1000, region_offset=500, nbytes=9000, imm=7)
        assert receiver.wait_imm(7, num_nics) == num_nics
        assert torch.equal(inbox[500:9500], data[1000:])
        assert not inbox[:500].any()
        assert not inbox[9500:].any()
        request.wait()
        assert request.done()
        request.wait()  # again is nothing


def test_whole_memory_is_the_default_and_no_immediate_is_sent() -> None:
    sender, receiver = pair()
    with sender, receiver:
        data = torch.randn(100)
        inbox = torch.zeros(100)
        region = sender.resolve(receiver.register(inbox).descriptor)
        sender.write(sender.register(data), region).wait()
        assert torch.equal(inbox, data)
        assert receiver.imm_value(0) == 0


@pytest.mark.parametrize("settings", ["", "seed=9"])
def test_pages_go_to_their_places(settings: str) -> None:
    sender, receiver = pair(2, settings)
    with sender, receiver:
        cache = torch.randn(8, 16)
        other = torch.zeros(10, 16)
        region = sender.resolve(receiver.register(other).descriptor)
        pages = torch.tensor([5, 0, 7])
        targets = torch.tensor([1, 9, 4])
        sender.write_pages(
            sender.register(cache),
            region,
            rows=PageRows(page_bytes=32, stride=64, region_stride=64),
            pages=pages,
            region_pages=targets,
            imm=3,
        ).wait()
        assert receiver.wait_imm(3, 3) == 3
        assert torch.equal(other[targets, :8], cache[pages, :8])
        assert not other[:, 8:].any()


@pytest.mark.parametrize("by_bytes", [False, True])
def test_scatter_reaches_several_peers(by_bytes: bool) -> None:
    sender, first = pair()
    with (
        sender,
        first,
        Engine(loopback()) as second,
    ):
        data = torch.arange(64, dtype=torch.int32)
        inboxes = [torch.zeros(64, dtype=torch.int32) for _ in range(2)]
        regions = [
            sender.resolve(engine.register(inbox).descriptor)
            for engine, inbox in zip((first, second), inboxes, strict=True)
        ]
        slices = [Slice(0, regions[0], 0, 64), Slice(64, regions[1], 128, 128)]
        sender.scatter(sender.register(data), slices, by_bytes=by_bytes, imm=1).wait()
        expected = 2 if by_bytes else 1
        for engine in (first, second):
            assert engine.wait_imm(1, expected) == expected
        assert inboxes[0][:16].tolist() == list(range(16))
        assert inboxes[1][32:64].tolist() == list(range(16, 48))


def test_immediates_need_no_memory() -> None:
    sender, receiver = pair()
    with sender, receiver:
        peer = sender.connect(receiver.address)
        for _ in range(5):
            sender.send_imm(peer, 2**31 - 1)
        assert receiver.wait_imm(2**31 - 1, 5) == 5
        assert receiver.imm_value(2**31 - 1) == 5


def test_counts_per_nic() -> None:
    sender, receiver = pair(2)
    with sender, receiver:
        inbox = torch.zeros(4096, dtype=torch.uint8)
        region = sender.resolve(receiver.register(inbox).descriptor)
        sender.write(sender.register(torch.ones_like(inbox)), region, imm=0).wait()
        receiver.wait_imm(0, 2)
        assert sum(nic["bytes_written"] for nic in sender.counters()) == 4096
        assert [nic["immediates_sent"] for nic in sender.counters()] == [1, 1]
        assert sum(nic["immediates_received"] for nic in receiver.counters()) == 2
        assert [nic["connections_refused"] for nic in receiver.counters()] == [0, 0]


def test_waits_end_at_their_deadline_and_report_what_arrived() -> None:
    with Engine(loopback(1), label="lonely") as engine:
        began = time.monotonic()
        with pytest.raises(
            moe_p2p.TimeoutError, match=r"lonely.*immediate 4 came 0 times.*expected 2"
        ):
            engine.wait_imm(4, 2, timeout_s=0.05)
        assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"nbytes": 101}, "101"),
        ({"offset": 50, "nbytes": 60}, "60"),
        ({"region_offset": 51}, "100"),
        ({"nbytes": -1}, "bytes is -1, must be at least 0"),
        ({"offset": -4, "nbytes": 8}, "offset is -4"),
        ({"imm": 2**31}, "imm is 2147483648, must be from 0 to 2147483647"),
    ],
)
def test_ranges_are_checked_before_anything_is_sent(change: dict[str, int], match: str) -> None:
    sender, receiver = pair()
    with sender, receiver:
        source = sender.register(torch.zeros(100, dtype=torch.uint8))
        inbox = torch.zeros(150, dtype=torch.uint8)
        region = sender.resolve(receiver.register(inbox).descriptor)
        with pytest.raises(moe_p2p.InvalidArgumentError, match=match):
            sender.write(source, region, **{"nbytes": 100, **change})
        assert all(nic["writes"] == 0 for nic in sender.counters())
        sender.write(source, region).wait()  # still usable


def proxies() -> set[int]:
    """The threads of engines in this process."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # it ended
            if (task / "comm").read_text().strip() == "moe_p2p.proxy":
                found.add(int(task.name))
    return found


def test_settings_pin_the_thread_to_a_core() -> None:
    core = max(os.sched_getaffinity(0))
    settings = f"latency_us=5,proxy_cpu={core},gbps=400"
    config = EngineConfig(transport="loopback", transport_settings=settings)
    before = proxies()  # of engines that nobody holds any more
    with Engine(config) as engine:
        engine.register(torch.zeros(4))  # by the thread, which has run since
        (thread,) = proxies() - before
        assert os.sched_getaffinity(thread) == {core}
    with Engine(EngineConfig(transport="loopback")):
        (thread,) = proxies() - before
        assert os.sched_getaffinity(thread) == os.sched_getaffinity(0)
    for cpu in ("-1", "65536", "first"):
        with pytest.raises(moe_p2p.InvalidArgumentError, match=f"proxy_cpu={cpu} is refused"):
            EngineConfig(transport_settings=f"proxy_cpu={cpu}")


def test_bad_arguments_name_themselves() -> None:
    with pytest.raises(moe_p2p.UnavailableError, match=r"quantum.*loopback"):
        Engine(EngineConfig(transport="quantum"))
    with pytest.raises(moe_p2p.InvalidArgumentError, match="nics_per_rank is 0"):
        EngineConfig(nics_per_rank=0)
    with pytest.raises(moe_p2p.InvalidArgumentError, match="wait is 'doze', must be one of"):
        EngineConfig(wait="doze")  # type: ignore[arg-type]
    with pytest.raises(moe_p2p.InvalidArgumentError, match="speed"):
        Engine(EngineConfig(transport="loopback", transport_settings="speed=1"))
    with Engine(EngineConfig(transport="loopback")) as engine:
        with pytest.raises(
            moe_p2p.InvalidArgumentError, match=r"memory.*strides \[1, 4\].*contiguous"
        ):
            engine.register(torch.zeros(4, 4).t())
        with pytest.raises(moe_p2p.InvalidArgumentError, match=r"float32 \[0\]"):
            engine.register(torch.zeros(0))
        with pytest.raises(moe_p2p.InvalidArgumentError, match="truncated"):
            engine.connect(b"\x01\x02")
        with pytest.raises(moe_p2p.InvalidArgumentError):
            engine.resolve(b"")


def test_unregistered_memory_refuses_writes() -> None:
    sender, receiver = pair()
    with sender, receiver:
        source, memory, region = ends(sender, receiver)
        inbox = memory.tensor
        memory.unregister()
        with pytest.raises(moe_p2p.RemoteAccessError, match=r"sender: write of 64 bytes failed"):
            sender.write(source, region).wait()
        assert not inbox.any()
        with pytest.raises(moe_p2p.InvalidArgumentError, match=r"memory .* is not known here"):
            memory.unregister()


def test_disconnected_peer_takes_its_regions_along() -> None:
    sender, receiver = pair()
    with sender, receiver:
        source = sender.register(torch.zeros(8, dtype=torch.uint8))
        peer = sender.connect(receiver.address)
        inbox = receiver.register(torch.zeros(8, dtype=torch.uint8))
        region = sender.resolve(inbox.descriptor, peer)
        sender.write(source, region).wait()
        peer.disconnect()
        with pytest.raises(moe_p2p.InvalidArgumentError, match=r"region .* is not known here"):
            sender.write(source, region)


def test_close_wakes_waiters_and_ends_calls() -> None:
    engine = Engine(loopback(1), label="closing")
    raised: list[BaseException] = []
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        try:
            engine.wait_imm(0, 1, timeout_s=30)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    engine.close()
    thread.join(10)
    assert not thread.is_alive()
    assert isinstance(raised[0], moe_p2p.ClosedError)
    with pytest.raises(moe_p2p.ClosedError, match="is closed"):
        engine.imm_value(0)
    with pytest.raises(moe_p2p.ClosedError, match="is closed"), engine:
        pass
    engine.close()
    assert engine.closed
    assert "closed" in repr(engine)


def test_registration_keeps_the_tensor_and_lets_go() -> None:
    with Engine(EngineConfig(transport="loopback")) as engine:
        tensor = torch.zeros(16)
        seen = weakref.ref(tensor.untyped_storage())
        memory = engine.register(tensor)
        memory.unregister()
        del tensor, memory
        gc.collect()
        assert seen() is None


def test_forgotten_requests_do_no_harm() -> None:
    sender, receiver = pair()
    with sender, receiver:
        source, _, region = ends(sender, receiver)
        for _ in range(100):
            sender.write(source, region, imm=1)
        receiver.wait_imm(1, 200)


# --- processes ---


def exchange(rank: Rank, key: str, mine: bytes, other: int) -> bytes:
    rank.store.set(f"{key}{rank.rank}", mine)  # type: ignore[arg-type]
    return rank.store.get(f"{key}{other}")


def run_ping_pong(rank: Rank) -> float:
    with Engine(loopback(), label=f"rank {rank.rank}") as engine:
        inbox, outbox = torch.zeros(256), torch.zeros(256)
        other = 1 - rank.rank
        descriptor = exchange(rank, "descriptor", engine.register(inbox).descriptor, other)
        region = engine.resolve(descriptor)
        source = engine.register(outbox)
        for turn in range(50):
            if turn % 2 == rank.rank:
                outbox.copy_(inbox + 1)
                engine.write(source, region, imm=0).wait()
            else:
                engine.wait_imm(0, 2 * (turn // 2 + 1))
        last = float(inbox.max())
        exchange(rank, "done", b"", other)
        return last


def test_processes_write_into_each_other() -> None:
    assert sorted(run_processes(2, run_ping_pong)) == [49.0, 50.0]


def run_lose_peer(rank: Rank) -> str:
    engine = Engine(loopback(), label=f"rank {rank.rank}")
    inbox = engine.register(torch.zeros(1024, dtype=torch.uint8))
    region = engine.resolve(exchange(rank, "descriptor", inbox.descriptor, 1 - rank.rank))
    if rank.rank == 1:
        engine.wait_imm(0, 2)
        os.kill(os.getpid(), signal.SIGKILL)
    source = engine.register(torch.zeros(1024, dtype=torch.uint8))
    ends = time.monotonic() + 30
    try:
        while time.monotonic() < ends:
            engine.write(source, region, imm=0).wait()
    except moe_p2p.MoeP2pError as error:
        engine.close()
        return type(error).__name__
    return "never noticed"


def test_killed_peer_fails_writes_in_time() -> None:
    results = run_processes(2, run_lose_peer, return_errors=True)
    assert results[0] in {"PeerDeadError", "TransportError", "RemoteAccessError"}


def test_values_of_immediates_are_given_back() -> None:
    """One value for each transfer: more of them than an engine counts at a time."""
    with Engine(loopback(1, 20)) as engine:
        peer = engine.connect(engine.address)
        for value in range(5000):
            engine.send_imm(peer, value)
            assert engine.wait_imm(value, 1) == 1
            assert engine.free_imm(value) == 1
        assert engine.imm_value(4999) == 0
        assert engine.free_imm(4999) == 0
        assert engine.discarded_imms == 0


def test_immediates_of_too_many_values_are_discarded_and_counted() -> None:
    with Engine(loopback(1, 20)) as engine:
        peer = engine.connect(engine.address)
        for value in range(4097):
            engine.send_imm(peer, value).wait()
        until = time.monotonic() + 20
        while engine.discarded_imms == 0 and time.monotonic() < until:
            time.sleep(0.01)
        assert engine.discarded_imms == 1
        lost = next(value for value in range(4097) if engine.imm_value(value) == 0)
        with pytest.raises(moe_p2p.ResourceExhaustedError, match=r"4096.*1 immediates.*free_imm"):
            engine.wait_imm(lost, 1)
        engine.free_imm(0 if lost else 1)
        engine.send_imm(peer, lost).wait()
        assert engine.wait_imm(lost, 1) == 1
