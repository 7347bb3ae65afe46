"""What a communicator counts: against the tokens it was given, over epochs, beside calls."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch

import moe_p2p
from moe_p2p import AllToAll, AllToAllPool
from moe_p2p.fleet import client
from tests.support import world_cases
from tests.support.cases import SMALL, check_step, make, make_tokens
from tests.support.ranks import Rank, run_threads

SAMPLE = re.compile(r"^moe_p2p_(\w+)\{([^}]*)\} (\S+)$", re.MULTILINE)


def counts(*objects: Any) -> dict[str, float]:
    """By name; with the last label where there are several: "moe_calls_total dispatch"."""
    found: dict[str, float] = {}
    for name, labels, value in SAMPLE.findall(moe_p2p.prometheus_text(*objects)):
        last = labels.rpartition('="')[2].rstrip('"')
        for key in (name, f"{name} {last}"):
            found[key] = found.get(key, 0) + float(value)
    return found


def written(comm: AllToAll) -> int:
    return sum(nic["bytes_written"] for nic in comm.counters())


@pytest.mark.parametrize("ranks_per_node", [4, 2])
def test_counts_are_those_of_the_calls(ranks_per_node: int) -> None:
    """Steps, calls, tokens, rows; the NICs' bytes are the engine's."""

    def body(rank: Rank) -> None:
        comm = make(rank, ranks_per_node=ranks_per_node, max_tokens=18, chunk_tokens=6)
        rows = 0
        for step in range(3):
            tokens = [make_tokens(step, r, 3 + r) for r in range(4)]
            got, _ = check_step(comm, tokens, max_tokens=6 if step == 0 else 18)
            rows += int(got.counts.sum())
        given = tokens[rank.rank]
        comm.release(comm.dispatch(given.x, given.topk_idx, given.topk_weights, max_tokens=6))
        before = written(comm)
        found = counts(comm)
        calls = {
            name: found[f"moe_calls_total {name}"] for name in ("dispatch", "combine", "release")
        }
        assert calls == {"dispatch": 4, "combine": 3, "release": 1}
        assert found["moe_sent_tokens_total"] == 4 * (3 + rank.rank)
        assert found["moe_received_rows_total"] >= rows
        # One pair of a step; two of three chunks, whose combines are as many steps; a dispatch.
        assert found["moe_steps_total"] == 1 + 2 * (3 + 3) + 1
        assert found["moe_deadlines_total"] == found["moe_masked_ranks"] == found["moe_epoch"] == 0
        # NICs may still be writing what the release sends.
        assert before <= found["nic_written_bytes_total"] <= written(comm)
        assert (before > 0) == (ranks_per_node == 2)
        comm.close()
        assert counts(comm) == {}

    run_threads(4, body)


def test_counters_go_on_in_the_next_epoch() -> None:
    """Its C++ object is a new one. No series falls, and none of the old ones ends."""

    def body(rank: Rank) -> None:
        seat, store = rank.rank, rank.store
        if seat < 2:
            comm = world_cases.begin(store, seat, [0, 1])
            world_cases.steps(comm, [0, 1])
            before = counts(comm)
            comm.update_members(add=[2, 3])
            now = counts(comm)
            falls = {name for name in before if now[name] < before[name]}
            assert falls <= {"moe_masked_ranks", *(n for n in before if n.startswith("moe_masked"))}
            assert now["moe_calls_total dispatch"] == before["moe_calls_total dispatch"] == 4
            assert (before["moe_masked_ranks"], now["moe_masked_ranks"]) == (2, 0)
            assert now["moe_epoch"] == before["moe_epoch"] + 1
        else:
            comm = world_cases.begin(store, seat, [0, 1])
        world_cases.steps(comm, range(4), 0, 3)
        assert counts(comm)["moe_calls_total dispatch"] == (7 if seat < 2 else 3)
        comm.close()

    run_threads(4, body)


def test_reading_waits_for_no_step_and_asks_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a call waits for another rank, which begins when the text is there."""

    def body(rank: Rank) -> Any:
        comm = world_cases.begin(rank.store, rank.rank, range(4))
        meet.wait(60)
        tokens = make_tokens(0, rank.rank, 3, num_experts=12)
        if rank.rank == 0:
            comms.append(comm)
            read.wait(60)
        got = comm.dispatch(tokens.x, tokens.topk_idx, tokens.topk_weights)
        comm.combine(got.x, got)
        meet.wait(60)
        comm.close()

    def reads() -> None:
        meet.wait(60)
        while not (comms and counts()["moe_steps_total"] >= 3):  # three ranks are in their call
            pass
        with monkeypatch.context() as patch:
            patch.setattr(client.Client, "run", None)  # any request would fail in this thread
            texts.append(moe_p2p.prometheus_text(*comms))
        read.set()
        meet.wait(60)

    comms: list[AllToAll] = []
    texts: list[str] = []
    meet, read = threading.Barrier(5), threading.Event()
    reader = threading.Thread(target=reads)
    reader.start()
    run_threads(4, body)
    reader.join()
    assert "moe_p2p_moe_steps_total" in texts[0]


def test_a_pool_counts_for_all_its_communicators() -> None:
    def body(rank: Rank) -> None:
        pool = AllToAllPool(rank.store, rank=rank.rank, world_size=2)
        for hidden in (64, 128):
            config = moe_p2p.AllToAllConfig(**(SMALL | {"hidden_dim": hidden}))
            tokens = make_tokens(0, rank.rank, 3, hidden_dim=hidden)
            comm = pool.get(config)
            comm.combine(
                comm.dispatch(tokens.x, tokens.topk_idx).x, comm.dispatch(tokens.x, tokens.topk_idx)
            )
        found = counts(pool)
        assert found["moe_calls_total dispatch"] == 4
        assert found["moe_calls_total combine"] == 2
        pool.close()
        assert counts(pool) == {}

    run_threads(2, body)


def test_profilers_of_torch_see_each_call_by_name() -> None:
    """Its ops need no range of their own: torch records them while a profiler is active."""
    with make(Rank(0, 1, torch.distributed.HashStore())) as comm:
        tokens = make_tokens(0, 0, 3)
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as profile:
            got = comm.dispatch(tokens.x, tokens.topk_idx, tokens.topk_weights)
            comm.combine(got.x, got)
            sent = comm.dispatch_send(tokens.x, tokens.topk_idx, tokens.topk_weights)
            got = comm.dispatch_recv(sent)
            comm.combine_recv(comm.combine_send(got.x, got))
    names = {event.key for event in profile.key_averages()}
    wanted = {"dispatch_inference", "combine_inference", "dispatch_send", "dispatch_recv"}
    wanted |= {"combine_send", "combine_recv"}
    assert {f"moe_p2p::{name}" for name in wanted} <= names
