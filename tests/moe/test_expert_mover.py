"""Moves of experts between slots, beside steps: whatever is asked for, and whoever is lost."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from moe_p2p import (
    AbortedError,
    ClosedError,
    Engine,
    ExpertMap,
    ExpertMover,
    InvalidArgumentError,
    PeerDeadError,
    ProtocolError,
    RemoteAccessError,
    TimeoutError,
)
from moe_p2p.moe.expert_map import EMPTY
from tests.support.expert_cases import alone, check_step, drawn, make_layer, world
from tests.support.ranks import DiedError, Rank, on_ranks, run_processes, run_threads

DEADLINE_S = 5.0  # of a wait that nobody ends; longer than a busy machine delays a vote
FIRST = [0, 1, 2, 3, 4, 5, 0, 1, -1]  # of three ranks
OTHER = [5, 1, 3, 2, 4, 0, 0, 2, 1]  # circles, a replica that comes and one that goes


def over(mover: ExpertMover, first: int = 0) -> int:
    """Steps until the move is over; returns their number."""
    step = first
    while not mover.step(step):
        step += 1
        assert step < first + 1000
    return step


# --- sums ---


def moves_beside_steps(rank: Rank, num_moves: int, seed: int, limit: int | None) -> list[int]:
    rng = random.Random(seed)
    slots = rng.randint(3, 4)
    num_slots = slots * rank.world_size
    experts = rng.randint(3, num_slots)
    placements = [drawn(rng, num_slots, experts, 0.3) for _ in range(num_moves + 1)]
    layers = [make_layer(rank, placements[0], experts, number) for number in range(2)]
    steps, last, swapped = 0, [placements[0]] * 2, []
    with world(rank, layers, staging_slots=slots, bytes_per_step=limit) as (comm, mover):
        for number, placement in enumerate(placements[1:]):
            layer = number % 2
            mover.move(placement, layer)
            while True:
                for each in (0, 1):
                    check_step(comm, layers[each], 2 * steps + each, each)
                steps += 1
                done = mover.step(steps)
                assert mover.moving != done
                assert layers[layer].table.placement == (placement if done else last[layer])
                layers[layer].check(layer)
                if done:
                    break
            last[layer] = placement
            swapped.append(steps)
    return swapped


@pytest.mark.parametrize(
    ("ranks", "num_moves", "limit"),
    [
        (3, 20, None),
        (2, 10, 40),  # some bytes of a slot in each step
        (1, 5, None),
        pytest.param(2, 1000, 128, marks=pytest.mark.more),
        pytest.param(4, 300, None, marks=pytest.mark.more),
    ],
)
def test_sums_beside_moves_are_exact(ranks: int, num_moves: int, limit: int | None) -> None:
    for seed in range(1 if num_moves > 100 else 3):
        swapped = run_threads(ranks, moves_beside_steps, num_moves, seed, limit)
        assert swapped == [swapped[0]] * ranks, "ranks swapped behind different steps"


@on_ranks(3)
def test_a_move_waits_for_itself_if_asked_to(rank: Rank) -> None:
    layer = make_layer(rank, FIRST, 6)
    with alone(rank, [layer], staging_slots=3, bytes_per_step=1) as mover:
        assert not mover.step(0)
        for step, placement in enumerate((OTHER, FIRST, OTHER)):
            mover.move(placement)
            assert mover.step(100 * step, wait=True)
            assert layer.table.placement == placement
            layer.check()
        mover.move(OTHER)  # nothing to copy
        assert mover.step(7, wait=True)


@on_ranks(2)
def test_empty_slots_need_no_staging_and_are_written_before_the_swap(rank: Rank) -> None:
    layer = make_layer(rank, [0, 1, -1, 2, 3, -1], 4)
    with alone(rank, [layer], staging_slots=0) as mover:
        mover.move([0, 1, 3, 2, 3, 0])
        over(mover)
        layer.check()
        with pytest.raises(InvalidArgumentError, match=r"rank 0 gets 2 experts in slots .* in use"):
            mover.move([1, 0, 3, 2, 3, 0])
        mover.move([0, 1, -1, 2, 3, 0])
        over(mover)
        mover.move([0, 1, 2, 2, 3, 0])
        over(mover)
        layer.check()


@on_ranks(2)
def test_gaps_between_slots_stay_as_they_are(rank: Rank) -> None:
    layer = make_layer(rank, [0, 1, 2, 3], 4)
    whole = layer.numbers.as_strided((2, layer.numbers.stride(0)), layer.numbers.stride())
    whole[:, 5:] = 77 + rank.rank
    with alone(rank, [layer], staging_slots=2) as mover:
        mover.move([3, 2, 1, 0])
        over(mover)
        layer.check()
    assert (whole[:, 5:] == 77 + rank.rank).all()


@on_ranks(2)
@pytest.mark.parametrize("inference", [(True, True), (True, False), (False, True)])
def test_parameters_move_in_any_mode(rank: Rank, inference: tuple[bool, bool]) -> None:
    """inference: where weights and mover are made, and where they are used."""
    with torch.inference_mode(inference[0]), Engine() as engine:
        expert = torch.nn.Parameter(torch.full((1, 4), float(rank.rank)))
        table = ExpertMap([0, 1], num_experts=2, rank=rank.rank)
        made = ExpertMover(rank.store, engine, [(table, [expert])], rank=rank.rank, world_size=2)
        with made, torch.inference_mode(inference[1]), torch.device("meta"):
            made.move([1, 0])
            made.step(0, wait=True)
        assert expert.tolist() == [[1.0 - rank.rank] * 4]


# --- what ranks must agree on ---


def refused_at_set_up(rank: Rank, case: str) -> None:
    layer = make_layer(rank, FIRST, 6)
    table, (a, b, c) = layer.table, layer.tensors
    tensors = [a, b, c]
    options: dict[str, int] = {}
    other = rank.rank == 2
    if case == "shape":
        tensors = [torch.zeros(3, 17 if other else 16)]
    elif case == "dtype":
        tensors = [a.double() if other else a]
    elif case == "number of tensors":
        tensors = [a, b] if other else [a, b, c]
    elif case == "staging":
        options = {"staging_slots": 2 if other else 1}
    elif case == "placement" and other:
        table = ExpertMap(OTHER, num_experts=6, rank=2)
    elif case == "slots" and other:
        tensors = [torch.zeros(4, 16)]
    elif case == "strides" and other:
        tensors = [torch.zeros(16, 3).t()]
    elif case == "overlap" and other:
        tensors = [torch.zeros(1, 16).expand(3, 16)]
    elif case == "no bytes" and other:
        tensors = [torch.zeros(3, 0)]
    elif case == "device" and other:
        tensors = [torch.zeros(3, 16, device="meta")]
    elif case == "rank" and other:
        table = ExpertMap(FIRST, num_experts=6, rank=1)
    elif case == "no tensors" and other:
        tensors = []
    elif case == "multiple":
        table = ExpertMap([*FIRST, 0], num_experts=6, rank=rank.rank)
    with Engine() as engine:
        ExpertMover(rank.store, engine, [(table, tensors)], rank=rank.rank, world_size=3, **options)


REFUSED = {
    "shape": r"layers differs: rank 0 has .*\[3, 16\].* rank 2 .*\[3, 17\]",
    "dtype": "layers differs: rank 0 has .*torch.float32.* rank 2 .*torch.float64",
    "number of tensors": "layers differs: rank 0",
    "staging": "staging_slots differs: rank 0 has 1, rank 2 2",
    "placement": "placements differs: rank 0 has",
    "slots": r"rank 2: .*layers\[0\]\[0\] is \[4, 16\], dim 0 must be the 3 slots",
    "strides": r"rank 2: .*layers\[0\]\[0\] has strides \[1, 3\]: each slot must be contiguous",
    "overlap": r"rank 2: .*layers\[0\]\[0\] has strides \[0, 1\]",
    "no bytes": r"rank 2: .*is \[3, 0\]: its slots have no bytes",
    "device": "rank 2: .*meta device",
    "no tensors": r"rank 2: .*layers\[0\] has no tensors",
    "rank": "rank 2: .*of rank 1 is given at rank 2 of 3",
    "multiple": "rank 0: .*a multiple of the ranks",
}


@pytest.mark.parametrize("case", REFUSED)
def test_layers_that_do_not_fit_are_refused_on_all_ranks(case: str) -> None:
    for error in run_threads(3, refused_at_set_up, case, return_errors=True):
        assert isinstance(error, InvalidArgumentError)
        assert re.search(REFUSED[case], str(error)), str(error)


@on_ranks(3)
def test_a_wrong_argument_begins_nothing(rank: Rank) -> None:
    layer = make_layer(rank, FIRST, 6)
    with alone(rank, [layer], staging_slots=1) as mover:
        wrong: list[tuple[Any, str]] = [
            (([0, 1, 2],), "has 3 slots, must have 9"),
            (([*FIRST[:8], 6],), r"slot \[8\] holds expert \[6\], must be 0 to 5"),
            (([0] * 9,), r"no slot holds experts \[1, 2, 3, 4, 5\]"),
            ((FIRST, 1), "layer is 1, must be 0 to 0"),
            ((OTHER,), "gets 2 experts in slots that are in use, and staging_slots is 1"),
        ]
        for arguments, text in wrong:
            with pytest.raises(InvalidArgumentError, match=text):
                mover.move(*arguments)
            assert not mover.moving
        mover.move([*FIRST[:8], 2])
        with pytest.raises(InvalidArgumentError, match=r"step is .* must be an int"):
            mover.step(1.5)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="a move is under way"):
            mover.move(FIRST)
        over(mover)
        layer.check()
    with pytest.raises(ClosedError, match="the mover is closed"):
        mover.move(FIRST)
    for given, text in (({"staging_slots": -1}, "staging_slots"), ({"bytes_per_step": 0}, "bytes")):
        with Engine() as engine, pytest.raises(InvalidArgumentError, match=text):
            ExpertMover(None, engine, [(layer.table, layer.tensors)], **given)
    with Engine() as engine, pytest.raises(InvalidArgumentError, match="layers is empty"):
        ExpertMover(None, engine, [])


@pytest.mark.parametrize(
    ("differs", "text"),
    [
        ("placement", "rank 1 moves experts by another placement"),
        ("step", "rank 1 moves experts by step 5 where rank 0 has step 4"),
    ],
)
def test_ranks_that_do_not_agree_all_learn_it_and_go_on(differs: str, text: str) -> None:
    def body(rank: Rank) -> None:
        layer = make_layer(rank, FIRST, 6)
        with alone(rank, [layer], staging_slots=3) as mover:
            wrong = rank.rank == 1
            mover.move(FIRST if wrong and differs == "placement" else OTHER)
            first = 5 if wrong and differs == "step" else 4
            with pytest.raises(ProtocolError, match=text):
                over(mover, first)
            assert layer.table.placement == FIRST
            layer.check()
            mover.move(OTHER)
            over(mover)
            layer.check()

    run_threads(3, body)


def test_a_read_that_fails_gives_the_move_up_on_all_ranks() -> None:
    def body(rank: Rank) -> tuple[type[BaseException], str]:
        layer = make_layer(rank, [0, 1, 2, 3, 4, 5], 6)
        with alone(rank, [layer], staging_slots=2) as mover:
            if rank.rank == 2:
                mover._registered[0].unregister()  # the factors: nobody can read them any more
            mover.move([4, 1, 2, 3, 0, 5])
            with pytest.raises((RemoteAccessError, AbortedError)) as error:
                over(mover)
            assert layer.table.placement == [0, 1, 2, 3, 4, 5]
            layer.check()
            mover.move([0, 1, 3, 2, 4, 5])
            over(mover)
            layer.check()
            return type(error.value), str(error.value)

    first, *others = run_threads(3, body)
    assert first[0] is RemoteAccessError
    assert "reading slot 4 of rank 2" in first[1]
    for kind, text in others:
        assert kind is AbortedError
        assert "rank 0 failed to read experts: nothing has changed" in text


# --- ranks that are lost ---


def killed(rank: Rank, at: int) -> tuple[str, str]:
    """The deadline is far: it is the end of the process that is seen."""
    layer = make_layer(rank, FIRST, 6)
    before = [each.clone() for each in layer.tensors]
    with alone(rank, [layer], staging_slots=3, bytes_per_step=16, timeout_s=60.0) as mover:
        mover.move(OTHER)
        for step in range(1000):
            if step == at and rank.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                assert not mover.step(step)
            except (PeerDeadError, AbortedError) as error:
                assert layer.table.placement == FIRST
                assert not layer.table.void
                for each, was in zip(layer.tensors, before, strict=True):
                    used = [slot for slot in range(3) if FIRST[3 * rank.rank + slot] >= 0]
                    assert torch.equal(each[used].view(torch.uint8), was[used].view(torch.uint8))
                layer.table.to_slots(torch.zeros(1, 1, dtype=torch.int64))
                with pytest.raises(AbortedError, match=r"has ended|was not sent"):
                    mover.move(OTHER)
                return type(error).__name__, str(error)
    raise AssertionError("nobody was missed")


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_killed_rank_is_named_and_the_old_placement_holds(at: int) -> None:
    results = run_processes(3, killed, at, return_errors=True)
    assert isinstance(results[1], DiedError)
    for rank in (0, 2):
        kind, text = results[rank]
        assert kind == "PeerDeadError"
        assert "rank 1" in text
        assert "the old placement holds" in text


def test_a_rank_that_does_not_vote_is_named_at_the_deadline() -> None:
    def body(rank: Rank) -> None:
        layer = make_layer(rank, FIRST, 6)
        with alone(rank, [layer], staging_slots=3) as mover:
            mover._timeout_s = DEADLINE_S
            mover.move(OTHER)
            if rank.rank == 1:
                mover.step(0)
                rank.store.wait(["over 0", "over 2"])
                return
            with pytest.raises(TimeoutError, match=r"ranks \[1\] did not vote in 5 s; the old pl"):
                over(mover)
            layer.check()
            assert layer.table.placement == FIRST
            with pytest.raises(AbortedError, match=r"ranks \[1\] did not vote"):
                mover.step(9)
            rank.store.set(f"over {rank.rank}", "")

    run_threads(3, body)


def test_a_rank_that_cannot_know_whether_others_swapped_makes_its_map_void() -> None:
    """The last vote of rank 0 does not reach rank 1: rank 0 swaps. Nothing has to be read, so both
    vote for the swap in their second step."""

    def body(rank: Rank) -> None:
        layer = make_layer(rank, [0, 1, 2, 2], 3)
        with alone(rank, [layer]) as mover:
            mover.move([0, 1, 2, EMPTY])
            assert not mover.step(0)
            if rank.rank == 0:
                send = mover._engine.scatter
                mover._engine.scatter = lambda memory, slices, **how: send(memory, [], **how)  # type: ignore[method-assign]
                assert not mover.step(1)
                assert mover.step(2)
                assert layer.table.placement == [0, 1, 2, EMPTY]
                return
            assert not mover.step(1)
            mover._timeout_s = 0.1
            with pytest.raises(TimeoutError, match=r"ranks \[0\].* this rank's map is void"):
                mover.step(2)
            with pytest.raises(AbortedError, match="did not vote"):
                layer.table.to_slots(torch.zeros(1, 1, dtype=torch.int64))
            assert (layer.table.slots == 4).all()

    run_threads(2, body)


@contextmanager
def all_may_swap(rank: Rank) -> Iterator[tuple[ExpertMover, ExpertMap]]:
    """A move to [0, 1, 2, EMPTY] of which all votes are known at the next step, number 2."""
    layer = make_layer(rank, [0, 1, 2, 2], 3)
    with alone(rank, [layer]) as mover:
        mover.move([0, 1, 2, EMPTY])
        for number in range(2):
            assert not mover.step(number)
        yield mover, layer.table


def test_a_mover_that_is_closed_when_all_may_swap_makes_its_map_void() -> None:
    def body(rank: Rank) -> None:
        with all_may_swap(rank) as (mover, table):
            if rank.rank == 0:
                assert mover.step(2)
                return
        with pytest.raises(AbortedError, match=r"the mover was closed; .* map is void"):
            table.to_slots(torch.zeros(1, 1, dtype=torch.int64))

    run_threads(2, body)


def test_a_swap_that_is_cut_off_makes_the_map_void(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = ExpertMap.set

    def cut_off(table: ExpertMap, placement: list[int]) -> None:
        if table.rank == 1 and placement == [0, 1, 2, EMPTY]:
            raise KeyboardInterrupt
        setting(table, placement)

    monkeypatch.setattr(ExpertMap, "set", cut_off)

    def body(rank: Rank) -> None:
        with all_may_swap(rank) as (mover, table):
            if rank.rank == 0:
                assert mover.step(2)
                return
            with pytest.raises(KeyboardInterrupt):
                mover.step(2)
            assert not mover.moving
            for call in (lambda: mover.step(3), lambda: table.to_slots(torch.zeros(1, 1))):
                with pytest.raises(AbortedError, match="cut off by KeyboardInterrupt"):
                    call()

    run_threads(2, body)


def test_a_step_that_no_vote_can_hold_is_refused() -> None:
    def body(rank: Rank) -> None:
        layer = make_layer(rank, [0, 1, 2, 2], 3)
        with alone(rank, [layer]) as mover:
            mover.move([0, 1, 2, EMPTY])
            with pytest.raises(InvalidArgumentError, match="must be less than 2"):
                mover.step(1 << 63)
            assert over(mover)

    run_threads(2, body)


def test_nobody_reads_while_the_swap_before_may_still_write() -> None:
    """On a GPU the copies of a swap run behind the host, which another rank would overtake."""

    class Event:
        left = 4

        def query(self) -> bool:
            self.left -= 1
            return self.left <= 0

    def body(rank: Rank) -> list[int]:
        layer = make_layer(rank, [0, 1, 2, 3], 4)
        with alone(rank, [layer], staging_slots=2) as mover:
            mover.move([3, 1, 2, 0])
            if rank.rank == 1:
                mover._settled = Event()  # type: ignore[assignment]
            reads = []
            for step in range(20):
                reads.append(sum(nic["reads"] for nic in mover._engine.counters()))
                if mover.step(step):
                    layer.check()
                    return reads
        raise AssertionError(reads)

    for reads in run_threads(2, body):
        assert reads[:5] == [0] * 5
        assert reads[-1] > 0
