"""moe_p2p.moe.gpu.fd_exchange: ranks of a node pass descriptors, or name who is missing."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import struct
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from moe_p2p import errors
from moe_p2p.fleet.bootstrap import Bootstrap
from moe_p2p.moe.gpu import fd_exchange
from tests.faults.causes import is_over
from tests.support import ranks
from tests.support.cases import memfd


def _exchange_texts(rank: ranks.Rank, key: str, timeout_s: float, num_local: int) -> list[str]:
    """Rank r gives r files; what all ranks gave, as `rank.file` by the process that reads."""
    fds = [memfd(f"{rank.rank}.{number}") for number in range(rank.rank)]
    deadline = time.monotonic() + timeout_s
    try:
        received = fd_exchange.exchange_fds(
            rank.rank, num_local, key=key, fds=fds, deadline=deadline
        )
    finally:
        for fd in fds:
            os.close(fd)
    texts = []
    for group in received:
        for fd in group:
            assert not os.get_inheritable(fd)
            texts.append(os.pread(fd, 100, 0).decode())
            os.close(fd)
    return texts


@pytest.mark.parametrize("num_local", [1, 2, 5])
def test_threads_exchange_descriptors(key: str, num_local: int) -> None:
    expected = [f"{rank}.{number}" for rank in range(num_local) for number in range(rank)]
    results = ranks.run_threads(num_local, _exchange_texts, key, 20.0, num_local)
    assert results == [expected] * num_local


def test_processes_exchange_descriptors() -> None:
    expected = [f"{rank}.{number}" for rank in range(4) for number in range(rank)]
    key = f"test-{uuid.uuid4()}"
    assert ranks.run_processes(4, _exchange_texts, key, 20.0, 4) == [expected] * 4


def test_the_same_key_serves_again_after_the_exchange(key: str) -> None:
    for _ in range(20):
        ranks.run_threads(3, _exchange_texts, key, 20.0, 3)


@pytest.mark.parametrize(("num_local", "missing"), [(4, "rank 3"), (6, "ranks 3, 4, 5")])
def test_missing_ranks_are_named(key: str, num_local: int, missing: str) -> None:
    results = ranks.run_threads(3, _exchange_texts, key, 0.3, num_local, return_errors=True)
    for rank, error in enumerate(results):
        assert isinstance(error, errors.TimeoutError)
        assert f"local rank {rank} of {num_local}" in str(error)
        assert f"local {missing} did not come" in str(error)


def test_a_key_in_use_is_refused(key: str) -> None:
    deadline = time.monotonic() + 20
    meeting = fd_exchange._Exchange(0, 2, key, [], deadline, {})
    with meeting, pytest.raises(errors.InvalidArgumentError, match="in use on this host"):
        fd_exchange.exchange_fds(0, 2, key=key, fds=[], deadline=deadline)


class _Peer:
    """Local rank 1 of 2, played by hand against an exchange of rank 0 on another thread."""

    def __init__(self, key: str) -> None:
        self.meeting = fd_exchange._Exchange(1, 2, key, [], time.monotonic() + 20, {1: []})
        self.outcome: list[list[int]] | Exception | None = None
        self.of_ranks = Bootstrap(dist.HashStore(), rank=0, world_size=2, timeout_s=20)
        self._thread = threading.Thread(target=self._run, args=(key,))
        self._thread.start()

    def _run(self, key: str) -> None:
        try:
            deadline = time.monotonic() + 20
            self.outcome = fd_exchange.exchange_fds(
                0, 2, key=key, fds=[], deadline=deadline, meeting=self.of_ranks
            )
        except Exception as error:
            self.outcome = error

    def connect(self) -> socket.socket:
        """To rank 0, as soon as it listens."""
        ends = time.monotonic() + 20
        while time.monotonic() < ends:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                connection.connect(self.meeting._address(0))
            except (ConnectionRefusedError, BlockingIOError):
                connection.close()
                continue
            connection.settimeout(20)
            return connection
        raise AssertionError("rank 0 does not listen")

    def send(self, header: bytes, fds: list[int]) -> socket.socket:
        """A connection to rank 0 on which this was sent."""
        connection = self.connect()
        socket.send_fds(connection, [header], fds)
        return connection

    def accept(self) -> socket.socket:
        """What rank 0 connected to the address of rank 1."""
        self.meeting._listener.settimeout(20)
        connection, _ = self.meeting._listener.accept()
        connection.settimeout(20)
        return connection

    def header(self, count: int) -> bytes:
        return fd_exchange._HEADER.pack(self.meeting._proof(1, 0), 1, count)

    def finish(self) -> list[list[int]] | Exception | None:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.outcome


def _addresses(key: str) -> set[bytes]:
    """Of an exchange, as everybody on this host finds them."""
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    found = {line.split()[-1].rstrip("@").encode() for line in lines if name in line}
    return {b"\0" + address[1:] for address in found}


def _strangers_headers(key: str) -> list[bytes]:
    """What can be made of the address, for this version of the header and the one before."""
    known = hashlib.sha256(key.encode()).digest()
    return [
        b"who is there?",
        b"\0" * fd_exchange._HEADER.size,
        struct.pack("<16sII", known[:16], 1, 1),
        fd_exchange._HEADER.pack(known[:16].ljust(32, b"\0"), 1, 1),
        fd_exchange._HEADER.pack(known, 1, 1),
        b"x" * 4096,
    ]


def test_the_address_alone_gives_nothing(
    key: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_P2P_LOG", "warning")
    peer = _Peer(key)
    fd = memfd("junk")
    try:
        peer.connect().close()
        assert _addresses(key) == {peer.meeting._address(0)}
        headers = _strangers_headers(key)
        for header in headers:
            with peer.send(header, [fd]) as stranger:
                greeting = stranger.recv(100)
                assert len(greeting) == fd_exchange._PROOF_BYTES
                # What rank 0 proves itself with proves nobody else.
                assert greeting != peer.meeting._proof(1, 0)
                with suppress(ConnectionResetError):
                    assert stranger.recv(100) == b""  # not acknowledged
    finally:
        os.close(fd)
    with peer.meeting:
        peer.meeting.run()
    assert peer.finish() == [[], []]
    assert f"{1 + len(headers)} connections refused" in capfd.readouterr().err
    assert peer.of_ranks.num_refused == 1 + len(headers)


def test_a_process_on_the_address_of_a_rank_gets_no_descriptors(key: str) -> None:
    """A stranger that listens there first: rank 0 sends nothing to it, and names rank 1."""
    stranger = fd_exchange._Exchange(1, 2, key, [], time.monotonic() + 20, {})
    fd = memfd("secret")
    exchange = fd_exchange._Exchange(0, 2, key, [fd], time.monotonic() + 0.5, {})
    asked = threading.Event()

    def listen() -> None:
        stranger._listener.settimeout(20)
        connection, _ = stranger._listener.accept()
        with connection:
            connection.send(exchange._proof(0, None))  # the one proof that a stranger can ask for
            connection.settimeout(20)
            assert connection.recv(100) == b""
            asked.set()

    try:
        with stranger, exchange:
            thread = threading.Thread(target=listen)
            thread.start()
            with pytest.raises(errors.TimeoutError, match=r"rank 1 did not come .* refused"):
                exchange.run()
            thread.join(20)
            assert asked.is_set()
    finally:
        os.close(fd)


def test_silent_connections_are_bounded_and_dropped(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than rank 0 holds, until their time is over; the exchange goes on."""
    monkeypatch.setattr(fd_exchange, "_PATIENCE_S", 0.2)
    peer = _Peer(key)
    peer.connect().close()
    silent = []
    try:
        for _ in range(3 * (2 + fd_exchange._MORE_SESSIONS)):
            silent.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            silent[-1].connect(peer.meeting._address(0))  # waits for room
        with peer.meeting:
            peer.meeting.run()
    finally:
        for connection in silent:
            connection.close()
    assert peer.finish() == [[], []]


def test_a_silent_session_does_not_stop_the_exchange(key: str) -> None:
    peer = _Peer(key)
    with peer.connect(), peer.meeting:
        peer.meeting.run()
        assert peer.finish() == [[], []]


def test_a_peer_that_goes_away_before_it_received_is_named(key: str) -> None:
    peer = _Peer(key)
    with peer.meeting, peer.send(peer.header(0), []):
        with peer.accept() as connection:
            connection.send(peer.meeting._proof(1, None))
            assert connection.recv(100)
        outcome = peer.finish()
    assert isinstance(outcome, errors.PeerDeadError)
    assert "local rank 1 went away" in str(outcome)


def test_a_peer_that_goes_away_before_it_proved_itself_may_come_back(key: str) -> None:
    peer = _Peer(key)
    with peer.meeting:
        peer.accept().close()
        peer.meeting._listener.setblocking(False)
        peer.meeting.run()
    assert peer.finish() == [[], []]


def test_fewer_descriptors_than_announced_is_an_error(key: str) -> None:
    peer = _Peer(key)
    fd = memfd("one of two")
    with peer.meeting, peer.send(peer.header(2), [fd]):
        os.close(fd)
        outcome = peer.finish()
    assert isinstance(outcome, errors.ResourceExhaustedError)
    assert "1 of the 2 file descriptors of local rank 1" in str(outcome)


def _misses_a_killed_rank(rank: ranks.Rank, key: str) -> float:
    with Bootstrap(rank.store, rank=rank.rank, world_size=2, timeout_s=60.0) as meeting:
        meeting.exchange(b"", "the keys")
        if rank.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(errors.PeerDeadError, match="the process of rank 1 has ended"):
            fd_exchange.exchange_fds(0, 2, key=key, fds=[], deadline=began + 60, meeting=meeting)
    return time.monotonic() - began


def test_a_rank_that_is_killed_before_it_came_is_missed_at_once() -> None:
    key = f"test-{uuid.uuid4()}"
    took_s, _ = ranks.run_processes(2, _misses_a_killed_rank, key, return_errors=True)
    assert took_s < 20  # of 60


def _misses_a_stopped_rank(rank: ranks.Rank, key: str) -> str:
    """Rank 1 goes on once rank 0 has given up, and finds nobody."""
    if rank.rank == 1:
        rank.store.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        pid = int(rank.store.get("pid"))
        while not is_over(pid):
            time.sleep(0.001)
    try:
        fd_exchange.exchange_fds(rank.rank, 2, key=key, fds=[], deadline=time.monotonic() + 0.5)
    except errors.TimeoutError as error:
        return str(error)
    finally:
        if rank.rank == 0:
            os.kill(pid, signal.SIGCONT)
    return ""


def test_a_rank_that_is_stopped_before_it_came_is_named_and_finds_nobody_later() -> None:
    texts = ranks.run_processes(2, _misses_a_stopped_rank, f"test-{uuid.uuid4()}")
    for rank, text in enumerate(texts):
        assert f"local rank {1 - rank} did not come before the deadline" in text
