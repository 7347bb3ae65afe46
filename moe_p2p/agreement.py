"""What ranks conclude from each other's facts: pure, so that all ranks conclude the same.

Every rank publishes its `Facts` and reads those of all, in rank order.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from moe_p2p import errors


class Facts(NamedTuple):
    """What a rank says of itself when it joins."""

    fields: dict[str, str]  # must be equal on all ranks
    host: str  # equal for ranks that can share memory
    next_communicator: int  # first number that its engine has not used

    def encode(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    @staticmethod
    def decode(data: bytes) -> Facts:
        return Facts(**json.loads(data))


class Agreement(NamedTuple):
    ranks_per_node: int
    communicator: int
    ranks_on_host: int  # of the rank that asks


def check_fields(facts: list[Facts]) -> None:
    """Raises InvalidArgumentError naming a field that differs, two ranks and both values."""
    first = facts[0].fields
    for rank, other in enumerate(facts):
        for name in [*first, *(name for name in other.fields if name not in first)]:
            mine, theirs = first.get(name, "missing"), other.fields.get(name, "missing")
            errors.require(
                mine == theirs,
                f"{name} differs between ranks: rank 0 has {mine}, rank {rank} has {theirs}",
            )


def find_ranks_per_node(hosts: list[str], wanted: int | None) -> int:
    """How many consecutive ranks share memory; `wanted` asks for smaller nodes than hosts are."""
    world_size = len(hosts)
    starts = [r for r in range(world_size) if r == 0 or hosts[r] != hosts[r - 1]]
    sizes = {
        after - before for before, after in zip(starts, [*starts[1:], world_size], strict=True)
    }
    found = "; ".join(f"ranks from {start} on {hosts[start]}" for start in starts[:8])
    if wanted is None:
        errors.require(
            len(sizes) == 1 and len(set(hosts)) == len(starts),
            f"ranks are not in equal blocks per host ({found}); start as many on each host, with "
            "consecutive ranks, or pass ranks_per_node",
        )
        wanted = sizes.pop()
        errors.require(
            wanted <= 64, f"{wanted} ranks share a host, at most 64 can; pass ranks_per_node"
        )
        return wanted
    errors.require(
        world_size % wanted == 0,
        f"ranks_per_node is {wanted}, must divide world_size {world_size}",
    )
    for start in range(0, world_size, wanted):
        errors.require(
            len(set(hosts[start : start + wanted])) == 1,
            f"ranks_per_node is {wanted}, but ranks {start} to {start + wanted - 1} are not on one "
            f"host ({found})",
        )
    return wanted


def conclude(facts: list[Facts], rank: int, wanted_ranks_per_node: int | None) -> Agreement:
    """What all ranks do, given what all ranks said."""
    check_fields(facts)
    hosts = [fact.host for fact in facts]
    return Agreement(
        ranks_per_node=find_ranks_per_node(hosts, wanted_ranks_per_node),
        communicator=max(fact.next_communicator for fact in facts),
        ranks_on_host=hosts.count(hosts[rank]),
    )
