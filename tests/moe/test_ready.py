"""Rows of y that are written while combine sends: each is read once its counter says so."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_p2p import AllToAll, Dispatched, InvalidArgumentError, TimeoutError
from moe_p2p.moe.ready import ReadyRows
from moe_p2p.moe.reference import Topology
from tests.support import cases
from tests.support.cases import Wanted
from tests.support.ranks import Rank, on_ranks, run_threads

NUM_EXPERTS, MAX_TOKENS = 8, 12
GROUPS = [(1, 1), (2, 2), (4, 2)]
ROWS = {"rows of an expert": None, "5 rows": 5, "64 rows": 64}


def steps_of(world_size: int, ranks_per_node: int) -> list[Wanted]:
    topology = Topology(
        world_size=world_size, ranks_per_node=ranks_per_node, num_experts=NUM_EXPERTS
    )
    counts = [[5, 3, 0, 12], [0] * 4, [12] * 4]

    def tokens(seed: int, rank: int) -> Any:
        return cases.make_tokens(
            seed, rank, counts[seed][rank], dtype=torch.bfloat16, num_experts=NUM_EXPERTS
        )

    return [
        cases.expect(topology, [tokens(seed, r) for r in range(world_size)], max_tokens=MAX_TOKENS)
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
