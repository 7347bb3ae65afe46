"""The mirror world: rank 0 of W ranks alone, on one GPU, or on each of two GPUs.

For measuring and testing kernels at W ranks where there are not as many GPUs. All ranks have the
same tokens, with experts turned by a rank from each rank to the next, so each of them does what
rank 0 does: the memory of all other ranks is the partner's, the other GPU's or this rank's own.
Kernels compiled with MOE_P2P_MIRROR store what rank 0 sends to rank d where rank 0 would find it
from rank W - d (kernels/device/shape.cuh). docs/gpu.md, "The mirror world", has the proof.

    group = MirrorGroup(8)                            # one GPU: its own partner
    group = MirrorGroup(8, place=rank, count=2, key="any text of both")  # two processes
    all_to_all = AllToAll(group, config)

Control path only. One node, experts in equal blocks, without masks. The ranks that are not there
answer each exchange with what rank 0 gave: gather_counts returns this rank's values W times.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

from torch._C._distributed_c10d import HashStore, ProcessGroup, Store

from moe_p2p import errors
from moe_p2p.fleet.bootstrap import Bootstrap, store_of
from moe_p2p.fleet.neighbours import Neighbours

ADDRESSES = "the addresses"  # the exchange whose payloads begin with the rank, int32


class MirrorGroup:
    """The part of a ProcessGroup that AllToAll, its pool and DeepEP's buffers use.

    world_size: W, ranks of the world. place, count: of the processes or threads that are rank 0 of
    it, one or two. key: names their meetings on this host; equal on both, and used once.
    """

    def __init__(
        self, world_size: int, *, place: int = 0, count: int = 1, key: str = "mirror"
    ) -> None:
        errors.require(
            count in (1, 2) and 0 <= place < count,
            f"place {place} of {count}: one rank is its own partner, or two are each other's",
        )
        self.world_size, self.place, self.count = world_size, place, count
        self._key, self._numbers = key, itertools.count()
        self._store = _MirrorStore(self)

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self.world_size

    def get_group_store(self) -> Store:
        return self._store

    def next_key(self) -> str:
        """Returns the name of the next meeting, the same on both."""
        return f"{self._key}.{next(self._numbers)}"


class _MirrorStore(HashStore):
    """Stands for the group where a Store is passed on; it carries nothing."""

    def __init__(self, group: MirrorGroup) -> None:
        super().__init__()
        self.group = group


class MirrorMeeting(Bootstrap):
    """A meeting in which every rank says what this one says."""

    def __init__(self, group: MirrorGroup) -> None:
        self.store, self.rank, self.world_size = group.get_group_store(), 0, group.world_size
        self.ranks = range(group.world_size)
        self._name = "mirror"
        self.group = group
        self.neighbours = Neighbours()
        self.num_refused = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.neighbours.close()

    def exchange(self, payload: bytes, what: str) -> list[bytes]:
        if what != ADDRESSES:
            return [payload] * self.world_size
        return [struct.pack("<i", rank) + payload[4:] for rank in range(self.world_size)]


def meet(
    group_or_store: ProcessGroup | Store | None,
    rank: int | None,
    world_size: int | None,
    *,
    timeout_s: float,
) -> Bootstrap:
    """Returns the meeting of these ranks. Arguments: Bootstrap's."""
    store, rank, world_size = store_of(group_or_store, rank, world_size)
    if isinstance(store, _MirrorStore):
        return MirrorMeeting(store.group)
    return Bootstrap(store, rank=rank, world_size=world_size, timeout_s=timeout_s)


class Sharing(NamedTuple):
    """Who shares device memory on a node, and as what.

    place, num_places, key: of exchange_fds. macros: of kernels, in addition to the shape's.
    """

    place: int
    num_places: int
    key: str
    macros: dict[str, int]
    world_size: int = 0  # of a mirror world, or of a node in which ranks are absent
    present: Sequence[int] = ()  # ranks of such a node

    def as_ranks(self, addresses: list[int]) -> list[int]:
        """Returns the address of every rank of the node, from addresses in order of place."""
        if self.present:  # nothing is written to an absent rank, nor read from it
            own = addresses[self.place]
            by_rank = dict(zip(self.present, addresses, strict=True))
            return [by_rank.get(rank, own) for rank in range(self.world_size)]
        if not self.world_size:
            return addresses
        partner = addresses[(self.place + 1) % self.num_places]
        return [addresses[self.place], *[partner] * (self.world_size - 1)]


def sharing_of(meeting: Bootstrap, ranks_per_node: int, key: str) -> Sharing:
    """key: of this node, which all its ranks have."""
    if meeting.absent and ranks_per_node == meeting.world_size:
        present = meeting.ranks
        place, macros = present.index(meeting.rank), dict[str, int]()
        return Sharing(place, len(present), key, macros, meeting.world_size, present)
    if not isinstance(meeting, MirrorMeeting):
        return Sharing(meeting.rank % ranks_per_node, ranks_per_node, key, {})
    group, world_size = meeting.group, meeting.world_size
    errors.require(
        ranks_per_node == world_size,
        f"ranks_per_node is {ranks_per_node}, a mirror world of {world_size} ranks is one node",
    )
    macros = {"MOE_P2P_MIRROR": 1}
    return Sharing(group.place, group.count, group.next_key(), macros, world_size)
