"""SIGTERM ends a program of ours and all of its processes, also where SIGINT is ignored.

So it is under `nohup`, in the background of a script, and in some CI: a program that counts on
Ctrl-C's handler, or on signals that it blocks, would leave workers there.
"""

from __future__ import annotations

import ast
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from moe_p2p.tools import launch
from tests.support import cells, warm
from tests.support.programs import DEADLINE_S, handled, program, until

SMALL = ("--ranks=2", "--ranks-per-node=1", "--tokens=4", "--hidden=256", "--device=cpu")
BENCH = ("-m", "moe_p2p", "bench")
DISAGGREGATED = ("-m", "moe_p2p.examples.disaggregated")
SOAK = ("benchmarks/soak.py", "--over=loopback", "--minutes=10", "--replace-every-s=1")
# A program, and a line that it prints in the middle of its work; without one: once two of its
# processes have memory.
PROGRAMS = {
    "demo": (("-m", "moe_p2p", "demo", "--steps=100000"), ""),
    "bench": ((*BENCH, *SMALL, "--seconds=60", "--json=", "--plot="), ""),
    "bench --check": ((*BENCH, *SMALL, "--check"), "padded, bf16"),
    "bench --api kv": ((*BENCH, "--api=kv", "--device=cpu", "--repeats=100000"), ""),
    "bench --api weights": ((*BENCH, "--api=weights", "--json=", "--plot="), ""),
    "tune": (("-m", "moe_p2p", "tune", "--device=cpu", "--seconds=60", "--into={into}"), ""),
    "disaggregated": ((*DISAGGREGATED, "--serve"), "http://"),
    "disaggregated, joins": ((*DISAGGREGATED, "--prefill=9"), "starts prefill-1"),
    "rl": (("-m", "moe_p2p.examples.rl", "--steps=2000"), "version   2"),
    "soak": (SOAK, "died in"),
    "kv_soak": (("benchmarks/kv_soak.py", "--requests=100000"), ""),
    "kv_reclaim": (("benchmarks/kv_reclaim.py", "--cancels=10000"), ""),
}
# What starts its processes as another one does, in launch.run_ranks or in kv_soak.
ALIKE = ("bench --api kv", "bench --api weights", "tune", "kv_reclaim")


@pytest.mark.parametrize(
    ("name", "starting", "sigint"),
    cells.few(
        itertools.product(PROGRAMS, (True, False), (signal.SIG_IGN, signal.default_int_handler)),
        keep=lambda cell: cell[0] not in ALIKE and cell[2] is signal.SIG_IGN,
    ),
)
def test_it_ends_all_processes(name: str, starting: bool, sigint: Any, tmp_path: Path) -> None:
    arguments, line = PROGRAMS[name]
    arguments = tuple(each.format(into=tmp_path / "tuned.json") for each in arguments)
    with handled(sigint), program(*arguments) as running:
        if starting:  # its first process, beside itself and the server of its copies
            until(lambda: len(running.processes()) >= 3, "it never begins")
        elif line:
            running.wait_for(line)
        else:
            until(lambda: len(running.memory()) >= 2, "it never begins")
        memory = running.memory()
        running.process.terminate()
        running.process.communicate(timeout=DEADLINE_S)
        assert running.process.returncode in (128 + signal.SIGTERM, -signal.SIGTERM)
        running.wait_until_gone()
        assert not memory & {*os.listdir("/dev/shm")}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_handled_when_a_process_has_started(number: int) -> None:
    """It once left a worker that had begun and that nobody knew."""
    before, started = signal.signal(number, launch.exit_by_signal), list[str]()

    def start() -> None:
        with launch.signals_wait():
            signal.raise_signal(number)
            started.append("a process")

    try:
        with pytest.raises(SystemExit) as ended:
            start()
        assert ended.value.code == 128 + number
        assert started
        assert signal.getsignal(number) is launch.exit_by_signal
    finally:
        signal.signal(number, before)


def test_tests_handle_sigint() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_tests_handle_sigint_where_it_was_ignored() -> None:
    with handled(signal.SIG_IGN):
        one = f"{__file__}::{test_tests_handle_sigint.__name__}"
        done = warm.run(
            *("-m", "pytest", "-q", "-p", "no:cacheprovider", one),
            cwd=warm.ROOT, capture_output=True, text=True, timeout=DEADLINE_S,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("module", ["engine.engine", "moe.communicator"])
def test_exit_removes_memory_whose_owner_a_signal_lost(module: str) -> None:
    """A handler's exception may come when memory is there and Python does not know it yet."""
    script = f"""
import os, signal, sys, torch, torch.distributed as dist
from moe_p2p import AllToAll, AllToAllConfig, Engine
from moe_p2p.{module[: module.index(".")]} import {module[module.index(".") + 1 :]} as module
from moe_p2p.tools.launch import exit_by_signal

def late(*_):
    print([name for name in os.listdir("/dev/shm") if f".{{os.getpid()}}." in name], flush=True)
    signal.raise_signal(signal.SIGTERM)

signal.signal(signal.SIGTERM, exit_by_signal)
module.Closing = late
if "{module}" == "engine.engine":
    Engine()
AllToAll(dist.HashStore(), AllToAllConfig(num_experts=2, hidden_dim=16, topk=1, max_tokens=2),
         rank=0, world_size=1)
"""
    done = warm.run("-c", script, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    names = ast.literal_eval(done.stdout)
    assert names
    assert not {*names} & {*os.listdir("/dev/shm")}


BOTH = """
import os, signal, sys
from moe_p2p.tools import launch
both = (signal.SIGINT, signal.SIGTERM)
for number in both:
    signal.signal(number, launch._end)
signal.pthread_sigmask(signal.SIG_BLOCK, both)
for number in both:
    os.kill(os.getpid(), number)
try:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, both)
except SystemExit as error:
    print(error.code)
"""


def test_a_rank_that_two_signals_end_at_once_prints_nothing() -> None:
    """Ctrl-C, and the agent's SIGTERM before the rank has handled it: Python printed `OSError:
    Signal 15 ignored due to race condition`."""
    done = warm.run("-c", BOTH, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.stdout, done.stderr) == ("130\n", "")
