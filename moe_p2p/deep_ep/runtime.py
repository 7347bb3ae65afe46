"""What V1's `Buffer` stands on: its ranks' communicators, and its place among nodes of 8 ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from moe_p2p import errors
from moe_p2p.deep_ep.mpi import MpiComm, store_over
from moe_p2p.moe.pool import AllToAllPool

NODE_RANKS = 8  # DeepEP's API assumes nodes of 8 ranks on every machine


class Runtime:
    """Stands in for DeepEP's C++ object."""

    def __init__(self, rank: int, group_size: int) -> None:
        self._rank = rank
        self._group_size = group_size

    def is_available(self) -> bool:
        return True

    def get_num_rdma_ranks(self) -> int:
        return max(1, self._group_size // NODE_RANKS)

    def get_rdma_rank(self) -> int:
        return self._rank // NODE_RANKS

    def get_root_rdma_rank(self, is_global: bool) -> int:
        return self._rank % NODE_RANKS if is_global else 0

    def get_local_device_id(self) -> int:
        return torch.cuda.current_device() if torch.cuda.is_available() else 0


def pool_of(
    group: dist.ProcessGroup | None,
    comm: MpiComm | None,
    timeout_s: float,
    *,
    is_intranode: bool | None,
) -> AllToAllPool:
    """Collective. Arguments as of `Buffer`."""
    if group is None and comm is not None:
        store, rank, size = store_over(comm)
        pool = AllToAllPool(store, rank=rank, world_size=size, timeout_s=timeout_s)
    else:
        pool = AllToAllPool(group, timeout_s=timeout_s)
    errors.require(
        not is_intranode or pool.ranks_per_node == pool.world_size,
        f"is_intranode is True, and {pool.world_size} ranks are on several hosts, "
        f"{pool.ranks_per_node} on each: leave it out",
    )
    return pool
