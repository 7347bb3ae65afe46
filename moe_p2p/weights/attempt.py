"""What trainers and engine ranks of weight updates both know of an attempt. Used by both ends.

An attempt is one call of `update` on all trainers of a job, numbered from 1. Job and number are in
its keys and in its immediates, so that what arrives late of one counts for no other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_p2p.engine import checksum
from moe_p2p.errors import AbortedError, InvalidArgumentError, make, require
from moe_p2p.fleet.member import name_of
from moe_p2p.weights.plan import WeightPlan, Write

FIRST_IMM = 1 << 29  # of 3 * 2^20: moe_p2p/engine/README.md has the table of immediates
COMMIT = "commit"
PRIORITY = 2


class Keys(NamedTuple):
    """Of one attempt. Engine ranks are named by their ids."""

    job: int
    attempt: int

    @property
    def stamp(self) -> int:
        """Rises with each attempt, over jobs, too. Version numbers may repeat, stamps do not."""
        return self.job << 24 | self.attempt

    @property
    def before(self) -> Keys:
        """Two attempts ago: nobody reads its words any more but who was away; `now` says so."""
        return Keys(self.job, self.attempt - 2)

    @property
    def update(self) -> str:
        """What it is: version, base, verify, only, members, lost trainers."""
        return f"{self.job}/{self.attempt}/update"

    @property
    def decision(self) -> str:
        """COMMIT, or a `refusal`."""
        return f"{self.job}/{self.attempt}/decision"

    def requests(self, trainer: int) -> str:
        """How many it makes, by engine rank; each is counted once by each of its NICs."""
        return f"{self.job}/{self.attempt}/requests/{trainer}"

    def sent(self, trainer: int) -> str:
        return f"{self.job}/{self.attempt}/sent/{trainer}"

    def ready(self, engine_rank: str) -> str:
        return f"{self.job}/{self.attempt}/ready/{engine_rank}"

    def arrived(self, engine_rank: str) -> str:
        return f"{self.job}/{self.attempt}/arrived/{engine_rank}"


def immediate(keys: Keys) -> int:
    return FIRST_IMM + (keys.job * 7919 + keys.attempt) % (1 << 20)


def refusal(why: str, **how: Any) -> dict[str, Any]:
    """A decision against an attempt. again: trainers go on with the next one, without the trainers
    in `lost`. whole: of all parameters."""
    return {"why": why, **how}


def not_partial(who: str, runs: list[int] | None, base: int | None) -> str:
    return (
        f"{name_of(who)} is at version {runs[1] if runs else None}, and some parameters alone make "
        f"a version only from what this job sent as version {base}; all are sent"
    )


def failed(version: int, why: str) -> Exception:
    return make(AbortedError, f"the update to version {version} failed: {why}")


def lost_ranks(
    plan: WeightPlan, gone: frozenset[int], lost: list[str], lease_s: float
) -> dict[str, Any]:
    """The decision that `lost` are lost: for a trainer another one has to send. gone: trainers that
    were before."""
    names = f"{', '.join(map(name_of, lost))} {'is' if len(lost) == 1 else 'are'} lost"
    trainers = gone | {int(name_of(who).split()[1]) for who in lost if who.startswith("trainer")}
    why = f"{names}: no renewal of the lease for {lease_s:g} s"
    try:
        plan.without(sorted(trainers))
    except InvalidArgumentError as error:
        return refusal(f"{why}; {error}")
    return refusal(why, again=True, lost=sorted(trainers))


def engine_rank_name(replica: str, rank: int) -> str:
    """replica: name of the engine ranks that joined by a layout of their own; "": of the set-up."""
    return f"generator {replica}/{rank}" if replica else f"generator {rank}"


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


def only(update: Mapping[str, Any]) -> set[str] | None:
    """Names of the parameters that are sent; None: all."""
    return None if update["only"] is None else set(update["only"])


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
