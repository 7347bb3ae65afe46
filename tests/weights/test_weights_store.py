"""What a fleet of weight updates asks of a TCPStore."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from moe_p2p import Engine
from moe_p2p.weights import Param, WeightGenerator, WeightLayout, WeightTrainer
from tests.support.store_clients import clients_of

LAYOUT = WeightLayout([Param("w", (4, 4), "bfloat16", (0,))], 1)


def test_a_rank_adds_two_clients_to_the_callers() -> None:
    """One for what ranks say to each other, one for the lease, which must not wait."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    tensors = [{"w": torch.zeros(4, 4, dtype=torch.bfloat16)} for _ in range(2)]
    before = clients_of(store.port)
    assert before == 1
    with (
        Engine(label="trainer") as one,
        Engine(label="generator") as other,
        ThreadPoolExecutor() as pool,
    ):
        made = pool.submit(WeightGenerator, other, store, LAYOUT, 0, tensors[1])
        with WeightTrainer(one, store, LAYOUT, 0, tensors[0]), made.result(100):
            assert clients_of(store.port) == before + 2 * 2
