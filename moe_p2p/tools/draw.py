"""Pictures, where matplotlib is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moe_p2p.tools.output import writing

NO_MATPLOTLIB = "matplotlib is not installed (pip install 'moe-p2p[bench]')"


def plain_log(axis: Any, *, ticks: Sequence[float] = ()) -> None:
    """Logarithmic axes with numbers as people write them. ticks: of x, if it is one."""
    from matplotlib.ticker import LogLocator, NullFormatter

    if ticks:
        axis.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
        axis.set_xticks([], minor=True)
    if axis.get_yscale() == "log":
        least, most = axis.get_ylim()
        axis.yaxis.set_major_locator(
            LogLocator(subs=range(1, 10) if most < 10 * least else (1, 2, 5))
        )
        axis.yaxis.set_major_formatter("{x:,g}")
        axis.yaxis.set_minor_formatter(NullFormatter())


def draw(path: Path, heading: str, paint: Callable[[Any], None], **subplots: Any) -> str | None:
    """Gives the axes of pyplot.subplots(**subplots) to `paint`, and writes the figure.

    Returns the reason if it could not be drawn. Raises NotWrittenError.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return NO_MATPLOTLIB
    import matplotlib  # takes a second: imported only to draw

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.backend_bases import FigureCanvasBase

    kind = path.suffix[1:].lower() or "png"
    if kind not in FigureCanvasBase.get_supported_filetypes():
        return f"{path}: matplotlib writes no .{kind}; name a .png, .svg or .pdf"
    figure, axes = pyplot.subplots(**subplots)
    paint(axes)
    inch = 1 / figure.get_figheight()
    figure.suptitle(heading, y=1 - 0.1 * inch, fontsize=10, wrap=True)
    figure.tight_layout()
    with writing(path):
        figure.savefig(path, dpi=130, format=kind)
    pyplot.close(figure)
    return None


def number(value: float) -> str:
    """As it stands beside a point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
