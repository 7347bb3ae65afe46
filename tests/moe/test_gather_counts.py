"""gather_counts: numbers of every rank on every host, with no GPU and no process group in it."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_p2p
from moe_p2p import AllToAll
from tests.support import gpu_ranks
from tests.support.cases import finish, make, make_tokens
from tests.support.ranks import DiedError, Rank, on_ranks, run_processes, run_threads

NUM_EXPERTS = 12
WORLDS = [(1, 1), (2, 2), (2, 1), (4, 4), (4, 2), (6, 2), (3, 1)]  # ranks, ranks per node


def values_of(rank: int, call: int) -> Tensor:
    """Of another length in every call, the largest included; none sometimes."""
    count = (0, 1, 5, NUM_EXPERTS)[call % 4]
    return torch.arange(count, dtype=torch.int32) * 1000 + 100 * call + rank


def check_calls(comm: AllToAll, count: int) -> None:
    for call in range(count):
        gathered = comm.gather_counts(values_of(comm.rank, call))
        wanted = [values_of(rank, call) for rank in range(comm.world_size)]
        assert gathered.dtype == torch.int32
        assert torch.equal(gathered, torch.stack(wanted))


def gather(rank: Rank, ranks_per_node: int, count: int, settings: str) -> None:
    config: dict[str, Any] = {"ranks_per_node": ranks_per_node, "transport_settings": settings}
    with make(rank, num_experts=NUM_EXPERTS, nics_per_rank=3, **config) as comm:
        check_calls(comm, count)


@pytest.mark.parametrize(("world_size", "ranks_per_node"), WORLDS)
def test_threads_have_the_values_of_all_ranks(world_size: int, ranks_per_node: int) -> None:
    run_threads(world_size, gather, ranks_per_node, 100, "")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_writes_and_immediates_may_come_in_any_order(seed: int) -> None:
    run_threads(4, gather, 1, 100, f"seed={seed}")


@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(4, 4), (4, 2)])
def test_processes_have_the_values_of_all_ranks(world_size: int, ranks_per_node: int) -> None:
    run_processes(world_size, gather, ranks_per_node, 100, "")


def gather_within_steps(comm: AllToAll) -> None:
    """Between the halves of dispatch and combine, whose own messages it must not touch."""
    tokens = [make_tokens(0, rank, 4) for rank in range(comm.world_size)]
    mine = tokens[comm.rank]
    device = comm.config.device
    x, idx = mine.x.to(device), mine.topk_idx.to(device)
    comm.gather_counts(torch.tensor([comm.rank], dtype=torch.int32))
    for step in range(4):
        sent = comm.dispatch_send(x, idx)
        counts = torch.tensor([step, comm.rank], dtype=torch.int32)
        wanted = [[step, rank] for rank in range(comm.world_size)]
        assert comm.gather_counts(counts).tolist() == wanted
        received = comm.dispatch_recv(sent)
        sending = comm.combine_send(received.x, received, weighted=False)
        assert comm.gather_counts(counts + 7).tolist() == [[a + 7, b + 7] for a, b in wanted]
        out = comm.combine_recv(sending)
        finish(comm)
        copies = (mine.topk_idx >= 0).sum(dim=1, keepdim=True)
        torch.testing.assert_close(out.cpu(), mine.x * copies)


@pytest.mark.parametrize("ranks_per_node", [4, 2])
@on_ranks(4)
def test_it_goes_between_the_halves_of_a_step(rank: Rank, ranks_per_node: int) -> None:
    with make(rank, ranks_per_node=ranks_per_node) as comm:
        gather_within_steps(comm)


def body_on_gpu(rank: Rank, world: gpu_ranks.World) -> None:
    fields = {"num_experts": 8, "hidden_dim": 48, "extra_bytes": 0}
    with gpu_ranks.make(rank, world, **fields) as comm:
        gather_within_steps(comm)


@pytest.mark.gpu
@pytest.mark.parametrize("world", gpu_ranks.worlds((2, 2), (2, 1)))
def test_it_goes_while_gpus_work(world: gpu_ranks.World) -> None:
    gpu_ranks.run(world, body_on_gpu, processes=True)


# --- what goes wrong -----------------------------------------------------------------------------


@on_ranks(2)
def test_too_many_values_or_others_than_int32_change_nothing(rank: Rank) -> None:
    with make(rank) as comm:
        most = comm.config.num_experts + comm.world_size + 16
        with pytest.raises(moe_p2p.InvalidArgumentError, match=f"at most {most} "):
            comm.gather_counts(torch.zeros(most + 1, dtype=torch.int32))
        with pytest.raises(moe_p2p.InvalidArgumentError, match=r"must be torch\.int32"):
            comm.gather_counts(torch.zeros(3))
        with pytest.raises(moe_p2p.InvalidArgumentError, match="values"):
            comm.gather_counts(torch.zeros(3, 2, dtype=torch.int32))
        assert comm.broken == ""
        full = torch.full((most,), comm.rank, dtype=torch.int32)
        assert torch.equal(comm.gather_counts(full), torch.stack([full * 0, full * 0 + 1]))


@pytest.mark.parametrize("ranks_per_node", [2, 1])
@on_ranks(2)
def test_ranks_that_disagree_about_the_number_of_values(rank: Rank, ranks_per_node: int) -> None:
    with make(rank, ranks_per_node=ranks_per_node) as comm:
        other = 1 - rank.rank
        text = f"gather_counts call 1: rank {other} gave {3 + other} values"
        with pytest.raises(moe_p2p.ProtocolError, match=text):
            comm.gather_counts(torch.zeros(3 + rank.rank, dtype=torch.int32))
        with pytest.raises(moe_p2p.ProtocolError, match=text):
            comm.gather_counts(torch.zeros(3, dtype=torch.int32))
        assert text in comm.broken


@pytest.mark.parametrize("ranks_per_node", [3, 1])
def test_a_rank_that_stays_away_is_named(ranks_per_node: int) -> None:
    one = torch.ones(1, dtype=torch.int32)

    def body(rank: Rank) -> None:
        comm = make(rank, timeout_s=0.7, ranks_per_node=ranks_per_node, num_experts=6)
        comm.gather_counts(one)
        if rank.rank == 1:
            rank.store.wait(["gave up 0", "gave up 2"], timedelta(seconds=20))
            comm.close()
            return
        began = time.monotonic()
        with pytest.raises((moe_p2p.TimeoutError, moe_p2p.AbortedError)) as caught:
            comm.gather_counts(one)
        rank.store.set(f"gave up {rank.rank}", "")
        assert time.monotonic() - began < 5
        if isinstance(caught.value, moe_p2p.TimeoutError):
            immediates = ", 0 of 2 immediates came" if ranks_per_node == 1 else ""
            node = 1 if ranks_per_node == 1 else 0
            missing = f"gather_counts call 2 waits for rank 1 (node {node}{immediates})"
            assert str(caught.value).endswith(missing)
        comm.close()

    run_threads(3, body)


def test_a_rank_that_closed_is_reported_at_once() -> None:
    one = torch.ones(1, dtype=torch.int32)

    def body(rank: Rank) -> None:
        with make(rank, timeout_s=30.0) as comm:
            comm.gather_counts(one)
            if rank.rank == 1:
                return
            began = time.monotonic()
            with pytest.raises(moe_p2p.PeerDeadError, match="rank 1 has closed"):
                comm.gather_counts(one)
            assert time.monotonic() - began < 10

    run_threads(2, body)


def gather_until_killed(rank: Rank, ranks_per_node: int) -> str:
    comm = make(rank, ranks_per_node=ranks_per_node, num_experts=6, timeout_s=3.0)
    one = torch.ones(1, dtype=torch.int32)
    comm.gather_counts(one)
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.gather_counts(one)
    except moe_p2p.MoeP2pError as error:
        comm.close()
        return f"{type(error).__name__}: {error}"
    return "never noticed"


@pytest.mark.parametrize("ranks_per_node", [3, 1])
def test_a_rank_that_is_killed_is_named(ranks_per_node: int) -> None:
    results = run_processes(3, gather_until_killed, ranks_per_node, return_errors=True)
    assert isinstance(results[1], DiedError)
    texts = [results[0], results[2]]
    assert all("Error: moe_p2p" in text for text in texts), texts
    assert any("rank 1" in text for text in texts), texts
    if ranks_per_node == 3:
        assert any("rank 1's process has ended" in text for text in texts), texts


def test_a_failed_write_ends_the_call_here_and_there() -> None:
    one = torch.ones(1, dtype=torch.int32)
    first_left = threading.Event()

    def body(rank: Rank) -> None:
        config: dict[str, Any] = {"ranks_per_node": 1, "transport_settings": "fail_nth=2"}
        with make(rank, **config) as comm:
            comm.gather_counts(one)  # one write of each NIC
            if rank.rank == 0:
                text = "gather_counts call 2: the write to rank 1"
                with pytest.raises(moe_p2p.TransportError, match=text):
                    comm.gather_counts(one)
            else:  # learns that the values will never arrive; does not wait for its deadline
                assert first_left.wait(60)
                with pytest.raises(moe_p2p.PeerDeadError, match=r"gather_counts call 2.*rank 0"):
                    comm.gather_counts(one)
        first_left.set()

    run_threads(2, body)
