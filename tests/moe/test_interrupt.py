"""Signals: a wait ends soon after Ctrl-C, handlers run within it, and programs end without a trace.

Deadlines of the waits are a minute, so that a signal that is seen at the deadline fails the test.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

import moe_p2p
from moe_p2p import Engine, EngineConfig
from moe_p2p.fleet import bootstrap
from moe_p2p.tools import launch
from tests.support import warm
from tests.support.cases import make, make_tokens, steps
from tests.support.programs import Program, program, until
from tests.support.ranks import Rank, run_processes

TICK_S = 0.05
SOON_S = 20.0  # of 60; on a quiet machine a wait ends 0.15 s after the signal


@contextmanager
def alarms(on_tick: Callable[[int], object]) -> Iterator[None]:
    """A signal every TICK_S; its handler is given their number."""
    ticks = 0

    def handle(*_: object) -> None:
        nonlocal ticks
        ticks += 1
        on_tick(ticks)

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, TICK_S, TICK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupt(tick: int) -> None:
    if tick == 8:  # late enough that the wait is under way
        signal.raise_signal(signal.SIGINT)


def is_interrupted(rank: Rank, ranks_per_node: int) -> tuple[float, str]:
    comm = make(rank, ranks_per_node=ranks_per_node, timeout_s=60.0)
    steps(comm)
    tokens = make_tokens(0, rank.rank, 4)
    began = time.monotonic()
    if rank.rank == 1:
        rank.store.wait(["interrupted"])

        def step() -> None:
            received = comm.dispatch(tokens.x, tokens.topk_idx)  # that of rank 0 may have come
            comm.combine(received.x, received)

        with pytest.raises(moe_p2p.MoeP2pError) as caught:
            step()
        comm.close()
        return time.monotonic() - began, str(caught.value)
    with pytest.raises(KeyboardInterrupt), alarms(interrupt):
        comm.dispatch(tokens.x, tokens.topk_idx)
    text = "interrupted by a signal; dispatch of step 5 waits for rank 1 (node"
    assert text in comm.broken
    with pytest.raises(moe_p2p.AbortedError, match="interrupted by a signal"):
        comm.dispatch(tokens.x, tokens.topk_idx)
    comm.close()
    rank.store.set("interrupted", "")
    return time.monotonic() - began, comm.broken


@pytest.mark.parametrize("ranks_per_node", [2, 1])
def test_ctrl_c_ends_the_wait_of_a_call(ranks_per_node: int) -> None:
    mine, other = run_processes(2, is_interrupted, ranks_per_node)
    assert mine[0] < SOON_S
    assert mine[1] == "closed"
    assert other[0] < SOON_S
    assert "rank 0" in other[1]


def is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "T"


def closes_without_its_partner(rank: Rank) -> None:
    """A process that is stopped takes nothing, so that who closes waits for it."""
    comm = make(rank, ranks_per_node=1, timeout_s=60.0)
    steps(comm)
    if rank.rank == 1:
        rank.store.wait(["has what it needs"])
        rank.store.set("partner", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        comm.close()
        return
    rank.store.set("has what it needs", "")
    partner = int(rank.store.get("partner"))
    until(lambda: is_stopped(partner), "a partner that goes on")
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt), alarms(interrupt):
            comm.close()
    finally:
        os.kill(partner, signal.SIGCONT)
    assert time.monotonic() - began < SOON_S
    assert comm.closed


def test_ctrl_c_ends_the_wait_for_partners_of_close() -> None:
    run_processes(2, closes_without_its_partner)


def goes_on(rank: Rank) -> None:
    """The other rank begins its call when the handler says that it ran."""
    with make(rank, timeout_s=60.0) as comm:
        if rank.rank == 1:
            rank.store.wait(["handled"])
            steps(comm)
            return

        def on_tick(tick: int) -> None:
            if tick == 4:
                rank.store.set("handled", "")

        began = time.monotonic()
        with alarms(on_tick):
            steps(comm)
        assert time.monotonic() - began < SOON_S


def test_a_handler_that_returns_lets_the_call_go_on() -> None:
    run_processes(2, goes_on)


def sets_up(rank: Rank) -> str:
    """Rank 1 comes when rank 0 has been interrupted."""
    if rank.rank == 1:
        rank.store.wait(["interrupted"])
        with pytest.raises(moe_p2p.MoeP2pError) as caught:
            make(rank, timeout_s=60.0)
        return str(caught.value)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), alarms(interrupt):
        make(rank, timeout_s=60.0)
    took_s = time.monotonic() - began
    assert took_s < SOON_S
    rank.store.set("interrupted", "")
    return ""


def test_ctrl_c_ends_the_wait_for_ranks_that_set_up() -> None:
    _, reported = run_processes(2, sets_up)
    assert "rank 0 failed before the transports: KeyboardInterrupt" in reported


@contextmanager
def stopped_store() -> Iterator[Store]:
    """A store whose server, another process, is stopped: it answers no request."""
    ports, port = os.pipe()
    server = os.fork()
    if server == 0:
        serving = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(port, str(serving.port).encode())
        signal.pause()
    try:
        store = dist.TCPStore("127.0.0.1", int(os.read(ports, 10)), is_master=False)
        os.kill(server, signal.SIGSTOP)
        until(lambda: is_stopped(server), "a server that goes on")
        yield store
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


def meets_at_a_stopped_store(_: Rank) -> None:
    with stopped_store() as store:
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt), alarms(interrupt):
            make(Rank(0, 2, store), timeout_s=60.0)
        assert time.monotonic() - began < SOON_S


def test_ctrl_c_ends_the_wait_for_a_store_that_does_not_answer() -> None:
    run_processes(1, meets_at_a_stopped_store)


def gives_up_a_stopped_store(_: Rank) -> None:
    bootstrap._PATIENCE_S = 1.0
    failed = "rank 1: the store failed: no answer within"
    with stopped_store() as store, pytest.raises(moe_p2p.MoeP2pError, match=failed):
        make(Rank(1, 2, store), timeout_s=0.5)


def test_a_store_that_does_not_answer_is_given_up_at_a_deadline() -> None:
    run_processes(1, gives_up_a_stopped_store)


def waits_again(rank: Rank) -> None:
    with Engine(EngineConfig(transport="loopback", timeout_s=60.0)) as engine:
        data = torch.arange(8)
        region = engine.resolve(engine.register(torch.zeros(8, dtype=torch.int64)).descriptor)
        waits: list[Callable[[], Any]] = [
            lambda: engine.wait_imm(7, engine.num_nics),
            lambda: engine.wait_imm(8, 1),
        ]
        for wait in waits:
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt), alarms(interrupt):
                wait()
            assert time.monotonic() - began < SOON_S
        engine.write(engine.register(data), region, imm=7).wait()
        assert waits[0]() == engine.num_nics


def test_ctrl_c_ends_the_wait_for_an_immediate_which_may_be_waited_for_again() -> None:
    run_processes(1, waits_again)


# --- programs ---


@contextmanager
def running(*arguments: str) -> Iterator[tuple[Program, set[str]]]:
    """A command whose four ranks are connected, and their shared memory."""
    with program("-m", "moe_p2p", *arguments, stderr=subprocess.PIPE) as command:
        until(lambda: sum(".rank." in name for name in command.memory()) == 4, "no ranks")
        yield command, command.memory()


LONG = {
    "demo": ("demo", "--steps", "100000"),
    "bench": ("bench", "--quick", "--no-baseline", "--seconds", "60"),
}


@pytest.mark.parametrize("command", LONG)
def test_ctrl_c_ends_a_command_with_one_line(command: str) -> None:
    with running(*LONG[command]) as (started, objects):
        os.killpg(started.process.pid, signal.SIGINT)  # as a terminal does: to all of them
        _, printed = started.process.communicate(timeout=250)
        assert (started.process.returncode, printed) == (130, f"{command}: interrupted\n")
        started.wait_until_gone()
        assert not objects & set(os.listdir("/dev/shm"))


def imports_torch(pid: int) -> bool:
    return "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()


def starts_ranks(pid: int) -> bool:
    """It has a fork server, which imports for seconds before it handles signals."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return any(b"forkserver" in Path(f"/proc/{c}/cmdline").read_bytes() for c in children)


@contextmanager
def interpreter(*arguments: str) -> Iterator[Program]:
    """Not a copy: what torch reads as it is imported is read."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen([sys.executable, *arguments], start_new_session=True, **pipes)
    command = Program(process)
    try:
        yield command
    finally:
        if command.processes():
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.more
def test_ctrl_c_of_the_weights_bench_prints_no_frames() -> None:
    """Ranks wait in a store that is gone: torch's warning of it has 20 lines of C++ frames."""
    weights = ("-m", "moe_p2p", "bench", "--api", "weights", "--plot=", "--json=")
    with interpreter(*weights) as command:
        until(command.memory, "no ranks")
        printed = command.interrupt(250)
        command.wait_until_gone()
    assert "frame #" not in printed
    assert "Traceback" not in printed
    assert printed.splitlines()[-1] == "bench: interrupted"


@pytest.mark.more
def test_processes_of_a_server_that_was_killed_end_without_tracebacks() -> None:
    """On a busy machine one may find the store gone before its parent is, and says so in a line."""
    serve = ("-m", "moe_p2p.examples.disaggregated", "--serve", "--port=0")
    with interpreter("-u", *serve) as command:
        command.wait_for("http://")
        command.process.kill()
        command.wait_until_gone()
        assert command.process.stdout is not None
        lines = command.process.stdout.read().splitlines()
        assert all(line.startswith("moe_p2p warning [pid ") for line in lines), lines


def test_a_process_that_begins_as_its_program_ends_prints_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its semaphores are gone by then. Other errors are printed."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    from moe_p2p.tools import forked

    lock = multiprocessing.get_context("forkserver").Lock()
    handle, kind, most, name = lock._semlock.handle, 1, 1, f"/gone-{os.getpid()}"
    for begin in (lambda: lock.__setstate__((handle, kind, most, name)), lambda: os.stat(name)):
        try:
            begin()
        except FileNotFoundError as error:
            forked._hook(type(error), error, error.__traceback__)
    assert capsys.readouterr().err.count("Traceback") == 1


@pytest.mark.parametrize(
    ("when", "line"),
    [(imports_torch, "moe_p2p: interrupted\n"), (starts_ranks, "bench: interrupted\n")],
)
def test_ctrl_c_ends_a_command_that_has_only_begun(when: Callable[[int], bool], line: str) -> None:
    """An interpreter, not a copy: it imports torch."""
    process = subprocess.Popen(
        [sys.executable, "-m", "moe_p2p", *LONG["bench"]],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    command = Program(process)
    try:
        until(lambda: when(process.pid), "it never begins")
        os.killpg(process.pid, signal.SIGINT)
        _, printed = process.communicate(timeout=250)
        assert (process.returncode, printed) == (130, line)
        command.wait_until_gone()
    finally:
        if command.processes():
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_ctrl_c_is_not_lost_while_the_fork_server_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signalled = []

    def interrupted() -> None:
        signal.raise_signal(signal.SIGINT)
        signalled.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))  # the server inherits it

    monkeypatch.setattr(launch.forkserver, "ensure_running", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch.start_fork_server("moe_p2p")
    assert signalled == [{signal.SIGINT}]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_ranks_do_not_inherit_the_mask_of_the_fork_server() -> None:
    assert launch.run_ranks(blocked_signals, num_ranks=1) == [[]]


def is_interrupted_by_itself(_: Rank) -> bool:
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    return True


BEHIND_A_COMMAND = """
from moe_p2p.tools import launch
launch.start_fork_server("moe_p2p")
from tests.moe.test_interrupt import is_interrupted_by_itself
from tests.support.ranks import run_processes
print(run_processes(1, is_interrupted_by_itself))
"""


def test_nor_do_ranks_of_tests_where_a_command_has_started_the_server() -> None:
    assert warm.run("-c", BEHIND_A_COMMAND, capture_output=True, text=True).stdout == "[True]\n"


def blocked_signals() -> list[int]:
    return sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))


def test_sigterm_ends_a_command_and_leaves_nothing() -> None:
    with running(*LONG["bench"]) as (started, objects):
        started.process.terminate()
        _, printed = started.process.communicate(timeout=250)
        assert (started.process.returncode, printed) == (143, "")
        started.wait_until_gone()
        assert not objects & set(os.listdir("/dev/shm"))


def test_ranks_end_when_their_launcher_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:  # takes what a killed process leaves
        monkeypatch.setenv("TMPDIR", folder)
        ranks_end_with_their_launcher()


def ranks_end_with_their_launcher() -> None:
    with running(*LONG["demo"]) as (started, objects):
        started.process.kill()
        started.process.wait()
        started.wait_until_gone()
        assert not objects & set(os.listdir("/dev/shm"))
