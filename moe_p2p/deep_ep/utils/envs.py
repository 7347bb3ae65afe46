"""deep_ep.utils.envs: how DeepEP's scripts start their ranks, and seeds.

MASTER_ADDR, MASTER_PORT, WORLD_SIZE (here the number of hosts) and RANK (of this host) say where.
"""

from __future__ import annotations

import random

import torch
import torch.distributed as dist

from moe_p2p import env
from moe_p2p.deep_ep.elastic import get_logical_domain_size, get_physical_domain_size

__all__ = ["get_logical_domain_size", "get_physical_domain_size"]
_local_rank, _local_seed, _global_seed = 0, 0, 0


def init_dist(
    local_rank: int, num_local_ranks: int, seed: int = 0
) -> tuple[int, int, dist.ProcessGroup]:
    """Makes the default group and sets what DeepEP's scripts expect: GPU, default device, type.

    Without a GPU the ranks are of gloo, on CPUs. Returns rank, number of ranks, and a group of all.
    """
    global _local_rank
    _local_rank = local_rank
    on_gpu = torch.cuda.is_available()
    address, port, num_hosts, host = env.hosts_of_a_script()
    if on_gpu:
        torch.cuda.set_device(local_rank)
    dist.init_process_group(
        backend="nccl" if on_gpu else "gloo",
        init_method=f"tcp://{address}:{port}",
        world_size=num_hosts * num_local_ranks,
        rank=host * num_local_ranks + local_rank,
        device_id=torch.device("cuda", local_rank) if on_gpu else None,
    )
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("cuda" if on_gpu else "cpu")
    init_seed(seed)
    group = dist.new_group(list(range(dist.get_world_size())))
    return dist.get_rank(), dist.get_world_size(), group


def init_seed(global_seed: int) -> None:
    """Seeds torch and random with the seed plus the rank."""
    global _local_seed, _global_seed
    _global_seed, _local_seed = global_seed, global_seed + dist.get_rank()
    torch.manual_seed(_local_seed)
    random.seed(_local_seed)


def get_local_seed() -> int:
    return _local_seed


def get_global_seed() -> int:
    return _global_seed


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Prints on all ranks, or on the first one of each host; then waits for all."""
    if not once_in_node or _local_rank == 0:
        print(s, flush=True)
    dist.barrier()


def check_nvlink_connections(group: dist.ProcessGroup) -> None:
    """Does nothing: a buffer checks itself what its ranks can reach, and names what they cannot."""


def check_torch_deterministic() -> None:
    """Does nothing: memory that torch fills is not shared with a stream that has not waited."""
