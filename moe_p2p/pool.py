"""AllToAll objects of one group by configuration: made at first use of a configuration, then kept.

Layers, engines and DeepEP's calls know the shape only when a call is made, and an AllToAll is made
for one shape. So they share a pool: layers of one shape share one AllToAll and its memory.

    pool = AllToAllPool(group)
    all_to_all = pool.get(AllToAllConfig(num_experts=256, hidden_dim=7168, topk=8, max_tokens=128))

Making one is collective: all ranks have to make the same calls in the same order.

Symbols: W ranks, L ranks per node, K top-k, E experts, H hidden size, M tokens per step.
"""

from __future__ import annotations

import dataclasses
import functools
from bisect import bisect_right
from typing import Any

import torch

from moe_p2p import errors, serving_steps
from moe_p2p.config import AllToAllConfig
from moe_p2p.ops import call
from moe_p2p.releasing import ReleasingAllToAll
from moe_p2p.rendezvous.agreement import find_ranks_per_node
from moe_p2p.rendezvous.bootstrap import Bootstrap, store_of

TIMEOUT_S = 100.0  # default deadline of every wait, as in DeepEP
# AllToAllConfig(**fields), built and checked once per set of fields: for use in every call.
config_of = functools.lru_cache(maxsize=1024)(AllToAllConfig)
MOST_STEP_TOKENS = 8192  # per step, where memory decides the step's size; more makes no call faster
_WHOLE_TOKENS = 64  # such a step is rounded down to a multiple of it, where so many fit
_KEPT_SHARE = 32  # 1/32 of the memory left is kept for other shapes


class AllToAllPool:
    """The AllToAll objects of one rank of a group. Making the pool is collective.

    group_or_store: a ProcessGroup of any backend (or what has its rank(), size() and
        get_group_store()), None for the default group, or a Store with rank and world_size. The
        store is used whenever an AllToAll is made, so it has to outlive this object.
    timeout_s: deadline for ranks to meet, in seconds.

    Dispatches need no combine: when a call needs a step, the oldest open dispatch is released.
    Where vLLM or SGLang runs, each of its steps ends with check().
    """

    def __init__(
        self,
        group_or_store: Any = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._store, self.rank, self.world_size = store_of(group_or_store, rank, world_size)
        self.timeout_s = timeout_s
        hosts = self.meet("the hosts", call(torch.ops.moe_p2p.host_identity.default))
        self.ranks_per_node = find_ranks_per_node(hosts, None)
        self._made: dict[tuple[AllToAllConfig, bool], ReleasingAllToAll] = {}
        self._limited_bytes = 0  # bytes of the AllToAlls made with a limit
        serving_steps.end_with_check(self)

    def get(
        self,
        config: AllToAllConfig,
        *,
        limit_bytes: int = 0,
        masked: torch.Tensor | None = None,
    ) -> ReleasingAllToAll:
        """Returns the AllToAll of this configuration; equal ones share it. Collective when new.

        config: without ranks_per_node, the ranks of a host form a node; with mask_lost_ranks and
            several hosts, each rank is a node.
        limit_bytes: bytes that all AllToAlls with a limit may take together; 0: no limit. With it,
            a step has as many tokens as fit into 31/32 of what is left, at most chunk_tokens.
        masked: int32 [W], the masks (AllToAll.masked), for a config with mask_lost_ranks.

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
        """Masks work in one node, or with nodes of one rank."""
        if config.mask_lost_ranks and self.ranks_per_node < self.world_size:
            return 1
        return self.ranks_per_node

    def _within(self, limit_bytes: int, config: AllToAllConfig) -> AllToAllConfig:
        """Returns `config` with as many tokens per step as memory allows, at most its own."""
        left, most = limit_bytes - self._limited_bytes, config.chunk_tokens or MOST_STEP_TOKENS
        room = left - left // _KEPT_SHARE

        tokens = self.tokens_within(room, dataclasses.replace(config, chunk_tokens=most))
        if tokens == 0:
            one, many = (
                self._size(dataclasses.replace(config, chunk_tokens=tokens)) for tokens in (1, 512)
            )
            text = (
                f"of the {limit_bytes} bytes that this pool may take {left} are left, and calls "
                f"with {config.num_experts} experts, hidden size {config.hidden_dim} and top-"
                f"{config.topk} need {one} for steps of one token, {many} for steps of "
                "512: allow more bytes, or give no limit"
            )
            raise errors.make(errors.ResourceExhaustedError, text)
        return dataclasses.replace(config, chunk_tokens=tokens)

    def tokens_within(self, room: int, config: AllToAllConfig) -> int:
        """Returns how many tokens of a step fit into `room` bytes, at most the step's; 0: none."""
        most = config.step_tokens

        def size(tokens: int) -> int:
            return self._size(dataclasses.replace(config, chunk_tokens=tokens))

        tokens = bisect_right(range(1, most + 1), room, key=size)
        if _WHOLE_TOKENS <= tokens < most:
            tokens -= tokens % _WHOLE_TOKENS
        return tokens

    def _size(self, config: AllToAllConfig) -> int:
        plan = config.plan(world_size=self.world_size, ranks_per_node=self.ranks_per_node)
        return sum(plan.values())

    def meet(self, what: str, text: str = "") -> list[str]:
        """Waits for all ranks; returns the text of each. `what` names the wait in errors."""
        meeting = Bootstrap(
            self._store, rank=self.rank, world_size=self.world_size, timeout_s=self.timeout_s
        )
        with meeting:
            return [data.decode() for data in meeting.exchange(text.encode(), what)]

    def check(self) -> None:
        """Raises the error that broke any of its AllToAlls (AllToAll.check)."""
        for made in tuple(self._made.values()):
            made.check()

    def check_others(self) -> None:
        """check() for callers that check their own AllToAll anyway: skips if it is the only one."""
        if len(self._made) > 1:
            self.check()

    def close_masking(self) -> None:
        """Closes AllToAlls that mask ranks; the next call of each shape makes a new one."""
        for key, made in tuple(self._made.items()):
            if made.config.mask_lost_ranks:
                self._made.pop(key).close()

    def close(self) -> None:
        """Closes all AllToAlls. Idempotent; not collective."""
        while self._made:
            self._made.popitem()[1].close()
