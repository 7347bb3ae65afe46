"""Pictures, where matplotlib is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

NO_MATPLOTLIB = "matplotlib is not installed (pip install 'moe-p2p[bench]')"


def draw(path: Path, heading: str, paint: Callable[[Any], None], **subplots: Any) -> str | None:
    """Gives the axes of pyplot.subplots(**subplots) to `paint`, and writes the figure.

    Returns the reason if it could not be drawn.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return NO_MATPLOTLIB
    import matplotlib  # takes a second: imported only to draw

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(**subplots)
    paint(axes)
    inch = 1 / figure.get_figheight()
    figure.suptitle(heading, y=1 - 0.1 * inch, fontsize=10, wrap=True)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.3 * inch))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return None


def number(value: float) -> str:
    """As it stands beside a point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def plain_log(axis: Any) -> None:
    """Ticks of a logarithmic axis of matplotlib at 1, 2 and 5, as plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_formatter(NullFormatter())
