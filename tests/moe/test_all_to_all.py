"""Dispatch and combine between ranks, compared with the reference bit for bit.

Ranks are threads of this process but where processes are the point. Every case runs several steps
with changing token counts: one step cannot see stale slots.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moe_p2p
from moe_p2p import AllToAll, AllToAllConfig, DispatchOptions, Engine, EngineConfig
from moe_p2p.moe import reference
from tests.support import cases
from tests.support.cases import GROUPS, HIDDEN_DIM, LAYOUTS, TOPK
from tests.support.ranks import Rank, on_ranks, run_processes, run_threads


@pytest.mark.parametrize(("world_size", "ranks_per_node"), GROUPS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_matches_the_reference(world_size: int, ranks_per_node: int, layout: str) -> None:
    config = {"ranks_per_node": ranks_per_node, "num_experts": max(4, 2 * world_size)}
    options = {"layout": layout, "with_ranges": layout == "padded"}
    run_threads(world_size, cases.run_steps, config, options)


@pytest.mark.parametrize("kind", ["int", "int32", "int64"])
@on_ranks(2)
def test_counts_only_the_first_rows(rank: Rank, kind: str) -> None:
    with cases.make(rank) as comm:
        full = [cases.make_tokens(3, r, 9) for r in range(2)]
        count = 4 + rank.rank
        given: Any = count
        if kind != "int":
            given = torch.tensor([count], dtype=getattr(torch, kind))
        mine = full[rank.rank]
        received = comm.dispatch(mine.x, mine.topk_idx.int(), mine.topk_weights, num_tokens=given)
        out = comm.combine(received.x, received)
        counted = [replace(t, num_tokens=4 + r) for r, t in enumerate(full)]
        routing = reference.route(cases.topology_of(comm), counted, max_tokens=12)
        rows = [reference.dispatch(routing, r) for r in range(2)]
        assert torch.equal(received.counts, rows[rank.rank].counts)
        want = reference.combine(routing, rank.rank, [r.x for r in rows], out_dtype=torch.float32)
        assert torch.equal(out, want)
        assert not out[count:].any()


@pytest.mark.parametrize("layout", ["grouped", "by_rank"])
def test_long_calls_run_in_chunks(layout: str) -> None:
    config = {"ranks_per_node": 2, "chunk_tokens": 3, "max_tokens": 12}
    run_threads(4, cases.run_steps, config, {"layout": layout})


def test_what_a_step_sends_leaves_in_parts() -> None:
    """Of at least so many bytes, and in no more than four."""

    def count_writes(rank: Rank, part_bytes: int) -> int:
        with Engine(EngineConfig(transport="loopback", nics_per_rank=1)) as engine:
            with cases.make(rank, engine=engine, ranks_per_node=1, part_bytes=part_bytes) as comm:
                cases.check_step(comm, [cases.make_tokens(2, r, 12) for r in range(2)])
            return sum(nic["writes"] for nic in engine.counters())  # closing waits for them

    def body(rank: Rank) -> list[int]:
        return [count_writes(rank, part_bytes) for part_bytes in (0, 1, 1 << 20)]

    for counted in run_threads(2, body):
        for writes, of_the_step in zip(counted, [2, 8, 2], strict=True):  # dispatch and combine
            # Whoever closes first says farewell, the other one need not.
            assert of_the_step <= writes <= of_the_step + 1


@pytest.mark.parametrize(("ranks_per_node", "part_bytes"), [(1, 1), (2, 1), (2, 500)])
def test_parts_change_no_result(ranks_per_node: int, part_bytes: int) -> None:
    config = {"ranks_per_node": ranks_per_node, "part_bytes": part_bytes, "max_tokens": 12}
    run_threads(4, cases.run_steps, config | {"transport_settings": "seed=3"}, {})
    run_threads(4, cases.run_steps, config | {"chunk_tokens": 5}, {"layout": "grouped"})


@pytest.mark.parametrize("layout", ["grouped", "by_rank"])
def test_experts_may_be_anywhere(layout: str) -> None:
    config = {
        "ranks_per_node": 1,
        "num_experts": 7,
        "topk": TOPK,
        "expert_rank": (2, 0, 0, 2, 0, 2, 0),
    }
    run_threads(3, cases.run_steps, config, {"layout": layout})


def test_one_configuration_many_nics_and_a_hostile_network() -> None:
    config = {"ranks_per_node": 1, "nics_per_rank": 3, "transport_settings": "seed=11"}
    run_threads(3, cases.run_steps, config | {"num_experts": 6}, {})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_halves_have_all_that_the_whole_call_has(layout: str) -> None:
    config = {"dtype": torch.bfloat16, "ranks_per_node": 1, "extra_bytes": 16}
    options = {"layout": layout, "quantize": True, "scale_format": "ue8m0", "column_scales": True}

    def body(rank: Rank) -> None:
        with cases.make(rank, **config) as comm:
            reused = None
            for seed in range(3):
                tokens = []
                for r in range(2):
                    t = cases.make_tokens(seed, r, 3 + seed + r, dtype=torch.bfloat16)
                    number = torch.arange(t.x.shape[0]).reshape(-1, 1) + 100 * r
                    tokens.append(replace(t, topk_idx=t.topk_idx.int(), extras=(number,)))
                wanted = cases.expect(cases.topology_of(comm), tokens, max_tokens=12, **options)
                sent = comm.dispatch_send(
                    **cases.dispatch_arguments(
                        comm, wanted, with_ranges=layout == "padded", with_wait_ticks=True
                    )
                )
                reused = comm.dispatch_recv(sent, out=reused)
                cases.assert_received(reused, wanted.received[rank.rank])
                assert reused.wait_ticks is not None
                assert bool((reused.wait_ticks >= 0).all())
                pending = comm.combine_send(
                    dispatched=reused, **cases.combine_arguments(comm, wanted)
                )
                out = comm.combine_recv(pending)
                assert isinstance(out, torch.Tensor)
                assert torch.equal(out, wanted.out[rank.rank])

    run_threads(2, body)


@pytest.mark.parametrize("halves", [False, True])
@on_ranks(2)
def test_topk_may_be_written_over_once_it_is_copied(rank: Rank, halves: bool) -> None:
    with cases.make(rank, ranks_per_node=1) as comm:
        tokens = [cases.make_tokens(0, r, 5 + r) for r in range(2)]
        wanted = cases.expect(cases.topology_of(comm), tokens, max_tokens=12)
        mine = tokens[rank.rank]
        given = cases.dispatch_arguments(comm, wanted, copy_topk=True)
        given["topk_idx"] = mine.topk_idx.clone()
        if halves:
            received = comm.dispatch_recv(comm.dispatch_send(**given))
        else:
            received = comm.dispatch(**given)
        given["topk_idx"].fill_(-1)
        assert torch.equal(received.topk_idx, mine.topk_idx)
        late = {"topk_weights": mine.topk_weights}  # by the experts of topk_idx
        out = comm.combine(dispatched=received, **late, **cases.combine_arguments(comm, wanted))
        assert torch.equal(out, wanted.out[rank.rank])


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_sums_go_into_a_tensor_of_the_caller(rank: Rank, layout: str) -> None:
    with cases.make(rank, ranks_per_node=1) as comm:
        for seed in range(3):
            tokens = [cases.make_tokens(seed, r, 3 + seed + r) for r in range(2)]
            wanted = cases.expect(cases.topology_of(comm), tokens, max_tokens=12, layout=layout)
            received = comm.dispatch(**cases.dispatch_arguments(comm, wanted))
            memory = torch.full((20, HIDDEN_DIM), 7.0)
            out = memory[2 : 2 + 3 + seed + rank.rank]
            sums, ticks = comm.combine(
                dispatched=received,
                **cases.combine_arguments(comm, wanted, with_wait_ticks=True),
                out=out,
            )
            assert sums is out
            assert torch.equal(out, wanted.out[rank.rank])
            assert bool((memory[:2] == 7).all())
            assert bool((memory[2 + len(out) :] == 7).all())
            assert ticks.shape == (2,)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("transport", "loopback"),
        ("nics_per_rank", 2),
        ("nics", "mlx5_0"),
        ("transport_settings", "seed=1"),
        ("transport_settings", "proxy_cpu=0"),
    ],
)
def test_what_an_engine_has_is_refused_beside_it(name: str, value: object) -> None:
    rank = Rank(0, 1, torch.distributed.HashStore())
    with Engine(EngineConfig(transport="loopback")) as engine:
        with pytest.raises(moe_p2p.InvalidArgumentError, match=f"{name} is .*an engine is given"):
            cases.make(rank, engine=engine, **{name: value})
        cases.make(rank, engine=engine, timeout_s=5.0, wait="yield").close()


@on_ranks(2)
def test_ranks_may_pin_their_threads_to_different_cores(rank: Rank) -> None:
    settings = "seed=1" + (",proxy_cpu=0" if rank.rank else "")
    cases.make(rank, ranks_per_node=1, transport_settings=settings).close()


def test_reports_how_long_it_waited_for_each_source() -> None:
    late = threading.Event()

    def body(rank: Rank) -> None:
        with cases.make(rank) as comm:
            t = cases.make_tokens(1, rank.rank, 4)
            if rank.rank == 1:
                assert late.wait(20)
            if rank.rank == 0:
                sent = comm.dispatch_send(t.x, t.topk_idx, **cases.in_options(with_wait_ticks=True))
                threading.Timer(0.2, late.set).start()
                began = time.monotonic_ns()
                received = comm.dispatch_recv(sent)
                took = time.monotonic_ns() - began
                assert received.wait_ticks is not None
                own, other = received.wait_ticks.tolist()
                assert own == 0 < other <= took
            else:
                received = comm.dispatch(t.x, t.topk_idx)
            comm.combine(received.x, received)

    run_threads(2, body)


@on_ranks(2)
def test_halves_of_two_batches_overlap(rank: Rank) -> None:
    with cases.make(rank, ranks_per_node=1) as comm:
        topology = cases.topology_of(comm)
        batches = [[cases.make_tokens(s, r, 6 + s) for r in range(2)] for s in range(2)]
        reused = None
        for _ in range(3):
            pending = []
            for batch in batches:
                t = batch[rank.rank]
                pending.append(comm.dispatch_send(t.x, t.topk_idx, t.topk_weights))
            combining = []
            for p in pending:
                received = comm.dispatch_recv(p, out=reused)
                y = received.x * 2
                combining.append(comm.combine_send(y, received))
                reused = received
            for batch, c in zip(batches, combining, strict=True):
                routing = reference.route(topology, batch, max_tokens=12)
                y_all = [reference.dispatch(routing, r).x * 2 for r in range(2)]
                want = reference.combine(routing, rank.rank, y_all, out_dtype=torch.float32)
                assert torch.equal(comm.combine_recv(c), want)


@on_ranks(2)
def test_a_dispatch_without_combine_is_released(rank: Rank) -> None:
    with cases.make(rank, ranks_per_node=1) as comm:
        t = cases.make_tokens(0, rank.rank, 5)
        for step in range(6):
            if step % 2:
                comm.release(comm.dispatch_send(t.x, t.topk_idx))
            else:
                comm.release(comm.dispatch(t.x, t.topk_idx))
        cases.steps(comm)


@on_ranks(2)
def test_one_handle_serves_several_combines(rank: Rank) -> None:
    with cases.make(rank, ranks_per_node=1) as comm:
        t = cases.make_tokens(2, rank.rank, 7)
        received = comm.dispatch(t.x, t.topk_idx, t.topk_weights)
        first = comm.combine(received.x, received)
        assert torch.equal(comm.combine(received.x, received), first)
        cases.steps(comm)


@on_ranks(2)
def test_two_communicators_share_an_engine(rank: Rank) -> None:
    with Engine(
        EngineConfig(transport="loopback", nics_per_rank=2), label=f"shared {rank.rank}"
    ) as engine:
        comms = [cases.make(rank, ranks_per_node=1, engine=engine) for _ in range(2)]
        for comm in comms:
            cases.steps(comm)
        comms[0].close()
        cases.steps(comms[1])
        comms[1].close()
        written = sum(nic["bytes_written"] for nic in engine.counters())
        assert written > 0


def test_counts_what_its_nics_wrote() -> None:
    def body(rank: Rank) -> list[moe_p2p.engine.transfers.NicCounters]:
        with cases.make(rank, ranks_per_node=2) as comm:
            cases.steps(comm)
            return comm.counters()

    # One node: nothing crosses a NIC.
    for counters in run_threads(2, body):
        assert [nic["bytes_written"] for nic in counters] == [0, 0]


@on_ranks(2)
def test_repr_names_rank_node_and_state(rank: Rank) -> None:
    comm = cases.make(rank)
    assert repr(comm) == (
        f"AllToAll(rank {rank.rank} of 2, 2 per node, 4 of 8 experts here, usable)"
    )
    comm.close()
    comm.close()
    assert "closed" in repr(comm)
    assert comm.closed


def test_an_error_is_not_hidden_by_a_close_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    close = Engine.close

    def fail(engine: Engine) -> None:
        close(engine)
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(Engine, "close", fail)
    config = AllToAllConfig(num_experts=8, hidden_dim=64, topk=2, max_tokens=4)
    alone: dict[str, Any] = {"rank": 0, "world_size": 1}
    with (
        pytest.warns(RuntimeWarning, match="closing .* failed too: the device is gone"),
        pytest.raises(ValueError, match="first"),
        AllToAll(dist.HashStore(), config, **alone),
    ):
        raise ValueError("first")
    with (
        pytest.raises(RuntimeError, match="the device is gone"),
        AllToAll(dist.HashStore(), config, **alone),
    ):
        pass


def test_plan_needs_no_ranks() -> None:
    config = AllToAllConfig(num_experts=256, hidden_dim=7168, topk=8, max_tokens=128)
    table = config.plan(world_size=8, ranks_per_node=8)
    assert table["outbox"] == 0
    assert table["inbox"] > 2 * 8 * 128 * 7168 * 2


def run_in_process_group(rank: Rank, config: dict[str, Any]) -> int:
    dist.init_process_group("gloo", store=rank.store, rank=rank.rank, world_size=rank.world_size)
    small = AllToAllConfig(**cases.SMALL, **config)
    # The default group, then halves of it: (0, 2) and (1, 3).
    with AllToAll(None, small) as comm:
        found = comm.ranks_per_node
        cases.steps(comm)
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    with AllToAll(groups[rank.rank % 2], small) as comm:
        assert (comm.rank, comm.world_size) == (rank.rank // 2, 2)
        cases.steps(comm)
    dist.destroy_process_group()
    return found


def test_processes_of_a_process_group() -> None:
    assert run_processes(4, run_in_process_group, {}) == [4] * 4


def test_processes_as_nodes_of_their_own() -> None:
    run_processes(
        3, cases.run_steps, {"ranks_per_node": 1, "num_experts": 6}, {"layout": "grouped"}
    )


@on_ranks(2)
def test_combines_of_solo_dispatches_keep_their_own_sums(rank: Rank) -> None:
    """Their handles name no step, so one combine once took the place of the other."""
    with cases.make(rank) as comm:
        step = [cases.make_tokens(5, r, 6) for r in range(2)][rank.rank]
        given = (step.topk_idx.int(), step.topk_weights)
        solo = DispatchOptions(solo=True)
        both = (step.x, 2 * step.x)
        received = [comm.dispatch(x, *given, options=solo) for x in both]
        sums = [comm.combine(one.x, one).clone() for one in received]
        assert not sums[0].equal(sums[1])
        pending = [comm.combine_send(one.x, one) for one in received]
        for sent, right in zip(pending, sums, strict=True):
            assert comm.combine_recv(sent).equal(right)
