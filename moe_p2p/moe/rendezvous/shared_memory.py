"""How much of /dev/shm communicators take: for `plan`, and for the error text of a full /dev/shm.

Each rank has an object with its signal words and, for tensors on the CPU, its regions. Each of its
software NICs has an object with a ring for the partner on every other node; its engine a small one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from moe_p2p import env, errors, library
from moe_p2p.machine.transport import TIMED
from moe_p2p.moe.config import AllToAllConfig

MIB = 1 << 20
PAGE = 4096
_ON_GPU = ("signals",)  # lines of the plan that lie in /dev/shm on GPUs, too


def of_a_rank(
    config: AllToAllConfig, *, world_size: int, ranks_per_node: int, num_nics: int
) -> dict[str, int]:
    """Returns bytes of /dev/shm by use. num_nics: software NICs of a rank; 0: NICs are real."""
    plan = config.plan(world_size=world_size, ranks_per_node=ranks_per_node)
    lines = _ON_GPU if config.on_gpu else plan.keys() - {"device_state"}
    nic = library.call(
        torch.ops.moe_p2p.software_nic_bytes.default,
        config.provider_settings if num_nics else "",
        world_size // ranks_per_node - 1,
        (env.transport() if config.transport == "auto" else config.transport) == TIMED,
    )
    sizes = {"regions and signals": sum(plan[name] for name in lines), "engine": PAGE}
    if num_nics:
        sizes["rings of software NICs"] = num_nics * nic
    return {name: -(-size // PAGE) * PAGE for name, size in sizes.items()}


@contextlib.contextmanager
def explained(needed: Callable[[], str]) -> Iterator[None]:
    """Adds needed(), the communicator's total, to the error text of a full /dev/shm."""
    try:
        yield
    except errors.ResourceExhaustedError as error:
        if "/dev/shm" not in str(error):
            raise
        raise errors.ResourceExhaustedError(f"{error}. {needed()}") from None
