"""Ranks that differ, do not come, do something else or die: every other rank is reported in time.

Each test would hang without a deadline somewhere; each says how long it may take.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moe_p2p
from moe_p2p import Engine, EngineConfig, library
from moe_p2p.engine.communicators import MOST, Communicators
from moe_p2p.moe import epoch
from moe_p2p.moe.options import DispatchOptions
from moe_p2p.moe.rendezvous import agreement
from moe_p2p.moe.rendezvous.agreement import Host, find_ranks_per_node
from tests.support import cases
from tests.support.cases import check_step, lose_a_rank, lose_an_idle_rank, make, make_tokens
from tests.support.gpu_ranks import meet
from tests.support.ranks import DiedError, Rank, on_ranks, run_processes, run_threads


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("hidden_dim", (48, 64)),
        ("max_tokens", (12, 16)),
        ("dtype", (torch.float32, torch.bfloat16)),
        ("steps_in_flight", (2, 3)),
        ("expert_rank", ((0, 1) * 4, (1, 0) * 4)),
        ("ranks_per_node", (2, 1)),
    ],
)
def test_configurations_that_differ(field: str, values: tuple[Any, Any]) -> None:
    def body(rank: Rank) -> None:
        make(rank, **{field: values[rank.rank]})

    first, second = values
    for error in run_threads(2, body, return_errors=True):
        assert isinstance(error, moe_p2p.InvalidArgumentError)
        assert f"{field} differs between ranks" in str(error)
        assert f"rank 0 has {first}, rank 1 has {second}" in str(error)


@on_ranks(2)
def test_each_rank_may_wait_in_its_own_way(rank: Rank) -> None:
    make(rank, wait=("yield", "sleep")[rank.rank], timeout_s=10.0 + rank.rank).close()


def test_a_rank_that_fails_reports_to_the_others() -> None:
    def body(rank: Rank) -> None:
        engine = Engine(EngineConfig(transport="loopback"))
        if rank.rank == 1:
            engine.close()
        make(rank, engine=engine)

    began = time.monotonic()
    first, second = run_threads(2, body, return_errors=True)
    assert time.monotonic() - began < 10
    assert isinstance(second, moe_p2p.ClosedError)
    assert isinstance(first, moe_p2p.AbortedError)
    assert "rank 1 failed before the addresses: moe_p2p [closed] engine" in str(first)


def test_a_member_that_never_comes() -> None:
    def body(rank: Rank) -> None:
        if rank.rank != 1:
            make(rank, timeout_s=0.7, num_experts=6)

    began = time.monotonic()
    results = run_threads(3, body, return_errors=True)
    assert time.monotonic() - began < 10
    for rank in (0, 2):
        assert isinstance(results[rank], moe_p2p.MoeP2pError)
        assert "rank 1 did not come within 0.7 s" in str(results[rank])
    assert any(isinstance(result, moe_p2p.TimeoutError) for result in results)


def test_a_late_member_learns_that_the_others_gave_up() -> None:
    store = dist.HashStore()
    with pytest.raises(moe_p2p.TimeoutError, match="rank 1 did not come"):
        make(Rank(0, 2, store), timeout_s=0.2)
    began = time.monotonic()
    with pytest.raises(moe_p2p.AbortedError, match=r"rank 0 failed.*rank 1 did not come"):
        make(Rank(1, 2, store), timeout_s=20.0)
    assert time.monotonic() - began < 5


def test_ranks_on_hosts() -> None:
    def found(keys: str, wanted: int | None, names: str = "") -> int:
        where = [Host(key, f"host{name}") for key, name in zip(keys, names or keys, strict=True)]
        return find_ranks_per_node([Host.decode(host.encode()) for host in where], wanted)

    assert found("aabb", None) == 2
    assert found("aaaa", None) == 4
    assert found("aaaa", None, "aabb") == 4  # containers that share memory
    assert found("aaaa", 2) == 2
    with pytest.raises(moe_p2p.InvalidArgumentError) as blocks:
        found("abab", None)
    assert "not in equal blocks per host (ranks from 0 on hosta; ranks from 1 on hostb; " in str(
        blocks.value
    )
    with pytest.raises(moe_p2p.InvalidArgumentError, match=r"from 2 on hostc \(b\)"):
        found("aab", None, "ccc")  # two hosts of one name
    with pytest.raises(moe_p2p.InvalidArgumentError, match="ranks 2 to 3 are not on one host"):
        found("aaab", 2)
    facts = agreement.Facts({"a": "1"}, "h", "host7", 3)
    assert agreement.Facts.decode(facts.encode()) == facts


def test_numbers_that_are_free_at_all_ranks() -> None:
    def agreed(*ranks: tuple[int, int]) -> int:
        """Of each rank: which number comes next, and the set of those that are taken."""
        facts = [agreement.Facts({}, "h", "", first, f"{taken:x}") for first, taken in ranks]
        return agreement.conclude(facts, 0, None).communicator

    assert agreed((0, 0), (0, 0)) == 0
    assert agreed((3, 0b111), (0, 0)) == 3
    assert agreed((3, 0b111), (1, 0b1001)) == 4
    last = 1 << MOST - 1
    assert agreed((MOST - 1, 0), (0, 1)) == MOST - 1
    assert agreed((MOST - 1, last), (0, 1)) == 1
    every = (1 << MOST) - 1
    assert agreed((9, every ^ 1 << 5), (9, 0)) == 5
    with pytest.raises(moe_p2p.ResourceExhaustedError, match=r"511 of 512 are taken on .* rank 1"):
        agreed((9, 1 << 5), (9, every ^ 1 << 5))


def test_a_number_returns_once_its_connections_are_severed() -> None:
    numbers, severed = Communicators(), list[int]()
    ended = [numbers.take(number, 100 + number) for number in range(MOST)]
    with pytest.raises(moe_p2p.InvalidArgumentError, match=r"number 3 was taken .* meanwhile"):
        numbers.take(3, 1)
    numbers.reclaim(severed.append, 1)
    assert (severed, numbers.next) == ([], 0)  # all are in use
    for number in (5, 6, 7, 5):  # closed twice
        ended[number]()

    def stuck(tag: int) -> None:
        raise moe_p2p.TimeoutError(f"{tag}")

    numbers.reclaim(stuck, 1)
    assert numbers.taken.bit_count() == MOST  # 5 is tried again, behind the others
    numbers.reclaim(severed.append, 1)
    assert (severed, numbers.taken) == ([106, 107, 105], (1 << MOST) - 1 - 0b11100000)

    def unable(tag: int) -> None:
        raise moe_p2p.UnavailableError(f"{tag}")

    ended_again = numbers.take(5, 205)
    ended[5]()  # of its communicator before: nothing
    numbers.reclaim(severed.append, 1)
    assert numbers.taken >> 5 & 1
    ended_again()
    numbers.reclaim(unable, 1)
    numbers.reclaim(severed.append, 1)  # not asked again
    assert numbers.taken >> 5 & 1
    for number in range(100, 400):
        ended[number]()
    severed.clear()
    numbers.reclaim(severed.append, 1)
    assert numbers.taken.bit_count() == MOST // 2  # others are severed when they are needed
    assert severed == list(range(200, 200 + len(severed)))


@pytest.mark.parametrize("world_size", [2, 4, 600])
def test_whichever_numbers_ranks_have_one_is_free(world_size: int) -> None:
    """With fewer than half of them taken at each rank, all together were."""
    share = -(-MOST // world_size)
    taken = 0
    for rank in range(world_size):
        numbers = Communicators()
        for number in range(rank * share, min((rank + 1) * share, MOST)):
            numbers.take(number, 1)()
        numbers.reclaim(lambda _: None, world_size)
        taken |= numbers.taken
    assert taken.bit_count() < MOST


# --- ranks that are lost or do something else ---


def test_ranks_that_disagree_about_a_call() -> None:
    def body(rank: Rank) -> None:
        with make(rank, timeout_s=2.0) as comm:
            t = make_tokens(0, rank.rank, 4)
            x = t.x if rank.rank else t.x.half()
            comm.dispatch(x, t.topk_idx)

    began = time.monotonic()
    results = run_threads(2, body, return_errors=True)
    assert time.monotonic() - began < 10
    assert all(isinstance(result, moe_p2p.MoeP2pError) for result in results)
    assert any(
        isinstance(result, moe_p2p.ProtocolError) and "all ranks must make the same" in str(result)
        for result in results
    )


@pytest.mark.parametrize("ranks_per_node", [2, 1])
@pytest.mark.parametrize(
    ("door", "layout"),
    [
        ("whole", "padded"),
        ("whole", "grouped"),
        ("whole", "by_rank"),
        ("halves", "grouped"),
        ("op", "padded"),
    ],
)
@pytest.mark.parametrize("bounds", [(2, 4), (8, 9), (6, 12), (9, 12)], ids=str)  # 8 a chunk
def test_ranks_that_disagree_about_max_tokens(
    bounds: tuple[int, int], door: str, layout: str, ranks_per_node: int
) -> None:
    """Named at the first call, by whoever is served first, although two tokens always fit."""

    def body(rank: Rank) -> None:
        fields = {"max_tokens": 12, "chunk_tokens": 8, "ranks_per_node": ranks_per_node}
        with make(rank, timeout_s=2.0, **fields) as comm:
            t = make_tokens(0, rank.rank, 2)
            given: dict[str, Any] = {"layout": layout, "max_tokens": bounds[rank.rank]}
            if door == "halves":
                comm.dispatch_recv(comm.dispatch_send(t.x, t.topk_idx, **given))
            elif door == "op":
                number = DispatchOptions(layout=layout).number
                bound = given["max_tokens"]
                rest = (None, None, [], None, None, -1)
                torch.ops.moe_p2p.dispatch(comm._comm, number, bound, 64, t.x, t.topk_idx, *rest)
            else:
                comm.dispatch(t.x, t.topk_idx, **given)

    results = run_threads(2, body, return_errors=True)
    kind = RuntimeError if door == "op" else moe_p2p.ProtocolError
    texts = [str(result) for result in results if isinstance(result, kind)]
    assert any(
        f"max_tokens of rank {1 - rank}'s call is {bounds[1 - rank]}, of rank {rank}'s "
        f"{bounds[rank]}; it must be the same on all ranks" in text
        for rank in range(2)
        for text in texts
    ), results


@pytest.mark.parametrize("max_tokens", [-1, -7])
def test_a_max_tokens_below_0_is_refused_by_its_name(max_tokens: int) -> None:
    def body(rank: Rank) -> None:
        with make(rank) as comm:
            t = make_tokens(0, rank.rank, 2)
            for call in (comm.dispatch, comm.dispatch_send):
                with pytest.raises(moe_p2p.InvalidArgumentError, match="max_tokens is -"):
                    call(t.x, t.topk_idx, max_tokens=max_tokens)

    run_threads(1, body)


@pytest.mark.parametrize("ranks_per_node", [3, 1])
def test_a_rank_that_stays_away_from_a_call(ranks_per_node: int) -> None:
    def body(rank: Rank) -> float:
        comm = make(rank, timeout_s=0.7, ranks_per_node=ranks_per_node, num_experts=6)
        t = make_tokens(0, rank.rank, 4, num_experts=6)
        check_step(comm, [make_tokens(0, r, 4, num_experts=6) for r in range(3)])
        if rank.rank == 1:
            rank.store.wait(["gave up 0", "gave up 2"], timedelta(seconds=20))
            assert not comm.closed
            return 0
        began = time.monotonic()
        with pytest.raises(moe_p2p.MoeP2pError) as caught:
            comm.dispatch(t.x, t.topk_idx)
        took = time.monotonic() - began
        assert isinstance(caught.value, (moe_p2p.TimeoutError, moe_p2p.AbortedError))
        if isinstance(caught.value, moe_p2p.TimeoutError):
            assert "rank 1" in str(caught.value)
            assert "dispatch of step 1" in str(caught.value)
        assert comm.broken
        rank.store.set(f"gave up {rank.rank}", "")
        return took

    assert max(run_threads(3, body)) < 5


def run_until_killed(rank: Rank, ranks_per_node: int) -> tuple[float, str, str]:
    comm = make(rank, ranks_per_node=ranks_per_node, num_experts=6, timeout_s=3.0)
    t = make_tokens(0, rank.rank, 6, num_experts=6)
    for _ in range(3):
        received = comm.dispatch(t.x, t.topk_idx, t.topk_weights)
        comm.combine(received.x, received)
    return lose_a_rank(comm, t, 1)


@pytest.mark.parametrize("ranks_per_node", [3, 1])
def test_a_rank_that_is_killed_within_a_step(ranks_per_node: int) -> None:
    results = run_processes(3, run_until_killed, ranks_per_node, return_errors=True)
    assert isinstance(results[1], DiedError)
    texts = [results[0], results[2]]
    assert all(isinstance(text, tuple) for text in texts), texts
    for took, text, broken in texts:
        assert took < 10, text
        assert broken, text
        assert "rank 1" in text or "gave up" in text, text
    assert any("rank 1" in text for _, text, _ in texts), texts


def run_until_one_is_gone(rank: Rank, call: str) -> tuple[float, str]:
    comm = make(rank, ranks_per_node=1, timeout_s=60.0)
    tokens = [make_tokens(0, r, 6) for r in range(2)]
    check_step(comm, tokens)
    calls = {
        "dispatch": lambda: comm.dispatch(tokens[0].x, tokens[0].topk_idx),
        "gather_counts": lambda: comm.gather_counts(torch.ones(1, dtype=torch.int32)),
    }
    return lose_an_idle_rank(comm, 1, calls[call])


@pytest.mark.parametrize("call", ["dispatch", "gather_counts"])
def test_a_rank_that_is_killed_while_nothing_is_under_way_to_it(call: str) -> None:
    results = run_processes(2, run_until_one_is_gone, call, return_errors=True)
    text = cases.text_of_loss(results, 1)
    assert "rank 1 (node 1) is gone" in text
    assert "a probe failed: peer dead" in text
    assert "waits for rank 1 (node 1, 0 of 2 immediates came)" in text


def run_meet(rank: Rank) -> str:
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        make(rank, timeout_s=1.0)
    except moe_p2p.TimeoutError as error:
        return str(error)
    return "never noticed"


def test_a_process_that_dies_before_it_meets_the_others() -> None:
    results = run_processes(2, run_meet, return_errors=True)
    assert "rank 1 did not come within 1.0 s" in results[0]


def run_connect(rank: Rank, ranks_per_node: int) -> str:
    """Rank 1 is killed when all have its address, before rank 0 connects to it."""
    connect = torch.ops.moe_p2p.all_to_all_connect

    def call(op: Any, *arguments: Any) -> Any:
        if op is connect.default and rank.rank == 1:
            rank.store.set("pid", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        if op is connect.default:
            pid = int(rank.store.get("pid"))
            with suppress(FileNotFoundError, ProcessLookupError):  # reaped
                while "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
                    time.sleep(0.01)
            for left in Path("/dev/shm").glob(f"moe_p2p*.{pid}.*"):  # as any new engine does
                left.unlink(missing_ok=True)
        return library.call(op, *arguments)

    epoch.call = call  # type: ignore[attr-defined]  # in this process only
    with pytest.raises(moe_p2p.PeerDeadError) as caught:
        make(rank, ranks_per_node=ranks_per_node, timeout_s=20.0)
    return str(caught.value)


@pytest.mark.parametrize("ranks_per_node", [2, 1])
def test_a_process_that_dies_before_it_is_connected_to(ranks_per_node: int) -> None:
    results = run_processes(2, run_connect, ranks_per_node, return_errors=True)
    assert "connecting to rank 1: " in results[0]


@on_ranks(2)
def test_check_raises_what_a_neighbour_has_met_as_well(rank: Rank) -> None:
    with make(rank, timeout_s=1.0) as comm:
        comm.check()
        if rank.rank == 0:  # the other one does not come
            t = make_tokens(0, 0, 8)
            with pytest.raises(moe_p2p.MoeP2pError) as first:
                comm.dispatch(t.x, t.topk_idx, t.topk_weights)
        meet(rank, "given up")
        with pytest.raises(moe_p2p.MoeP2pError) as error:
            comm.check()
        assert str(error.value) == comm.broken
        if rank.rank == 0:
            assert str(error.value) == str(first.value)
        else:
            assert "rank 0 of this node gave up" in str(error.value)
        meet(rank, "reported")
