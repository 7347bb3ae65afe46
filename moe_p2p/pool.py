"""AllToAll objects of one group by configuration: made when a configuration first comes, and kept.

Layers, engines and DeepEP's calls learn the shape of a call when it is made, and an AllToAll is
made for one shape. So they share a pool: layers of one shape share one AllToAll and its memory.

    pool = AllToAllPool(group)
    all_to_all = pool.get(AllToAllConfig(num_experts=256, hidden_dim=7168, topk=8, max_tokens=128))

Making one is collective, which holds by itself where all ranks make the same calls in one order.

Symbols: W ranks, L ranks per node, K top-k, E experts, H hidden size, M tokens per step.
"""

from __future__ import annotations

import dataclasses
import functools
from bisect import bisect_right
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from moe_p2p import errors
from moe_p2p.config import AllToAllConfig
from moe_p2p.ops import call
from moe_p2p.releasing import ReleasingAllToAll
from moe_p2p.rendezvous.agreement import find_ranks_per_node
from moe_p2p.rendezvous.bootstrap import Bootstrap

TIMEOUT_S = 100.0  # of every wait, where an engine does not say: as in DeepEP
# AllToAllConfig(**fields), checked once for equal fields: for callers that ask in every call.
config_of = functools.lru_cache(maxsize=1024)(AllToAllConfig)
_MOST_TOKENS = 8192  # of a step whose size memory decides; more would make no call faster
_WHOLE_TOKENS = 64  # such a step is a multiple of it, where so many fit
_KEPT_SHARE = 32  # this part of what is left is left to other shapes


class AllToAllPool:
    """The AllToAll objects of one rank of a group. Making the pool is collective.

    group_or_store: a ProcessGroup of any backend (or what has its rank(), size() and
        get_group_store()), None for the default group, or a Store with rank and world_size. The
        store is used whenever an AllToAll is made, so it has to outlive this object.
    timeout_s: deadline for ranks to meet, in seconds.

    Dispatches need no combine: a call that needs the step of an open one releases the oldest.
    """

    def __init__(
        self,
        group_or_store: Any = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._store, self.rank, self.world_size = _store_of(group_or_store, rank, world_size)
        self.timeout_s = timeout_s
        hosts = self.meet("the hosts", call(torch.ops.moe_p2p.host_identity.default))
        self.ranks_per_node = find_ranks_per_node(hosts, None)
        self._made: dict[tuple[AllToAllConfig, bool], ReleasingAllToAll] = {}
        self._limited_bytes = 0  # of those made within a limit

    def get(
        self,
        config: AllToAllConfig,
        *,
        limit_bytes: int = 0,
        masked: torch.Tensor | None = None,
    ) -> ReleasingAllToAll:
        """The AllToAll of this configuration; equal configurations share one. Collective when new.

        config: without ranks_per_node, the ranks that share a host are a node; with
            mask_lost_ranks and several hosts each rank is one.
        limit_bytes: what all that are made with a limit may take together; 0: no limit. A step then
            has as many tokens as fit into 31/32 of what is left, at most chunk_tokens.
        masked: of one with mask_lost_ranks, the tensor [W] of its masks (AllToAll.masked).

        Raises ResourceExhaustedError when not even a step of one token fits.
        """
        key = config, bool(limit_bytes)
        made = self._made.get(key)
        if made is None:
            if config.ranks_per_node is None:
                config = dataclasses.replace(config, ranks_per_node=self._ranks_per_node(config))
            if limit_bytes:
                config = self._within(limit_bytes, config)
            made = self._made[key] = ReleasingAllToAll(
                self._store, config, rank=self.rank, world_size=self.world_size, masked=masked
            )
            if limit_bytes:
                self._limited_bytes += self._size(config)
        return made

    def _ranks_per_node(self, config: AllToAllConfig) -> int:
        """Masks are for one node, or for nodes of one rank."""
        if config.mask_lost_ranks and self.ranks_per_node < self.world_size:
            return 1
        return self.ranks_per_node

    def _within(self, limit_bytes: int, config: AllToAllConfig) -> AllToAllConfig:
        """With a step of as many tokens as there is memory for, at most those of `config`."""
        left, most = limit_bytes - self._limited_bytes, config.chunk_tokens or _MOST_TOKENS
        room = left - left // _KEPT_SHARE

        def size(tokens: int) -> int:
            return self._size(dataclasses.replace(config, chunk_tokens=tokens))

        tokens = bisect_right(range(1, most + 1), room, key=size)
        if tokens == 0:
            text = (
                f"of the {limit_bytes} bytes that this pool may take {left} are left, and calls "
                f"with {config.num_experts} experts, hidden size {config.hidden_dim} and top-"
                f"{config.topk} need {size(1)} for steps of one token, {size(512)} for steps of "
                "512: allow more bytes, or give no limit"
            )
            raise errors.make(errors.ResourceExhaustedError, text)
        if _WHOLE_TOKENS <= tokens < most:
            tokens -= tokens % _WHOLE_TOKENS
        return dataclasses.replace(config, chunk_tokens=tokens)

    def _size(self, config: AllToAllConfig) -> int:
        plan = config.plan(world_size=self.world_size, ranks_per_node=self.ranks_per_node)
        return sum(plan.values())

    def meet(self, what: str, said: str = "") -> list[str]:
        """Returns when all ranks have come, with what each of them says. `what` is for errors."""
        meeting = Bootstrap(
            self._store, rank=self.rank, world_size=self.world_size, timeout_s=self.timeout_s
        )
        with meeting:
            return [data.decode() for data in meeting.exchange(said.encode(), what)]

    def check(self) -> None:
        """Raises what has broken one of them (AllToAll.check)."""
        for made in self._made.values():
            made.check()

    def check_others(self) -> None:
        """The same, before a call that looks at its own anyway."""
        if len(self._made) > 1:
            self.check()

    def close_masking(self) -> None:
        """Closes those that mask ranks; the next call of each shape makes a new one."""
        for key, made in tuple(self._made.items()):
            if made.config.mask_lost_ranks:
                self._made.pop(key).close()

    def close(self) -> None:
        """Closes what was made. Idempotent; each rank closes on its own."""
        while self._made:
            self._made.popitem()[1].close()


def _store_of(
    group_or_store: Any, rank: int | None, world_size: int | None
) -> tuple[Store, int, int]:
    if isinstance(group_or_store, Store):
        if rank is None or world_size is None:
            text = "a Store was given without rank and world_size"
            raise errors.make(errors.InvalidArgumentError, text)
        return group_or_store, rank, world_size
    errors.require(
        rank is None and world_size is None,
        "rank and world_size go with a Store; a process group knows its own",
    )
    if group_or_store is None:
        errors.require(
            dist.is_initialized(),
            "no group was given and there is no default group: call "
            "torch.distributed.init_process_group first, or pass a Store with rank and world_size",
        )
        group_or_store = dist.group.WORLD
    return group_or_store.get_group_store(), group_or_store.rank(), group_or_store.size()
