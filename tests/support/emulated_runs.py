"""Runs of pytest on the emulated GPU, each in a process of its own that has everything loaded.

Importing torch takes longer than many of the runs, so one process imports it, once for all of them,
and starts each run as a copy of itself. What a run does to its process, a fault of a kernel that
ends it included, no other run sees.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parents[2]


class Ran(NamedTuple):
    status: int  # of pytest, or less than 0: the signal that ended it
    output: str


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Ends with this process, when its input does."""
    from tests.support import emulated_gpu

    environment = os.environ | {"PYTHONPATH": str(ROOT), "MOE_P2P_EMULATED_GPU": "1"}
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.support.emulated_runs"],
        cwd=ROOT,
        env=environment | emulated_gpu.few_cpus(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)
    return server


def run(
    cases: list[str], *options: str, deadline_s: float, cpu_s: int | None = None, **more: str
) -> Ran:
    """Runs these cases of tests/gpu. cpu_s: limit of CPU time; more: environment variables.

    A run that has not ended by the deadline is ended by SIGKILL.
    """
    options = ("-p", "tests.support.emulated_gpu", "-p", "no:cacheprovider", "-q", "-s", *options)
    options += ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # loaded before
    with tempfile.NamedTemporaryFile("r", prefix="moe_p2p_emulated.", errors="replace") as output:
        job = {
            "arguments": [*options, *(f"tests/gpu/{case}" for case in cases)],
            "environment": more,
            "deadline_s": deadline_s,
            "cpu_s": cpu_s,
            "output": output.name,
        }
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, f"the process that starts runs ended with status {server.wait()}"
        return Ran(int(answer), output.read())


def _begin(job: dict[str, Any]) -> NoReturn:
    """In the copy. os._exit: nothing of the process that was copied is to end here."""
    status: int = 70  # no status of pytest
    try:
        os.setsid()
        with open(job["output"], "wb") as output, open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.environ.update(job["environment"])
        if job["cpu_s"]:
            resource.setrlimit(resource.RLIMIT_CPU, (job["cpu_s"], job["cpu_s"] + 10))
        import pytest

        status = pytest.main(job["arguments"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _status(run: int, deadline_s: float) -> int:
    """Of a copy, which is killed at the deadline."""
    ended = os.pidfd_open(run)
    try:
        if not select.select([ended], [], [], deadline_s)[0]:
            os.kill(run, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(run, 0)[1])
    finally:
        os.close(ended)


def _serve() -> None:
    import tests.support.emulated_gpu
    import tests.support.gpu_ranks  # noqa: F401

    threads = os.listdir("/proc/self/task")
    assert len(threads) == threading.active_count() == 1, "a copy would lack threads of this one"
    for line in sys.stdin:
        job = json.loads(line)
        if (run := os.fork()) == 0:
            _begin(job)
        print(_status(run, job["deadline_s"]), flush=True)


if __name__ == "__main__":
    _serve()
