"""The loop of a process that obeys commands: one JSON object a line in, one line out.

Used by mirror_worker.py and host_worker.py, which turns.Worker starts.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, TextIO


def take_output() -> TextIO:
    """Returns the way to who asks; what else is printed goes to standard error from now on."""
    answers_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers_to


def obey(answers_to: TextIO, worker: Callable[[], Any]) -> NoReturn:
    """Calls methods of `worker()` until the input ends; an exception is an answer, too."""
    for line in sys.stdin:
        command, arguments = json.loads(line)
        try:
            reply: Any = {"result": getattr(worker(), command)(*arguments)}
        except Exception:
            reply = {"error": traceback.format_exc()}
        answers_to.write(json.dumps(reply) + "\n")
        answers_to.flush()
    os._exit(0)  # ranks need not meet again


def module_of(*names: str) -> Any:
    """The first of these modules of moe_p2p that this tree has: older ones have other folders."""
    for name in names[:-1]:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(f"moe_p2p.{name}")
    return importlib.import_module(f"moe_p2p.{names[-1]}")
