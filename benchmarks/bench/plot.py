"""The plot, where matplotlib is installed: floor, ours and baselines on one axis in microseconds.

Each kind of DeepEP's calls has a row: the pair, and beside it its halves. So a laptop's screen has
the whole picture, and a phone's a panel at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moe_p2p.bench.report import Row, headline, title
from moe_p2p.tools.draw import draw, number, plain_log

OURS, MARKERS = "moe_p2p", "os^vDP*X"
WIDE, LINES_HIGH = 6.2, 4.4  # inches of a panel


def plot(rows: Sequence[Row], path: Path) -> str | None:
    """Draws all worlds into a PNG; returns the reason if it could not."""
    pairs = lines(rows)
    grid: list[list[Callable[[Any], None]]] = []
    heights: list[float] = []
    for calls in dict.fromkeys(row.interface for row in rows):
        suffix = f", {calls} calls" if calls else ""
        whole = {label: points for label, points in pairs.items() if points[0].interface == calls}
        grid.append([functools.partial(_latency, series=whole, what=f"pair{suffix}")])
        apart = {
            f"{label} {what}": [row for row in of_one if row is not None]
            for what in ("dispatch", "combine")
            for label, points in whole.items()
            for of_one in ([_same(pair, what, rows) for pair in points],)
            if any(of_one)
        }
        if apart:
            what = f"dispatch and combine apart{suffix}"
            grid[-1].append(functools.partial(_latency, series=apart, what=what))
        heights.append(_height(apart or whole))
    of_bytes: list[Callable[[Any], None]] = []
    if any(row.wire_bytes for row in rows):
        of_bytes.append(lambda axis: _bytes(axis, pairs))
    if any(row.percent_of_push for row in rows):
        of_bytes.append(lambda axis: _part_of_push(axis, pairs))
    if of_bytes:
        grid.append(of_bytes)
        heights.append(LINES_HIGH)
    num_columns = max(map(len, grid))

    def paint(axes: Any) -> None:
        for of_row, panels in zip(axes, grid, strict=True):
            for axis in of_row[len(panels) :]:
                axis.remove()
            for axis, panel in zip(of_row, panels, strict=False):
                panel(axis)

    size = {"nrows": len(grid), "ncols": num_columns, "squeeze": False}
    inches = {"figsize": (WIDE * num_columns, sum(heights)), "height_ratios": heights}
    return draw(path, title(rows[0]), paint, **size, **inches)


def _height(series: dict[str, list[Row]]) -> float:
    """Inches of a panel: of lines, or of as many bars."""
    return 1.4 + 0.55 * len(series) if _one_count(series) else LINES_HIGH


def _one_count(series: dict[str, list[Row]]) -> bool:
    return len({row.tokens for points in series.values() for row in points}) == 1


def lines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Returns headline rows by label; each label is a line over token counts."""
    found: dict[str, list[Row]] = {}
    for case in dict.fromkeys(row.case for row in rows):
        pair = headline(row for row in rows if row.case == case)
        if pair is not None:
            found.setdefault(_label(pair), []).append(pair)
    return {label: sorted(points, key=lambda row: row.tokens) for label, points in found.items()}


def _label(row: Row) -> str:
    parts = [row.system, row.interface, _world(row)]
    if row.num_sms and row.on_cuda:
        parts.append(f"{row.num_sms} SMs")
    if row.num_steps > 1:
        parts.append(f"chunks of {row.chunk_tokens}")
    return " ".join(part for part in parts if part)


def _world(row: Row) -> str:
    nodes = row.ranks // row.ranks_per_node
    return f"EP{row.ranks}" + (f" {nodes}x{row.ranks_per_node}" if nodes > 1 else "")


def _same(pair: Row, what: str, rows: Sequence[Row]) -> Row | None:
    return next((row for row in rows if row.case == pair.case and row.what == what), None)


def _latency(axis: Any, series: dict[str, list[Row]], what: str) -> None:
    """Draws ours in full lines with numbers, others dashed, the links' floor dotted."""
    if _one_count(series):
        _bars(axis, series, what)
        return
    floors: set[tuple[Any, ...]] = set()
    for i, (label, points) in enumerate(series.items()):
        tokens, ours = [row.tokens for row in points], points[0].system == OURS
        p50 = [row.spread.p50_us for row in points]
        style = {"marker": MARKERS[i % len(MARKERS)], "color": f"C{i}", "label": label}
        more = {"linestyle": "-", "linewidth": 2.5} if ours else {"linestyle": "--", "mfc": "white"}
        axis.plot(tokens, p50, **style, **more)
        for at, value in zip(tokens, p50, strict=True) if len(series) < 4 else ():
            above = (0, -14 if ours else 7)  # or numbers of near lines overlap
            axis.annotate(
                number(value), (at, value), above, textcoords="offset points", ha="center"
            )
        floor = [row.floor_us for row in points]
        key = points[0].ranks, points[0].ranks_per_node, *floor
        if all(floor) and ours and key not in floors:
            floors.add(key)
            axis.plot(tokens, floor, ":", color=f"C{i}", linewidth=2, label=f"floor of {label}")
    axis.set(ylabel="p50, µs", title=what, xscale="log", yscale="log")
    _finish(axis, series)


def _bars(axis: Any, series: dict[str, list[Row]], what: str) -> None:
    """Of one token count: lengths from 0, so that a small difference looks small."""
    rows = [points[0] for points in series.values()]
    for i, (label, row) in enumerate(zip(series, rows, strict=True)):
        ours, p50 = row.system == OURS, row.spread.p50_us
        axis.barh(i, p50, 0.5, color=f"C{i}" if ours else "white", edgecolor=f"C{i}", linewidth=2)
        axis.text(0, i - 0.28, f" {label}: {number(p50)}", va="bottom")
        if ours and row.floor_us:
            axis.plot([row.floor_us] * 2, [i - 0.25, i + 0.25], "k:", linewidth=2)
    dotted = "; dotted: floor" if any(row.system == OURS and row.floor_us for row in rows) else ""
    axis.set(xlabel=f"p50, µs{dotted}", title=f"{what}, {rows[0].tokens:,} tokens per rank")
    axis.set(xlim=(0, None), ylim=(len(rows) - 0.6, -0.7), yticks=[])
    axis.xaxis.set_major_formatter("{x:,g}")
    axis.grid(alpha=0.3, axis="x")


def _bytes(axis: Any, series: dict[str, list[Row]]) -> None:
    """Draws the bytes of a pair, beside the least, and beside a copy for each expert."""
    ours = {name: points for name, points in series.items() if points[0].wire_bytes}
    for i, (label, points) in enumerate(ours.items()):
        tokens = [row.tokens for row in points]
        for style, name, values in (
            ("o-", "sent", [row.wire_bytes or 0 for row in points]),
            (":", "least: each token once per node", [row.floor_bytes for row in points]),
            ("--", "each token once per expert", [row.flat_floor_bytes for row in points]),
        ):
            kib = [value / 1024 for value in values]
            axis.plot(tokens, kib, style, color=f"C{i}", label=f"{label}: {name}")
    axis.set(ylabel="KiB, pair, all ranks", title="between nodes", xscale="log", yscale="log")
    _finish(axis, ours)


def _part_of_push(axis: Any, series: dict[str, list[Row]]) -> None:
    ours = {name: points for name, points in series.items() if points[0].percent_of_push}
    for i, (label, points) in enumerate(ours.items()):
        percents = [row.percent_of_push or 0.0 for row in points]
        axis.plot([row.tokens for row in points], percents, "o-", color=f"C{i}", label=label)
    axis.set(ylabel="% of push bandwidth", title="NVLink bytes", ylim=(0, 105), xscale="log")
    _finish(axis, ours)


def _finish(axis: Any, series: dict[str, list[Row]]) -> None:
    tokens = sorted({row.tokens for points in series.values() for row in points})
    axis.margins(x=0.1, y=0.12)
    if axis.get_yscale() == "log":  # room for the legend, which else covers lines
        bottom, top = axis.get_ylim()
        num_labels = len(axis.get_legend_handles_labels()[1])
        axis.set_ylim(bottom, top * (top / bottom) ** (0.08 * num_labels))
    plain_log(axis, ticks=tokens)
    axis.set_xlabel("tokens per rank")
    axis.grid(alpha=0.3)
    axis.legend(loc="upper left")
