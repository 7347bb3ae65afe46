"""Runs of pytest on the emulated GPU, each in a process of its own that has everything loaded.

A server (warm.py) imports torch once for all of them and starts each run as a copy. What a run does
to its process, a fault of a kernel that ends it included, no other run sees.
"""

from __future__ import annotations

import functools
import os
import resource
import subprocess
import threading
from pathlib import Path
from typing import NamedTuple

from tests.support import emulated_gpu, warm

ROOT = Path(__file__).resolve().parents[2]
MODULES = (*warm.MODULES, "tests.support.emulated_gpu", "tests.support.gpu_ranks")
_starting = threading.Lock()  # one server, though several threads want one


class Ran(NamedTuple):
    status: int  # of pytest, or less than 0: the signal that ended it
    output: str


@functools.cache
def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    more = {"PYTHONPATH": path, "MOE_P2P_EMULATED_GPU": "1"}
    return os.environ | more | emulated_gpu.few_cpus()


@functools.cache
def _server() -> warm.Server:
    return warm.Server(modules=MODULES, environment=_environment())


def run(
    cases: list[str], *options: str, deadline_s: float, cpu_s: int | None = None, **more: str
) -> Ran:
    """Runs these cases of tests/gpu. cpu_s: limit of CPU time; more: environment variables.

    A run that has not ended by the deadline is ended by SIGKILL.
    """
    options = ("-p", "tests.support.emulated_gpu", "-p", "no:cacheprovider", "-q", "-s", *options)
    options += ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # loaded before
    limit = functools.partial(
        resource.setrlimit, resource.RLIMIT_CPU, (cpu_s or 0, (cpu_s or 0) + 10)
    )
    with _starting:
        server = _server()
    process = server.popen(
        *("-m", "pytest", *options, *(f"tests/gpu/{case}" for case in cases)),
        cwd=ROOT,
        env=_environment() | more,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=limit if cpu_s else None,
    )
    try:
        output, _ = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    return Ran(process.returncode, output)
