"""What is closed raises ClosedError in every call, also where no op refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from moe_p2p import AllToAll, AllToAllConfig, AllToAllPool, ClosedError
from moe_p2p.deep_ep import Buffer, ElasticBuffer
from tests.support.ranks import Rank, StoreGroup

CONFIG = AllToAllConfig(num_experts=4, hidden_dim=64, topk=2, max_tokens=8, mask_lost_ranks=True)
X, IDS, WEIGHTS = torch.ones(2, 64).bfloat16(), torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2)


def refused(calls: list[Callable[[], Any]], text: str) -> None:
    for call in calls:
        with pytest.raises(ClosedError, match=text):
            call()


def test_all_to_all() -> None:
    """`prepare` on a CPU, `mask_ranks` and `make_outputs` returned as if it were open."""
    comm = AllToAll(HashStore(), CONFIG, rank=0, world_size=1)
    received = comm.dispatch(X, IDS, WEIGHTS)
    comm.combine(received.x, received)
    pending = comm.dispatch_send(X, IDS, WEIGHTS)
    comm.close()
    refused(
        [
            lambda: comm.dispatch(X, IDS, WEIGHTS),
            lambda: comm.dispatch_send(X, IDS),
            lambda: comm.make_outputs(pending),
            lambda: comm.dispatch_recv(pending),
            lambda: comm.combine(received.x, received),
            lambda: comm.combine_send(received.x, received),
            lambda: comm.release(pending),
            comm.prepare,
            comm.check,
            comm.counters,
            comm.clean_masks,
            lambda: comm.mask_ranks([0]),
            lambda: comm.gather_counts(torch.zeros(1, dtype=torch.int32)),
            lambda: comm.arrival_flags,
            comm.__enter__,
        ],
        r"(communicator|engine) \d+ is closed|the communicator is closed",
    )


def test_pool() -> None:
    group: Any = StoreGroup(Rank(0, 1, HashStore()))
    pool = AllToAllPool(group)
    pool.get(CONFIG)
    pool.close()
    refused(
        [lambda: pool.get(CONFIG), lambda: pool.prepare(CONFIG), pool.check, pool.clean_masks],
        "rank 0: the pool, or its buffer, was closed; make another one",
    )


def test_deep_ep() -> None:
    group: Any = StoreGroup(Rank(0, 1, HashStore()))
    buffer = Buffer(group, low_latency_mode=True, explicitly_destroy=True, enable_shrink=True)
    buffer.low_latency_dispatch(X, IDS, 4, 4, use_fp8=False)
    elastic = ElasticBuffer(group, num_max_tokens_per_rank=8, explicitly_destroy=True)
    buffer.destroy()
    elastic.destroy()
    refused(
        [
            buffer.check,
            lambda: buffer.prepare(64, 4, 2),
            lambda: buffer.low_latency_dispatch(X, IDS, 4, 4, use_fp8=False),
            lambda: buffer.prepare_low_latency(4, 64, 4, 2),
            lambda: buffer.clean_low_latency_buffer(4, 64, 4),
            lambda: buffer.low_latency_update_mask_buffer(0),
            lambda: buffer.low_latency_query_mask_buffer(torch.zeros(1, dtype=torch.int32)),
            buffer.low_latency_clean_mask_buffer,
            elastic.check,
            elastic.barrier,
            lambda: elastic.dispatch(X, IDS, WEIGHTS, num_experts=4),
            lambda: elastic.prepare(64, 4, 2),
        ],
        "rank 0: the pool, or its buffer, was closed; make another one",
    )
