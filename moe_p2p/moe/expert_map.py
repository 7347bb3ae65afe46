"""Which slot of which rank holds which expert: a table on the device, and its pure half.

A rank has a fixed number of slots; an AllToAll of world_size * slots_per_rank "experts" numbers
them, rank by rank. An ExpertMap turns the ids of a router, *logical* experts, into slots. It may
change between two replays of a graph: its tensors stay where they are.

Symbols: T tokens, K top-k, E logical experts, N slots of all ranks, M = N - E + 1, the most slots
that an expert can have.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_p2p import errors
from moe_p2p.library import call, register_fake, unaffected
from moe_p2p.machine import jit

_ops = torch.ops.moe_p2p
EMPTY = -1  # in a placement: a slot that holds no expert


class Move(NamedTuple):
    """The expert of slot `source` goes to slot `target`; both are numbers among all N."""

    source: int
    target: int


def check_placement(placement: Sequence[int], num_slots: int, num_experts: int) -> list[int]:
    """The placement as a list, or InvalidArgumentError: each expert needs a slot."""
    try:
        found = [operator.index(each) for each in placement]
    except TypeError:
        raise errors.wrong_type("placement", placement, "a list of ints") from None
    errors.require(
        len(found) == num_slots, f"placement has {len(found)} slots, must have {num_slots}"
    )
    wrong = [slot for slot, expert in enumerate(found) if not EMPTY <= expert < num_experts]
    errors.require(
        not wrong,
        f"placement: slot {wrong[:1]} holds expert {[found[slot] for slot in wrong[:1]]}, must be "
        f"0 to {num_experts - 1}, or {EMPTY} for none",
    )
    missing = sorted(set(range(num_experts)) - set(found))
    errors.require(not missing, f"placement: no slot holds experts {missing[:8]}; each needs one")
    return found


def replicas(placement: Sequence[int], num_experts: int) -> list[list[int]]:
    """The slots of each expert, in their order."""
    found: list[list[int]] = [[] for _ in range(num_experts)]
    for slot, expert in enumerate(placement):
        if expert != EMPTY:
            found[expert].append(slot)
    return found


def moves_between(
    before: Sequence[int], after: Sequence[int], slots_per_rank: int, num_experts: int
) -> list[Move]:
    """What has to be copied, the same on all ranks: no target is named twice.

    An expert comes from a slot of the same rank if there is one, else from the rank that has the
    fewest to give so far. Sources are slots of `before`, so none may be written before all moves
    are over, unless `before` has it empty.

        before [0, 1, 2, -1], after [0, 2, 1, 0], 2 slots a rank: moves 2 -> 1, 1 -> 2, 0 -> 3
    """
    held = replicas(before, num_experts)
    given = [0] * (len(before) // slots_per_rank)
    found = []
    for target, expert in enumerate(after):
        if expert in (EMPTY, before[target]):
            continue
        rank = target // slots_per_rank
        source = min(
            held[expert],
            key=lambda slot: (slot // slots_per_rank != rank, given[slot // slots_per_rank], slot),
        )
        given[source // slots_per_rank] += source // slots_per_rank != rank
        found.append(Move(source, target))
    return found


class ExpertMap:
    """The slots of logical experts, for one layer.

    placement: [N] the expert of each slot, in the order of ranks; -1: none. Each expert has at
        least one slot. DeepSeek's EPLB, vLLM and SGLang call it physical_to_logical_map.
    num_experts: E. rank: this rank's; tokens of different ranks then begin with different slots of
        an expert. device: of topk_idx.

    slots: [E, M] int32 on the device, of each expert as many as counts tells (others are -1);
    counts: [E] int32 there (vLLM's logical_to_physical_map and logical_replica_count). Their
    addresses stay. Raises InvalidArgumentError.
    """

    def __init__(
        self,
        placement: Sequence[int],
        *,
        num_experts: int,
        rank: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, number, least in (("num_experts", num_experts, 1), ("rank", rank, 0)):
            errors.require_type(name, number, int, "an int")
            errors.require(
                least <= number < 1 << 31, f"{name} is {number}, must be {least} to 2^31 - 1"
            )
        errors.require_type("placement", placement, (Sequence, Tensor), "a sequence of ints")
        self.num_slots, self.num_experts, self.rank = len(placement), num_experts, rank
        check_placement(placement, self.num_slots, num_experts)
        most = self.num_slots - num_experts + 1
        with torch.inference_mode(False):  # `set` writes to them in any mode
            self.slots = torch.empty((num_experts, most), dtype=torch.int32, device=device)
            self.counts = torch.empty((num_experts,), dtype=torch.int32, device=device)
        map_kernel(self.slots.get_device())  # loaded before anybody captures
        self.void = ""
        self.placement: list[int] = []
        self.set(placement)

    @unaffected
    def to_slots(self, topk_idx: Tensor) -> Tensor:
        """The slots [T, K] of topk_idx [T, K], int32 or int64 logical experts; -1 stays -1.

        Token t of rank r takes slot (t + r) mod n of an expert with n slots: the same in each
        replay, spread evenly over tokens. One kernel, which reads the tables when it runs.
        Raises InvalidArgumentError for an id outside 0 to E - 1; on a GPU the dispatch does, which
        gets N for it. AbortedError once the map is void (`ExpertMover.step`).
        """
        if self.void:
            raise errors.make(errors.AbortedError, self.void)
        errors.require_type("topk_idx", topk_idx, Tensor)
        slots: Tensor = call(
            _ops.map_experts.default,
            map_kernel(topk_idx.get_device()),
            topk_idx,
            self.slots,
            self.counts,
            self.num_slots,
            self.rank,
        )
        return slots

    def set(self, placement: Sequence[int]) -> None:
        """Takes another placement, on a GPU in the order of the current stream.

        All ranks do it between the same two steps, when the slots hold these experts:
        `ExpertMover` does both. Nothing changes if it raises InvalidArgumentError.
        """
        found = check_placement(placement, self.num_slots, self.num_experts)
        self._write(replicas(found, self.num_experts))
        self.placement = found

    def make_void(self, why: str) -> None:
        """For a rank that cannot know which placement the others have: `to_slots` raises, and
        replays name a slot that no rank has, which their dispatch refuses."""
        self.void = why
        self._write([[self.num_slots] * self.slots.shape[1]] * self.num_experts)

    def _write(self, held: list[list[int]]) -> None:
        width = self.slots.shape[1]
        slots = [slot for each in held for slot in (*each, *[EMPTY] * (width - len(each)))]
        for tensor, values in ((self.slots, slots), (self.counts, [len(each) for each in held])):
            made = torch.tensor(values, dtype=torch.int32, device="cpu").view(tensor.shape)
            # Torch keeps pinned memory until the stream has read it.
            tensor.copy_(made.pin_memory() if tensor.is_cuda else made, non_blocking=True)

    def __repr__(self) -> str:
        state = "void" if self.void else f"{self.placement.count(EMPTY)} empty"
        return f"ExpertMap({self.num_experts} experts in {self.num_slots} slots, {state})"


def map_kernel(device: int) -> int:
    """Returns kernels/map.cu, loaded; 0 for host memory (device -1)."""
    return 0 if device < 0 else _loaded(device)


@functools.cache
def _loaded(device: int) -> int:
    return jit.load(device, "map.cu", "moe_p2p_map", {})


def _fake_map_experts(kernel: int, topk_idx: Tensor, *_: object) -> Tensor:
    return topk_idx.new_empty(topk_idx.shape)


register_fake("map_experts", _fake_map_experts)
