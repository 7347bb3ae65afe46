"""What ranks conclude from each other's facts. Pure functions, so all ranks conclude the same.

Every rank publishes its `Facts` and reads the facts of all ranks, in rank order.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from moe_p2p import errors
from moe_p2p.engine.communicators import MOST
from moe_p2p.machine.transport import LOOPBACK, SOFTWARE, Choice


class Host(NamedTuple):
    """Where a rank is. Only `key` is compared: names may be equal, or differ among containers."""

    key: str  # equal for ranks that can share memory
    name: str = ""

    def encode(self) -> bytes:
        return json.dumps(self).encode()

    @staticmethod
    def decode(data: bytes) -> Host:
        return Host(*json.loads(data))


class Offer(NamedTuple):
    """The transport that a rank would use, before there is an engine."""

    host: str  # Host.key
    choice: Choice
    tuned: tuple[int, ...] = ()  # what all have to do alike, as rank 0 has measured it (tuned.py)

    def encode(self) -> bytes:
        return json.dumps(self).encode()

    @staticmethod
    def decode(data: bytes) -> Offer:
        host, choice, tuned = json.loads(data)
        return Offer(host, Choice(*choice), tuple(tuned))


class Facts(NamedTuple):
    """What a rank publishes about itself when it joins."""

    fields: dict[str, str]  # must be equal on all ranks
    host: str  # Host.key
    host_name: str
    next_communicator: int  # engine/communicators.py
    taken: str = "0"  # likewise, in hexadecimal digits
    tag: int = 0  # at random; the largest is that of the communicator's connections

    def encode(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    @staticmethod
    def decode(data: bytes) -> Facts:
        return Facts(**json.loads(data))


class Agreement(NamedTuple):
    ranks_per_node: int
    communicator: int
    tag: int
    ranks_on_host: int  # ranks on this rank's host, itself included


def agree_on_transport(offers: list[Offer], wanted_ranks_per_node: int | None) -> Choice:
    """Returns the transport of all ranks.

    Raises InvalidArgumentError when ranks chose different ones, UnavailableError when the chosen
    one does not reach from host to host.
    """
    hosts = {offer.host for offer in offers}
    automatic = all(offer.choice.automatic for offer in offers)
    if automatic and len(hosts) == 1 and wanted_ranks_per_node in (None, len(offers)):
        return Choice(LOOPBACK, "all ranks are of one node, no write leaves it", automatic=True)
    chosen = offers[0].choice
    if any(offer.choice.provider != chosen.provider for offer in offers):
        raise errors.make(
            errors.InvalidArgumentError,
            f"transport differs between ranks: {_by_choice(offers)}. Name one with transport=, or "
            "compare the hosts with `python -m moe_p2p doctor`",
        )
    if chosen.provider in SOFTWARE and len(hosts) > 1:
        raise errors.make(
            errors.UnavailableError,
            f"ranks are on {len(hosts)} hosts, and {chosen.provider} stays on one: "
            f"{_by_choice(offers)}. `python -m moe_p2p doctor` says what each host lacks",
        )
    return chosen


def _by_choice(offers: list[Offer]) -> str:
    """Lists which ranks chose what and why; consecutive ranks with equal choices share an entry."""
    starts = [
        rank
        for rank, offer in enumerate(offers)
        if rank == 0 or offer.choice != offers[rank - 1].choice
    ]
    parts = []
    for start, after in zip(starts, [*starts[1:], len(offers)], strict=True):
        ranks = f"rank {start} has" if after == start + 1 else f"ranks {start} to {after - 1} have"
        parts.append(f"{ranks} {offers[start].choice.provider} ({offers[start].choice.why})")
    return "; ".join(parts[:8])


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


def find_ranks_per_node(where: list[Host], wanted: int | None) -> int:
    """Returns how many consecutive ranks form a node; `wanted` may split a host into several."""
    hosts, world_size = [host.key for host in where], len(where)
    starts = [r for r in range(world_size) if r == 0 or hosts[r] != hosts[r - 1]]
    sizes = {
        after - before for before, after in zip(starts, [*starts[1:], world_size], strict=True)
    }
    found = _by_host(where, starts)
    if wanted is None:
        errors.require(
            len(sizes) == 1 and len(set(hosts)) == len(starts),
            f"ranks are not in equal blocks per host ({found}); start as many on each host, with "
            "consecutive ranks, or pass ranks_per_node",
        )
        return sizes.pop()
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


def _by_host(where: list[Host], starts: list[int]) -> str:
    """Lists where ranks are, by name; by key too where hosts that share no memory have one name."""
    keys: dict[str, set[str]] = {}
    for host in where:
        keys.setdefault(host.name, set()).add(host.key)
    parts = []
    for start in starts[:8]:
        key, name = where[start]
        unclear = not name or len(keys[name]) > 1
        parts.append(f"ranks from {start} on {f'{name} ({key})'.strip() if unclear else name}")
    return "; ".join(parts)


def _free_number(facts: list[Facts]) -> int:
    """Returns a number for the communicator that is free on the engines of all ranks."""
    first = max(fact.next_communicator for fact in facts)
    taken = [int(fact.taken, 16) for fact in facts]
    numbers: tuple[int, ...] = (*range(first, MOST), *range(first))
    for number in numbers:
        if not any(bits >> number & 1 for bits in taken):
            return number
    fullest = max(range(len(facts)), key=lambda rank: taken[rank].bit_count())
    raise errors.make(
        errors.ResourceExhaustedError,
        f"no communicator number is free on the engines of all ranks: {taken[fullest].bit_count()} "
        f"of {MOST} are taken on that of rank {fullest}. Close communicators there, or, over "
        "libfabric, where none returns, make another engine",
    )


def conclude(facts: list[Facts], rank: int, wanted_ranks_per_node: int | None) -> Agreement:
    """Returns what all ranks do, given the facts of all ranks."""
    check_fields(facts)
    hosts = [fact.host for fact in facts]
    return Agreement(
        ranks_per_node=find_ranks_per_node(
            [Host(fact.host, fact.host_name) for fact in facts], wanted_ranks_per_node
        ),
        communicator=_free_number(facts),
        tag=max(fact.tag for fact in facts),
        ranks_on_host=hosts.count(hosts[rank]),
    )
