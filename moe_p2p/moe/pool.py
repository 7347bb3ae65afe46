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
import secrets
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, Store

from moe_p2p import errors
from moe_p2p.engine.metrics import Family, of_each
from moe_p2p.fleet.bootstrap import store_of
from moe_p2p.fleet.neighbours import has_ended, own_identity
from moe_p2p.library import call, raise_typed, register_fake, watched, without_default_device
from moe_p2p.moe import arguments, direct
from moe_p2p.moe.all_to_all import AllToAll
from moe_p2p.moe.config import AllToAllConfig
from moe_p2p.moe.dispatched import Dispatched, dispatched_of, new_tuple
from moe_p2p.moe.epoch import own_host
from moe_p2p.moe.options import DispatchOptions
from moe_p2p.moe.rendezvous.agreement import Host, find_ranks_per_node
from moe_p2p.moe.rendezvous.mirror import meet
from moe_p2p.moe.row_counts import Given, HostSizes

_ops = torch.ops.moe_p2p
_CHECK = _ops.all_to_all_check.default
_COUNTED, _COUNTED_OP = direct.call_of("dispatch_counted"), _ops.dispatch_counted.default
TIMEOUT_S = 100.0  # default deadline of every wait, as in DeepEP
# AllToAllConfig(**fields), built and checked once per set of fields: for use in every call.
config_of = functools.lru_cache(maxsize=1024)(AllToAllConfig)
MOST_STEP_TOKENS = 8192  # per step, where memory decides the step's size; more makes no call faster
_WHOLE_TOKENS = 64  # such a step is rounded down to a multiple of it, where so many fit
_KEPT_SHARE = 32  # 1/32 of the memory left is kept for other shapes


class ReleasingAllToAll(AllToAll):
    """An AllToAll whose dispatches need no combine: a call that needs a step releases the oldest.

    DeepEP's callers dispatch without combining (a backward pass, a benchmark) and combine one
    dispatch several times. Here a paired dispatch holds one of `steps_in_flight` steps until its
    combine, so the oldest are released when their steps come up again (csrc/moe/ledger.h); a later
    combine of theirs opens a step of its own. All ranks make the same calls, so all release the
    same ones at the same call.
    """

    others: list[int] | None = None  # numbers of the others of its pool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        call(_ops.all_to_all_release_oldest.default, self._comm)

    def name_others(self, numbers: list[int]) -> None:
        self.others = numbers

    def dispatch_counted(
        self,
        options: DispatchOptions,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor | None,
        scales: Tensor | None,
        given: Given,
        *,
        alignment: int,
        max_tokens: int = -1,
    ) -> tuple[Dispatched, HostSizes]:
        """Waits for the counts of all ranks, and makes exactly as many rows. Without gradients.

        given: this rank's counts. alignment: of the rows of an expert that are counted.
        max_tokens: bound on T of all ranks; -1: the largest, which the ranks' hosts exchange.

        Returns also the sizes that follow from the counts.
        """
        number = options.number
        if self._device is not None:
            self._communicator.prepare_dispatch(x.dtype, number, False, arguments.bytes_of_rows(x))
        first = self._comm, number, x, scales, topk_idx, topk_weights, max_tokens, alignment
        counts = given.kernel, given.host, given.number
        try:
            found = _COUNTED(*first, *counts) or _COUNTED_OP(*first, *counts)
        except RuntimeError as error:
            more = {"topk_weights": topk_weights, "scales": scales}
            raise_typed(error, x=x, topk_idx=topk_idx, **more)
        *made, gathered, sizes, tokens, bound, grouped = found
        capacity = made[0].shape[0]
        received = dispatched_of(made, number, topk_idx, scales is not None, bound, capacity)
        return received, new_tuple(HostSizes, (tokens, bound, grouped, sizes, gathered))


def _fake_dispatch_counted(*_: object) -> None:
    text = "a dispatch whose host waits for the counts of all ranks cannot be traced: pass "
    text += "num_worst_tokens (V1) or do_cpu_sync=False (V2)"
    raise errors.make(errors.UnavailableError, text)


register_fake("dispatch_counted", _fake_dispatch_counted)

# Called with each new pool: integrations have some (moe_p2p/__init__.py).
when_made: list[Callable[[AllToAllPool], None]] = []


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
        group_or_store: ProcessGroup | Store | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._store, self.rank, self.world_size = store_of(group_or_store, rank, world_size)
        self.timeout_s = timeout_s
        host = own_host().encode().decode()
        said = self.meet("the hosts", f"{host}\n{own_identity()}\n{secrets.token_hex(8)}")
        hosts, self._identities, names = zip(*(text.split("\n") for text in said), strict=True)
        self._departures = f"moe_p2p/departures/{names[0]}"  # of this pool
        where = [Host.decode(each.encode()) for each in hosts]
        self.ranks_per_node = find_ranks_per_node(where, None)
        self._made: dict[tuple[AllToAllConfig, bool], ReleasingAllToAll] = {}
        self._comms: list[int] = []  # numbers of those, for check()
        self._closed = False
        self._limited_bytes = 0  # bytes of the AllToAlls made with a limit
        for each in when_made:
            each(self)

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
        try:
            made = self._made.get(key)
        except TypeError:  # what is no configuration may have no hash
            made = None
        if made is None:
            errors.require_type("config", config, AllToAllConfig, "an AllToAllConfig")
            self.require_open()
            if config.ranks_per_node is None:
                config = dataclasses.replace(config, ranks_per_node=self._ranks_per_node(config))
            if limit_bytes:
                config = self._within(limit_bytes, config)
            made = self._made[key] = ReleasingAllToAll(
                self._store,
                config,
                rank=self.rank,
                world_size=self.world_size,
                masked=masked,
                gone=self._is_gone,
            )
            self._name([*self._comms, made._comm])
            if limit_bytes:
                self._limited_bytes += self._size(config)
        return made

    def prepare(
        self, config: AllToAllConfig, *options: DispatchOptions, limit_bytes: int = 0, **types: Any
    ) -> None:
        """Makes the AllToAll of this configuration, and compiles what calls with each of these
        options need: before a CUDA graph is captured. Collective when new.

        types: x_dtype, y_dtype, combine, row_bytes (AllToAll.prepare).
        """
        self.get(config, limit_bytes=limit_bytes).prepare(*options, **types)

    def _name(self, comms: list[int]) -> None:
        """Keeps the numbers of all AllToAlls, for check() and for dispatches of each other."""
        self._comms = comms
        for made in self._made.values():
            made.name_others([number for number in comms if number != made._comm])

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

    @property
    def num_bytes(self) -> int:
        """Bytes of its AllToAlls' regions."""
        return sum(self._size(made.config) for made in self._made.values())

    def _size(self, config: AllToAllConfig) -> int:
        plan = config.plan(world_size=self.world_size, ranks_per_node=self.ranks_per_node)
        return sum(plan.values())

    def require_open(self) -> None:
        if self._closed:
            text = f"rank {self.rank}: the pool, or its buffer, was closed; make another one"
            raise errors.make(errors.ClosedError, text)

    def meet(self, what: str, text: str = "") -> list[str]:
        """Waits for all ranks; returns the text of each. `what` names the wait in errors."""
        with meet(self._store, self.rank, self.world_size, timeout_s=self.timeout_s) as meeting:
            return [data.decode() for data in meeting.exchange(text.encode(), what)]

    def depart(self) -> None:
        """Notes that this rank takes part no more: objects that mask ranks are made without it."""
        self._store.set(f"{self._departures}/{self.rank}", "gone")

    def _is_gone(self, rank: int) -> bool:
        """Whether a rank has departed, or its process has ended. A masked rank may yet come."""
        ended = has_ended(self._identities[rank])
        return ended or self._store.check([f"{self._departures}/{rank}"])

    def check(self) -> None:
        """Raises the error that broke any of its AllToAlls (AllToAll.check), and ClosedError once
        it is closed."""
        self.require_open()
        try:
            without_default_device(_CHECK)(self._comms)
        except RuntimeError as error:
            raise_typed(error)

    def check_others(self, *, dispatches: bool = False) -> None:
        """check() for callers that check their own AllToAll anyway: skips if it is the only one.

        dispatches: a dispatch_with() follows that is given AllToAll.others: its op checks them,
        where neither a compiler nor a mode of torch watches.
        """
        if len(self._made) > 1 and (not dispatches or watched()):
            self.check()

    @property
    def keeps_masking(self) -> bool:
        """Whether clean_masks() keeps the AllToAlls, and so CUDA graphs that hold them."""
        return self.ranks_per_node == self.world_size

    def clean_masks(self) -> None:
        """Takes masked ranks back; every rank calls it (AllToAll.clean_masks).

        With several hosts it closes the AllToAlls that mask ranks: the next call of each shape
        makes a new one.
        """
        self.require_open()
        for key, made in tuple(self._made.items()):
            if not made.config.mask_lost_ranks:
                continue
            if self.keeps_masking:
                made.clean_masks()
            else:
                self._close(key)

    def metrics(self) -> list[Family]:
        """For moe_p2p.prometheus_text: of all its AllToAlls."""
        return of_each(tuple(self._made.values()))

    def close(self) -> None:
        """Closes all AllToAlls; `get` makes none after that. Idempotent; not collective."""
        self._closed = True
        while self._made:
            self._close(next(reversed(self._made)))

    def _close(self, key: tuple[AllToAllConfig, bool]) -> None:
        made = self._made.pop(key)
        self._name([number for number in self._comms if number != made._comm])
        made.close()
