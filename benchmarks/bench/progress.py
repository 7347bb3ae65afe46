"""The bar on a terminal, where tqdm is installed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Protocol


class Progress(Protocol):
    """The part of tqdm that the worker uses."""

    def set_description(self, text: str) -> None: ...
    def update(self) -> object: ...


class NoBar:
    def set_description(self, text: str) -> None:
        """Shows nothing: pip install 'moe-p2p[bench]' brings tqdm."""

    def update(self) -> None: ...


@contextlib.contextmanager
def bar(total: int, *, shown: bool) -> Iterator[Progress]:
    """Counts `total` updates on stderr while it is a terminal and `shown`; else prints nothing."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        yield NoBar()
        return
    hidden = not (shown and sys.stderr.isatty())
    with tqdm(total=total, disable=hidden, file=sys.stderr, leave=False) as progress:
        yield progress
