"""Rows that are complete while others are not, by counters: of y while combine sends, and of x
while dispatch receives.

Symbols: E_local experts of this rank, C rows of an expert (capacity).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_p2p import errors
from moe_p2p.moe.shape import layout

if TYPE_CHECKING:
    from moe_p2p.moe.communicator import Communicator


@dataclass(frozen=True, kw_only=True)
class ReadyRows:
    """Counters that a product raises, on another stream, behind rows of y that it has written; or
    that dispatch_recv raises behind rows that have arrived, for a product on another stream.

    Row r of expert e may be read once counter [e, r // rows] is at `want` or beyond. Who raises it
    writes the rows, then adds with a release (red.release.gpu.global.add). Counters may pass 2^32:
    the difference to what is awaited counts, as a signed number. The product's kernels have run
    before: CUDA loads a kernel at its first launch, and a load waits for kernels that run.

    Those of dispatch_recv (received.ready) are made and cleared by make_outputs(), in the order of
    its stream. Each of them comes to `want`, also where its expert has fewer rows, or none, and
    with it all of a row: x, scales, extras, row_weights, source. counts[e], and the ranges of e,
    may be read once counter [e, 0] is above `rows`. After a failed dispatch some stay below: who
    waits has a deadline.

    counters: int32 or uint32, contiguous, on y's device: at least [E_local, ceil(C / rows)],
        expert by expert. All start below what is awaited, zero for instance, each time.
    want: what is awaited; a product of n tiles of columns that each add 1 makes it n.
    rows: of a counter. None: C, one counter for each expert.
    base: [1] int32 or uint32 on the same device, added to `want`: where counters are not cleared
        between replays of a graph, the value that they had before this one.
    num_sms: most multiprocessors that combine's sending half may hold while it waits, or dispatch's
        receiving half, which the product must not need. At least 1 on a GPU; on CPUs it means
        nothing.
    timeout_s: deadline of a product that waits.
    late: [1] int64 in pinned memory, where such a product notes what did not come in time:
        1 + the number of a counter, times 2^32, and what that stood at. AllToAll.check() raises it.
    """

    counters: Tensor
    want: int
    rows: int | None = None
    base: Tensor | None = None
    num_sms: int = 0
    timeout_s: float = 30.0
    late: Tensor | None = None


def arguments_of(
    ready: ReadyRows,
    communicator: Communicator,
    y: Tensor,
    out_dtype: torch.dtype,
    partials: int,
) -> tuple[Any, ...]:
    """Compiles the kernel if it has to; returns what the op takes."""
    errors.require_type("ready", ready, ReadyRows, "ReadyRows(counters=, want=, ...)")
    errors.require(
        isinstance(ready.counters, Tensor),
        f"ready: counters is {type(ready.counters).__name__}, must be a tensor of int32 or uint32",
    )
    errors.require(
        isinstance(ready.want, int) and 0 <= ready.want < 1 << 31,
        f"ready: want is {ready.want!r}, must be an integer from 0 to 2^31 - 1",
    )
    communicator.prepare_ready(y.dtype, out_dtype, partials)
    rows = max(y.shape[1], 1) if ready.rows is None and y.dim() == 3 else ready.rows
    return ready.counters, ready.base, 0 if rows is None else rows, ready.want, ready.num_sms


def arriving_rows(
    like: Tensor, capacity: int, communicator: Communicator, num_sms: int
) -> ReadyRows:
    """Makes the counters of a dispatch, of zero. like: [E_local]."""
    at = layout()
    errors.require(
        type(num_sms) is int and num_sms >= (communicator.device is not None),
        f"num_sms is {num_sms!r}, must be an integer of at least 1: dispatch_recv may hold as many "
        "multiprocessors, which the product must not need",
    )
    shape = like.shape[0], -(-capacity // at.arrival_rows)
    return ReadyRows(
        counters=like.new_zeros(shape, dtype=torch.int32),
        want=at.arrival_want,
        rows=at.arrival_rows,
        num_sms=num_sms,
        timeout_s=float(communicator.config.timeout_s),
        late=communicator.late,
    )
