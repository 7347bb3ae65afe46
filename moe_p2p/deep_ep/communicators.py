"""Which AllToAll serves a call of DeepEP's API.

DeepEP's buffers learn the shape of a call when it is made; an AllToAll is made for one shape. So a
buffer has one of these, which makes an AllToAll the first time that a shape comes, and keeps it.
Making one is collective. That holds by itself: all ranks make the same calls in the same order.

Symbols: W ranks, L ranks per node, K top-k, E experts, H hidden size, M tokens per step.
"""

from __future__ import annotations

import dataclasses
import socket
from bisect import bisect_right
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from moe_p2p import errors
from moe_p2p.config import AllToAllConfig
from moe_p2p.deep_ep.releasing import ReleasingAllToAll
from moe_p2p.ops import call
from moe_p2p.rendezvous.agreement import find_ranks_per_node
from moe_p2p.rendezvous.bootstrap import Bootstrap

TIMEOUT_S = 100.0  # of every wait, as in DeepEP
_MOST_TOKENS = 8192  # of a step whose size memory decides; more would make no call faster
_WHOLE_TOKENS = 64  # such a step is a multiple of it, where so many fit
_KEPT_SHARE = 32  # this part of what is left is left to other shapes


class MpiComm(Protocol):
    """What is used of an mpi4py communicator."""

    def Get_rank(self) -> int: ...  # noqa: N802
    def Get_size(self) -> int: ...  # noqa: N802
    def bcast(self, obj: Any, root: int = 0) -> Any: ...


class Communicators:
    """The AllToAll objects of one rank of a group, by shape. Making this is collective.

    group: a ProcessGroup of any backend, or None for `comm` or the default group. Its store is used
        whenever a communicator is made, so it has to outlive this object.
    comm: an mpi4py communicator, in place of a group.
    timeout_s: deadline of every wait, in seconds.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        comm: MpiComm | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        if group is None and comm is not None:
            self._store, self.rank, self.world_size = _store_over(comm)
        else:
            self._store, self.rank, self.world_size = _store_of(group)
        self.timeout_s = timeout_s
        hosts = self.meet("the hosts", call(torch.ops.moe_p2p.host_identity.default))
        self.ranks_per_node = find_ranks_per_node(hosts, None)
        self._made: dict[tuple[object, ...], ReleasingAllToAll] = {}
        self._limited_bytes = 0  # of those made within a limit

    def get(
        self,
        *,
        num_experts: int,
        hidden_dim: int,
        topk: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        combine_dtype: torch.dtype | None = None,
        extra_bytes: int = 0,
        chunk_tokens: int | None = None,
        steps_in_flight: int = 2,
        num_sms: int | None = None,
        limit_bytes: int = 0,
        masked: torch.Tensor | None = None,
    ) -> ReleasingAllToAll:
        """The AllToAll for this shape; the arguments are fields of AllToAllConfig.

        limit_bytes: what all that are made with a limit may take together; 0: no limit. A step then
            has as many tokens as fit into 31/32 of what is left, at most chunk_tokens.
        masked: makes one that masks ranks, here (AllToAll.masked); without limit_bytes. On several
            hosts each of its ranks is a node.

        Raises ResourceExhaustedError when not even a step of one token fits.
        """
        key = (
            num_experts,
            hidden_dim,
            topk,
            max_tokens,
            dtype,
            device.type,
            combine_dtype,
            extra_bytes,
            chunk_tokens,
            steps_in_flight,
            num_sms,
            masked is not None,
        )
        made = self._made.get(key)
        if made is None:
            ranks_per_node = self.ranks_per_node
            if masked is not None and ranks_per_node < self.world_size:
                ranks_per_node = 1
            config = AllToAllConfig(
                num_experts=num_experts,
                hidden_dim=hidden_dim,
                topk=topk,
                max_tokens=max_tokens,
                dtype=dtype,
                device=device.type,
                combine_dtype=combine_dtype,
                extra_bytes=extra_bytes,
                chunk_tokens=chunk_tokens,
                steps_in_flight=steps_in_flight,
                num_sms=num_sms,
                ranks_per_node=ranks_per_node,
                timeout_s=self.timeout_s,
                mask_lost_ranks=masked is not None,
            )
            if limit_bytes:
                config = self._within(limit_bytes, config)
            made = ReleasingAllToAll(
                self._store, config, rank=self.rank, world_size=self.world_size, masked=masked
            )
            self._made[key] = made
            if limit_bytes:
                self._limited_bytes += self._size(config)
        return made

    def _within(self, limit_bytes: int, config: AllToAllConfig) -> AllToAllConfig:
        """With a step of as many tokens as there is memory for, at most those of `config`."""
        left, most = limit_bytes - self._limited_bytes, config.chunk_tokens or _MOST_TOKENS
        room = left - left // _KEPT_SHARE

        def size(tokens: int) -> int:
            return self._size(dataclasses.replace(config, chunk_tokens=tokens))

        tokens = bisect_right(range(1, most + 1), room, key=size)
        if tokens == 0:
            text = (
                f"of the {limit_bytes} bytes that this buffer may take {left} are left, and calls "
                f"with {config.num_experts} experts, hidden size {config.hidden_dim} and top-"
                f"{config.topk} need {size(1)} for steps of one token, {size(512)} for steps of "
                "512: make the buffer with more bytes, or with none given"
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


def _store_of(group: dist.ProcessGroup | None) -> tuple[Store, int, int]:
    if group is None:
        errors.require(
            dist.is_initialized(),
            "group is None and there is no default group: call "
            "torch.distributed.init_process_group first, or pass comm",
        )
        group = dist.group.WORLD
    assert group is not None
    return group.get_group_store(), group.rank(), group.size()


def _store_over(comm: MpiComm) -> tuple[Store, int, int]:
    """A store of its own for ranks that know each other through MPI only."""
    rank, host = comm.Get_rank(), socket.gethostname()
    if rank == 0:
        server = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        comm.bcast((host, server.port), root=0)
        return server, rank, comm.Get_size()
    host, port = comm.bcast(None, root=0)
    return TCPStore(host, port, is_master=False), rank, comm.Get_size()
