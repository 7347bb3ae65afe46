"""Starts one process per rank on this machine, with torchrun's own machinery, and joins them.

Used by the commands of `python -m moe_p2p`. The agent watches the ranks: when one fails the others
are ended, and the failure comes back with the tracebacks of all ranks that raised, causes first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from moe_p2p import env, errors

# Of every collective of the helpers' process group. A rank that imports torch on a busy machine
# needs several seconds; a dead one is noticed by the agent long before this.
GROUP_TIMEOUT = timedelta(seconds=120)
# The agent ends all ranks once the first has left, so one that failed stays for the stories of
# others: a moment, or long enough for the cause while only results of it are told. (Who began it
# closes what it holds before its error comes here.) Too short: nobody learns why.
STORIES_TIMEOUT_S, CAUSE_TIMEOUT_S = 1.0, 10.0
STORIES_LOOK_S = 0.02

_CONFIG_FIELDS = {field.name for field in dataclasses.fields(LaunchConfig)}


class RanksFailedError(RuntimeError):
    """Ranks raised or died; the text has the story of each, those that began it first."""


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
    with tempfile.TemporaryDirectory(prefix="moe_p2p_ranks_") as stories:
        try:
            results = elastic_launch(config, _enter)(Path(stories), function, *args)
        except ChildFailedError as error:
            raise RanksFailedError(_story(error, Path(stories))) from None
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


def _enter(stories: Path, function: Callable[..., Any], *args: Any) -> Any:
    torch.set_num_threads(threads_per_rank(env.local_world_size()))
    try:
        return function(*args)
    except Exception as error:
        _tell(stories, error)
        raise
    finally:
        sys.stdout.flush()


# Files of ranks that raised: `cause.<rank>`, or `result.<rank>` where another rank failed first.


def _is_result(error: Exception) -> bool:
    """Whether another rank's failure led to this one: ours, or that of a collective it has left."""
    return isinstance(error, errors.AbortedError) or "/gloo/" in str(error)


def _tell(stories: Path, error: Exception) -> None:
    """Leaves the story for run_ranks, and waits for those of other ranks."""
    unfinished = stories / f"unfinished.{env.rank()}"
    unfinished.write_text("".join(traceback.format_exception(error)).strip())
    unfinished.rename(stories / f"{'result' if _is_result(error) else 'cause'}.{env.rank()}")
    started = time.monotonic()
    while len(kinds := [path.stem for path in stories.iterdir()]) < env.local_world_size():
        timeout_s = STORIES_TIMEOUT_S if "cause" in kinds else CAUSE_TIMEOUT_S
        if time.monotonic() - started > timeout_s:
            return
        time.sleep(STORIES_LOOK_S)


def _story(error: ChildFailedError, stories: Path) -> str:
    told = {
        int(path.suffix[1:]): path.read_text()
        for kind in ("cause", "result")
        for path in sorted(stories.glob(f"{kind}.*"), key=lambda path: path.stat().st_mtime_ns)
    }
    # A rank that died without a word comes first: the others may have failed because of it.
    died = [_end_of(rank, error) for rank in sorted(error.failures) if rank not in told]
    return "\n".join(died + [f"rank {rank} failed:\n{text}" for rank, text in told.items()])


def _end_of(rank: int, error: ChildFailedError) -> str:
    """What the agent knows of a rank that failed."""
    failure = error.failures[rank]
    message = failure.message
    if isinstance(message, dict):
        extra = message.get("extraInfo", {})
        message = extra.get("py_callstack", "") if isinstance(extra, dict) else ""
        message = message or str(failure.message.get("message", ""))
    exit_code = f"exit code {failure.exitcode}" if failure.exitcode >= 0 else failure.signal_name()
    return f"rank {rank} failed ({exit_code}):\n{str(message).strip()}"
