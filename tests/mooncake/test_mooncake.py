"""moe_p2p.mooncake: transfers by address between processes, and what becomes of wrong or lost ones.

tests/engines/test_mooncake.py compares it with the real wheel.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import multiprocessing
import random
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_p2p import InvalidArgumentError, PeerDeadError, TimeoutError, errors, mooncake
from moe_p2p.engine.transfers import Memory
from moe_p2p.fleet.member import new_id
from moe_p2p.mooncake import TransferEngine, handshake, peers
from moe_p2p.mooncake.memory import Table, tensor_at
from moe_p2p.mooncake.peers import Remote
from tests.support import mooncake_calls, warm

HOST, SIZE = "127.0.0.1", 1 << 16


class Buffer:
    """Host memory by address."""

    def __init__(self, nbytes: int = SIZE, fill: int = 0) -> None:
        self.bytes = (ctypes.c_ubyte * nbytes)(*([fill] * nbytes))
        self.address, self.nbytes = ctypes.addressof(self.bytes), nbytes


def opened() -> TransferEngine:
    engine = TransferEngine()
    assert engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") == 0
    return engine


def name_of(engine: TransferEngine) -> str:
    return f"{HOST}:{engine.get_rpc_port()}"


@pytest.fixture(name="pair")
def two_engines() -> Iterator[tuple[TransferEngine, TransferEngine, Buffer, Buffer]]:
    a, b = opened(), opened()
    source, target = Buffer(fill=7), Buffer()
    assert a.register_memory(source.address, SIZE) == b.register_memory(target.address, SIZE) == 0
    yield a, b, source, target
    a.unregister_memory(source.address)
    b.unregister_memory(target.address)


def test_calls_return_what_the_real_one_returned() -> None:
    """Recorded from the wheel; tests/engines runs both."""
    got = mooncake_calls.calls(mooncake.engine)
    kib = mooncake_calls.KIB
    source = [0] * 100 + [i % 251 for i in range(100, kib)]
    at_first = [i % 251 for i in range(kib)]
    assert got.pop("write") == [0, True]
    assert got.pop("read") == [0, [*at_first[50:100], 0]]
    written = at_first[50:100] + source[50:]
    wanted = at_first[:140]
    wanted[7:71], wanted[71:135] = written[:64], written[64:128]
    wanted[0] = written[300]
    assert got.pop("batch bytes") == bytes(wanted).hex()
    assert got == {
        "initialize": [0, 0],
        "initialize again": 0,
        "register": [0, 0],
        "register again": -7,
        "register within": -7,
        "register nothing": -1,
        "batch": 0,
        "batch read": 0,
        "batch of none": 0,
        "batch uneven": -1,
        "no bytes": 0,
        "beyond the peer's": -1,
        "unknown to the peer": -1,
        "registered later": [0, 0],
        "registered anew": [0, 0, 0, 0],
        "nobody there": -1,
        "no peer's name": -1,
        "status": [True, 0],
        "status of none": 0,
        "asynchronous to nobody": 0,
        "submit": [True, 1],
        "first": [True, True],
        "first of nobody": 0,
        "probe": [0, -102],
        "notify": 0,
        "notifies": [[("name", "text")], []],
        "managed": [True, 0, "hello", 0],
        "unregister": [0, -3],
        "batch that fails": [-7, -3],
        "batch of memory": [0, -7, 0, -3, 0],
    }


def test_batches_of_pieces_of_many_sizes(pair: Any) -> None:
    a, b, source, target = pair
    drawn = random.Random(1)
    for i in range(SIZE):
        source.bytes[i] = drawn.randrange(256)
    wanted = bytearray(SIZE)
    places = drawn.sample(range(SIZE // 64), 300)  # each piece has 64 bytes to itself there
    pieces = [(drawn.randrange(SIZE - 64), 64 * p, drawn.choice((1, 8, 33, 64))) for p in places]
    for here, there, n in pieces:
        wanted[there : there + n] = bytes(source.bytes)[here : here + n]
    arguments = (
        [source.address + here for here, _, _ in pieces],
        [target.address + there for _, there, _ in pieces],
        [n for _, _, n in pieces],
    )
    assert a.batch_transfer_sync_write(name_of(b), *arguments) == 0
    assert bytes(target.bytes) == wanted
    ctypes.memset(source.address, 0, SIZE)
    assert a.batch_transfer_sync_read(name_of(b), *arguments) == 0
    back = bytearray(SIZE)
    for here, there, n in pieces:  # sources overlap, and they hold the same bytes
        back[here : here + n] = wanted[there : there + n]
    assert bytes(source.bytes) == back


def test_each_piece_is_looked_for_once_at_either_end(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches have thousands, and looking is most of what they cost the caller."""
    a, b, source, target = pair
    looked, find = list[int](), Table.find

    def finds(table: Table, address: int, nbytes: int) -> Any:
        looked.append(address)
        return find(table, address, nbytes)

    monkeypatch.setattr(Table, "find", finds)
    places = range(0, SIZE, 128)
    here, there = ([each.address + at for at in places] for each in (source, target))
    for _ in range(2):
        looked.clear()
        assert a.batch_transfer_sync_write(name_of(b), here, there, [64] * len(places)) == 0
        assert sorted(looked) == sorted(here + there)


def test_errors_name_the_call_and_its_arguments(
    pair: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """They named an inner function, its argument `page_bytes`, or said "zip() argument 2"."""
    a, b, source, target = pair
    here, there, name = source.address, target.address, name_of(b)

    def said() -> str:
        return capfd.readouterr().err.partition("mooncake: ")[2]

    uneven = "buffers, peer_buffer_addresses and lengths have 2, 1 and 2 entries, must have equally"
    for code, way in ((-1, "sync_write"), (-1, "sync_read"), (0, "async_write"), (0, "async_read")):
        call = f"batch_transfer_{way}"
        assert getattr(a, call)(name, [here, here], [there], [8, 8]) == code
        assert said().startswith(f"{call} returns {code}: moe_p2p [invalid argument] {uneven}")
    for call in ("transfer_sync_write", "transfer_sync_read"):
        assert getattr(a, call)(name, here, there, -1) == -1
        assert said().startswith(f"{call} returns -1: moe_p2p [invalid argument] lengths[0] is -1")
    assert a.transfer_submit_write(name, here, there, -1) == 0
    assert said().startswith("transfer_submit_write returns 0: ")
    assert a.get_batch_transfer_status([999]) == -1
    assert said().startswith("get_batch_transfer_status returns -1: moe_p2p [invalid argument] 999")
    assert a.transfer_check_status(999) == -1
    assert said().startswith("transfer_check_status returns -1: ")


def test_memory_that_is_not_registered_is_never_touched(
    pair: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    a, b, source, target = pair
    for buffer in (source.address + SIZE - 8, source.address - 4, 8):
        assert a.transfer_sync_write(name_of(b), buffer, target.address, 16) == -1
    assert a.write_bytes_to_buffer(source.address + SIZE - 2, "abc", 3) == -1
    assert a.write_bytes_to_buffer(source.address, "abc", 4) == -1
    assert "16 bytes at" in capfd.readouterr().err
    assert bytes(target.bytes) == bytes(SIZE)


def test_before_initialize_calls_fail_by_name(capfd: pytest.CaptureFixture[str]) -> None:
    engine = TransferEngine()
    assert engine.register_memory(1 << 20, 10) == -1
    assert engine.transfer_sync_write("a:1", 1, 2, 3) == -1
    assert capfd.readouterr().err.count("call initialize() first") == 2
    assert engine.initialize(HOST, "etcd://x", "tcp", "") == -1
    assert engine.initialize(HOST, "P2PHANDSHAKE", "carrier pigeon", "") == -1
    for _ in range(2):  # the first leaves nothing that the second would take for an engine
        assert engine.initialize("no-such-host.invalid", "P2PHANDSHAKE", "tcp", "") == -1
    assert engine.initialize(HOST, "P2PHANDSHAKE", "rdma", "no_such_nic") == -1
    told = capfd.readouterr().err
    assert "'P2PHANDSHAKE'" in told
    assert "'carrier pigeon', must be one of 'rdma', 'tcp', 'efa', ''" in told
    assert told.count("local_hostname is 'no-such-host.invalid', which is no name of a host") == 2
    assert engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.get_rpc_port() > 0


# --- peers that leave, strangers ---


def hold(connection: Connection) -> None:
    """A peer in a process of its own, until it is killed."""
    engine, memory = opened(), Buffer()
    engine.register_memory(memory.address, SIZE)
    connection.send((engine.get_rpc_port(), memory.address))
    while connection.recv() == "sum":
        connection.send(sum(memory.bytes))


def test_what_is_no_memory_is_refused_and_not_touched(pair: Any) -> None:
    """An address or a length below 0 would be a very large one in C."""
    engine = pair[0]
    for address, nbytes in ((-1, 16), (0, 16), (1, -16), (1 << 64, 16)):
        assert engine.register_memory(address, nbytes) == -1
    buffer = Buffer()
    assert engine.register_memory(buffer.address, buffer.nbytes) == 0
    assert engine.write_bytes_to_buffer(buffer.address, b"abc", -1) == -1
    with pytest.raises(InvalidArgumentError, match="-1 bytes at"):
        engine.read_bytes_from_buffer(buffer.address, -1)
    assert engine.allocate_managed_buffer(1 << 50) == 0
    assert engine.unregister_memory(buffer.address) == 0


@pytest.fixture(name="peer")
def a_peer() -> Iterator[tuple[Any, Connection, str, int]]:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(theirs,), daemon=True)
    process.start()
    assert ours.poll(60)
    port, address = ours.recv()
    yield process, ours, f"{HOST}:{port}", address
    process.kill()
    process.join()


def test_a_killed_peer_is_an_error_and_its_successor_is_found(
    peer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", "5")
    process, connection, name, address = peer
    engine, source = opened(), Buffer(fill=1)
    engine.register_memory(source.address, SIZE)
    assert engine.transfer_sync_write(name, source.address, address, SIZE) == 0
    connection.send("sum")
    assert connection.poll(30)
    assert connection.recv() == SIZE
    process.kill()
    process.join()
    assert engine.transfer_sync_write(name, source.address, address, SIZE) < 0
    assert engine.send_probe(name) < 0
    # A worker that was started again and has the same port.
    successor, target = opened(), Buffer()
    successor.register_memory(target.address, SIZE)
    monkeypatch.setattr(handshake, "split", lambda _: (HOST, successor.get_rpc_port()))
    assert engine.transfer_sync_write(name, source.address, target.address, 9) == 0
    assert sum(target.bytes) == 9


def test_a_successor_at_the_same_address_gets_no_transfer_that_was_begun_before_it(
    pair: Any,
) -> None:
    """Its port, its NICs' addresses and its memory's are those of the process before: what was
    meant for that one is not repeated into this one's memory."""
    a, b, source, target = pair
    assert a.transfer_sync_write(name_of(b), source.address, target.address, 9) == 0
    ctypes.memset(target.address, 0, SIZE)
    assert b.unregister_memory(target.address) == 0
    b._id = new_id(name_of(b))  # as a process that was started again
    assert b.register_memory(target.address, SIZE) == 0
    assert a.transfer_sync_write(name_of(b), source.address, target.address, 9) < 0
    assert not any(target.bytes)
    assert a.transfer_sync_write(name_of(b), source.address, target.address, 9) == 0
    assert sum(target.bytes) == 9 * 7


def test_memory_that_was_registered_anew_is_found(pair: Any) -> None:
    a, b, source, target = pair
    assert a.transfer_sync_write(name_of(b), source.address, target.address, 5) == 0
    assert b.unregister_memory(target.address) == 0
    assert a.transfer_sync_write(name_of(b), source.address, target.address, 6) == -1
    assert b.register_memory(target.address, SIZE) == 0
    assert a.transfer_sync_write(name_of(b), source.address, target.address, 7) == 0
    assert sum(target.bytes) == 49


def check_status(engine: TransferEngine, number: int) -> int:
    deadline = time.monotonic() + 30
    while (state := engine.transfer_check_status(number)) == 0 and time.monotonic() < deadline:
        time.sleep(0.001)
    return 0 if state == 1 else -1


@pytest.mark.parametrize("way", ["write", "read", "batch", "asynchronous", "submit"])
def test_memory_registered_anew_between_two_transfers_is_found_at_once(pair: Any, way: str) -> None:
    """As checkpoint-engine at each update, and vLLM around sleep."""
    a, b, source, target = pair
    name, here, there = name_of(b), source.address, target.address

    def move() -> int:
        if way == "write":
            return a.transfer_sync_write(name, here, there, 8)
        if way == "read":
            return a.transfer_sync_read(name, here, there, 8)
        if way == "batch":
            return a.batch_transfer_sync_write(name, [here, here], [there, there + 9], [8, 7])
        if way == "submit":
            return check_status(a, a.transfer_submit_write(name, here, there, 8))
        number = a.batch_transfer_async_write(name, [here], [there], [8])
        return a.get_batch_transfer_status([number])

    for _ in range(3):
        assert move() == 0
        assert b.unregister_memory(there) == 0
        assert b.register_memory(there, SIZE) == 0
    assert move() == 0
    assert b.unregister_memory(there) == 0
    assert b.register_memory(there + 4, 100) == 0  # another one, which holds only a part
    assert move() == -1
    assert b.unregister_memory(there + 4) == 0


def test_a_transfer_that_fails_leaves_those_of_other_threads_alone(pair: Any) -> None:
    a, b, source, target = pair
    removed = Buffer()
    name, stop, codes = name_of(b), threading.Event(), list[int]()

    def work(at: int) -> None:
        while not stop.is_set():
            codes.append(a.transfer_sync_write(name, source.address, target.address + at, 4096))

    threads = [threading.Thread(target=work, args=(4096 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    found = []
    for _ in range(10):
        b.register_memory(removed.address, SIZE)
        found.append(a.transfer_sync_write(name, source.address, removed.address, 64))
        b.unregister_memory(removed.address)
        found.append(a.transfer_sync_write(name, source.address, removed.address, 64))
    stop.set()
    for thread in threads:
        thread.join(60)
    assert found == [0, -1] * 10
    assert set(codes) == {0}


def test_a_peer_is_answered_while_memory_is_unregistered(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, source, target = pair
    leaving, unregister = Buffer(), Memory.unregister
    codes: list[int] = []

    def slow(memory: Memory) -> None:
        unregister(memory)  # it has no descriptor any more
        codes.append(a.transfer_sync_write(name_of(b), source.address, target.address, 8))

    assert b.register_memory(leaving.address, SIZE) == 0
    monkeypatch.setattr(Memory, "unregister", slow)
    assert b.unregister_memory(leaving.address) == 0
    assert codes == [0]


def test_nothing_is_under_way_to_a_peer_that_another_thread_disconnects() -> None:
    """Else its transfer would return while the NIC still reads the caller's memory."""
    begun, go_on, over, seen = threading.Event(), threading.Event(), list[bool](), list[bool]()

    def disconnect() -> None:
        begun.set()
        assert go_on.wait(60)
        over.append(True)

    peer = SimpleNamespace(disconnect=disconnect)
    engine: Any = SimpleNamespace(connect=lambda address: peer)
    remote = Remote(engine, {"id": "peer#1", "address": "00", "memory": [], "first": 0})

    def second() -> None:
        remote.disconnect()
        seen.extend(over)

    threads = [threading.Thread(target=each) for each in (remote.disconnect, second)]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    threads[1].join(0.2)  # it would end here
    go_on.set()
    for each in threads:
        each.join(60)
    assert seen == [True]


def test_peers_that_began_anew_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time at another port: nobody asks for the one before any more."""
    monkeypatch.setattr(peers, "_MOST_KNOWN", 3)
    ours, mine = opened(), Buffer()
    assert ours.register_memory(mine.address, SIZE) == 0
    for _ in range(20):
        theirs, buffer = opened(), Buffer()
        assert theirs.register_memory(buffer.address, SIZE) == 0
        for _ in range(2):
            assert (
                ours.transfer_sync_write(name_of(theirs), mine.address, buffer.address, SIZE) == 0
            )
    assert len(ours._peers._remotes) == 3


def test_rounds_of_registration_keep_nothing(pair: Any) -> None:
    a, b, source, _ = pair
    buffers = [Buffer(64) for _ in range(150)]
    for buffer in buffers:
        assert b.register_memory(buffer.address, 64) == 0
        assert a.transfer_sync_read(name_of(b), source.address, buffer.address, 64) == 0
        assert b.unregister_memory(buffer.address) == 0
    assert a._peers is not None
    (remote,) = a._peers._remotes.values()
    assert len(remote._regions) < 70
    assert remote.is_idle


class StuckRequest:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.cancelled = False

    def done(self) -> bool:
        return False

    def cancel(self) -> None:
        self.cancelled = True

    def wait(self, timeout_s: float | None) -> None:
        raise TimeoutError("waited in vain")


def test_nothing_is_under_way_after_a_transfer_that_ran_out_of_time(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not done when it was cancelled ends with its connection."""
    a, b, source, target = pair
    assert a.transfer_sync_write(name_of(b), source.address, target.address, 8) == 0
    (remote,) = a._peers._remotes.values()
    stuck = StuckRequest()
    with monkeypatch.context() as patch:
        patch.setattr(a._engine, "write_pages", lambda *_, **__: stuck)
        assert a.transfer_sync_write(name_of(b), source.address, target.address, 8) == -1
    assert stuck.cancelled
    assert not remote._connected
    assert a.transfer_sync_write(name_of(b), source.address, target.address, 8) == 0


@pytest.mark.parametrize(
    "sent",
    [b"", b"\n", b"GET / HTTP/1.1\r\n\r\n", b'{"version": 0}\n', b"[1]\n", b'{"notify": 3}\n'],
)
def test_strangers_get_nothing_and_harm_nothing(pair: Any, sent: bytes) -> None:
    a, b, source, target = pair
    with socket.create_connection((HOST, b.get_rpc_port()), timeout=10) as stranger:
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(1000) == b""
    assert a.transfer_sync_write(name_of(b), source.address, target.address, 5) == 0
    assert b.get_notifies() == []


def test_an_engine_of_something_else_is_refused_by_name(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server((HOST, 0)) as server:
        greet = threading.Thread(target=lambda: server.accept()[0].sendall(b"SSH-2.0\r\n"))
        greet.start()
        assert opened().send_probe(f"{HOST}:{server.getsockname()[1]}") == -102
    greet.join()
    assert "no transfer engine of this version" in capfd.readouterr().err


def test_many_threads_at_once(pair: Any) -> None:
    a, b, source, target = pair
    failed: list[int] = []

    def work(i: int) -> None:
        for _ in range(50):
            number = a.batch_transfer_async_write(
                name_of(b), [source.address + 64 * i], [target.address + 64 * i], [64]
            )
            failed.append(a.get_batch_transfer_status([number]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == [0] * 400
    assert sum(target.bytes) == 7 * 64 * 8


def test_memory_that_could_not_be_taken_back_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As while reads into it are under way over libfabric: a peer may write to it still."""
    engine = opened()
    memory = torch.zeros(SIZE, dtype=torch.uint8)
    assert engine.register_memory(memory.data_ptr(), SIZE) == 0
    unregister = Memory.unregister

    def not_yet(self: Memory) -> None:
        assert engine.unregister_memory(memory.data_ptr()) == -3, "this thread's"
        raise errors.make(errors.TimeoutError, "1 reads are not answered")

    monkeypatch.setattr(Memory, "unregister", not_yet)
    assert engine.unregister_memory(memory.data_ptr()) == -1
    assert engine.register_memory(memory.data_ptr(), SIZE) == -7
    monkeypatch.setattr(Memory, "unregister", unregister)
    assert engine.unregister_memory(memory.data_ptr()) == 0
    assert engine.unregister_memory(memory.data_ptr()) == -3


def test_an_engine_that_is_collected_is_closed() -> None:
    engine = opened()
    name, inside = name_of(engine), engine._engine
    assert inside is not None
    del engine
    gc.collect()
    assert inside.closed
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            handshake.ask(name, {})
        except PeerDeadError:
            return
    pytest.fail("it answers still")


# --- imports ---


def test_imports_give_this_package_until_uninstall() -> None:
    mooncake.install()
    try:
        assert importlib.import_module("mooncake.engine").TransferEngine is TransferEngine
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("mooncake.store")
    finally:
        mooncake.uninstall()
    assert importlib.util.find_spec("mooncake") is None


@pytest.mark.parametrize("way", ["environment", "path", "launcher"])
def test_a_program_finds_it(way: str, tmp_path: Any) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import mooncake.engine as e\nfrom mooncake.engine import TransferEngine\n"
        "print(e.__name__, TransferEngine().initialize('127.0.0.1', 'P2PHANDSHAKE', 'tcp', ''))"
    )
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60}
    with pytest.MonkeyPatch.context() as patch:
        if way == "environment":
            patch.setenv("MOE_P2P_AS_MOONCAKE", "1")
            text = f"import moe_p2p\n{program.read_text()}"
            ran = warm.without_moe_p2p().run("-c", text, **options)
        elif way == "path":
            package = Path(mooncake.__file__).parents[2]  # not installed, and not this folder's
            paths = f"{mooncake.installation.PATH}:{package}"
            patch.setenv("PYTHONPATH", paths, prepend=":")
            ran = warm.without_moe_p2p().run(str(program), **options)
        else:
            ran = warm.run("-m", "moe_p2p.mooncake", str(program), **options)
    assert ran.stdout.split() == ["moe_p2p.mooncake.engine", "0"], ran.stderr


@pytest.mark.gpu
@pytest.mark.multi_gpu
@pytest.mark.parametrize("gpu", [0, 1])
@pytest.mark.parametrize("default", [None, "cpu", "cuda:0"])
def test_memory_of_any_gpu_is_found_where_it_is(gpu: int, default: str | None) -> None:
    given = torch.full((SIZE,), gpu + 1, dtype=torch.uint8, device=f"cuda:{gpu}")
    with contextlib.nullcontext() if default is None else torch.device(default):
        found = tensor_at(given.data_ptr(), SIZE)
    assert (found.device, found.data_ptr()) == (given.device, given.data_ptr())
    assert torch.equal(found, given)


@pytest.mark.gpu
def test_memory_of_a_gpu_by_its_address() -> None:
    a, b = opened(), opened()
    source = torch.full((SIZE,), 7, dtype=torch.uint8, device="cuda")
    target = torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    assert a.register_memory(source.data_ptr(), SIZE) == 0
    assert b.register_memory(target.data_ptr(), SIZE) == 0
    pieces = range(0, SIZE, 8192)
    here, there = ([t.data_ptr() + i for i in pieces] for t in (source, target))
    assert a.batch_transfer_sync_write(name_of(b), here, there, [4096] * len(pieces)) == 0
    assert int(target.sum()) == 7 * SIZE // 2
    assert json.loads(a.get_local_topology())["cpu:0"][1] == []
