"""Rows of y that are written while combine sends: each is read once its counter says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_p2p import AllToAll, Dispatched, InvalidArgumentError, ReadyRows, TimeoutError
from moe_p2p.moe.reference import Topology
from tests.support import cases
from tests.support.cases import Wanted
from tests.support.ranks import Rank, run_threads

NUM_EXPERTS, MAX_TOKENS = 8, 12
GROUPS = [(1, 1), (2, 2), (4, 2)]
ROWS = {"rows of an expert": None, "5 rows": 5, "64 rows": 64}


def steps_of(
    world_size: int,
    ranks_per_node: int,
    *,
    first: tuple[int, ...] = (5, 3, 0, 12),
    most: int = MAX_TOKENS,
    num_experts: int = NUM_EXPERTS,
    **options: Any,
) -> list[Wanted]:
    """A step with `first` tokens of each rank, one without any, and one with as many as may be."""
    topology = Topology(
        world_size=world_size, ranks_per_node=ranks_per_node, num_experts=num_experts
    )
    counts = [first, (0,) * 4, (most,) * 4]

    def tokens(seed: int, rank: int) -> Any:
        return cases.make_tokens(
            seed, rank, counts[seed][rank], dtype=torch.bfloat16, num_experts=num_experts
        )

    return [
        cases.expect(
            topology,
            [tokens(seed, r) for r in range(world_size)],
            max_tokens=most,
            **options,
        )
        for seed in range(len(counts))
    ]


def counters_of(y: Tensor, rows: int | None) -> Tensor:
    per_expert = 1 if rows is None else -(-y.shape[1] // rows)
    return torch.zeros(y.shape[0], per_expert, dtype=torch.int32)


def write_slowly(y: Tensor, result: Tensor, counters: Tensor, rows: int | None, adds: int) -> None:
    """The product: the last rows first, and garbage where it has not been yet."""
    step = y.shape[1] if rows is None else rows
    for expert in reversed(range(y.shape[0])):
        for block in reversed(range(counters.shape[1])):
            time.sleep(0.001)
            part = slice(block * step, (block + 1) * step)
            y[expert, part] = result[expert, part]
            counters[expert, block] += adds


def sums(comm: AllToAll, wanted: Wanted, rows: int | None, base: int) -> Tensor:
    got: Dispatched = comm.dispatch(**cases.dispatch_arguments(comm, wanted))
    given = cases.combine_arguments(comm, wanted)
    result = given.pop("y").reshape(comm.num_local_experts, -1, comm.config.hidden_dim)
    y = torch.full_like(result, float("nan"))
    counters = counters_of(y, rows)
    counters += base
    start = torch.tensor([base], dtype=torch.int32) if base else None
    product = threading.Thread(target=write_slowly, args=(y, result, counters, rows, 3))
    product.start()
    try:
        ready = ReadyRows(counters=counters, want=3, rows=rows, base=start)
        pending = comm.combine_send(y, got, ready=ready, **given)
        out: Tensor = comm.combine_recv(pending)
    finally:
        product.join()
    return out


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_rows_are_read_behind_their_counters(group: tuple[int, int], rows: int | None) -> None:
    steps = steps_of(*group)

    def body(rank: Rank) -> None:
        with cases.make(
            rank,
            num_experts=NUM_EXPERTS,
            ranks_per_node=group[1],
            max_tokens=MAX_TOKENS,
            dtype=torch.bfloat16,
        ) as comm:
            # The second time counters go on from where they stood, the third they pass 2^31.
            for base in (0, 3, (1 << 31) - 2):
                for wanted in steps:
                    cases.assert_combined(sums(comm, wanted, rows, base), wanted.out[comm.rank])

    run_threads(group[0], body)


@pytest.fixture(name="alone")
def one_rank() -> Iterator[AllToAll]:
    with cases.make(
        Rank(0, 1, dist.HashStore()), num_experts=4, topk=2, dtype=torch.bfloat16, timeout_s=0.3
    ) as comm:
        yield comm


def received(comm: AllToAll) -> Dispatched:
    x = torch.ones(3, comm.config.hidden_dim, dtype=torch.bfloat16)
    return comm.dispatch(x, torch.tensor([[1, 3], [2, -1], [0, 1]]))


def test_a_counter_that_is_never_raised_is_named(alone: AllToAll) -> None:
    got = received(alone)
    counters = counters_of(got.x, None)
    counters[:] = torch.tensor([[2], [1], [2], [2]])
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="counter 1 of `ready` stands at 1, less than"):
        alone.combine_send(got.x, got, ready=ReadyRows(counters=counters, want=2))
    assert time.monotonic() - began < 20
    assert "counter 1 of `ready`" in alone.broken


def test_counters_of_rows_that_nobody_needs_are_not_waited_for(alone: AllToAll) -> None:
    got = received(alone)
    counters = counters_of(got.x, 1)
    for expert, count in enumerate(got.counts.tolist()):
        counters[expert, :count] = 1
    ready = ReadyRows(counters=counters, want=1, rows=1)
    sums = alone.combine_recv(alone.combine_send(got.x, got, ready=ready))
    assert torch.equal(sums[:, 0].float(), torch.tensor([2.0, 1.0, 2.0]))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no tensor": ({"counters": [0] * 4}, "counters is list, must be a tensor"),
    "another type": ({"counters": torch.zeros(4)}, "must be of torch.int32 or torch.uint32"),
    "too few": ({"counters": torch.zeros(3, dtype=torch.int32)}, "must have 1 counters for each"),
    "too few of some rows": ({"rows": 5}, "one for 5 of"),
    "strides": ({"counters": torch.zeros(8, dtype=torch.int32)[::2]}, "must be contiguous"),
    "no rows": ({"rows": 0}, "rows of a counter are 0, must be at least 1"),
    "less than nothing": ({"want": -1}, "want is -1, must be an integer from 0"),
    "no number": ({"want": 1.5}, "want is 1.5, must be an integer from 0"),
    "two bases": ({"base": torch.zeros(2, dtype=torch.int32)}, "ready_base is .* one number"),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_bad_counters_are_refused_before_anything_is_sent(
    alone: AllToAll, bad: tuple[dict[str, Any], str]
) -> None:
    got = received(alone)
    given = {"counters": torch.ones(4, dtype=torch.int32), "want": 1} | bad[0]
    with pytest.raises(InvalidArgumentError, match=bad[1]):
        alone.combine_send(got.x, got, ready=ReadyRows(**given))
    ready = ReadyRows(counters=torch.ones(4, dtype=torch.uint32), want=1)
    alone.combine_recv(alone.combine_send(got.x, got, ready=ready))


def test_bare_counters_are_refused_by_their_type(alone: AllToAll) -> None:
    got = received(alone)
    counters: Any = torch.ones(4, dtype=torch.int32)
    with pytest.raises(InvalidArgumentError, match=r"ready is .*Tensor"):
        alone.combine_send(got.x, got, ready=counters)
    alone.release(got)


def test_flat_rows_and_masks_are_refused(alone: AllToAll) -> None:
    ready = ReadyRows(counters=torch.ones(4, dtype=torch.int32), want=1)
    x = torch.ones(3, alone.config.hidden_dim, dtype=torch.bfloat16)
    got = alone.dispatch(x, torch.tensor([[0, 1]] * 3), layout="grouped")
    with pytest.raises(InvalidArgumentError, match="of a dispatch in layout 'padded'"):
        alone.combine_send(got.x, got, ready=ready)
    alone.release(got)
    fields = {"num_experts": 4, "topk": 2, "dtype": torch.bfloat16, "mask_lost_ranks": True}
    with cases.make(Rank(0, 1, dist.HashStore()), **fields) as masking:
        got = received(masking)
        with pytest.raises(InvalidArgumentError, match="only where no rank is masked"):
            masking.combine_send(got.x, got, ready=ready)
