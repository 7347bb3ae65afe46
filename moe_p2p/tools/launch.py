"""Starts one process per rank on this machine, with torchrun's own machinery, and joins them.

Used by the commands of `python -m moe_p2p`. The agent watches the ranks: when one fails the others
are ended, and the failure comes back with the tracebacks of all ranks that raised, causes first.

A signal that ends the program (Ctrl-C, SIGTERM) ends the ranks without a word of theirs: they close
what they hold. When the program is killed they notice, and do the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import multiprocessing
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
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
# Ranks that were asked to end are killed after so long. Too short: they leave shared memory behind,
# which is removed after them; they close within milliseconds unless a core is hard to get.
END_S = 5

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>: the IPv4 address of an interface
_CONFIG_FIELDS = {field.name for field in dataclasses.fields(LaunchConfig)}


class RanksFailedError(RuntimeError):
    """Ranks raised or died; the text has the story of each, those that began it first."""


def run_ranks(function: Callable[..., Any], *args: Any, num_ranks: int) -> list[Any]:
    """Calls function(*args) in `num_ranks` new processes; returns what they return, by rank.

    `function` must be importable by name, args and results must pickle. Inside, `process_group()`
    gives the gloo group. Raises RanksFailedError; on signals KeyboardInterrupt or SystemExit.
    """
    # torch before 2.12 waits for its own time when it ends ranks.
    shutdown: dict[str, Any] = (
        {"shutdown_timeout": END_S} if "shutdown_timeout" in _CONFIG_FIELDS else {}
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
    # The error raised here says it once. The agent's own logger has a level of its own.
    for name in ("torch", "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="moe_p2p_ranks_") as stories, _handlers_restored():
        try:
            results = elastic_launch(config, _enter)(os.getpid(), Path(stories), function, *args)
        except ChildFailedError as error:
            raise RanksFailedError(_story(error, Path(stories))) from None
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.sigval) from None
        finally:
            torch.ops.moe_p2p.remove_stale_memory.default()  # of ranks that had to be killed
    return [results[rank] for rank in range(num_ranks)]


@contextlib.contextmanager
def _handlers_restored() -> Iterator[None]:
    """The agent leaves its own behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in caught}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def process_group() -> Iterator[tuple[int, int]]:
    """The gloo group of the started ranks, within another such `with` that one's."""
    is_outer = not dist.is_initialized()
    if is_outer:
        if env.local_world_size() < env.world_size() and (
            name := interface_to(env.master_address())
        ):
            env.use_gloo_interface(name)
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        if is_outer:
            dist.destroy_process_group()


def device_index() -> int:
    """The GPU of this rank; ranks share one where there are fewer."""
    return env.local_rank() % torch.cuda.device_count()


def interface_to(host: str) -> str:
    """The IPv4 interface from which packets to a host leave; empty: not known.

    By itself gloo takes the address that the host's name stands for: often 127.0.1.1, where no
    other host finds it.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            address = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                with contextlib.suppress(OSError):  # an interface without an address
                    found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                    if socket.inet_ntoa(found[20:24]) == address:
                        return name
    except OSError:
        pass
    return ""


def threads_per_rank(num_ranks: int) -> int:
    """So that all ranks together use the cores of this machine once."""
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)


def _enter(launcher: int, stories: Path, function: Callable[..., Any], *args: Any) -> Any:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    _end_with(launcher)
    torch.set_num_threads(threads_per_rank(env.local_world_size()))
    try:
        return function(*args)
    except Exception as error:
        _tell(stories, error)
        raise
    finally:
        sys.stdout.flush()


def _end(number: int, _: FrameType | None) -> None:
    """Unwinds the rank, so that it closes what it holds; the launcher has the word."""
    for other in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C comes from the terminal and the agent
        signal.signal(other, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _end_with(launcher: int) -> None:
    """This rank ends when the launcher has; its parent is the fork server, which lives on."""
    try:
        process = os.pidfd_open(launcher)
    except ProcessLookupError:
        os._exit(1)
    except OSError:  # a kernel without them
        return

    def watch() -> None:
        select.select([process], [], [])
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(END_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="watch the launcher").start()


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
