"""moe_p2p.fleet.bootstrap: few requests, no keys left, errors of others."""

from __future__ import annotations

import math
import re
import runpy
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_p2p import Engine, EngineConfig, errors
from moe_p2p.fleet import bootstrap
from moe_p2p.fleet.bootstrap import Bootstrap
from moe_p2p.fleet.requests import Requests
from tests.support import ranks
from tests.support.cases import make

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("the transports", "the configurations", "the addresses")


class CountingStore(dist.Store):
    """Passes everything on and counts it; one object for each rank."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self.inner = inner
        self.asked: Counter[str] = Counter()

    def _pass(self, name: str, *arguments: Any) -> Any:
        self.asked[name] += 1
        return getattr(self.inner, name)(*arguments)

    def set(self, key: str, value: Any) -> None:
        self._pass("set", key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._pass("get", key))

    def add(self, key: str, value: int) -> int:
        return int(self._pass("add", key, value))

    def check(self, keys: list[str]) -> bool:
        return bool(self._pass("check", keys))

    def delete_key(self, key: str) -> bool:
        return bool(self._pass("delete_key", key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return list(self._pass("multi_get", keys))

    def compare_set(self, key: str, before: str, after: str) -> bytes:
        return bytes(self._pass("compare_set", key, before, after))


class FailsOnce(CountingStore):
    """Request number `at`, without those that look whether a key is there. after: when it has been
    carried out."""

    def __init__(self, inner: dist.Store, at: int, *, after: bool) -> None:
        super().__init__(inner)
        self.at, self.after, self.failed = at, after, ""

    def _pass(self, name: str, *arguments: Any) -> Any:
        number = sum(self.asked.values()) - self.asked["check"]
        fails = name != "check" and number == self.at
        if fails and not self.after:
            self.asked[name] += 1
            self.failed = name
            raise RuntimeError("connection reset")
        found = super()._pass(name, *arguments)
        if fails:
            self.failed = name
            raise RuntimeError("connection reset")
        return found


def _payload(rank: int, what: str) -> bytes:
    return f"{what} of rank {rank}".encode() * (rank % 7)  # rank 0 brings nothing


def _meet(rank: ranks.Rank, store: dist.Store, timeout_s: float = 30.0) -> None:
    with Bootstrap(
        store, rank=rank.rank, world_size=rank.world_size, timeout_s=timeout_s
    ) as meeting:
        for what in STAGES:
            got = meeting.exchange(_payload(rank.rank, what), what)
            assert got == [_payload(other, what) for other in range(rank.world_size)]


@pytest.mark.parametrize("world_size", [2, 48])
def test_requests_of_a_rank_do_not_grow_with_the_ranks(world_size: int) -> None:
    began = time.monotonic()

    def body(rank: ranks.Rank) -> Counter[str]:
        store = CountingStore(rank.store)
        _meet(rank, store)
        return store.asked

    first, *others = ranks.run_threads(world_size, body)
    # At most that often does a wait ask, of which each exchange has one, and the first one more.
    first_pause = max(bootstrap._FIRST_PAUSE_S, bootstrap._PAUSE_OF_A_RANK_S * world_size)
    longest = bootstrap._LAST_PAUSE_S
    growing = math.log(longest / first_pause, 1.5) + 3
    checks = (1 + len(STAGES)) * growing + (time.monotonic() - began) / longest
    for asked in (first, *others):
        assert asked.pop("check") <= checks
    for asked in others:
        assert asked["get"] == 1 + len(STAGES)  # one value for each exchange, and its answer
        # The one that leaves last deletes three keys more.
        assert sum(asked.values()) <= 6 + 3 * len(STAGES) + 2
    assert sum(first.values()) <= (3 + 2 * len(STAGES)) * world_size + 20


def test_a_set_up_makes_the_exchanges_that_its_documentation_adds_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exchange = Bootstrap.exchange
    names: list[list[str]] = [[], []]

    def noted(self: Bootstrap, payload: bytes, what: str) -> list[bytes]:
        names[self.rank].append(what)
        return exchange(self, payload, what)

    def body(rank: ranks.Rank) -> None:
        with make(rank):
            pass

    monkeypatch.setattr(Bootstrap, "exchange", noted)
    ranks.run_threads(2, body)
    assert names[0] == names[1] == [*STAGES, "all ranks to be connected"]
    text = (ROOT / "docs/failure.md").read_text()
    assert f"{len(names[0])} exchanges on CPUs ({', '.join(STAGES)}, being connected)" in text


@pytest.mark.parametrize("kind", ["tcp", "hash", "file", "prefix"])
def test_no_key_is_left(kind: str, tmp_path: Path) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = dist.HashStore()

    def make_store() -> dist.Store:
        if kind == "hash":
            return shared
        if kind == "file":
            return dist.FileStore(str(tmp_path / "store"), 4)
        mine = dist.TCPStore("127.0.0.1", server.port, is_master=False)
        return mine if kind == "tcp" else dist.PrefixStore("group", mine)

    watching = make_store()

    def body(rank: ranks.Rank) -> None:
        store = make_store()
        for _ in range(3):
            _meet(rank, store)

    ranks.run_threads(3, body)
    # A FileStore has keys of its own, and lists all without their first letter.
    assert not [key for key in watching.list_keys() if "oe_p2p" in key]


def test_no_key_is_left_by_a_hundred_communicators() -> None:
    def body(rank: ranks.Rank) -> None:
        with make(rank):
            pass
        engine = Engine(EngineConfig(transport="loopback"))
        for _ in range(99):
            make(rank, engine=engine).close()
        engine.close()
        lists.append(rank.store)

    lists: list[dist.Store] = []
    ranks.run_threads(2, body)
    assert lists[0].num_keys() == 0, lists[0].list_keys()


def run_soon(num_ranks: int, body: Callable[[ranks.Rank], None]) -> None:
    """No deadline of 30 s is waited for, and no key is left in the store."""
    stores: list[dist.Store] = []

    def noted(rank: ranks.Rank) -> None:
        stores.append(rank.store)
        body(rank)

    began = time.monotonic()
    ranks.run_threads(num_ranks, noted)
    assert time.monotonic() - began < 20
    assert stores[0].num_keys() == 0, stores[0].list_keys()


def test_values_that_a_store_does_not_take_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "_PIECE_BYTES", 10)

    def body(rank: ranks.Rank) -> None:
        _meet(rank, rank.store)

    run_soon(4, body)


def _fail_at(rank: ranks.Rank, failing: int, stage: int, store: dist.Store) -> None:
    with Bootstrap(store, rank=rank.rank, world_size=rank.world_size, timeout_s=30.0) as meeting:
        for number, what in enumerate(STAGES):
            if (rank.rank, number) == (failing, stage):
                raise ValueError("no such NIC")
            meeting.exchange(b"", what)


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_all_ranks_name_the_failed_one_and_can_meet_again(failing: int, stage: int) -> None:
    def body(rank: ranks.Rank) -> None:
        with pytest.raises((ValueError, errors.AbortedError)) as caught:
            _fail_at(rank, failing, stage, rank.store)
        if rank.rank != failing:
            expected = f"rank {failing} failed before {STAGES[stage]}: no such NIC"
            assert expected in str(caught.value)
        _meet(rank, rank.store)

    run_soon(4, body)


def test_all_may_fail_at_once_and_try_again() -> None:
    def body(rank: ranks.Rank) -> None:
        for _ in range(3):
            with (
                pytest.raises(ValueError, match="no NIC here"),
                Bootstrap(rank.store, rank=rank.rank, world_size=3, timeout_s=30.0),
            ):
                raise ValueError("no NIC here")
        _meet(rank, rank.store)

    run_soon(3, body)


@pytest.mark.parametrize(("present", "missing"), [((0, 1), "ranks 2, 3"), ((1, 2, 3), "rank 0")])
def test_ranks_that_do_not_come_are_named(present: tuple[int, ...], missing: str) -> None:
    def body(rank: ranks.Rank) -> None:
        if rank.rank in present:
            _meet(rank, rank.store, timeout_s=0.5)

    results = ranks.run_threads(4, body, return_errors=True)
    for rank in present:
        text = str(results[rank])
        assert f"waiting for the transports, {missing} did not come within 0.5 s" in text
        assert "raise timeout_s" in text


def test_each_exchange_has_its_own_deadline() -> None:
    """Three exchanges, each of which takes less than the deadline, and together more."""
    store, timeout_s = dist.HashStore(), 2.0
    idle = threading.Event()

    def body(rank: ranks.Rank) -> None:
        with Bootstrap(store, rank=rank.rank, world_size=2, timeout_s=timeout_s) as meeting:
            for what in STAGES:
                if rank.rank == 1:
                    idle.wait(0.4 * timeout_s)
                meeting.exchange(b"", what)

    ranks.run_threads(2, body)


def test_of_many_missing_ranks_some_are_named_with_few_requests() -> None:
    store = CountingStore(dist.HashStore())
    with (
        pytest.raises(errors.TimeoutError, match=r"ranks 1, 2, .*, 16, \.\.\. did not come"),
        Bootstrap(store, rank=0, world_size=1024, timeout_s=0.1) as meeting,
    ):
        meeting.exchange(b"", "the transports")
    assert store.asked["check"] < 100


def test_an_answer_to_a_rank_that_died_is_not_taken_for_ones_own() -> None:
    store = dist.HashStore()
    store.set("moe_p2p/1/answer/1", "+moe_p2p/gone")
    ranks.run_threads(2, lambda rank: _meet(rank, store))
    assert store.num_keys() == 0, store.list_keys()


def test_a_store_that_fails_is_named() -> None:
    class Broken(CountingStore):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("connection reset")

    for rank in (0, 1):
        with (
            pytest.raises(errors.TransportError, match="the store failed: connection reset"),
            Bootstrap(Broken(dist.HashStore()), rank=rank, world_size=2, timeout_s=30) as meeting,
        ):
            meeting.exchange(b"", "the transports")


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_request_that_fails_once_is_heard_by_all(failing: int, after: bool) -> None:
    """Whichever it is: nobody waits for a deadline. The first one is of a rank that others have not
    heard of."""

    def body(rank: ranks.Rank, broken: list[FailsOnce], at: int) -> str:
        store = rank.store
        if rank.rank == failing:
            broken.append(FailsOnce(rank.store, at, after=after))
            store = broken[0]
        try:
            _meet(rank, store, timeout_s=20.0)
        except errors.MoeP2pError as error:
            return str(error)
        return ""

    for at in range(1, 100):
        began, broken = time.monotonic(), list[FailsOnce]()
        heard = ranks.run_threads(3, partial(body, broken=broken, at=at))
        assert time.monotonic() - began < 15, (at, broken[0].failed, heard)
        if not broken[0].failed:
            break
        assert "the store failed: connection reset" in heard[failing], (at, heard)
        others = [text for rank, text in enumerate(heard) if rank != failing]
        assert all(not text or f"rank {failing} failed before" in text for text in others), heard
    assert at > 8
    assert not any(heard)


def test_a_report_that_failed_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others hear the cause, and not that the store failed meanwhile."""
    answer_all, tries = Bootstrap._answer_all, list[bytes]()

    def fails_once(self: Bootstrap, value: bytes) -> None:
        tries.append(value)
        if len(tries) == 1:
            raise errors.make(errors.TransportError, "connection reset")
        answer_all(self, value)

    monkeypatch.setattr(Bootstrap, "_answer_all", fails_once)

    def body(rank: ranks.Rank) -> str:
        with pytest.raises((ValueError, errors.MoeP2pError)) as caught:
            _fail_at(rank, 2, 0, rank.store)
        return str(caught.value)

    began = time.monotonic()
    heard = ranks.run_threads(4, body)
    assert time.monotonic() - began < 20
    assert "rank 2 failed before the transports: no such NIC" in heard[1]
    assert len(tries) == 2


def test_requests_to_a_store_end_at_a_deadline_and_leave_no_thread() -> None:
    """What the server answers later is not taken for the answer to the next request."""
    before = threading.active_count()
    made, release = Requests(), threading.Event()

    def fails() -> int:
        raise ValueError("of the store")

    assert made.run(lambda: 1, 5.0) == 1
    with pytest.raises(ValueError, match="of the store"):
        made.run(fails, 5.0)
    with pytest.raises(TimeoutError, match=r"no answer within 0\.01 s"):
        made.run(lambda: release.wait(30), 0.01)
    with pytest.raises(TimeoutError, match="no answer to the request before"):
        made.run(lambda: 2, 5.0)
    release.set()
    assert made.run(lambda: 3, 5.0) == 3
    made.close()
    while threading.active_count() > before:
        time.sleep(0.01)


class AnotherVersion(Bootstrap):
    """A rank of a build with another letter; or of one that knows of none."""

    def __init__(self, *args: Any, text: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._version = text


@pytest.mark.parametrize("other", [0, 2])
@pytest.mark.parametrize(
    "text", ["moe_p2p 9.9.9, letter 0123456789abcdef", "moe_p2p 0.1.0, letter 0123456789abcdef"]
)
def test_a_mix_of_versions_is_refused_by_name(other: int, text: str) -> None:
    ours = torch.ops.moe_p2p.letter.default()

    def body(rank: ranks.Rank) -> None:
        kind: Any = partial(AnotherVersion, text=text) if rank.rank == other else Bootstrap
        with (
            pytest.raises(errors.MoeP2pError, match="do not fit together") as caught,
            kind(rank.store, rank=rank.rank, world_size=3, timeout_s=30.0) as meeting,
        ):
            meeting.exchange(b"", "the transports")
        assert text in str(caught.value)
        assert f"letter {ours}" in str(caught.value)
        assert f"rank {max(other, 1)} has" in str(caught.value)
        assert "Install one version on all ranks" in str(caught.value)
        _meet(rank, rank.store)

    run_soon(3, body)


def test_ranks_that_come_for_something_else_are_named() -> None:
    """A buffer that was destroyed on one rank met the first call on the others."""

    def body(rank: ranks.Rank) -> None:
        what = "all ranks to destroy their buffers" if rank.rank == 1 else "the transports"
        with Bootstrap(rank.store, rank=rank.rank, world_size=3, timeout_s=30.0) as meeting:
            meeting.exchange(b"", what)

    first, *others = failed = ranks.run_threads(3, body, return_errors=True)
    text = "rank 0 waits for the transports, and rank 1 for all ranks to destroy their buffers"
    assert all(text in str(error) for error in failed)
    assert isinstance(first, errors.ProtocolError)
    assert all(isinstance(error, errors.AbortedError) for error in others)


def test_versions_with_one_letter_fit_together() -> None:
    text = f"moe_p2p 9.9.9, letter {torch.ops.moe_p2p.letter.default()}"

    def body(rank: ranks.Rank) -> list[bytes]:
        kind: Any = partial(AnotherVersion, text=text) if rank.rank == 1 else Bootstrap
        with kind(rank.store, rank=rank.rank, world_size=2, timeout_s=30.0) as meeting:
            met: list[bytes] = meeting.exchange(b"a\nb", "the transports")
        return met

    assert ranks.run_threads(2, body) == [[b"a\nb"] * 2] * 2


def test_a_rank_of_before_there_were_letters_is_named() -> None:
    store = dist.HashStore()
    store.set("moe_p2p/1/0/1", '+["host", ["loopback", "", true]]')
    with (
        pytest.raises(errors.ProtocolError, match="rank 1 has a version without a letter"),
        Bootstrap(store, rank=0, world_size=2, timeout_s=5.0) as meeting,
    ):
        meeting.exchange(b"", "the transports")


def test_the_letter_of_the_extension_is_that_of_its_files() -> None:
    made = runpy.run_path(str(ROOT / "csrc" / "letter.py"))
    assert torch.ops.moe_p2p.letter.default() == made["letter"](), "run make build"
    hashed = {str(path.relative_to(ROOT)) for path in made["files"]()}
    for path in (ROOT / "csrc").rglob("*.cpp"):  # a handshake that refuses others is one of them
        if re.search(r"\b(put|expect)_letter\(", path.read_text()) and path.stem != "letter":
            assert str(path.relative_to(ROOT)) in hashed
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "kernels/abi").iterdir()} <= hashed
