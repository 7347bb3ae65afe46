"""Time of the wire alone, at sizes that no machine here has: a lower bound for every system.

    python benchmarks/model.py [--gbps 400] [--tokens 128] ...

One NIC per GPU, all busy at once, bytes only: the time in which a rank's NIC sends its tokens to
other nodes, for uniform routing. Three ways to send: a copy per (token, expert), a copy per (token,
node), and a copy per (token, node) with this package's slot heads and headers. Expectations are
exact (hypergeometric: a token's experts are distinct), so they match the benchmark's byte counts.

Symbols: W ranks, L ranks per node, N = W / L nodes, T tokens per rank, K top-k, E experts,
H hidden size.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace

from moe_p2p.reference.wire import LINE, align, slot_head_bytes


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A job. Rates in Gbit/s, sizes in bytes."""

    ranks: int = 16
    ranks_per_node: int = 8
    tokens: int = 128
    hidden: int = 7168
    topk: int = 8
    experts: int = 256
    dispatch_item: int = 1  # fp8, with one fp32 scale per 128 values
    combine_item: int = 2
    gbps: float = 400.0

    @property
    def num_nodes(self) -> int:
        return self.ranks // self.ranks_per_node

    @property
    def dispatch_row(self) -> int:
        """Payload and scales of one token."""
        scales = 4 * -(-self.hidden // 128) if self.dispatch_item == 1 else 0
        return self.hidden * self.dispatch_item + scales

    @property
    def combine_row(self) -> int:
        return self.hidden * self.combine_item


@dataclass(frozen=True, kw_only=True)
class Floor:
    """Microseconds for which a NIC is busy."""

    dispatch_us: float
    combine_us: float


def copies_per_expert(scale: Scale) -> float:
    """Expected (token, expert) pairs of one token that leave its node."""
    return scale.topk * (1 - 1 / scale.num_nodes)


def copies_per_node(scale: Scale) -> float:
    """Expected number of other nodes to which one token goes.

    Example: 2 nodes, top-8 of 256: all experts are on the own node once in 285, so 0.9965.
    """
    away = scale.experts - scale.experts // scale.num_nodes  # experts on all nodes but one
    missed = math.comb(away, scale.topk) / math.comb(scale.experts, scale.topk)
    return (scale.num_nodes - 1) * (1 - missed)


def flat_floor(scale: Scale) -> Floor:
    """A copy per (token, expert)."""
    return _floor(scale, copies_per_expert(scale), scale.dispatch_row, scale.combine_row)


def node_floor(scale: Scale) -> Floor:
    """A copy per (token, node)."""
    return _floor(scale, copies_per_node(scale), scale.dispatch_row, scale.combine_row)


def as_sent(scale: Scale) -> Floor:
    """As this package sends: slots with heads, region headers and counts."""
    payload = scale.hidden * scale.dispatch_item
    parts = align(payload, 16) + align(scale.dispatch_row - payload, 16)
    slot = align(slot_head_bytes(scale.topk) + parts, LINE)
    others = scale.num_nodes - 1
    counts = align(4 * scale.ranks_per_node * (scale.experts // scale.ranks), LINE)
    slots = scale.tokens * copies_per_node(scale)
    return Floor(
        dispatch_us=_microseconds(scale, others * (LINE + counts) + slots * slot),
        combine_us=_microseconds(scale, others * LINE + slots * align(scale.combine_row, LINE)),
    )


def _floor(scale: Scale, copies: float, dispatch_row: int, combine_row: int) -> Floor:
    rows = scale.tokens * copies
    return Floor(
        dispatch_us=_microseconds(scale, rows * dispatch_row),
        combine_us=_microseconds(scale, rows * combine_row),
    )


def _microseconds(scale: Scale, num_bytes: float) -> float:
    return num_bytes * 8 / scale.gbps / 1e3


def table(scale: Scale, ranks: list[int]) -> str:
    """Dispatch / combine in microseconds, one line per number of ranks."""
    lines = [f"{'EP':>5}{'per expert':>18}{'per node':>18}{'as sent':>18}{'fewer bytes':>13}"]
    for count in ranks:
        at = replace(scale, ranks=count)
        floors = flat_floor(at), node_floor(at), as_sent(at)
        cells = [f"{f.dispatch_us:.0f} / {f.combine_us:.0f}" for f in floors]
        saved = floors[0].dispatch_us / floors[2].dispatch_us
        lines.append(f"{count:5}" + "".join(f"{cell:>18}" for cell in cells) + f"{saved:12.1f}x")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Floor of the wire, microseconds.")
    defaults = Scale()
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--ranks-per-node", type=int, default=defaults.ranks_per_node)
    parser.add_argument("--tokens", type=int, default=defaults.tokens)
    parser.add_argument("--hidden", type=int, default=defaults.hidden)
    parser.add_argument("--topk", type=int, default=defaults.topk)
    parser.add_argument("--experts", type=int, default=defaults.experts)
    parser.add_argument("--gbps", type=float, default=defaults.gbps)
    given = parser.parse_args()
    scale = Scale(
        ranks_per_node=given.ranks_per_node,
        tokens=given.tokens,
        hidden=given.hidden,
        topk=given.topk,
        experts=given.experts,
        gbps=given.gbps,
    )
    print(f"dispatch / combine, us; {scale}")
    print(table(scale, given.ranks))


if __name__ == "__main__":
    main()
