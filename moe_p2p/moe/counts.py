"""What a communicator counts, as metrics (engine/metrics.py). Read beside its calls.

Symbols: W ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_p2p.engine.metrics import Family, counter, gauge
from moe_p2p.library import call

_ops = torch.ops.moe_p2p


class Counts(NamedTuple):
    """all_to_all_counters, over all epochs. waits: by rank, seconds and how often it was named."""

    steps: int
    calls: dict[str, int]
    tokens_sent: int
    rows_received: int
    deadlines: int
    lost_tokens: int
    waits: list[tuple[float, int]]

    @staticmethod
    def of(number: int) -> Counts:
        steps, dispatches, combines, releases, *rest = call(
            _ops.all_to_all_counters.default, number
        )
        tokens, rows, deadlines, lost, *waits = rest
        calls = {"dispatch": dispatches, "combine": combines, "release": releases}
        by_rank = [(ns / 1e9, named) for ns, named in zip(waits[::2], waits[1::2], strict=True)]
        return Counts(steps, calls, tokens, rows, deadlines, lost, by_rank)


class OnDevice(NamedTuple):
    """What only the GPU knows. kernels: that have begun, replays included. next_step: the first
    that none of them has begun. masked: ranks."""

    kernels: int
    next_step: int
    masked: list[int]


def families_of(
    number: int, rank: int, *, epoch: int, masked: int, refused: int, device: OnDevice | None
) -> list[Family]:
    """number: of the communicator. epoch: 0 in a fixed world. device: None on a CPU."""
    own = {"communicator": str(number), "rank": str(rank)}
    found = Counts.of(number)
    by_source = [(own | {"source": str(i)}, each) for i, each in enumerate(found.waits)]
    made = [
        counter(
            "moe_calls",
            "Calls, or their first halves; on a GPU launched or captured by the host",
            [(own | {"call": name}, count) for name, count in found.calls.items()],
        ),
        counter(
            "moe_sent_tokens", "Tokens dispatched, as far as the host knows their number",
            [(own, found.tokens_sent)],
        ),
        counter(
            "moe_wait_seconds", "Time that a host thread waited, by the rank that was missing",
            [(labels, seconds) for labels, (seconds, _) in by_source],
        ),
        counter(
            "moe_stragglers", "Waits in which a rank was named, long before the deadline",
            [(labels, named) for labels, (_, named) in by_source],
        ),
        counter("moe_deadlines", "Waits that reached their deadline", [(own, found.deadlines)]),
        counter(
            "moe_lost_tokens", "Tokens of this rank whose sums lacked rows of a lost rank",
            [(own, found.lost_tokens)],
        ),
        counter(
            "moe_refused_connections", "Strangers that were refused memory of this rank's GPU",
            [(own, refused)],
        ),
        gauge("moe_masked_ranks", "Ranks that are masked here", [(own, masked)]),
        gauge("moe_epoch", "Epoch of the world's members; 0: fixed", [(own, epoch)]),
    ]  # fmt: skip
    if device is not None:
        about = "Kernels that the GPU has begun, replays of graphs included"
        return [*made, counter("moe_kernels", about, [(own, device.kernels)])]
    return [
        *made,
        counter("moe_steps", "Steps begun, of calls of several chunks too", [(own, found.steps)]),
        counter("moe_received_rows", "Rows received for experts", [(own, found.rows_received)]),
    ]
