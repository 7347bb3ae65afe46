"""EPBuffer's balanced experts on CPU ranks: plans, copies of weights, gradients, refusals."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_p2p import (
    AbortedError,
    ClosedError,
    InvalidArgumentError,
    PeerDeadError,
    ProtocolError,
    TimeoutError,
)
from moe_p2p.deep_ep_v25 import (
    BufferAllocator,
    EPBuffer,
    balance,
    get_num_allocation_alignment,
    get_num_rdma_alignment,
    get_num_tma_alignment,
)
from moe_p2p.moe import pool
from tests.support import balance_cases as cases
from tests.support import elastic_cases
from tests.support.balance_cases import LOCAL, SLOTS, WIDTH, make
from tests.support.ranks import DiedError, Rank, on_ranks, run_processes, run_threads

MIB2 = 2 << 20


# --- plans ---


def test_a_plan_has_aligned_tensors_that_get_their_memory_in_place() -> None:
    assert [get_num_allocation_alignment(), get_num_rdma_alignment(), get_num_tma_alignment()] == [
        MIB2, 64, 32]  # fmt: skip
    plan = BufferAllocator()
    assert plan.alignment == MIB2
    tensors = [
        plan.allocate((3, 5), torch.bfloat16),
        plan.allocate((MIB2 + 1,), torch.uint8),
        plan.allocate((2, 2), torch.float32),
        plan.allocate(0, torch.int8),
    ]
    assert all(each.is_meta for each in tensors)
    assert [first for _, first in plan.allocations] == [0, MIB2, 3 * MIB2, 4 * MIB2]
    assert plan.num_bytes == 4 * MIB2
    storage = torch.zeros(4 * MIB2, dtype=torch.uint8)
    with pytest.raises(
        InvalidArgumentError, match=r"storage is .8388609. torch.uint8, must be the"
    ):
        plan.materialize(torch.zeros(4 * MIB2 + 1, dtype=torch.uint8))
    plan.materialize(storage)
    assert plan.materialized
    assert [each.data_ptr() - storage.data_ptr() for each in tensors[:3]] == [0, MIB2, 3 * MIB2]
    assert (tensors[0].shape, tensors[0].dtype) == ((3, 5), torch.bfloat16)
    for again in (lambda: plan.allocate(1, torch.int8), lambda: plan.materialize(storage)):
        with pytest.raises(InvalidArgumentError, match="the plan has its memory already"):
            again()


@on_ranks(1)
def test_a_plan_belongs_to_one_buffer(rank: Rank) -> None:
    plan = BufferAllocator()
    tensor = plan.allocate((2, 8), torch.float32)
    buffer = elastic_cases.make_buffer(rank, EPBuffer, lb_allocation_plan_or_num_bytes=plan)
    storage = buffer.runtime.lb_storage
    assert (storage.shape, buffer.num_lb_bytes) == ((MIB2,), MIB2)
    assert tensor.data_ptr() == storage.data_ptr()
    with pytest.raises(InvalidArgumentError, match="of another buffer: make a new plan"):
        elastic_cases.make_buffer(rank, EPBuffer, lb_allocation_plan_or_num_bytes=plan)
    buffer.destroy()


@on_ranks(2)
def test_regions_that_differ_are_named(rank: Rank) -> None:
    sizes = (2 * MIB2, 0)
    text = "differs: rank 0 gives 4194304 bytes, rank 1 0"
    with pytest.raises(InvalidArgumentError, match=text):
        elastic_cases.make_buffer(rank, EPBuffer, lb_allocation_plan_or_num_bytes=sizes[rank.rank])


# --- copies and gradients ---


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_weights_go_to_copies_and_gradients_come_back(num_ranks: int) -> None:
    run_threads(num_ranks, cases.rounds, "cpu", 6, num_ranks)


def test_within_nodes_experts_are_numbered_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "find_ranks_per_node", lambda *_: 2)
    run_threads(4, cases.rounds, "cpu", 4, 2)


def test_gradients_are_added_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "_STAGED_BYTES", 64)  # a row has 160
    run_threads(2, cases.rounds, "cpu", 4, 2)


def beside_dispatches(rank: Rank) -> None:
    """Copies under way while tokens are dispatched; a call begins behind the one before it."""
    buffer, weights, grads = make(rank)
    experts = [torch.full((LOCAL, 48), rank.rank + 1, dtype=torch.int8)]
    mapping = torch.tensor([[LOCAL, -1], [0, 1]], dtype=torch.int32)
    own = torch.zeros(LOCAL, WIDTH)
    grads.fill_(1.0)
    events = [
        buffer.lb_prefetch_weights(weights[0], experts, mapping),
        buffer.lb_reduce_grads(grads, own, mapping),
        buffer.lb_reduce_grads(grads, own, mapping),
    ]
    elastic_cases.any_order(elastic_cases.Place(rank, "cpu", buffer))
    for event in reversed(events):
        event.current_stream_wait()
        event.event.synchronize()
    got = weights[0].view(torch.int8).view(SLOTS, 48)
    assert (got[0] == (2, 1)[rank.rank]).all()
    wanted = ([2.0, 2.0, 0.0], [2.0, 0.0, 0.0])[rank.rank]
    assert own[:, 0].tolist() == wanted
    buffer.destroy()


def test_copies_beside_dispatches_in_the_order_of_the_calls() -> None:
    run_threads(2, beside_dispatches)


def in_a_process(rank: Rank) -> None:
    cases.rounds(rank, "cpu", 3, rank.world_size)


def test_between_processes() -> None:
    run_processes(2, in_a_process)


# --- what is wrong ---


@on_ranks(1)
def test_arguments_are_refused_by_name(rank: Rank) -> None:
    buffer, weights, grads = make(rank)
    mapping = torch.tensor([[0, -1]], dtype=torch.int32)
    experts = torch.zeros(LOCAL, 48, dtype=torch.int8)
    own = torch.zeros(LOCAL, WIDTH)

    def refused(text: str, call: Callable[..., Any], *arguments: Any, **more: Any) -> None:
        with pytest.raises(InvalidArgumentError, match=text):
            call(*arguments, **more)

    def prefetch(text: str, one: Any, other: Any, table: Any = mapping, **more: Any) -> None:
        refused(text, buffer.lb_prefetch_weights, one, other, table, **more)

    slots, other = weights
    prefetch("redundant_expert_weights is empty", [], [])
    prefetch("redundant_expert_weights is None, must be a torch.Tensor, or several", None, experts)
    prefetch(r"expert_weights\[0\] is None, must be a torch.Tensor", slots, [None])
    prefetch("are 1 tensors and expert_weights 2, must be as many", slots, [experts, experts])
    prefetch("is not in the buffer's region: take it from the plan", slots.clone(), experts)
    prefetch("has 48 bytes an expert, and expert_weights 96", slots, experts.short())
    prefetch("must be contiguous, on cpu", slots, experts[:, ::2])
    prefetch("dim 0 must be 3 and no other 0", [slots, other], [experts, other[:2]])
    prefetch(r"must be contiguous", slots, torch.tensor(1.0))
    wrong = {
        "2 dims": mapping[0],
        "int64": mapping.long(),
        "rows": mapping.expand(2, 2),
    }
    for table in wrong.values():
        prefetch(
            r"redundancy_mapping is .*, must be int32 .1, slots.: a row for ea",
            slots,
            experts,
            table,
        )
    prefetch("redundancy_mapping is None", slots, experts, None)
    prefetch("dim 0 must be 1 and", slots, experts, mapping[:, :1])
    prefetch("num_sms is -1", slots, experts, num_sms=-1)
    reduce = buffer.lb_reduce_grads
    refused(
        "redundant_expert_grads is .2, 4, 6. torch.bfloat16, must be float32",
        reduce,
        slots,
        own,
        mapping,
    )
    refused(
        "expert_grads is .3, 40. torch.float64, must be float32",
        reduce,
        grads,
        own.double(),
        mapping,
    )
    refused("expert_grads is None", reduce, grads, None, mapping)
    for number in (-2, LOCAL):
        event = reduce(grads, own, mapping.clone().fill_(number))
        with pytest.raises(
            InvalidArgumentError, match=rf"mapping.0, 0. is {number}, must be -1, f"
        ):
            event.current_stream_wait()
    buffer.lb_reduce_grads(grads, own, mapping).wait()  # usable after what was refused
    buffer.destroy()
    with pytest.raises(ClosedError, match="lb_reduce_grads: the buffer was destroyed"):
        reduce(grads, own, mapping)
    without = elastic_cases.make_buffer(rank, EPBuffer)
    refused("has no region for copies of experts", without.lb_reduce_grads, grads, own, mapping)
    without.destroy()


def unlike(rank: Rank) -> None:
    buffer, weights, grads = make(rank)
    own = torch.zeros(LOCAL, WIDTH)
    mappings = [torch.tensor([[3, -1], [0, each]], dtype=torch.int32) for each in (1, 2)]
    event = buffer.lb_reduce_grads(grads, own, mappings[rank.rank])
    with pytest.raises(ProtocolError, match="the node's ranks 0 and 1 make another call, or with"):
        event.wait()
    experts = torch.zeros(LOCAL, 48, dtype=torch.int8)
    if rank.rank:
        event = buffer.lb_reduce_grads(grads, own, mappings[0])
    else:
        event = buffer.lb_prefetch_weights(weights[0], experts, mappings[0])
    with pytest.raises(ProtocolError, match="make another call"):
        event.wait()
    assert not own.any()
    cases.prefetch(rank, (buffer, weights, grads), "cpu", 1, 0, 2)  # usable
    buffer.destroy()


def test_unlike_calls_are_refused_on_all_ranks() -> None:
    run_threads(2, unlike)


def fails_at_one(rank: Rank) -> None:
    buffer, weights, grads = make(rank)
    mapping = torch.tensor([[3, -1], [0, 1]], dtype=torch.int32)
    experts = torch.zeros(LOCAL, 48, dtype=torch.int8)
    engine = buffer._balancer._engine
    write = engine.write
    if rank.rank:

        def fail(*_: Any, **__: Any) -> None:
            raise errors_make()

        engine.write = fail
    event = buffer.lb_prefetch_weights(weights[0], experts, mapping)
    kind, text = (AbortedError, "failed at the node's rank 1") if rank.rank == 0 else (
        TimeoutError, "slow")  # fmt: skip
    with pytest.raises(kind, match=text):
        event.wait()
    engine.write = write
    cases.prefetch(rank, (buffer, weights, grads), "cpu", 1, 0, 2)
    buffer.destroy()


def errors_make() -> TimeoutError:
    return TimeoutError("moe_p2p [timeout] slow")


def test_what_fails_at_one_rank_is_an_error_at_all() -> None:
    run_threads(2, fails_at_one)


def alone(rank: Rank) -> None:
    buffer, _, grads = make(rank, num_gpu_timeout_secs=1.0)
    own = torch.zeros(LOCAL, WIDTH)
    mapping = torch.full((2, SLOTS), -1, dtype=torch.int32)
    if rank.rank == 0:
        for kind, text in (
            (TimeoutError, "lb_reduce_grads: rank 0, the node's rank 0: .*ranks .1. did not vote"),
            (AbortedError, "ranks .1. did not vote in 1 s"),
        ):
            with pytest.raises(kind, match=text):
                buffer.lb_reduce_grads(grads, own, mapping).wait()
    rank.store.set(f"done {rank.rank}", "")
    rank.store.wait(["done 0"])


def test_a_rank_that_makes_no_call_is_named_at_the_deadline() -> None:
    run_threads(2, alone)


def killed(rank: Rank) -> None:
    buffer, _, grads = make(rank)
    own = torch.zeros(LOCAL, WIDTH)
    if rank.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    mapping = torch.full((2, SLOTS), -1, dtype=torch.int32)
    with pytest.raises(PeerDeadError, match="the process of rank 1 has ended"):
        buffer.lb_reduce_grads(grads, own, mapping).wait()


def test_a_killed_rank_is_named_at_once() -> None:
    first, second = run_processes(2, killed, return_errors=True)
    assert first is None
    assert isinstance(second, DiedError)
