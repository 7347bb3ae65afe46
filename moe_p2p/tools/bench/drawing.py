"""PNGs, where matplotlib is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

NO_MATPLOTLIB = "matplotlib is not installed (pip install 'moe-p2p[bench]')"


def draw(path: Path, title: str, paint: Callable[[Any], None], **subplots: Any) -> str | None:
    """A figure of pyplot.subplots(**subplots), whose axes are given to `paint`.

    Returns why not where it could not be drawn.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return NO_MATPLOTLIB
    import matplotlib  # takes a second: only when there is something to draw

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(**subplots)
    paint(axes)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return None
