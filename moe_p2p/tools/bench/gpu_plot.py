"""Plots of GPU figures: latency, part of the push bandwidth, emulated nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moe_p2p.tools.bench.drawing import draw
from moe_p2p.tools.bench.gpu_report import GpuRow, headline, title


def plot(rows: list[GpuRow], path: Path) -> str | None:
    """A PNG of all worlds; returns why not where it could not be drawn."""

    def paint(axes: Any) -> None:
        _latency(axes[0], rows)
        _part_of_push(axes[1], rows)
        _nodes(axes[2], rows)

    return draw(path, title(rows[0]), paint, ncols=3, figsize=(16, 4.6))


def lines(rows: list[GpuRow]) -> dict[str, list[GpuRow]]:
    """Headline rows by label, each label a line over token counts."""
    found: dict[str, list[GpuRow]] = {}
    for case in dict.fromkeys((row.ranks, *row.case) for row in rows):
        pair = headline(row for row in rows if (row.ranks, *row.case) == case)
        if pair is not None:
            found.setdefault(_label(pair), []).append(pair)
    return found


def _label(row: GpuRow) -> str:
    parts = [row.system, f"EP{row.ranks}"]
    if row.ranks_per_node < row.ranks:
        parts.append(f"{row.ranks // row.ranks_per_node}x{row.ranks_per_node}")
    if row.num_sms:
        parts.append(f"{row.num_sms} SMs")
    if row.num_steps > 1:
        parts.append(f"chunks of {row.chunk_tokens}")
    return " ".join(parts)


def _one_node(rows: list[GpuRow]) -> list[GpuRow]:
    return [row for row in rows if row.ranks_per_node == row.ranks]


def _latency(axis: Any, rows: list[GpuRow]) -> None:
    with_floor = set()
    for i, (label, points) in enumerate(lines(_one_node(rows)).items()):
        points = sorted(points, key=lambda row: row.tokens)
        tokens = [row.tokens for row in points]
        axis.plot(tokens, [row.spread.p50_us for row in points], "o-", color=f"C{i}", label=label)
        ranks = points[0].ranks
        if ranks not in with_floor and all(row.floor_us for row in points):
            floors = [row.floor_us for row in points]
            axis.plot(tokens, floors, ":", color=f"C{i}", label=f"floor EP{ranks}")
            with_floor.add(ranks)
    axis.set(xlabel="tokens per rank", ylabel="pair p50, µs", title="one node")
    _finish(axis, log=True)


def _part_of_push(axis: Any, rows: list[GpuRow]) -> None:
    for i, (label, points) in enumerate(lines(_one_node(rows)).items()):
        points = sorted(points, key=lambda row: row.tokens)
        percents = [row.percent_of_push or 0.0 for row in points]
        if points[0].system == "moe_p2p" and any(percents):
            axis.plot([row.tokens for row in points], percents, "o-", color=f"C{i}", label=label)
    axis.set(xlabel="tokens per rank", ylabel="% of push bandwidth", title="NVLink bytes")
    axis.set(ylim=(0, 105), xscale="log")
    _finish(axis, log=False)


def _nodes(axis: Any, rows: list[GpuRow]) -> None:
    apart = [row for row in rows if row.ranks_per_node < row.ranks and row.system == "moe_p2p"]
    for i, (label, points) in enumerate(lines(apart).items()):
        points = sorted(points, key=lambda row: row.tokens)
        tokens = [row.tokens for row in points]
        axis.plot(tokens, [row.spread.p50_us for row in points], "o-", color=f"C{i}", label=label)
        axis.plot(tokens, [row.floor_us for row in points], ":", color=f"C{i}", label="wire floor")
    axis.set(xlabel="tokens per rank", ylabel="pair p50, µs", title="emulated nodes")
    _finish(axis, log=True)


def _finish(axis: Any, *, log: bool) -> None:
    if not axis.lines:
        axis.text(0.5, 0.5, "not measured", ha="center", transform=axis.transAxes)
        return
    axis.set_xscale("log", base=2)
    if log:
        axis.set_yscale("log")
    axis.legend(fontsize=7)
