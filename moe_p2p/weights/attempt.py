"""What trainers and generators of weight updates both know of an attempt. Used by both ends.

An attempt is one call of `update` on all trainers, numbered from 1. Its number is in its keys and
in its immediates, so that what arrives late of one counts for no other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from moe_p2p.errors import InvalidArgumentError, ProtocolError, make
from moe_p2p.kv import checksum
from moe_p2p.weights.board import Board, Deadline
from moe_p2p.weights.layout import WeightLayout
from moe_p2p.weights.plan import WeightPlan, Write, weight_plan

FIRST_IMM = 1 << 29  # of 2^20; those of moe_p2p.kv begin at 2^30
COMMIT = "commit"
PRIORITY = 2


def immediate(attempt: int) -> int:
    return FIRST_IMM + attempt % (1 << 20)


class Keys(NamedTuple):
    """Of one attempt."""

    attempt: int

    @property
    def update(self) -> str:
        return f"{self.attempt}/update"

    @property
    def decision(self) -> str:
        """COMMIT, or why not."""
        return f"{self.attempt}/decision"

    def maxima(self, trainer: int) -> str:
        return f"{self.attempt}/maxima/{trainer}"

    def sent(self, trainer: int) -> str:
        return f"{self.attempt}/sent/{trainer}"

    def ready(self, generator: int) -> str:
        return f"{self.attempt}/ready/{generator}"

    def arrived(self, generator: int) -> str:
        return f"{self.attempt}/arrived/{generator}"


def agree_on_plan(
    board: Board, side: str, rank: int, layout: WeightLayout, deadline: Deadline
) -> WeightPlan:
    """Both sides' rank 0 publish their layouts, and every rank makes the plan."""
    if rank == 0:
        board.put(f"{side} layout", layout.to_bytes().hex())
    keys = {f"{each} layout": f"{each} 0" for each in ("trainer", "generator")}
    found = {key: WeightLayout.from_bytes(bytes.fromhex(value))
             for key, value in board.wait(keys, deadline).items()}  # fmt: skip
    if found[f"{side} layout"].digest != layout.digest:
        raise make(ProtocolError, f"{side} {rank} has another layout than {side} 0")
    return weight_plan(found["trainer layout"], found["generator layout"])


def check_rows(who: str, writes: Iterable[Write], tensors: Mapping[str, Tensor], side: int) -> None:
    """That tensors are there and large enough. side: 0 of sources, 1 of targets."""
    needed: dict[str, int] = defaultdict(int)
    for write in writes:
        rows, name = write.rows, (write.source_tensor, write.target_tensor)[side]
        stride = (rows.source_stride, rows.target_stride)[side]
        end = max(each[side] for each in rows.offsets) + (rows.num_rows - 1) * stride
        needed[name] = max(needed[name], end + rows.row_bytes)
    for name, nbytes in needed.items():
        if name not in tensors:
            raise make(
                InvalidArgumentError, f"{who} has no tensor {name!r}, which its layout names"
            )
        have = tensors[name].numel() * tensors[name].element_size()
        if have < nbytes or not tensors[name].is_contiguous():
            text = f"{who}: tensor {name!r} has {have} bytes, must be contiguous and have {nbytes}"
            raise make(InvalidArgumentError, text)


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
