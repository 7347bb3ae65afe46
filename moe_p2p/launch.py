"""Starts one process per rank on this machine, with torchrun's own machinery, and joins them.

Used by the commands of `python -m moe_p2p`. The agent watches the ranks: when one fails the others
are ended, and the failure comes back with the rank and its traceback.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from moe_p2p import env

# Of every collective of the helpers' process group. A rank that imports torch on a busy machine
# needs several seconds; a dead one is noticed by the agent long before this.
GROUP_TIMEOUT = timedelta(seconds=120)


_CONFIG_FIELDS = {field.name for field in dataclasses.fields(LaunchConfig)}


class RanksFailedError(RuntimeError):
    """A rank raised or died; the text is the story of the first one."""


def run_ranks(function: Callable[..., Any], *args: Any, num_ranks: int) -> list[Any]:
    """Calls function(*args) in `num_ranks` new processes; returns what they return, by rank.

    `function` must be importable by name, args and results must pickle. Inside, `process_group()`
    gives the gloo group. Raises RanksFailedError.
    """
    # torch before 2.12 waits for its own time when it ends ranks.
    shutdown: dict[str, Any] = (
        {"shutdown_timeout": 5} if "shutdown_timeout" in _CONFIG_FIELDS else {}
    )
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        run_id=f"moe_p2p_{os.getpid()}",
        max_restarts=0,
        monitor_interval=0.05,
        start_method="forkserver",
        **shutdown,
    )
    # Ranks are forked from a server that has imported all this once: 2 s instead of 2 s each.
    multiprocessing.set_forkserver_preload([function.__module__])
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # the error raised here says it once
    try:
        results = elastic_launch(config, _enter)(function, *args)
    except ChildFailedError as error:
        raise RanksFailedError(_story(error)) from None
    return [results[rank] for rank in range(num_ranks)]


@contextlib.contextmanager
def process_group() -> Iterator[tuple[int, int]]:
    """The gloo group of the started ranks; yields (rank, world_size)."""
    dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def threads_per_rank(num_ranks: int) -> int:
    """So that all ranks together use the cores of this machine once."""
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)


def _enter(function: Callable[..., Any], *args: Any) -> Any:
    torch.set_num_threads(threads_per_rank(env.local_world_size()))
    try:
        return function(*args)
    finally:
        sys.stdout.flush()


def _story(error: ChildFailedError) -> str:
    rank, failure = error.get_first_failure()
    message = failure.message
    if isinstance(message, dict):
        extra = message.get("extraInfo", {})
        message = extra.get("py_callstack", "") if isinstance(extra, dict) else ""
        message = message or str(failure.message.get("message", ""))
    exit_code = f"exit code {failure.exitcode}" if failure.exitcode >= 0 else failure.signal_name()
    return f"rank {rank} failed ({exit_code}):\n{str(message).strip()}"
