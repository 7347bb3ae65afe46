"""Files that commands write at their end: a disk may be full only then.

`python -m moe_p2p` prints a NotWrittenError in a line and ends with status 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


class NotWrittenError(Exception):
    """The text names the file and the reason."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Makes the folder of `path`; an OSError inside becomes a NotWrittenError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise NotWrittenError(
            f"{path} could not be written: {error.strerror or error}; what was computed is above"
        ) from error


def write(path: str | Path, text: str) -> None:
    """Raises NotWrittenError."""
    with writing(Path(path)):
        Path(path).write_text(text)
