"""What strangers may cost at the ports that KV workers and Mooncake's calls open."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from torch.distributed import HashStore

from moe_p2p import Engine, kv
from moe_p2p.fleet import listener
from moe_p2p.fleet.listener import MOST_STRANGERS
from moe_p2p.integrations.weights.verl import Checkpoint
from moe_p2p.kv import channel
from moe_p2p.mooncake import handshake
from tests.support.kv_fakes import cache_of
from tests.support.kv_workers import QUICK

LAYOUT = kv.KVLayout((kv.KVGroup("kv", (0,), heads=1, k_bytes=16, v_bytes=16, page_size=4),))
Port = tuple[int, Callable[[], None]]  # and what a real peer does there


@contextmanager
def kv_worker(limit_s: float) -> Iterator[Port]:
    store = HashStore()
    timeouts = kv.KVTimeouts(connect_s=limit_s)
    with Engine() as one, Engine() as other:
        receiver = kv.KVReceiver(one, cache_of(LAYOUT, 0, 4), instance="d", timeouts=QUICK)
        sender = kv.KVSender(other, cache_of(LAYOUT, 0, 4), instance="p", timeouts=timeouts)
        with kv.LeaseKeeper(sender, kv.TorchLeases(store)) as opened:

            def meet() -> None:
                with kv.LeaseKeeper(receiver, kv.TorchLeases(store)):
                    receiver.wait_for("p", 60)

            yield opened.record.port, meet


@contextmanager
def mooncake_engine(limit_s: float) -> Iterator[Port]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handshake, "_LIMIT_S", limit_s)
        service = handshake.Service("127.0.0.1", lambda request: {})
        patch.setattr(handshake, "_LIMIT_S", 60)
        try:
            yield service.port, lambda: ask(service.port)
        finally:
            service.close()


def ask(port: int) -> None:
    assert handshake.ask(f"127.0.0.1:{port}", {}) == {"version": handshake.VERSION}


PORTS = pytest.mark.parametrize("opens", [kv_worker, mooncake_engine])


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 20)


@PORTS
def test_silent_connections_take_a_bounded_number_of_threads(
    opens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_GRACE_S", 0.0)
    with opens(3600) as (port, meet):
        before, most = threading.active_count(), 0
        silent = []
        for _ in range(3 * MOST_STRANGERS):
            silent.append(connect(port))
            most = max(most, threading.active_count() - before)
        meet()  # a real peer is served all the same
        assert most <= MOST_STRANGERS + 16  # some have been closed and not ended yet
        for each in silent:
            each.close()


@PORTS
def test_a_byte_now_and_then_does_not_hold_a_connection(opens: Any) -> None:
    with opens(0.5) as (port, _), connect(port) as slow:
        slow.settimeout(0.1)
        for _ in range(60):  # fewer than a proof has
            try:
                slow.sendall(b"x")
                if slow.recv(1 << 10) == b"":
                    return
            except TimeoutError:  # nothing to be read
                continue
            except OSError:
                return
        pytest.fail("it is held")


def test_a_request_without_an_end_is_dropped() -> None:
    with mooncake_engine(3600) as (port, _), connect(port) as endless:
        with suppress(OSError):
            for _ in range(64):
                endless.sendall(b"x" * (1 << 16))
        try:
            assert endless.recv(1) == b""
        except ConnectionError:
            return


def test_a_listener_without_file_descriptors_goes_on() -> None:
    """As where a process has as many open as it may: `accept` fails, and later it does not."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        class Full:
            fails = 2

            def __getattr__(self, name: str) -> Any:
                return getattr(listening, name)

            def accept(self) -> Any:
                Full.fails -= 1
                if Full.fails >= 0:
                    raise OSError(24, "Too many open files")
                return listening.accept()

        def answer(connection: socket.socket, deadline: Any, proved: Any) -> None:
            with connection:
                connection.sendall(b"hello")

        full: Any = Full()
        made = listener.Listener("test", full, answer, 20)
        with connect(port) as peer:
            assert peer.recv(5) == b"hello"
        made.close()


def test_a_listener_without_threads_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a process has as many as it may: it serves nobody, and later it does."""

    def answer(connection: socket.socket, deadline: Any, proved: Any) -> None:
        with connection:
            connection.sendall(b"hello")

    start, tried = threading.Thread.start, list[str]()

    def full(thread: threading.Thread) -> None:
        if thread.name == "test meets":
            tried.append(thread.name)
            if len(tried) <= 2:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", full)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        made = listener.Listener("test", listening, answer, 20)
        for said in (b"", b"", b"hello"):
            with connect(made.port) as peer:
                assert peer.recv(5) == said
            assert said or not made._strangers
        made.close()


def test_a_message_of_a_peer_is_whole_in_time() -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(channel.Message("open", {}, ()).to_bytes()[:-1])
        with pytest.raises(OSError, match=r"nothing more was said within 0.2 s"):
            channel.receive(here, limit_s=0.2)


@pytest.mark.parametrize(
    ("host", "secret", "warns"),
    [
        ("127.0.0.1", "", False),
        ("::1", "", False),
        ("[::1]", "", False),
        ("[2001:db8::7]", "", True),
        ("192.0.2.7", "", True),
        ("", "", True),
        ("192.0.2.7", "long", False),
    ],
)
def test_hosts_that_others_reach_are_warned_of(
    host: str,
    secret: str,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MOE_P2P_SECRET", secret)
    listener.warn_of_strangers("p/0", host, "whoever reaches it may write")
    assert ("set MOE_P2P_SECRET" in capfd.readouterr().err) == warns


def test_a_worker_on_all_interfaces_says_who_is_trusted(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MOE_P2P_SECRET", raising=False)
    with Engine() as engine:
        worker = kv.KVReceiver(engine, cache_of(LAYOUT, 0, 4), instance="d", timeouts=QUICK)
        kv.LeaseKeeper(worker, kv.TorchLeases(HashStore()), host="0.0.0.0").close()
    assert "d/0: whoever reaches the store of leases may write" in capfd.readouterr().err


def test_verls_store_says_who_is_trusted(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Once: verl makes a group for each update."""
    monkeypatch.delenv("MOE_P2P_SECRET", raising=False)
    made = Checkpoint(64, device="cpu")
    for _ in range(2):
        made.prepare()
    told = capfd.readouterr().err
    assert told.count("whoever reaches it may write to weights; keep its port within") == 1
