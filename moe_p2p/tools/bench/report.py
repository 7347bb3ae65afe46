"""Rows of figures: as a table, as JSON, as a plot."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_p2p.tools.bench.drawing import draw

BASELINE = (
    "torch: all_to_all_single over gloo, one row per (token, expert); TCP on this host, where "
    "moe_p2p's nodes talk through its software NIC"
)
BOUNDARY = (
    "slowest rank of each iteration, from the barrier's end to its own result; "
    "bytes: of all ranks between nodes, per iteration"
)


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Microseconds over the iterations."""

    p50_us: float
    p90_us: float
    p99_us: float

    @staticmethod
    def of(spans_us: Tensor) -> Latency:
        at = torch.quantile(spans_us, torch.tensor([0.5, 0.9, 0.99], dtype=spans_us.dtype))
        p50, p90, p99 = (round(float(v), 1) for v in at)
        return Latency(p50_us=p50, p90_us=p90, p99_us=p99)


@dataclass(frozen=True, kw_only=True)
class Row:
    what: str  # dispatch, combine or pair
    ranks: int
    ranks_per_node: int
    tokens: int  # of each rank
    hidden: int
    topk: int
    experts: int
    dtype: str
    routing: str
    settings: str  # of the transport
    iterations: int
    latency: Latency
    baseline: Latency | None
    wire_bytes: int  # counted by the engines
    floor_bytes: int  # payload once per (token, other node)
    flat_floor_bytes: int  # payload once per (token, expert on another node)
    correct: bool
    story: list[str] = field(default_factory=list)  # what is not

    @property
    def tokens_per_s(self) -> float:
        return self.ranks * self.tokens / self.latency.p50_us * 1e6

    @property
    def speedup(self) -> float | None:
        return self.baseline.p50_us / self.latency.p50_us if self.baseline else None

    def as_json(self) -> dict[str, Any]:
        flat = asdict(self)
        flat.pop("latency")
        flat.pop("baseline")
        flat.update(asdict(self.latency))
        baseline = asdict(self.baseline) if self.baseline else {}
        for name in ("p50_us", "p90_us", "p99_us"):
            flat[f"baseline_{name}"] = baseline.get(name)
        flat["speedup"] = round(self.speedup, 3) if self.speedup else None
        flat["tokens_per_s"] = round(self.tokens_per_s)
        flat["boundary"] = BOUNDARY
        return flat


def table(rows: list[Row]) -> str:
    """One line per row, columns aligned."""
    head = (
        "what", "T", "p50 us", "p90 us", "p99 us", "tokens/s", "wire KiB", "floor KiB",
        "no dedup KiB", "torch p50", "speedup", "correct",
    )  # fmt: skip
    lines = [head]
    for row in rows:
        lines.append(
            (
                row.what,
                f"{row.tokens}",
                f"{row.latency.p50_us:,.0f}",
                f"{row.latency.p90_us:,.0f}",
                f"{row.latency.p99_us:,.0f}",
                f"{row.tokens_per_s:,.0f}",
                f"{row.wire_bytes / 1024:,.1f}",
                f"{row.floor_bytes / 1024:,.1f}",
                f"{row.flat_floor_bytes / 1024:,.1f}",
                f"{row.baseline.p50_us:,.0f}" if row.baseline else "-",
                f"{row.speedup:.2f}x" if row.speedup else "-",
                "yes" if row.correct else "NO",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def title(row: Row) -> str:
    settings = f", {row.settings}" if row.settings else ""
    return (
        f"{row.ranks} ranks, {row.ranks_per_node} per node, H {row.hidden}, top-{row.topk} of "
        f"{row.experts}, {row.dtype}, routing {row.routing}{settings}"
    )


def plot(rows: list[Row], path: Path) -> str | None:
    """Latency and bytes over token counts as PNG; returns why not where it could not be drawn."""

    def paint(axes: Any) -> None:
        _latency(axes[0], rows)
        _bytes(axes[1], [row for row in rows if row.what == "pair"])

    return draw(path, title(rows[0]), paint, ncols=2, figsize=(12, 4.6))


def _latency(axis: Any, rows: list[Row]) -> None:
    """A colour for each call, full lines for moe_p2p and dashed ones for torch."""
    for color, marker, what in (
        ("C0", "o", "dispatch"),
        ("C1", "^", "combine"),
        ("C2", "s", "pair"),
    ):
        mine = [row for row in rows if row.what == what]
        tokens = [row.tokens for row in mine]
        ours = [row.latency.p50_us for row in mine]
        axis.plot(tokens, ours, f"{marker}-", color=color, label=f"moe_p2p {what}")
        if all(row.baseline for row in mine):
            slower = [row.baseline.p50_us for row in mine if row.baseline]
            axis.plot(
                tokens, slower, f"{marker}--", mfc="white", color=color, label=f"torch {what}"
            )
    axis.set(xscale="log", yscale="log", xlabel="tokens per rank", ylabel="p50, µs")
    axis.set_xticks(tokens, [str(count) for count in tokens])
    axis.set_xticks([], minor=True)
    axis.legend(fontsize=8)


def _bytes(axis: Any, pairs: list[Row]) -> None:
    at = range(len(pairs))
    for shift, color, label, values in (
        (-0.27, "C0", "sent, as the NICs counted it", [row.wire_bytes for row in pairs]),
        (0.0, "C2", "least: each token once per node", [row.floor_bytes for row in pairs]),
        (0.27, "C3", "each token once per expert", [row.flat_floor_bytes for row in pairs]),
    ):
        heights = [v / 1024 for v in values]
        bars = axis.bar([i + shift for i in at], heights, 0.25, color=color, label=label)
        axis.bar_label(bars, [f"{height:,.0f}" for height in heights], fontsize=6.5, padding=1)
    axis.set(yscale="log", xlabel="tokens per rank", ylabel="KiB between nodes, pair, all ranks")
    axis.set_xticks(list(at), [str(row.tokens) for row in pairs])
    axis.margins(y=0.12)
    axis.legend(fontsize=8)
