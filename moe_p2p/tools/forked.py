"""Imported by the fork server alone, before it serves (launch.start_fork_server).

A program that ends takes its semaphores with it. A process that the server begins just then finds
them gone and would print a traceback of multiprocessing after the program's last line.
"""

from __future__ import annotations

import sys
import traceback
from multiprocessing import synchronize
from types import TracebackType


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    last = traceback.extract_tb(trace)[-1:]
    gone = kind is FileNotFoundError and [each.filename for each in last] == [synchronize.__file__]
    if not gone:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _hook
