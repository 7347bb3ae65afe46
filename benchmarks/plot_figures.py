"""Draws the figures of README.md: docs/ep4_h200.svg, from benchmarks/data/ep4_h200.json.

    python benchmarks/plot_figures.py            # writes the SVG
    python benchmarks/plot_figures.py --table    # prints README's table

Bars on one axis in microseconds, each followed by its value, readable on a phone. A bar longer than
the axis is cut and shows a gap. tests/package/test_docs.py compares both outputs with the committed
files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
DATA, PLOT = ROOT / "benchmarks/data/ep4_h200.json", ROOT / "docs/ep4_h200.svg"
PLOTTED = ("8", "32", "128")  # tokens a rank
MIRROR = "mirror"  # in the table alone
COLORS = {
    "floor": "#9aa0a6",
    "all_to_all": "#1a73e8",
    "as_deep_ep_v1": "#4a90f0",
    "deep_ep_v1": "#e8710a",
    "as_deep_ep_v2": "#8ab4f8",
    "deep_ep_v2": "#f9ab00",
    "nccl": "#5f6368",
}
WIDTH, ROW, BAR, LEFT, RIGHT = 720, 26, 18, 200, 650
LONGEST_US, STEP_US = 110.0, 20


def read() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(DATA.read_text())
    return data


def number(us: float) -> str:
    return f"{us:.1f}" if us < 200 else f"{int(us + 0.5):,}"


def cell(name: str, found: dict[str, float]) -> str:
    """A figure; a mirror's with what it is off the real one."""
    off = f" ({found[name] / found['all_to_all'] - 1:+.1%})" if name == MIRROR else ""
    return number(found[name]) + off


def table(data: dict[str, Any]) -> str:
    """Markdown."""
    systems = data["systems"]
    lines = [
        "| tokens a rank | " + " | ".join(each["label"] for each in systems.values()) + " |",
        "|" + "---|" * (len(systems) + 1),
    ]
    for tokens, found in data["pairs"].items():
        cells = (cell(name, found) for name in systems)
        lines.append(f"| {int(tokens):,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 15) -> str:
    place = f'x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"'
    return f"<text {place}>{escape(words)}</text>"


def bar(y: float, us: float, color: str) -> list[str]:
    """One bar with its value; cut where it is longer than the axis."""
    cut = us > LONGEST_US
    end = RIGHT if cut else LEFT + (RIGHT - LEFT) * us / LONGEST_US
    parts = [f'<rect x="{LEFT}" y="{y:g}" width="{end - LEFT:.1f}" height="{BAR}" fill="{color}"/>']
    if cut:  # a gap in it
        gap = f"M{RIGHT - 26} {y + BAR + 2:g}l8 {-BAR - 4}"
        parts.append(f'<path d="{gap}" stroke="#ffffff" stroke-width="5" fill="none"/>')
    return [*parts, text(end + 6, y + BAR - 4, number(us))]


def axis(bottom: float) -> list[str]:
    parts = []
    for us in range(0, int(LONGEST_US) + 1, STEP_US):
        x = LEFT + (RIGHT - LEFT) * us / LONGEST_US
        parts.append(f'<path d="M{x:.1f} 62V{bottom:g}" stroke="#dadce0" stroke-width="1"/>')
        parts.append(text(x, bottom + 18, f"{us} µs" if us == 0 else str(us), anchor="middle"))
    return parts


def plot(data: dict[str, Any]) -> str:
    body: list[str] = []
    y = 66.0
    for tokens in PLOTTED:
        body.append(text(8, y + BAR - 3, f"{tokens} tokens a rank", size=16))
        y += ROW
        for name, system in data["systems"].items():
            if name == MIRROR:
                continue
            body.append(text(LEFT - 8, y + BAR - 4, system["label"], anchor="end"))
            body += bar(y, data["pairs"][tokens][name], COLORS[name])
            y += ROW
    height = y + 30
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
        'font-family="sans-serif" fill="#202124">'
    )
    title = [
        f'<rect width="{WIDTH}" height="{height:g}" fill="#ffffff"/>',
        text(8, 24, "Dispatch and combine, one pair, µs (shorter is better)", size=18),
        text(8, 46, f"4 H200, {data['shape']}", size=14),
    ]
    return "\n".join([head, *title, *axis(y), *body, "</svg>", ""])


def main() -> None:
    data = read()
    if sys.argv[1:] == ["--table"]:
        print(table(data))
        return
    PLOT.write_text(plot(data))
    print(f"wrote {PLOT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
