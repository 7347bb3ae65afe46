"""Worlds of which only rank 0 is there: their calls, and what the reference wants of them.

All ranks have rank 0's tokens with experts turned by a rank from each to the next, and local expert
i of every rank computes the same.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_p2p import AllToAll, AllToAllConfig
from moe_p2p.moe.reference import Received, Tokens, Topology
from moe_p2p.moe.rendezvous.mirror import MirrorGroup
from tests.support.cases import SMALL, Wanted, apply_experts, expect, make_tokens
from tests.support.gpu_ranks import HIDDEN_DIM, MAX_TOKENS, World, fields_of
from tests.support.ranks import Rank

_numbers = itertools.count()


def key_of_world() -> str:
    """Returns a key that no other world of this host has."""
    return f"mirror.{os.getpid()}.{next(_numbers)}"


def turned(tokens: Tokens, topology: Topology) -> list[Tokens]:
    """Returns every rank's tokens, from rank 0's."""
    idx, num_experts = tokens.topk_idx, topology.num_experts
    num_local = num_experts // topology.world_size

    def of(rank: int) -> Tensor:
        return torch.where(idx < 0, idx, (idx + rank * num_local) % num_experts)

    return [replace(tokens, topk_idx=of(rank)) for rank in range(topology.world_size)]


def like_rank_0(topology: Topology, _: int, received: Received) -> Tensor:
    """Experts that compute what the experts of rank 0 do."""
    return apply_experts(topology, 0, received)


def mirrored_call(world: World, seed: int, *, count: int = MAX_TOKENS, **options: Any) -> Wanted:
    """A call of `count` tokens of each rank; options: dtype and hidden_dim, and of dispatch."""
    topology = world.topology()
    tokens = make_tokens(
        seed,
        0,
        count,
        dtype=options.pop("dtype", torch.float32),
        num_experts=topology.num_experts,
        hidden_dim=options.pop("hidden_dim", HIDDEN_DIM),
    )
    tokens = options.pop("change", lambda t: t)(tokens)
    options = {"max_tokens": MAX_TOKENS} | options
    return expect(topology, turned(tokens, topology), experts=like_rank_0, **options)


def make_mirror(rank: Rank, world: World, key: str, **overrides: Any) -> AllToAll:
    """Rank 0 of `world`; the threads or processes of `rank` are each other's partners."""
    group = MirrorGroup(world.ranks, place=rank.rank, count=rank.world_size, key=key)
    config = AllToAllConfig(**(SMALL | fields_of(world, **overrides)))
    return AllToAll(group, config)
