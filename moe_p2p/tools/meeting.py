"""Lines the GPUs of all ranks up before a span begins.

Within a host a kernel does it, between hosts a dispatch of this package.

Collective: all ranks of the default process group make the same calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from moe_p2p import AllToAll, AllToAllConfig
from moe_p2p.tools.probe import Probe

MIRROR_GPUS = 2  # most of a mirror world


class Ranks(Protocol):
    """What a meeting knows of them."""

    @property
    def ranks(self) -> int: ...
    @property
    def ranks_per_node(self) -> int: ...
    @property
    def hosts(self) -> int: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def device(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class OnGpus:
    """Ranks with a GPU each."""

    ranks: int
    ranks_per_node: int
    hosts: int
    timeout_s: float
    device: str = "cuda"


class Meeting:
    """links: of the GPUs of this host, measured once."""

    def __init__(self, ranks: Ranks) -> None:
        self._probe = Probe(timeout_s=ranks.timeout_s, group=host_group(ranks))
        self.links = self._probe.links()
        self._hosts = HostsMeet(ranks) if ranks.hosts > 1 else None

    def align(self) -> None:
        if self._hosts is not None:
            self._hosts.meet()
        self._probe.barrier()

    def check(self) -> None:
        """After a synchronization: raises TimeoutError when a wait on the device failed."""
        self._probe.check()

    def close(self) -> None:
        """Not to be called after a failure: it waits for the others."""
        if self._hosts is not None:
            self._hosts.close()
        self._probe.close()


def host_group(ranks: Ranks) -> dist.ProcessGroup | None:
    """Returns the ranks of this host; None: all ranks."""
    if ranks.hosts == 1:
        return None
    local = ranks.ranks // ranks.hosts
    every = [dist.new_group(range(h * local, (h + 1) * local)) for h in range(ranks.hosts)]
    found: dist.ProcessGroup = every[dist.get_rank() // local]
    return found


class HostsMeet:
    """Lines ranks of several hosts up: a dispatch ends when counts of all ranks have arrived."""

    def __init__(self, ranks: Ranks) -> None:
        config = AllToAllConfig(
            num_experts=ranks.ranks,
            hidden_dim=128,
            topk=1,
            max_tokens=1,
            ranks_per_node=ranks.ranks_per_node,
            timeout_s=ranks.timeout_s,
            device=ranks.device,
        )
        self._comm = AllToAll(None, config)
        self._x = torch.zeros(1, 128, dtype=torch.bfloat16, device=ranks.device)
        self._idx = torch.full((1, 1), dist.get_rank(), device=ranks.device)

    def meet(self) -> None:
        """On GPUs in order of the current stream; the host does not wait."""
        self._comm.release(self._comm.dispatch(self._x, self._idx))

    def close(self) -> None:
        self._comm.close()
