"""Weights that combine is given, bias, and how long combine waited, on CPU ranks.

What combine makes of weights that dispatch did not know is, bit for bit, what it makes of those
that it did: the reference has one answer for both. Every case runs several steps with changing
counts, some of which have no late weights: one step cannot see stale slots.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_p2p import AllToAll, CombineOptions, Dispatched, InvalidArgumentError, TimeoutError
from moe_p2p.moe.reference import Tokens, Topology
from tests.support import cases
from tests.support.cases import TOPK, Wanted
from tests.support.ranks import Rank, on_ranks, run_processes, run_threads

GROUPS = [(1, 1), (2, 2), (2, 1), (3, 1), (4, 2), (4, 1), (4, 4)]
COUNTS = [[5, 3, 0, 12], [0] * 4, [12] * 4, [0, 0, 9, 0], [1, 2, 3, 4], [7, 0, 12, 1]]
NUM_EXPERTS = 12


def wanted_steps(world_size: int, ranks_per_node: int, **options: Any) -> list[Wanted]:
    topology = Topology(
        world_size=world_size, ranks_per_node=ranks_per_node, num_experts=NUM_EXPERTS
    )
    dtype = options.pop("dtype", torch.float32)
    num_tokens = options.pop("num_tokens", 12)

    def tokens(seed: int, rank: int, count: int) -> Tokens:
        made = cases.make_tokens(seed, rank, count, dtype=dtype, num_experts=NUM_EXPERTS)
        return replace(made, num_tokens=min(count, num_tokens))

    return [
        cases.expect(
            topology,
            [tokens(seed, rank, counts[rank]) for rank in range(world_size)],
            max_tokens=12,
            **options,
        )
        for seed, counts in enumerate(COUNTS)
    ]


def late_dispatch(comm: AllToAll, wanted: Wanted) -> dict[str, Any]:
    return cases.dispatch_arguments(comm, wanted) | {"topk_weights": None}


def late_halves(comm: AllToAll, pair: Sequence[Wanted]) -> list[Tensor]:
    """Sums of steps in flight together, in halves."""
    given = [late_dispatch(comm, step) for step in pair]
    sent = [comm.dispatch_send(**arguments) for arguments in given]
    got = [comm.dispatch_recv(pending) for pending in sent]
    back = [late_combine(comm, step, g) for step, g in zip(pair, got, strict=True)]
    combining = [comm.combine_send(**arguments) for arguments in back]
    return [comm.combine_recv(pending) for pending in combining]


def late_combine(comm: AllToAll, wanted: Wanted, got: Dispatched) -> dict[str, Any]:
    weights = cases.on_device(comm, wanted.tokens[comm.rank].topk_weights)
    return cases.combine_arguments(comm, wanted) | {"dispatched": got, "topk_weights": weights}


def run_late(comm: AllToAll, wanted: Wanted) -> None:
    got = comm.dispatch(**late_dispatch(comm, wanted))
    out = comm.combine(**late_combine(comm, wanted, got))
    assert torch.equal(out, wanted.out[comm.rank])


def mixed_steps(rank: Rank, wanted: list[Wanted], config: dict[str, Any]) -> None:
    with cases.make(rank, num_experts=NUM_EXPERTS, **config) as comm:
        for i, step in enumerate([*wanted, *wanted[::-1]]):
            if i % 3 == 2:
                cases.run_step(
                    comm, step
                )  # no late weights: the slot's next ones must not be taken for it
            else:
                run_late(comm, step)
        assert comm.broken == ""


@pytest.mark.parametrize(("world_size", "ranks_per_node"), GROUPS)
@pytest.mark.parametrize("layout", ["padded", "grouped"])
def test_late_weights_are_as_good_as_early_ones(
    world_size: int, ranks_per_node: int, layout: str
) -> None:
    wanted = wanted_steps(world_size, ranks_per_node, layout=layout)
    run_threads(world_size, mixed_steps, wanted, {"ranks_per_node": ranks_per_node})


@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("steps_in_flight", [2, 3])
def test_late_weights_of_several_chunks(
    world_size: int, ranks_per_node: int, steps_in_flight: int
) -> None:
    wanted = wanted_steps(world_size, ranks_per_node, layout="grouped")
    config = {"chunk_tokens": 3, "steps_in_flight": steps_in_flight}
    run_threads(world_size, mixed_steps, wanted, config | {"ranks_per_node": ranks_per_node})


def test_late_weights_over_many_nics_and_a_hostile_network() -> None:
    config = {"ranks_per_node": 1, "nics_per_rank": 3, "transport_settings": "seed=7"}
    wanted = wanted_steps(3, 1, dtype=torch.bfloat16)
    run_threads(3, mixed_steps, wanted, config | {"dtype": torch.bfloat16})


def test_late_weights_between_processes() -> None:
    run_processes(4, mixed_steps, wanted_steps(4, 2), {"ranks_per_node": 2})


@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(2, 2), (2, 1), (4, 2)])
def test_late_weights_in_halves_of_two_steps_in_flight(
    world_size: int, ranks_per_node: int
) -> None:
    wanted = wanted_steps(world_size, ranks_per_node)

    def body(rank: Rank) -> None:
        with cases.make(rank, num_experts=NUM_EXPERTS, ranks_per_node=ranks_per_node) as comm:
            for pair in zip(wanted[::2], wanted[1::2], strict=True):
                sent = [comm.dispatch_send(**late_dispatch(comm, step)) for step in pair]
                got = [comm.dispatch_recv(pending) for pending in sent]
                combining = [
                    comm.combine_send(**late_combine(comm, step, g))
                    for step, g in zip(pair, got, strict=True)
                ]
                for step, pending in zip(pair, combining, strict=True):
                    assert torch.equal(comm.combine_recv(pending), step.out[rank.rank])

    run_threads(world_size, body)


def test_one_handle_takes_other_late_weights_each_time() -> None:
    wanted = wanted_steps(4, 2)[0]

    def body(rank: Rank) -> None:
        with cases.make(rank, num_experts=NUM_EXPERTS, ranks_per_node=2) as comm:
            got = comm.dispatch(**cases.dispatch_arguments(comm, wanted))
            late = late_combine(comm, wanted, got)
            for factor in (1.0, 0.5, 0.0):  # the first closes the step, the others open their own
                out = comm.combine(**late | {"topk_weights": late["topk_weights"] * factor})
                # A power of two scales every product and sum exactly.
                assert torch.equal(out, wanted.out[rank.rank] * factor)
            assert torch.equal(
                comm.combine(dispatched=got, **cases.combine_arguments(comm, wanted)),
                wanted.out[rank.rank],
            )

    run_threads(4, body)


@on_ranks(2)
def test_rows_past_num_tokens_have_no_weight(rank: Rank) -> None:
    with cases.make(rank, num_experts=NUM_EXPERTS, ranks_per_node=1) as comm:
        tokens = [
            replace(cases.make_tokens(3, r, 9, num_experts=NUM_EXPERTS), num_tokens=4 + r)
            for r in range(2)
        ]
        wanted = cases.expect(cases.topology_of(comm), tokens, max_tokens=12)
        weights = tokens[rank.rank].topk_weights
        assert weights is not None
        weights[4 + rank.rank :] = float("nan")
        run_late(comm, wanted)


# --- what is refused, and what is missed ---------------------------------------------------------


def refused(comm: AllToAll, got: Dispatched, tokens: Any) -> None:
    weights = tokens.topk_weights
    y = got.x.clone()
    with pytest.raises(InvalidArgumentError, match="topk_weights"):
        comm.combine(y, got, topk_weights=weights[:-1])
    with pytest.raises(InvalidArgumentError, match="topk_weights"):
        comm.combine(y, got, topk_weights=weights.double())
    with pytest.raises(InvalidArgumentError, match="not differentiable"):
        comm.combine(y.requires_grad_(), got, topk_weights=weights)


@on_ranks(2)
def test_late_weights_that_do_not_fit_are_refused_before_anything_is_sent(rank: Rank) -> None:
    with cases.make(rank, ranks_per_node=1) as comm:
        tokens = cases.make_tokens(0, rank.rank, 6)
        got = comm.dispatch(tokens.x, tokens.topk_idx)
        refused(comm, got, tokens)
        comm.combine(got.x, got, topk_weights=tokens.topk_weights)


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_weights_that_do_not_come_are_missed_by_name(ranks_per_node: int) -> None:
    def body(rank: Rank) -> str:
        timeout_s = 1.0 if rank.rank == 0 else 20.0
        with cases.make(rank, ranks_per_node=ranks_per_node, timeout_s=timeout_s) as comm:
            tokens = cases.make_tokens(0, rank.rank, 6)
            got = comm.dispatch(tokens.x, tokens.topk_idx)
            if rank.rank == 0:
                with pytest.raises(TimeoutError) as raised:
                    comm.combine(got.x, got, topk_weights=tokens.topk_weights)
                rank.store.set("reported", str(raised.value))
            rank.store.wait(["reported"])
            return str(rank.store.get("reported"), "utf-8")

    reported, _ = run_threads(2, body)
    assert "late weights of step 0 waits for rank 1" in reported


# --- bias ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_biases", [1, 2])
def test_bias_is_the_first_addend(ranks_per_node: int, dtype: torch.dtype, num_biases: int) -> None:
    steps = wanted_steps(4, ranks_per_node, dtype=dtype, num_tokens=5)

    def body(rank: Rank) -> None:
        config = {"num_experts": NUM_EXPERTS, "ranks_per_node": ranks_per_node, "dtype": dtype}
        with cases.make(rank, **config) as comm:
            for wanted in steps:
                bias = cases.biases_of(rank.rank, wanted.out[rank.rank], num_biases)
                given = bias[0] if num_biases == 1 else (bias[0], bias[1])
                got = comm.dispatch(**cases.dispatch_arguments(comm, wanted))
                back = cases.combine_arguments(comm, wanted) | {"dispatched": got}
                out = comm.combine(**back, bias=given)
                want = cases.sums_of(cases.topology_of(comm), wanted, num_biases)[rank.rank]
                assert torch.equal(out, want)
                # Rows that do not count have nothing but bias.
                rest = sum((b[5:].float() for b in bias), torch.zeros_like(want[5:]).float())
                assert torch.equal(out[5:], rest.to(dtype))

    run_threads(4, body)


def test_bias_goes_with_halves_and_late_weights_and_not_into_scalars() -> None:
    wanted = wanted_steps(4, 2)[0]

    def body(rank: Rank) -> None:
        with cases.make(rank, num_experts=NUM_EXPERTS, ranks_per_node=2) as comm:
            got = comm.dispatch(**late_dispatch(comm, wanted))
            late = late_combine(comm, wanted, got)
            pending = comm.combine_send(**late, row_scalars=torch.ones_like(got.row_weights))
            first, second = cases.biases_of(rank.rank, wanted.out[rank.rank], 2)
            out, ones = comm.combine_recv(pending, bias=(first, second))
            assert torch.equal(out, cases.sums_of(cases.topology_of(comm), wanted, 2)[rank.rank])
            assert torch.equal(ones, (wanted.tokens[rank.rank].topk_idx >= 0).float())

    run_threads(4, body)


# --- how long it waited --------------------------------------------------------------------------


def waits_of_a_late_rank(rank: Rank, ranks_per_node: int, halves: bool) -> bool:
    """Whether, in one of a few tries, the others saw that they waited for rank 1 and how long."""
    late_s, tries, seen = 0.02, 20, False
    with cases.make(rank, num_experts=NUM_EXPERTS, ranks_per_node=ranks_per_node) as comm:
        tokens = cases.make_tokens(0, rank.rank, 5, num_experts=NUM_EXPERTS)
        for _ in range(tries):  # a machine that is busy may wake the others after rank 1
            got = comm.dispatch(tokens.x, tokens.topk_idx)
            if rank.rank == 1:
                time.sleep(late_s)  # is what the others wait for
            began = time.monotonic_ns()
            if halves:
                _, ticks = comm.combine_recv(comm.combine_send(got.x, got), with_wait_ticks=True)
            else:
                _, ticks = comm.combine(got.x, got, options=CombineOptions(with_wait_ticks=True))
            took = time.monotonic_ns() - began
            assert (ticks.shape, ticks.dtype) == ((3,), torch.int64)
            assert int(ticks.min()) >= 0
            assert int(ticks.max()) <= took
            seen = seen or (int(ticks.argmax()) == 1 and int(ticks[1]) >= late_s / 2 * 1e9)
    return seen


@pytest.mark.parametrize("ranks_per_node", [1, 3])
@pytest.mark.parametrize("halves", [False, True])
def test_combine_reports_the_sources_it_waited_for(ranks_per_node: int, halves: bool) -> None:
    first, _, third = run_threads(3, waits_of_a_late_rank, ranks_per_node, halves)
    assert first
    assert third


@on_ranks(2)
def test_sizes_of_weights_are_in_the_plan(rank: Rank) -> None:
    with cases.make(rank, ranks_per_node=1, max_tokens=12) as comm:
        plan = comm.config.plan(world_size=2, ranks_per_node=1)
        # Two steps; a header, then K tagged floats of 12 tokens, in lines of 128 bytes.
        assert plan["weights_outbox"] == 2 * (128 + -(-12 * TOPK * 8 // 128) * 128)
