"""Worlds that change on GPUs: every step is that of a world of its members, and a captured graph
goes on from epoch to epoch.

Ranks are processes, with a GPU each where there are as many; on the emulated GPU they are threads,
and who is lost makes no call any more.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch

import moe_p2p
from moe_p2p import AllToAll, CombineOptions, DispatchOptions
from tests.gpu.test_gpu_graphs import Inputs, doubled, record
from tests.support import gpu_ranks
from tests.support import world_cases as cases
from tests.support.cases import (
    assert_received,
    combine_arguments,
    expect,
    finish,
    make_tokens,
    on_cpu,
)
from tests.support.emulated_gpu import compute
from tests.support.gpu_ranks import DEADLINE_S, HIDDEN_DIM, LATER_S, MAX_TOKENS, World
from tests.support.mask_cases import (
    expect_without,
    given_by,
    last_step,
    masks_of,
    step,
    tokens_by,
)
from tests.support.programs import until
from tests.support.ranks import DiedError, Rank
from tests.support.world_cases import SEATS, together

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

EMULATED = "MOE_P2P_EMULATED_GPU" in os.environ
# Ranks of a node, and whether lost ranks are masked, or absent ones alone; nodes of several ranks
# come and go whole.
NODES: list[dict[str, Any]] = [
    {"per_node": 4},
    {"per_node": 1},
    {"per_node": 4, "mask_lost_ranks": False},
    {"per_node": 2, "mask_lost_ranks": False},
]
NAMES = ["4 a node", "1 a node", "4 a node, absent alone", "2 a node, absent alone"]
MASKS = NODES[:2]
LOST = ["drop", "poison"]


def world_of(fields: dict[str, Any]) -> World:
    return World(SEATS, fields["per_node"])


def begin(rank: Rank, seat: int, members: Iterable[int], **fields: Any) -> AllToAll:
    """One of `members`, or another one, which joins; with the kernels of mask_cases.step."""
    world = World(SEATS, fields.pop("per_node"))
    given = gpu_ranks.fields_of(world, timeout_s=DEADLINE_S) | fields
    comm = cases.begin(rank.store, seat, members, **given)
    assert comm._device is not None
    comm._device.prepare_dispatch(torch.float32, DispatchOptions(layout="by_rank").number)
    return comm


def run(ranks: int, body: Any, *arguments: Any, **options: Any) -> list[Any]:
    options |= {"processes": not EMULATED, "deadline_s": 350.0}
    return gpu_ranks.run(World(ranks, ranks), body, *arguments, **options)


def grow_and_shrink(rank: Rank, _: World, fields: dict[str, Any]) -> None:
    """2 -> 4 -> 2 -> 4: the last two come twice."""
    seat = rank.rank
    if seat < 2:
        comm = begin(rank, seat, [0, 1], **fields)
        cases.steps(comm, [0, 1])
    for time in range(2):
        if seat < 2:
            comm.update_members(add=[2, 3])
        else:
            comm = begin(rank, seat, [0, 1], **fields)
        cases.steps(comm, range(4), time)
        comm.update_members(remove=[2, 3])
        assert comm.closed == (seat >= 2)
        if seat < 2:
            cases.steps(comm, [0, 1], time)
    if seat < 2:
        comm.close()
    gpu_ranks.assert_device_usable()


@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize("fields", NODES, ids=NAMES)
def test_grows_and_shrinks(fields: dict[str, Any], lost: str) -> None:
    run(4, grow_and_shrink, fields | {"lost": lost})


class Replayed:
    """A graph of a pair, captured once and replayed in every epoch."""

    def __init__(self, rank: Rank, comm: AllToAll, world: World, name: str) -> None:
        self._rank, self._comm, self._world = rank, comm, world
        self._place = Inputs.make(MAX_TOKENS)
        assert comm._device is not None
        comm._device.prepare([(torch.bfloat16, 0, 0)], [(torch.bfloat16, torch.bfloat16, False, 0)])
        comm._device.prepare_dispatch(torch.bfloat16, DispatchOptions(layout="grouped").number)

        given: dict[str, Any] = self._place.arguments(MAX_TOKENS) | {"num_tokens": None}

        def pair() -> Any:
            got = comm.dispatch(**given)
            y = torch.zeros_like(got.x)
            compute(lambda: torch.mul(got.x, 2, out=y))
            return got, comm.combine(y, got)

        self._graph, (self._live, self._out) = self._record(name, pair)

    def _record(self, name: str, pair: Any) -> Any:
        if EMULATED:
            return record(self._rank, name, pair)
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            results = pair()
        return graph, results

    def check(self, present: Iterable[int], first: int, count: int = 3) -> None:
        """Every replay has other tokens, and what a world of these seats has, bit for bit."""
        for seed in range(first, first + count):
            wanted = self._wanted(seed, list(present))
            seat = self._comm.rank
            self._place.set(wanted.tokens[seat])
            self._graph.replay()
            finish(self._comm)
            self._comm.check()
            assert_received(on_cpu(self._live), wanted.received[seat])
            assert torch.equal(self._out.cpu(), wanted.out[seat])

    def lose(self) -> None:
        """Replays it once, as someone is lost: its sums may lack something."""
        self._graph.replay()
        finish(self._comm)
        with suppress(moe_p2p.PeerDeadError):
            self._comm.check()

    def _wanted(self, seed: int, present: list[int]) -> Any:
        topology = self._world.topology()
        gone = [seat for seat in range(SEATS) if seat not in present]
        owned = [topology.local_experts(seat) for seat in gone]
        lost = torch.cat(owned) if owned else torch.empty(0)
        tokens = []
        for seat in range(SEATS):
            made = make_tokens(
                seed,
                seat,
                MAX_TOKENS,
                dtype=torch.bfloat16,
                num_experts=topology.num_experts,
                hidden_dim=HIDDEN_DIM,
            )
            topk_idx = made.topk_idx.masked_fill(torch.isin(made.topk_idx, lost), -1)
            if seat in gone:
                topk_idx = torch.full_like(topk_idx, -1)
            tokens.append(replace(made, topk_idx=topk_idx, num_tokens=None))
        more: dict[str, Any] = {"max_tokens": MAX_TOKENS, "layout": "grouped"}
        return expect(topology, tokens, experts=doubled, **more)


def replaced(rank: Rank, _: World, fields: dict[str, Any]) -> str:
    """4 -> 3 -> 4: seat 2 is lost; its new process comes. Graphs are captured once."""
    store, others, world = rank.store, [0, 1, 3], world_of(fields)
    masks = fields.get("mask_lost_ranks", True)
    seat = 2 if rank.rank == 4 else rank.rank
    if rank.rank == 4:
        store.wait(["seat 2 is gone"])
        comm = begin(rank, seat, [], **fields)
        graph = Replayed(replace(rank, world_size=1), comm, world, "newcomer")
    else:
        comm = begin(rank, seat, range(4), **fields)
        cases.steps(comm, range(4))
        together(store, "first steps", 4)
        graph = Replayed(replace(rank, world_size=4), comm, world, "members")
        graph.check(range(4), 0)
        together(store, "replays", 4)
        if seat == 2:
            if not EMULATED:
                os.kill(os.getpid(), signal.SIGKILL)
            together(store, "replaced", 5)
            comm.close()
            return "lost"
        if masks and EMULATED:
            comm.mask_ranks([2])
        if masks:
            graph.lose()
            cases.steps(comm, others)
            graph.check(others, 3)
        store.set("seat 2 is gone", "")
        comm.stage_members(add=[2])
        if masks:
            assert cases.steps_until_staged(comm, store, "new", others) > 0
        comm.commit_members()
    assert masks_of(comm) == []
    graph.check(range(4), 6)
    cases.steps(comm, range(4), 1, 8)
    if EMULATED:
        together(store, "replaced", 5)
    comm.close()
    gpu_ranks.assert_device_usable()
    return "done"


@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize(
    "fields", MASKS if EMULATED else NODES, ids=NAMES[:2] if EMULATED else NAMES
)
def test_a_lost_rank_is_replaced(fields: dict[str, Any], lost: str) -> None:
    timeout_s = DEADLINE_S if fields["per_node"] > 1 or EMULATED else LATER_S
    given = fields | {"lost": lost, "timeout_s": timeout_s}
    results = run(5, replaced, given, return_errors=not EMULATED)
    gone = results.pop(2)
    assert gone == "lost" if EMULATED else isinstance(gone, DiedError), results
    assert results == ["done"] * 4


def graphs(rank: Rank, _: World, fields: dict[str, Any]) -> None:
    """2 -> 4 -> 2 -> 4 under graphs: of the first two the same one from the begin to the end."""
    seat = rank.rank
    if seat < 2:
        comm = begin(rank, seat, [0, 1], **fields)
        graph = Replayed(replace(rank, world_size=2), comm, world_of(fields), "first")
        graph.check([0, 1], 0)
    for time in range(2):
        if seat < 2:
            comm.update_members(add=[2, 3])
        else:
            comm = begin(rank, seat, [0, 1], **fields)
            name = f"newcomers {time}"
            graph = Replayed(replace(rank, world_size=2), comm, world_of(fields), name)
        graph.check(range(4), 3 * time)
        cases.steps(comm, range(4), time, 2)  # and calls that are not captured
        graph.check(range(4), 20 + time, 1)
        comm.update_members(remove=[2, 3])
        if seat < 2:
            graph.check([0, 1], 7 + time)
            cases.steps(comm, [0, 1], time, 2)
    if seat < 2:
        comm.close()


@pytest.mark.parametrize("fields", NODES, ids=NAMES)
def test_a_captured_graph_goes_on(fields: dict[str, Any]) -> None:
    run(4, graphs, fields)


def lost_at_the_change(rank: Rank, _: World, fields: dict[str, Any], lost: list[int]) -> None:
    """Rank 1 is lost: its last combine has come to rank 0 and not to rank 2. So ranks 0 and 3 wait
    in the next epoch for both, and rank 2, which begins later, in the one before for rank 1.

    lost: none of them at first, so that no rank compiles while others wait for it."""
    store, seat, members = rank.store, rank.rank, [0, 1, 2]
    fields = fields | {"timeout_s": 8.0 if lost else DEADLINE_S}
    comm = begin(rank, seat, members, **fields)
    if seat in members:
        cases.steps(comm, members)
        comm.stage_members(add=[3])
        until(comm.members_staged, "never staged")
        got = comm.dispatch(**given_by(comm, 1))
        finish(comm)
        together(store, "dispatched", len(members))
        if seat == 0:
            comm.mask_ranks(lost)  # as if it had that one's sums: it does not wait for them
        if seat not in lost:
            wanted = expect_without(comm, 1, [3])
            pending = comm.combine_send(dispatched=got, **combine_arguments(comm, wanted))
            finish(comm)
            if seat == 2 and lost:
                store.wait(["entered"], timedelta(seconds=DEADLINE_S))
            comm.combine_recv(pending)
            finish(comm)
            comm.commit_members()
    if seat == 0:
        store.set("entered", "")
    try:
        if seat not in lost:
            step(comm, 1, lost)
            assert masks_of(comm) == lost
    finally:  # rank 1 waits for the others, also when one of them has failed
        together(store, "done", SEATS)
    comm.close()


@pytest.mark.skipif(not EMULATED, reason="of threads, whose kernels are compiled once")
@pytest.mark.parametrize("fields", MASKS, ids=NAMES[:2])
def test_a_rank_that_is_lost_at_the_change_costs_no_other(fields: dict[str, Any]) -> None:
    for lost in ([], [1]):
        run(SEATS, lost_at_the_change, fields, lost)


def lost_sums(rank: Rank, _: World, fields: dict[str, Any]) -> None:
    """Rank 1 is lost between a dispatch and its combine."""
    poisoned = fields["lost"] != "drop"
    comm = begin(rank, rank.rank, range(4), **fields)
    cases.steps(comm, range(4))
    comm.check()
    assert comm.lost_tokens == 0
    if rank.rank == 1:
        comm.dispatch(**given_by(comm, 4))
        finish(comm)
        together(rank.store, "dispatched", 4)
    else:

        def mask() -> None:
            together(rank.store, "dispatched", 4)
            comm.mask_ranks([1])

        lacking = last_step(comm, 4, [], [1], mask, poisoned=poisoned)
        assert comm.lost_tokens == lacking
        assert lacking > 0
        if poisoned:
            text = rf"lost rank 1: the sums of {lacking} tokens lack"
            with pytest.raises(moe_p2p.PeerDeadError, match=text):
                comm.check()
        comm.check()  # once
        cases.steps(comm, [0, 2, 3], 0, 2)  # steps that begin without it lose nothing
        comm.check()
        assert comm.lost_tokens == lacking
    together(rank.store, "lost", 4)
    comm.update_members()
    assert comm.lost_tokens == 0
    comm.check()
    cases.steps(comm, range(4))
    comm.close()


@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize("fields", MASKS, ids=NAMES[:2])
def test_sums_of_tokens_whose_rank_was_lost(fields: dict[str, Any], lost: str) -> None:
    run(4, lost_sums, fields | {"lost": lost})


def in_top_k_order(rank: Rank, _: World, order: str) -> None:
    fields = {"per_node": 4, "lost": "poison", "combine_rows": 4}
    comm = begin(rank, rank.rank, range(4), **fields)
    options = CombineOptions(order=order, weighted=order != "rows")  # type: ignore[arg-type]
    comm.prepare(y_dtype=torch.float32, combine=options)
    mine = tokens_by(comm, 0)
    received = comm.dispatch(**given_by(comm, 0))
    finish(comm)
    together(rank.store, "dispatched", 4)
    if rank.rank != 1:
        comm.mask_ranks([1])
        out = comm.combine(received.x, received, options=options)
        finish(comm)
        lacking = ((mine.topk_idx >= 4) & (mine.topk_idx < 8)).any(1)
        assert torch.equal(out.cpu().isnan().all(1), lacking)
        assert comm.lost_tokens == int(lacking.sum())
    together(rank.store, "combined", 4)
    comm.close()


@pytest.mark.parametrize("order", ["topk", "rows"])
def test_sums_in_every_order_are_poisoned(order: str) -> None:
    run(4, in_top_k_order, order)


def training(rank: Rank, _: World) -> tuple[int, str]:
    """Rank 1 is lost within a step that autograd records."""
    comm = begin(rank, rank.rank, range(4), per_node=4, lost="poison")
    mine = tokens_by(comm, 0)
    device = gpu_ranks.DEVICE
    x = mine.x.to(device).requires_grad_()
    weights = mine.topk_weights.to(device)  # type: ignore[union-attr]
    live = comm.dispatch(x, mine.topk_idx.to(device), weights, layout="grouped")  # type: ignore[call-arg]
    y = live.x * 2.0
    finish(comm)
    together(rank.store, "dispatched", 4)
    text = "no error"
    if rank.rank != 1:
        comm.mask_ranks([1])
        try:
            out = comm.combine(y, live)
            finish(comm)
            comm.mask_ranks([other for other in range(4) if other != rank.rank])
            out.sum().backward()
        except moe_p2p.MoeP2pError as error:
            text = str(error)
    together(rank.store, "done", 4)
    comm.close()
    return int(((mine.topk_idx >= 4) & (mine.topk_idx < 8)).any(1).sum()), text


def test_autograd_raises() -> None:
    results = run(4, training)
    results.pop(1)
    assert any(lacking for lacking, _ in results)
    for lacking, text in results:
        assert not lacking or f"lost rank 1: the sums of {lacking} tokens lack" in text, results


def refused(rank: Rank, _: World) -> None:
    bad = moe_p2p.InvalidArgumentError
    comm = begin(rank, 0, [0], per_node=4)
    with pytest.raises(moe_p2p.UnavailableError, match="update_members takes masked ranks back"):
        comm.clean_masks()
    handle = comm.dispatch(**given_by(comm, 2))
    comm.update_members()

    def commit() -> None:
        comm.stage_members()
        with pytest.raises(moe_p2p.UnavailableError, match="members are to be committed before"):
            comm.commit_members()

    record(rank, "commits", commit)
    comm.commit_members()
    comm.combine(handle.x, handle)
    torch.cuda.synchronize() if not EMULATED else None
    with pytest.raises(bad, match="not made by a dispatch of this max_tokens and of communicator"):
        comm.check()
    comm.update_members()  # errors are of an epoch
    cases.steps(comm, [0])
    comm.close()


def test_what_is_refused() -> None:
    run(1, refused)
