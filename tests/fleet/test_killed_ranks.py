"""ranks that are killed while all ranks meet are missed, by name."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch.distributed as dist

from moe_p2p import errors
from moe_p2p.fleet import bootstrap, neighbours
from moe_p2p.fleet.bootstrap import Bootstrap
from moe_p2p.fleet.neighbours import Neighbours
from tests.support import ranks

STAGES = ("the transports", "the configurations", "the addresses")


def _is_killed(rank: ranks.Rank, killed: int, stage: int) -> float:
    """One rank is killed before an exchange; how long the others took to learn of it."""
    began = time.monotonic()
    with Bootstrap(
        rank.store, rank=rank.rank, world_size=rank.world_size, timeout_s=60.0
    ) as meeting:
        for number, what in enumerate(STAGES):
            if (rank.rank, number) == (killed, stage):
                os.kill(os.getpid(), signal.SIGKILL)
            began = time.monotonic()
            if number < stage:
                meeting.exchange(b"", what)
                continue
            expected = f"the process of rank {killed} has ended"
            kinds = (errors.PeerDeadError, errors.AbortedError)
            with pytest.raises(kinds, match=expected):
                meeting.exchange(b"", what)
            break
    return time.monotonic() - began


@pytest.mark.parametrize("killed", [0, 2])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_rank_that_is_killed_is_missed_at_once(killed: int, stage: int) -> None:
    results = ranks.run_processes(4, _is_killed, killed, stage, return_errors=True)
    for rank, took_s in enumerate(results):
        if rank == killed:
            assert isinstance(took_s, ranks.DiedError)
        else:
            assert took_s < 20, took_s  # of 60; 0.3 s on a quiet machine


def _is_reported(rank: ranks.Rank) -> str:
    """Rank 2 is killed, rank 1 alone can see it: rank 0 is as of another host."""
    if rank.rank == 0:
        neighbours.own_identity = lambda: "another-host 1 1"  # type: ignore[assignment]
        bootstrap.own_identity = neighbours.own_identity
    with Bootstrap(rank.store, rank=rank.rank, world_size=3, timeout_s=60.0) as meeting:
        meeting.exchange(b"", STAGES[0])
        if rank.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(errors.MoeP2pError) as caught:
            meeting.exchange(b"", STAGES[1])
    return f"{type(caught.value).__name__}: {caught.value}"


def test_ranks_of_other_hosts_report_a_rank_that_was_killed() -> None:
    began = time.monotonic()
    first, second, killed = ranks.run_processes(3, _is_reported, return_errors=True)
    assert time.monotonic() - began < 30
    assert isinstance(killed, ranks.DiedError)
    assert "PeerDeadError" in second
    assert "AbortedError" in first
    for text in (first, second):
        assert "the process of rank 2 has ended" in text


def test_the_reason_of_a_rank_that_left_is_not_lost_with_its_process() -> None:
    store = dist.HashStore()
    store.set("moe_p2p/1/1/1", "-no such NIC")
    meeting = Bootstrap(store, rank=2, world_size=3, timeout_s=5.0)
    meeting._met, meeting._stage = True, 1
    reason = "rank 1 failed before the NICs: no such NIC"
    with pytest.raises(errors.AbortedError, match=reason):
        meeting.check_neighbours(1, "the NICs")


class _Deleting(dist.Store):
    """Rank 0 deletes every key of a rank as soon as it has been seen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dist.HashStore()

    def check(self, keys: list[str]) -> bool:
        there = self.inner.check(keys)
        for key in keys:
            if not key.endswith("/all"):
                self.inner.delete_key(key)
        return bool(there)

    def get(self, key: str) -> bytes:
        assert self.inner.check([key]), "get() blocks for a key that is not there"
        return bytes(self.inner.get(key))

    def __getattribute__(self, name: str) -> Any:
        if name in ("add", "set", "delete_key", "compare_set"):
            return getattr(self.inner, name)
        return super().__getattribute__(name)


def test_rank_0_may_take_the_word_of_a_killed_rank_meanwhile() -> None:
    meeting = Bootstrap(_Deleting(), rank=2, world_size=3, timeout_s=5.0)
    meeting._met, meeting._stage = True, 1
    meeting.store.set(meeting._key(1), "+payload")
    with pytest.raises(errors.PeerDeadError, match="the process of rank 1 has ended"):
        meeting.check_neighbours(1, "the NICs")


def test_a_process_that_ended_before_it_was_watched_is_missed() -> None:
    watched = Neighbours()
    space, _, start = neighbours.own_identity().split(" ")
    watched.add([f"{space} {os.getppid()} 1", neighbours.own_identity(), "elsewhere 1 1", ""])
    assert watched.wait(0.0) == 0  # its number is another process's by now
    watched.close()
    watched = Neighbours()
    watched.add([neighbours.own_identity(), f"{space} 4194304 {start}"])
    assert watched.wait(0.0) == 1
    watched.close()
