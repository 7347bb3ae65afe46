"""Starts one process per rank on this machine, with torchrun's own machinery, and joins them.

Used by the commands of `python -m moe_p2p`. torchrun's agent watches the ranks: when one fails, it
ends the others, and the error raised here has the tracebacks of all ranks, causes first; of a
refusal it has only the text.

A signal that ends the program (Ctrl-C, SIGTERM) ends the ranks without output: they close what they
hold. They do the same when the program is killed.
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
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from moe_p2p import env, errors
from moe_p2p.fleet import addresses
from moe_p2p.tools.out_of_memory import not_allocated

# Timeout of collectives in process_group(). A rank that imports torch on a busy machine needs
# several seconds; the agent notices a dead rank long before this.
GROUP_TIMEOUT = timedelta(seconds=120)
# The agent ends all ranks once the first has exited, so a failed rank waits for the error reports
# of others: briefly, or, while all reports are results of another rank's failure, long enough for
# the report of the cause. (That rank closes what it holds first.) Too short: the cause is lost.
REPORTS_TIMEOUT_S, CAUSE_TIMEOUT_S = 1.0, 10.0
REPORTS_POLL_S = 0.02
# Seconds until ranks that were asked to end are killed. Too short: they leave shared memory, which
# run_ranks removes. They close within milliseconds unless the cores are busy.
END_S = 5

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>: the IPv4 address of an interface
# Of what was asked for, or is missing: their texts say all, a traceback adds nothing.
_REFUSALS = (errors.InvalidArgumentError, errors.ResourceExhaustedError, errors.UnavailableError)
_CONFIG_FIELDS = {field.name for field in dataclasses.fields(LaunchConfig)}


class RanksFailedError(RuntimeError):
    """Ranks raised or died; the text has the error of each, causes first."""


def run_ranks(function: Callable[..., Any], *args: Any, num_ranks: int) -> list[Any]:
    """Calls function(*args) in `num_ranks` new processes; returns what they return, by rank.

    `function` must be importable by name, args and results must pickle. Inside, `process_group()`
    gives the gloo group. Raises RanksFailedError; on signals KeyboardInterrupt or SystemExit.
    """
    # torch before 2.12 has a fixed time to end ranks.
    shutdown: dict[str, Any] = (
        {"shutdown_timeout": END_S} if "shutdown_timeout" in _CONFIG_FIELDS else {}
    )
    # The error raised here has everything. The agent's logger has a level of its own.
    for name in ("torch", "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with _handlers(), tempfile.TemporaryDirectory(prefix="moe_p2p_ranks_") as folder:
        start_fork_server(function.__module__)
        (reports := Path(folder, "reports")).mkdir()
        here = addresses.loopback()
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{here}:0",
            local_addr=here,
            run_id=f"moe_p2p_{os.getpid()}",
            max_restarts=0,
            monitor_interval=0.05,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(f"{folder}/logs"),  # without, torch leaves its folder
            **shutdown,
        )
        try:
            results = elastic_launch(config, _enter)(os.getpid(), reports, function, *args)
        except ChildFailedError as error:
            raise RanksFailedError(_error_text(error, reports)) from None
        except RendezvousConnectionError as error:
            why = f"{here} does not answer: is the interface lo up (ip link set lo up)?"
            raise RanksFailedError(f"no rank was started: {why}") from error
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.sigval) from None
        finally:
            torch.ops.moe_p2p.remove_stale_memory.default()  # of ranks that had to be killed
    return [results[rank] for rank in range(num_ranks)]


def start_fork_server(module: str) -> None:
    """Starts the server that forks this program's processes, unless there is one.

    It imports `module` and torch once, 2 s instead of 2 s in each process, and opens no GPU.

    Ctrl-C at a terminal reaches it too, and would print a traceback while it imports. So it
    inherits a mask without the signal, which it ignores once it serves. Here the signal waits
    meanwhile; where it were ignored it would be lost. Processes have that mask, too.
    """
    # It leaves out __main__ (Python 3.11), in which a program's own function is.
    multiprocessing.set_forkserver_preload(["moe_p2p.tools.forked", __name__, module])
    env.hide_frames_of_torch()
    resource_tracker.ensure_running()  # which would end the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _handlers() -> Iterator[None]:
    """Restores signal handlers, which the agent replaces.

    A signal that comes before it has would end this process at once, and its folders would stay.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in caught}
    if handlers[signal.SIGTERM] is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, exit_by_signal)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def exit_by_signal(number: int, _: FrameType | None) -> None:
    """A handler of SIGTERM for programs that have processes to end."""
    raise SystemExit(128 + number)


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Ctrl-C and SIGTERM are handled at the end: half of a started process would not be ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    late: list[int] = []
    caught = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda given, _: late.append(given)) for number in caught]
    try:
        yield
    finally:
        for number, handler in zip(caught, before, strict=True):
            signal.signal(number, handler)
    for given in late:
        signal.raise_signal(given)


@contextlib.contextmanager
def process_group(backend: str = "gloo") -> Iterator[tuple[int, int]]:
    """Yields (rank, world_size) of the started ranks' group; nested uses share one group."""
    is_outer = not dist.is_initialized()
    if is_outer:
        # On one host gloo finds addresses by itself, but of IPv4 alone where names say nothing.
        far = env.local_world_size() < env.world_size() or addresses.loopback() == "::1"
        if far and (name := interface_to(env.master_address())):
            env.use_gloo_interface(name)
        dist.init_process_group(backend, timeout=GROUP_TIMEOUT)
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        if is_outer:
            dist.destroy_process_group()


def device_index() -> int:
    """Returns this rank's GPU; ranks share GPUs where there are fewer."""
    return gpu_of(env.local_rank())


def gpu_of(local_rank: int) -> int:
    """Returns the GPU of a rank of this host."""
    return local_rank % num_gpus()


def num_gpus() -> int:
    """Returns the GPUs that this process, a rank, may use.

    Before CUDA is initialised torch counts what NVML lists, which may be every GPU of a host of
    which this process has one: then rank 1 would get an invalid device ordinal.
    """
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return torch.cuda.device_count()


def interface_to(host: str) -> str:
    """Returns the interface that sends packets to a host; empty: not known.

    By default gloo uses the address to which the own host name resolves: often 127.0.1.1, which
    other hosts cannot reach.
    """
    try:
        address = addresses.towards(host)
    except errors.MoeP2pError:
        return ""
    if ":" in address:
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        with contextlib.suppress(OSError):  # a kernel without IPv6 has no such file
            for line in Path("/proc/net/if_inet6").read_text().splitlines():
                if line.startswith(packed):
                    return line.split()[-1]
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return ""


def threads_per_rank(num_ranks: int) -> int:
    """Returns CPU threads per rank such that all ranks together use each core once."""
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)


def _enter(launcher: int, reports: Path, function: Callable[..., Any], *args: Any) -> Any:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # start_fork_server()
    end_with(launcher)
    torch.set_num_threads(threads_per_rank(env.local_world_size()))
    try:
        return function(*args)
    except Exception as error:
        _report(reports, error)
        raise
    finally:
        sys.stdout.flush()


def _end(number: int, _: FrameType | None) -> None:
    """Unwinds the rank, so that it closes what it holds; the launcher reports."""
    # Ctrl-C comes from the terminal and the agent, perhaps before this runs: ignored by SIG_IGN, a
    # signal that is here already has Python print "ignored due to race condition".
    for other in (signal.SIGINT, signal.SIGTERM):
        signal.signal(other, lambda *_: None)
    raise SystemExit(128 + number)


def end_with(launcher: int) -> None:
    """Ends this rank when the launcher ends; its parent is the fork server, which lives on."""
    try:
        process = os.pidfd_open(launcher)
    except ProcessLookupError:
        os._exit(1)
    except OSError:  # a kernel without pidfds
        return

    def watch() -> None:
        select.select([process], [], [])
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(END_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="watch the launcher").start()


# Files of ranks that raised: `cause.<rank>`, or `result.<rank>` where another rank failed first.


def _is_result(error: Exception) -> bool:
    """Whether another rank's failure caused this one: by our abort, or by a broken collective."""
    return isinstance(error, errors.AbortedError) or "/gloo/" in str(error)


def _report(reports: Path, error: Exception) -> None:
    """Writes this rank's error for run_ranks, and waits for the reports of other ranks."""
    unfinished = reports / f"unfinished.{env.rank()}"
    unfinished.write_text(_told(error))
    unfinished.rename(reports / f"{'result' if _is_result(error) else 'cause'}.{env.rank()}")
    started = time.monotonic()
    while len(kinds := [path.stem for path in reports.iterdir()]) < env.local_world_size():
        timeout_s = REPORTS_TIMEOUT_S if "cause" in kinds else CAUSE_TIMEOUT_S
        if time.monotonic() - started > timeout_s:
            return
        time.sleep(REPORTS_POLL_S)


def _told(error: Exception) -> str:
    if size := not_allocated(error):
        return f"no memory for {size}; lower --tokens, --hidden or another size that was asked for"
    told = str(error) if isinstance(error, _REFUSALS) else traceback.format_exception(error)
    return "".join(told).strip()


def _error_text(error: ChildFailedError, reports: Path) -> str:
    texts = {
        int(path.suffix[1:]): path.read_text()
        for kind in ("cause", "result")
        for path in sorted(reports.glob(f"{kind}.*"), key=lambda path: path.stat().st_mtime_ns)
    }
    # Ranks that died without a report come first: the others may have failed because of them.
    died = [_end_of(rank, error) for rank in sorted(error.failures) if rank not in texts]
    alike: dict[str, list[int]] = {}
    for rank, text in texts.items():
        alike.setdefault(text, []).append(rank)
    return "\n".join(died + [f"{_named(ranks)} failed:\n{text}" for text, ranks in alike.items()])


def _named(ranks: list[int]) -> str:
    names = ", ".join(map(str, sorted(ranks)))
    return f"ranks {names}" if len(ranks) > 1 else f"rank {names}"


def _end_of(rank: int, error: ChildFailedError) -> str:
    """Returns the agent's description of a failed rank."""
    failure = error.failures[rank]
    message = failure.message
    if isinstance(message, dict):
        extra = message.get("extraInfo", {})
        message = extra.get("py_callstack", "") if isinstance(extra, dict) else ""
        message = message or str(failure.message.get("message", ""))
    exit_code = f"exit code {failure.exitcode}" if failure.exitcode >= 0 else failure.signal_name()
    return f"rank {rank} failed ({exit_code}):\n{str(message).strip()}"
