"""moe_p2p.fd_exchange: the ranks of a node pass each other descriptors, or say who is missing."""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid

import pytest

import ranks
from cases import memfd
from moe_p2p import errors, fd_exchange


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
    meeting = fd_exchange._Meeting(0, 2, key, [], deadline, {})
    with meeting, pytest.raises(errors.InvalidArgumentError, match="in use on this host"):
        fd_exchange.exchange_fds(0, 2, key=key, fds=[], deadline=deadline)


class _Peer:
    """Local rank 1 of 2, played by hand against an exchange of rank 0 on another thread."""

    def __init__(self, key: str) -> None:
        self.meeting = fd_exchange._Meeting(1, 2, key, [], time.monotonic() + 20, {1: []})
        self.outcome: list[list[int]] | Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(key,))
        self._thread.start()

    def _run(self, key: str) -> None:
        try:
            self.outcome = fd_exchange.exchange_fds(
                0, 2, key=key, fds=[], deadline=time.monotonic() + 20
            )
        except Exception as error:
            self.outcome = error

    def send(self, header: bytes, fds: list[int]) -> socket.socket:
        """A connection to rank 0 on which this was sent, as soon as rank 0 listens."""
        ends = time.monotonic() + 20
        while time.monotonic() < ends:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                connection.connect(self.meeting._address(0))
            except ConnectionRefusedError:
                connection.close()
                continue
            socket.send_fds(connection, [header], fds)
            return connection
        raise AssertionError("rank 0 does not listen")

    def finish(self) -> list[list[int]] | Exception | None:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.outcome


def test_a_connection_without_the_key_is_dropped(key: str) -> None:
    peer = _Peer(key)
    fd = memfd("junk")
    try:
        with peer.send(b"who is there?", [fd]) as one, peer.send(b"\0" * 24, [fd]) as other:
            with peer.meeting:
                peer.meeting.run()
            assert one.recv(1) == b""
            assert other.recv(1) == b""
    finally:
        os.close(fd)
    assert peer.finish() == [[], []]


def test_a_peer_that_goes_away_before_it_received_is_named(key: str) -> None:
    peer = _Peer(key)
    header = fd_exchange._HEADER.pack(peer.meeting._hash, 1, 0)
    with peer.meeting, peer.send(header, []):
        peer.meeting._listener.settimeout(20)
        connection, _ = peer.meeting._listener.accept()
        connection.settimeout(20)
        assert connection.recv(64)  # closed before rank 0 has sent, it would only try again
        connection.close()
        outcome = peer.finish()
    assert isinstance(outcome, errors.PeerDeadError)
    assert "local rank 1 went away" in str(outcome)


def test_fewer_descriptors_than_announced_is_an_error(key: str) -> None:
    peer = _Peer(key)
    fd = memfd("one of two")
    with peer.meeting, peer.send(fd_exchange._HEADER.pack(peer.meeting._hash, 1, 2), [fd]):
        os.close(fd)
        outcome = peer.finish()
    assert isinstance(outcome, errors.ResourceExhaustedError)
    assert "1 of the 2 file descriptors of local rank 1" in str(outcome)
