"""Soaks: work for a long time while peers die and links fail; no loss, no growth.

    python benchmarks/soak.py --minutes 10         moe: dispatches and combines (moe_soak.py)
    python benchmarks/soak.py kv --requests 1000   requests for KV pages (kv_soak.py)

Here is what soaks share: processes that are forked from a server, and their end.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
# Processes are forked from a server that has imported torch once and searches these folders.
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])

import torch  # noqa: E402

from moe_p2p.tools import launch  # noqa: E402

KINDS = {"moe": "moe_soak", "kv": "kv_soak"}


class FailedError(Exception):
    """The run failed; the text says why."""


class Processes:
    """Starts processes, each with a pipe, from a server that imports `module` once."""

    def __init__(self, module: str) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([module])

    def start(
        self, function: Callable[..., None], *arguments: Any
    ) -> tuple[BaseProcess, Connection]:
        """Calls function(*arguments, pipe) in a process; returns it, and this end of the pipe."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=function, args=(*arguments, theirs), daemon=True)
        with launch.signals_wait():
            process.start()
        theirs.close()
        return process, ours


def end_all() -> None:
    """Ends all processes that are left."""
    for child in multiprocessing.active_children():
        child.kill()
        child.join(10)
    torch.ops.moe_p2p.remove_stale_memory.default()  # of those that were killed


def main() -> int:
    kind = sys.argv.pop(1) if sys.argv[1:] and sys.argv[1] in KINDS else "moe"
    return int(importlib.import_module(KINDS[kind]).main())


if __name__ == "__main__":
    sys.modules["soak"] = sys.modules["__main__"]
    sys.exit(main())
