"""What communicators take of /dev/shm, before they are made and in the error of one that is full.

Each rank has an object with its signal words and, for tensors on the CPU, its regions. Each of its
software NICs has one with a ring for the partner on every other node, and its engine a small one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from moe_p2p import errors, ops
from moe_p2p.config import AllToAllConfig

MIB = 1 << 20
PAGE = 4096
_ON_GPU = ("signals",)  # lines of the plan that lie in /dev/shm whatever the device


def of_a_rank(
    config: AllToAllConfig, *, world_size: int, ranks_per_node: int, num_nics: int
) -> dict[str, int]:
    """Bytes by what takes them; `num_nics` are software NICs, 0 where NICs are real."""
    plan = config.plan(world_size=world_size, ranks_per_node=ranks_per_node)
    lines = _ON_GPU if config.device == "cuda" else plan.keys() - {"device_state"}
    nic = ops.call(
        torch.ops.moe_p2p.software_nic_bytes.default,
        config.provider_settings if num_nics else "",
        world_size // ranks_per_node - 1,
    )
    sizes = {"regions and signals": sum(plan[name] for name in lines), "engine": PAGE}
    if num_nics:
        sizes["rings of software NICs"] = num_nics * nic
    return {name: -(-size // PAGE) * PAGE for name, size in sizes.items()}


@contextlib.contextmanager
def explained(needed: Callable[[], str]) -> Iterator[None]:
    """Adds to the error of a full /dev/shm what all of the communicator needs of it."""
    try:
        yield
    except errors.ResourceExhaustedError as error:
        if "/dev/shm" not in str(error):
            raise
        raise errors.ResourceExhaustedError(f"{error}. {needed()}") from None
