"""DeepEP's V2 calls, ElasticBuffer, on ranks of the CPU, which are threads, against plain torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_p2p import AllToAllConfig, AllToAllPool
from moe_p2p.deep_ep import (
    ElasticBuffer,
    get_logical_domain_size,
    get_physical_domain_size,
)
from moe_p2p.deep_ep.elastic import usual_steps
from moe_p2p.moe import pool
from tests.support import elastic_cases as cases
from tests.support.deep_ep_oracle import Place, Shape, make_batches
from tests.support.elastic_cases import CALLS, SHAPE, Call
from tests.support.elastic_order import deep_ep_order
from tests.support.ranks import Rank, on_ranks, run_processes, run_threads


def run(num_ranks: int, check: Callable[..., None], *arguments: Any) -> None:
    def body(rank: Rank) -> None:
        place = Place(rank, "cpu", cases.make_buffer(rank))
        check(place, *arguments)
        place.buffer.destroy()

    run_threads(num_ranks, body)


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
@pytest.mark.parametrize("name", CALLS)
def test_rows_sums_and_handles(num_ranks: int, name: str) -> None:
    run(num_ranks, cases.steps, CALLS[name])


def test_what_is_asked_may_change_from_call_to_call() -> None:
    def all_calls(place: Place) -> None:
        for call in (*CALLS.values(), *CALLS.values()):
            cases.steps(place, call)

    run(2, all_calls)


@pytest.mark.parametrize("shape", [(2, 1), (4, 2)], ids=["2-nodes-of-1", "2-nodes-of-2"])
@pytest.mark.parametrize("name", ["rows by rank", "expanded, fp8, biases"])
def test_between_nodes(shape: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of this host as several nodes."""
    num_ranks, per_node = shape
    monkeypatch.setattr(pool, "find_ranks_per_node", lambda *_: per_node)
    run(num_ranks, cases.steps, CALLS[name])
    run(num_ranks, cases.any_order)


def test_sums_are_rounded_once_where_no_more_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    run(2, cases.one_rounding, True)
    monkeypatch.setattr(pool, "find_ranks_per_node", lambda *_: 2)
    run(4, cases.one_rounding, False)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("call", "allowed"),
    [
        (Call(do_expand=True), False),
        (Call(do_expand=True, do_cpu_sync=False, expert_alignment=8, num_bias=1), False),
        (Call(), False),
        (Call(num_bias=2), True),
        (Call(do_expand=True, num_bias=1), True),
    ],
)
def test_sums_are_in_deep_eps_order(num_ranks: int, call: Call, allowed: bool) -> None:
    run(num_ranks, deep_ep_order, call, allowed)


def stale_slots(place: Place) -> None:
    """A handle looks at no slot of another rank, where a GPU leaves what the memory held."""
    batches = make_batches(3, [12] * 4, SHAPE)
    call = Call(do_expand=True, do_cpu_sync=False)
    handle = cases.dispatch(place.buffer, batches[place.rank.rank], SHAPE, call)[3]
    cases.check_handle(handle, batches, place.rank.rank, SHAPE, call)
    wanted = handle.recv_src_metadata
    shape, words = handle.all_to_all._shape, handle.received.call.handle
    sizes = (16 + 4, 4 * shape.chunk_tokens * SHAPE.topk)  # words before rows, and of rows
    rows = words[sizes[0] : sum(sizes)].view(4, shape.chunk_tokens, SHAPE.topk)
    others = (rows == -1).all(2)
    others[place.rank.rank // 2 * 2 :][:2] = False  # the own node's
    assert others.any()
    rows[others] = 0
    for name in ("_token_rows", "recv_src_metadata", "psum_num_recv_tokens_per_scaleup_rank"):
        vars(handle).pop(name, None)
    count = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
    assert torch.equal(handle.recv_src_metadata[:count], wanted[:count])
    cases.check_handle(handle, batches, place.rank.rank, SHAPE, call)


def test_slots_of_other_ranks_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "find_ranks_per_node", lambda *_: 2)
    run(4, stale_slots)


@pytest.mark.parametrize("num_ranks", [5, 6, 7])
def test_in_worlds_that_deep_ep_refuses(num_ranks: int) -> None:
    shape = SHAPE._replace(num_experts=2 * num_ranks)
    for call in (Call(), Call(do_expand=True, do_cpu_sync=False)):
        run(num_ranks, cases.steps, call, shape, [[5, 3, 0, 12, 1, 0, 7]])


@pytest.mark.parametrize("call", [Call(do_cpu_sync=False), Call(do_expand=True)])
def test_many_experts_and_many_k(call: Call) -> None:
    run(2, cases.steps, call, Shape(896, 3584, 16, 6), [[6, 4]])


@pytest.mark.parametrize("call", [Call(), Call(do_expand=True, do_cpu_sync=False)])
def test_more_tokens_than_a_step_holds(call: Call) -> None:
    run(2, cases.steps, call, SHAPE._replace(max_tokens=40), [[40, 17], [0, 29]])


@pytest.mark.parametrize(
    "name", ["rows by rank", "rows by rank, no CPU sync", "expanded, fp8, biases"]
)
def test_a_handle_repeats_its_routing(name: str) -> None:
    run(3, cases.cached, CALLS[name])


@pytest.mark.parametrize("check", [cases.any_order, cases.own_routing, cases.zero_padding])
def test_handles_and_padding(check: Callable[[Place], None]) -> None:
    run(2, check)


@pytest.mark.parametrize("num_packs", [1, 3, 24])
@pytest.mark.parametrize("do_expand", [False, True])
def test_packs_of_any_width_by_columns(num_packs: int, do_expand: bool) -> None:
    run(2, cases.columns, num_packs, do_expand)


@pytest.mark.parametrize("do_expand", [False, True])
def test_repeats_give_the_same_bits(do_expand: bool) -> None:
    run(3, cases.repeats, do_expand)


def with_gloo(rank: Rank) -> None:
    dist.init_process_group("gloo", store=rank.store, rank=rank.rank, world_size=rank.world_size)
    group = dist.group.WORLD
    assert group is not None
    hint = ElasticBuffer.get_buffer_size_hint(group, 4096, 7168, num_topk=8)
    assert hint % (2 << 20) == 0
    tokens = 4096 if torch.cuda.is_available() else 512
    steps_of = 2 * rank.world_size * tokens * 2 * 2 * 7168  # both ways, two steps
    assert steps_of < hint < 1.2 * steps_of
    buffer = ElasticBuffer(
        group,
        num_max_tokens_per_rank=SHAPE.max_tokens,
        hidden=SHAPE.hidden_dim,
        num_topk=SHAPE.topk,
        explicitly_destroy=True,
    )
    assert 0 < buffer.num_bytes < hint
    assert buffer.get_physical_domain_size() == (1, rank.world_size)
    assert buffer.get_logical_domain_size() == (1, rank.world_size)
    assert (buffer.rank_idx, buffer.num_ranks) == (rank.rank, rank.world_size)
    assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks) == (1, rank.world_size)
    assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == (0, rank.rank)
    assert (buffer.num_rdma_ranks, buffer.num_nvlink_ranks) == (1, rank.world_size)
    assert buffer.num_max_tokens_per_rank == SHAPE.max_tokens
    assert buffer.group is group
    assert buffer.runtime is not None
    assert get_physical_domain_size(group) == get_logical_domain_size(group) == (1, 2)
    buffer.barrier()
    buffer.barrier(use_comm_stream=False, with_cpu_sync=True)
    batches = make_batches(1, [12, 8], SHAPE)
    result = cases.dispatch(buffer, batches[rank.rank], SHAPE, Call())
    y = cases.check_by_rank(result, batches, rank.rank, SHAPE, Call())
    cases.check_combine(buffer, y, result, batches[rank.rank], "cpu", Call())
    buffer.destroy()
    dist.destroy_process_group()


def test_processes_with_a_group_of_gloo() -> None:
    run_processes(2, with_gloo)


def test_without_num_bytes_a_call_is_one_step_as_far_as_memory_allows() -> None:
    """As users of DeepEP make their buffers; steps of 512 tokens made long calls a third slower."""
    made = AllToAllPool(dist.HashStore(), rank=0, world_size=1)
    job: dict[str, Any] = {"num_experts": 256, "hidden_dim": 7168, "topk": 8}
    config = AllToAllConfig(**job, max_tokens=1 << 24, chunk_tokens=512)
    wanted = [(1, 4096, 4096), (8, 4096, 4096), (64, 4096, 576), (1, 9000, 8192)]
    for ranks, tokens, steps in wanted:
        made.world_size = made.ranks_per_node = ranks
        chosen = usual_steps(made, config, tokens)
        assert chosen.step_tokens == steps
        assert sum(chosen.plan(world_size=ranks, ranks_per_node=ranks).values()) <= 2 << 30
    made.world_size = made.ranks_per_node = 64
    assert usual_steps(made, dataclasses.replace(config, hidden_dim=65536), 512).step_tokens == 512
    assert usual_steps(made, dataclasses.replace(config, chunk_tokens=100), 100).step_tokens == 100


@on_ranks(2)
def test_num_bytes_bounds_the_steps(rank: Rank) -> None:
    sizes = []
    for num_bytes in (2 << 20, 64 << 20):
        buffer = cases.make_buffer(rank, num_max_tokens_per_rank=512, num_bytes=num_bytes)
        batches = make_batches(1, [12, 8], SHAPE)
        handle = cases.dispatch(buffer, batches[rank.rank], SHAPE, Call())[3]
        config = handle.all_to_all.config
        regions = config.plan(world_size=2, ranks_per_node=2)
        assert sum(regions.values()) <= num_bytes
        sizes.append(config.step_tokens)
        buffer.destroy()
    assert sizes[0] < sizes[1] <= 512


@pytest.mark.parametrize("do_cpu_sync", [True, False])
def test_bounds_that_differ_are_named_at_the_first_call(do_cpu_sync: bool) -> None:
    bounds = (SHAPE.max_tokens, SHAPE.max_tokens - 1)

    def body(rank: Rank) -> None:
        buffer = cases.make_buffer(rank)
        mine = make_batches(1, [2, 2], SHAPE)[rank.rank]
        call = Call(do_cpu_sync=do_cpu_sync)
        cases.dispatch(buffer, mine, SHAPE, call, num_max_tokens_per_rank=bounds[rank.rank])

    results = run_threads(2, body, return_errors=True)
    assert any(
        f"max_tokens of rank {1 - rank}'s call is {bounds[1 - rank]}, of rank {rank}'s" in str(each)
        for rank in range(2)
        for each in results
    ), results


@on_ranks(1)
def test_what_is_refused(rank: Rank) -> None:
    buffer = cases.make_buffer(rank)
    mine = make_batches(1, [3], SHAPE)[0]
    handle = cases.dispatch(buffer, mine, SHAPE, Call())[3]
    with pytest.raises(AssertionError, match="give one of them"):
        cases.dispatch(buffer, mine, SHAPE, Call(), handle=handle, do_cpu_sync=None)
    with pytest.raises(AssertionError, match="no CPU sync"):
        buffer.dispatch(mine.x, handle=handle, do_cpu_sync=True)
    with pytest.raises(AssertionError, match="do_expand is True, the handle's is"):
        buffer.dispatch(mine.x, handle=handle, do_expand=True)
    for name, value in (("num_experts", 6), ("expert_alignment", 4)):
        with pytest.raises(AssertionError, match=f"{name} is {value}, the handle"):
            buffer.dispatch(mine.x, handle=handle, **{name: value})
    with pytest.raises(AssertionError, match="needs do_expand"):
        cases.dispatch(buffer, mine, SHAPE, Call(), do_zero_padding=True)
    with pytest.raises(NotImplementedError, match="engram_fetch"):
        buffer.engram_fetch(mine.topk_idx)
    buffer.destroy()
