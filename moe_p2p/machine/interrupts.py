"""Ends `python -m moe_p2p ...` with one line when Ctrl-C comes while torch is imported.

`python -m` imports the package, and with it torch, before __main__ can catch anything; that takes
seconds. Imported first by moe_p2p/__init__.py, which calls restore() last. In all other programs it
changes nothing.
"""

from __future__ import annotations

import os
import signal
import sys


def _end(*_: object) -> None:
    os.write(2, b"moe_p2p: interrupted\n")
    os._exit(128 + signal.SIGINT)


def restore() -> None:
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# sys.argv[0] is "-m" while `python -m` imports the package of the program that it will run.
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _end)
