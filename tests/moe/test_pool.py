"""AllToAllPool: one AllToAll for each configuration, whoever asks for it."""

from __future__ import annotations

import dataclasses
import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moe_p2p
from moe_p2p import AllToAllConfig, AllToAllPool
from moe_p2p.integrations import serving_steps
from tests.support.ranks import Rank, on_ranks, run_processes, run_threads

CONFIG = AllToAllConfig(num_experts=8, hidden_dim=128, topk=2, max_tokens=16, timeout_s=20.0)


def make(rank: Rank) -> AllToAllPool:
    return AllToAllPool(rank.store, rank=rank.rank, world_size=rank.world_size)


def round_trip(pool: AllToAllPool, config: AllToAllConfig) -> None:
    """Experts that change nothing: each token comes back as the sum of its weights times itself."""
    all_to_all = pool.get(config)
    x = torch.full((4, config.hidden_dim), 1.0 + pool.rank, dtype=torch.bfloat16)
    experts = torch.tensor([[0, 5], [1, 4], [7, 2], [3, 6]])
    weights = torch.full((4, 2), 0.25)
    received = all_to_all.dispatch(x, experts, weights)
    assert torch.equal(all_to_all.combine(received.x, received), x / 2)


@on_ranks(2)
def test_equal_configurations_share_one(rank: Rank) -> None:
    pool = make(rank)
    first = pool.get(CONFIG)
    assert pool.get(dataclasses.replace(CONFIG)) is first  # equal, not the same
    other = pool.get(dataclasses.replace(CONFIG, hidden_dim=256))
    assert other is not first
    assert first.config.ranks_per_node == rank.world_size  # found by the pool
    assert pool.get(dataclasses.replace(CONFIG, ranks_per_node=1)) is not first
    round_trip(pool, CONFIG)
    round_trip(pool, dataclasses.replace(CONFIG, ranks_per_node=1))
    pool.check()
    pool.close()
    for closed in (first, other):
        with pytest.raises(moe_p2p.ClosedError):
            closed.check()
    pool.close()  # idempotent


def _loses_its_peer(rank: Rank, module: str, owner: str, method: str) -> None:
    # The step makes no call, as if it replayed graphs.
    runner = type(owner, (), {method: lambda self, batch: 2 * batch})
    sys.modules[module] = types.SimpleNamespace(**{owner: runner})  # type: ignore[assignment]
    pool = make(rank)
    round_trip(pool, CONFIG)
    if rank.rank == 0:
        assert getattr(runner(), method)(3) == 6
        with pytest.raises(moe_p2p.PeerDeadError):
            round_trip(pool, CONFIG)
        with pytest.raises(moe_p2p.PeerDeadError, match="rank 1 has closed") as error:
            getattr(runner(), method)(3)
        assert str(error.value) == pool.get(CONFIG).broken
    pool.close()


@pytest.mark.parametrize("place", serving_steps.STEPS, ids=lambda place: str(place[1]))
def test_a_step_of_an_engine_raises_what_broke(place: tuple[str, str, str]) -> None:
    run_processes(2, _loses_its_peer, *place)


def _limited(rank: Rank, one_step: int) -> list[int]:
    pool = make(rank)
    unlimited = dataclasses.replace(CONFIG, max_tokens=4096, chunk_tokens=4096)
    limit = 40 * one_step
    made = [pool.get(dataclasses.replace(unlimited, topk=k), limit_bytes=limit) for k in (2, 1)]
    assert pool.get(unlimited, limit_bytes=limit) is made[0]
    with pytest.raises(moe_p2p.ResourceExhaustedError, match="bytes that this pool may take"):
        pool.get(dataclasses.replace(unlimited, hidden_dim=1 << 16), limit_bytes=limit)
    pool.close()
    return [each.config.step_tokens for each in made]


def test_a_limit_decides_the_tokens_of_a_step() -> None:
    one = dataclasses.replace(CONFIG, max_tokens=4096, chunk_tokens=1)
    one_step = sum(one.plan(world_size=2, ranks_per_node=2).values())
    first, second = run_threads(2, _limited, one_step)[0]
    assert 4096 > first > second >= 1


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"group_or_store": dist.HashStore()}, "without rank and world_size"),
        ({"rank": 0, "world_size": 1}, "go with a Store"),
        ({}, "no default group"),
    ],
)
def test_what_is_no_group_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(moe_p2p.InvalidArgumentError, match=text):
        AllToAllPool(**given)


def _with_groups(rank: Rank) -> None:
    dist.init_process_group("gloo", store=rank.store, rank=rank.rank, world_size=rank.world_size)
    try:
        for group in (None, dist.new_group([0, 1])):
            pool = AllToAllPool(group)
            assert (pool.rank, pool.world_size) == (rank.rank, rank.world_size)
            round_trip(pool, CONFIG)
            pool.close()
    finally:
        dist.destroy_process_group()


def test_groups_of_torch() -> None:
    run_processes(2, _with_groups)


@pytest.mark.parametrize("config", [None, {"num_experts": 8}])
def test_what_is_no_configuration_is_refused(config: Any) -> None:
    pool = AllToAllPool(dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(moe_p2p.InvalidArgumentError, match="must be an AllToAllConfig"):
        pool.get(config)
    pool.close()
