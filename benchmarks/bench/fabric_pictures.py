"""Pictures of fabric-check's report, as SVG: bars of rails, lines of pairs.

They are drawn narrow, so that their letters can be read on a phone.
"""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_p2p.bench.fabric_rails import ALONE, TOGETHER
from moe_p2p.tools.draw import draw, number, plain_log

Body = Mapping[str, Any]
WIDTH = 4.6  # inches
MOST_BARS = 32  # of a picture
COLORS = {ALONE: "C0", TOGETHER: "C1"}
NOTES: dict[str, Any] = {"fontsize": 8}

Picture = tuple[str, Callable[[Any], None], float]  # title, what paints it, inches high


def pictures(body: Body) -> tuple[list[str], str]:
    """Elements of a page, or why there are none."""
    found = list[str]()
    with tempfile.TemporaryDirectory() as scratch:
        for i, (title, paint, height) in enumerate(_all(body)):
            path = Path(scratch, f"{i}.svg")
            titled = functools.partial(_titled, paint, title)
            if reason := draw(path, "", titled, figsize=(WIDTH, height)):
                return [], reason
            found.append(_element(path.read_text(), i, title))
    return found, ""


def _all(body: Body) -> Iterator[Picture]:
    rates = {
        id(row): max(row["gbytes_per_s"].items(), key=lambda item: int(item[0]))[1]
        for row in body["rails"]
        if row["gbytes_per_s"]
    }
    written = [row for row in body["rails"] if id(row) in rates]
    pinged = [row for row in body["rails"] if row["latency_us"] is not None]
    for title, rows, figure, value in (
        ("GB/s of each rail, largest pages", written, "gbytes_per_s", lambda row: rates[id(row)]),
        ("one way of 8 bytes, µs", pinged, "latency_us", lambda row: row["latency_us"]),
    ):
        shown = rows[:MOST_BARS]
        more = f", the first {MOST_BARS} of {len(rows)}" if len(rows) > MOST_BARS else ""
        paint = functools.partial(_bars, rows=shown, values=[*map(value, shown)], figure=figure)
        if shown:
            yield title + more, paint, 1.1 + 0.24 * len(shown)
    for interface in dict.fromkeys(row["interface"] for row in body["pairs"]):
        of_one = [row for row in body["pairs"] if row["interface"] == interface]
        title = f"a pair, p50 µs{', ' + interface + ' calls' if interface else ''}"
        yield title, functools.partial(_lines, rows=of_one), 4.4


def _titled(paint: Callable[[Any], None], title: str, axis: Any) -> None:
    paint(axis)
    axis.set_title(title, fontsize=10)


def _element(svg: str, place: int, title: str) -> str:
    """The SVG alone. Names within a picture are of the whole page: each picture has its own."""
    element = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.S)
    element = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>p{place}-", element)
    return element.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)


def label(row: Body) -> str:
    nics = ":".join(row["nics"]) or row["provider"] or "software"
    return f"rank {row['rank']} {nics if row['way'] == ALONE else TOGETHER}"


def system(row: Body) -> str:
    """With what torch's baseline goes over, and whose deep_ep it is."""
    names = {"torch": "NCCL" if row["device"] != "cpu" else "gloo", "deep_ep": row["beside"]}
    return " ".join(filter(None, [names.get(row["system"]) or row["system"], row["interface"]]))


def _bars(axis: Any, rows: Sequence[Body], values: Sequence[float], figure: str) -> None:
    """A bar for each row with its number; black lines: the interval of the prediction."""
    places = list(range(len(rows)))
    axis.barh(places, values, color=[COLORS[row["way"]] for row in rows], height=0.7)
    for place, row, value in zip(places, rows, values, strict=True):
        end = value
        if row["comparable"]:
            _, least, most = row["predicted"][figure]
            axis.plot([least, most], [place, place], color="black", linewidth=1.5, marker="|")
            end = max(value, most)
        axis.annotate(f" {number(value)}", (end, place), va="center", **NOTES)
    axis.set_yticks(places, [label(row) for row in rows], fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.15)
    axis.grid(alpha=0.3, axis="x")


def _lines(axis: Any, rows: Sequence[Body]) -> None:
    """The pair of each system over tokens, and the band of the prediction where it is of these."""
    for i, name in enumerate(dict.fromkeys(map(system, rows))):
        points = {
            row["tokens"]: row
            for what in ("pair eager", "pair graph")  # the latter is shown where it is there
            for row in rows
            if (system(row), row["what"]) == (name, what)
        }
        shown = [points[count] for count in sorted(points)]
        style = "o-" if name.startswith("moe_p2p") else "s--"
        values = [(row["tokens"], row["p50_us"]) for row in shown]
        axis.plot(*zip(*values, strict=True), style, color=f"C{i}", label=name)
        for at in values:
            how: Any = {"textcoords": "offset points", "ha": "center", **NOTES}
            axis.annotate(number(at[1]), at, (0, 6), **how)
        if bands := [(row["tokens"], *row["predicted"][1:]) for row in shown if _is_known(row)]:
            band = {"color": f"C{i}", "alpha": 0.2, "label": f"{name}, predicted"}
            axis.fill_between(*zip(*bands, strict=True), **band)
    tokens = sorted({row["tokens"] for row in rows})
    axis.set(xscale="log", yscale="log", xlabel="tokens per rank")
    axis.set_xticks(tokens, [str(count) for count in tokens])
    axis.set_xticks([], minor=True)
    axis.margins(x=0.12, y=0.18)
    plain_log(axis)
    axis.grid(alpha=0.3)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), **NOTES)  # below: it hides nothing


def _is_known(row: Body) -> bool:
    return bool(row["predicted"] and row["comparable"])
