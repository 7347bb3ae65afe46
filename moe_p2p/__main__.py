"""`python -m moe_p2p COMMAND`: accuracy, bench, compile, demo, doctor, fabric-check, model, ...

Each has a --help; without a command it prints all.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys

from moe_p2p.tools.output import NotWrittenError
from moe_p2p.version import __version__

COMMANDS = {
    "accuracy": (
        "moe_p2p.tools.accuracy",
        "errors of sums whose partial sums travel in other types, and their bytes",
    ),
    "bench": ("moe_p2p.bench.command", "correctness, then latency and bytes on the wire"),
    "compile": (
        "moe_p2p.tools.compile_kernels",
        "kernels of a model's shape, ahead, into a folder: for an image of a container",
    ),
    "demo": ("moe_p2p.tools.demo", "train a small language model with experts spread over ranks"),
    "doctor": (
        "moe_p2p.tools.doctor.command",
        "what this machine, or the hosts of a job, have and lack",
    ),
    "fabric-check": (
        "moe_p2p.bench.fabric",
        "the NICs of a job: correctness, each rail, pairs beside others; a report to send back",
    ),
    "model": (
        "moe_p2p.tools.model.command",
        "predicted times at sizes that no machine here has, beside published ones",
    ),
    "plan": (
        "moe_p2p.tools.plan",
        "memory of every region for given shapes; --kv: a KV transfer; --weights: an update",
    ),
    "replay": (
        "moe_p2p.tools.replay",
        "step through what proxies recorded before a stall: who waits for what, and since when",
    ),
    "store": ("moe_p2p.tools.store", "serve the store in which engines' KV workers meet"),
    "trace": (
        "moe_p2p.bench.trace",
        "where a step's time goes on all ranks: a file for Perfetto, a picture, the straggler",
    ),
    "tune": (
        "moe_p2p.tools.tune.command",
        "measure this machine once: launch shapes, bulk, parts, NICs; found by itself",
    ),
}


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in COMMANDS:
        lines = [f"  {name:12} {about}" for name, (_, about) in COMMANDS.items()]
        usage = "\n".join(["usage: python -m moe_p2p COMMAND [OPTIONS] | --version", "", *lines])
        if arguments and arguments[0] in ("-h", "--help"):
            print(usage)
            return 0
        if arguments and arguments[0] == "--version":
            print(__version__)
            return 0
        wrong = f"{arguments[0]!r} is not a command" if arguments else "a command is missing"
        print(f"{usage}\n\nmoe_p2p: {wrong}", file=sys.stderr)
        return 2
    try:
        command = importlib.import_module(COMMANDS[arguments[0]][0])
        status = int(command.main(arguments[1:]))
        sys.stdout.flush()
        return status
    except NotWrittenError as error:
        print(f"{arguments[0]}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EPIPE) or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
        if error.errno == errno.ENOSPC:
            print(
                f"{arguments[0]}: what it prints was not written: {error.strerror}; free space "
                "there, or print elsewhere",
                file=sys.stderr,
            )
        return 1  # a reader that went away needs no text
    except KeyboardInterrupt:
        print(f"{arguments[0]}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
