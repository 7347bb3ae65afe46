"""The bar on a terminal: tqdm's where it is installed, else one line, overwritten."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Protocol


class Progress(Protocol):
    """The part of tqdm that the worker uses."""

    def set_description(self, text: str) -> None: ...
    def update(self) -> object: ...


class Line:
    """[ 3/20] text"""

    def __init__(self, total: int, *, shown: bool) -> None:
        self._total, self._done, self._text = total, 0, ""
        self._shown = shown

    def set_description(self, text: str) -> None:
        self._text = text
        self._write(f"[{self._done:2}/{self._total}] {self._text}")

    def update(self) -> None:
        self._done += 1
        self._write(f"[{self._done:2}/{self._total}] {self._text}")

    def clear(self) -> None:
        self._write("")

    def _write(self, text: str) -> None:
        if self._shown:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def bar(total: int, *, shown: bool) -> Iterator[Progress]:
    """Counts `total` updates on stderr while it is a terminal and `shown`; else prints nothing."""
    shown = shown and sys.stderr.isatty()
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        line = Line(total, shown=shown)
        yield line
        line.clear()
        return
    with tqdm(total=total, disable=not shown, file=sys.stderr, leave=False) as progress:
        yield progress
