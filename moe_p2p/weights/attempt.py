"""What trainers and generators of weight updates both know of an attempt. Used by both ends.

An attempt is one call of `update` on all trainers, numbered from 1. Its number is in its keys and
in its immediates, so that what arrives late of one counts for no other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_p2p.errors import AbortedError, InvalidArgumentError, ProtocolError, make, require
from moe_p2p.kv import checksum
from moe_p2p.weights.board import Board, Deadline
from moe_p2p.weights.layout import WeightLayout
from moe_p2p.weights.plan import WeightPlan, Write, weight_plan

FIRST_IMM = 1 << 29  # of 2^20; immediates of moe_p2p.kv begin at 2^30
COMMIT = "commit"
PRIORITY = 2


def immediate(attempt: int) -> int:
    return FIRST_IMM + attempt % (1 << 20)


class Keys(NamedTuple):
    """Of one attempt."""

    attempt: int

    @property
    def update(self) -> str:
        """What it is: version, base, verify, only, changed, members, lost trainers."""
        return f"{self.attempt}/update"

    @property
    def decision(self) -> str:
        """COMMIT, or a `refusal`."""
        return f"{self.attempt}/decision"

    def changed(self, trainer: int) -> str:
        return f"{self.attempt}/changed/{trainer}"

    def requests(self, trainer: int) -> str:
        """How many it makes, by generator; each is counted once by each of its NICs."""
        return f"{self.attempt}/requests/{trainer}"

    def sent(self, trainer: int) -> str:
        return f"{self.attempt}/sent/{trainer}"

    def ready(self, generator: str) -> str:
        return f"{self.attempt}/ready/{generator}"

    def arrived(self, generator: str) -> str:
        return f"{self.attempt}/arrived/{generator}"


def refusal(why: str, **how: Any) -> dict[str, Any]:
    """A decision against an attempt. again: trainers go on with the next one, without the trainers
    in `lost`; full: with all parameters."""
    return {"why": why, **how}


def not_partial(who: str, runs: int | None, base: int | None) -> str:
    return (
        f"{who} is at version {runs}, and some parameters alone make a version only from "
        f"{base}; update in full"
    )


def failed(version: int, why: str) -> Exception:
    return make(AbortedError, f"the update to version {version} failed: {why}")


def lost_ranks(
    plan: WeightPlan, gone: frozenset[int], lost: list[str], lease_s: float
) -> dict[str, Any]:
    """The decision that `lost` are lost: for a trainer another one has to send. gone: trainers that
    were before."""
    names = f"{', '.join(lost)} {'is' if len(lost) == 1 else 'are'} lost"
    trainers = gone | {int(who.split()[1]) for who in lost if who.startswith("trainer")}
    why = f"{names}: no renewal of the lease for {lease_s:g} s"
    try:
        plan.without(sorted(trainers))
    except InvalidArgumentError as error:
        return refusal(f"{why}; {error}")
    return refusal(why, again=True, lost=sorted(trainers))


def name_of(replica: str, rank: int) -> str:
    """replica: name of the generators that joined by a layout of their own; "": of the set-up."""
    return f"generator {replica}/{rank}" if replica else f"generator {rank}"


def layout_key(digest: str) -> str:
    """Of a replica's layout."""
    return f"layout {digest}"


def agree_on_plan(
    board: Board, side: str, rank: int, layout: WeightLayout, deadline: Deadline
) -> WeightPlan:
    """Both sides' rank 0 publish their layouts, and every rank makes the plan. side: "trainer" or
    "generator"."""
    if rank == 0:
        board.put(f"{side} layout", layout.to_bytes().hex())
    keys = {f"{each} layout": f"{each} 0" for each in ("trainer", "generator")}
    found = {key: WeightLayout.from_bytes(bytes.fromhex(value))
             for key, value in board.wait(keys, deadline).items()}  # fmt: skip
    if found[f"{side} layout"].digest != layout.digest:
        raise make(
            ProtocolError,
            f"{side} {rank} has another layout than {side} 0; layout_of, or WeightLayout.merged, "
            f"makes one of all: {layout.difference(found[f'{side} layout'])[:500]}",
        )
    return weight_plan(found["trainer layout"], found["generator layout"])


def plan_of_replica(board: Board, layout: WeightLayout, deadline: Deadline) -> WeightPlan:
    """Of generators that join: trainers find their layout by its digest."""
    board.put(layout_key(layout.digest), layout.to_bytes().hex())
    data = board.wait({"trainer layout": "trainer 0"}, deadline)["trainer layout"]
    return weight_plan(WeightLayout.from_bytes(bytes.fromhex(data)), layout)


def check_there(who: str, names: Iterable[str], tensors: Mapping[str, Tensor]) -> None:
    for name in names:
        require(name in tensors, f"{who} has no tensor {name!r}, which its layout names")


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def sums(writes: Iterable[Write], tensors: Mapping[str, Tensor], side: int) -> dict[str, int]:
    """64-bit sums over what is written, by the target's tensor; equal on both sides."""
    found: dict[str, int] = defaultdict(int)
    for write in writes:
        rows, name = write.rows, (write.source_tensor, write.target_tensor)[side]
        at = [each[side] for each in rows.offsets]
        unit = math.gcd(*at) or 1
        one = checksum.rows_checksum(
            as_bytes(tensors[name]),
            torch.tensor([each // unit for each in at], device="cpu"),
            offset=0,
            unit=unit,
            row_bytes=rows.row_bytes,
            num_rows=rows.num_rows,
            row_stride=(rows.source_stride, rows.target_stride)[side],
            first_row=rows.offsets[0][1],  # another one for each write to a tensor
        )
        found[write.target_tensor] = checksum.add(found[write.target_tensor], one)
    return dict(found)


def whole_sum(tensor: Tensor) -> int:
    """Of a whole tensor."""
    data = as_bytes(tensor)
    if not len(data):
        return 0
    row = 1 << 16
    full, rest = divmod(len(data), row)
    common = {"unit": row, "num_rows": 1, "row_stride": row}
    rows = torch.arange(full, device="cpu")
    total = checksum.rows_checksum(data, rows, offset=0, row_bytes=row, **common)
    if rest:
        tail = checksum.rows_checksum(
            data,
            torch.zeros(1, dtype=torch.int64, device="cpu"),
            offset=full * row,
            row_bytes=rest,
            first_row=full,
            **common,
        )
        total = checksum.add(total, tail)
    return total


def differing(tensors: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors whose bytes are other ones in the reference."""
    absent = [name for name in tensors if name not in reference]
    require(not absent, f"check_equal: the reference lacks {', '.join(absent[:3])}")
    return [name for name, each in tensors.items()
            if whole_sum(reference[name].contiguous()) != whole_sum(each)]  # fmt: skip
