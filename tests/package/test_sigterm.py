"""SIGTERM ends a program of ours and all of its processes, also where SIGINT is ignored.

So it is under `nohup`, in the background of a script, and in some CI: a program that counts on
Ctrl-C's handler, or on signals that it blocks, would leave workers there.
"""

from __future__ import annotations

import os
import signal
import socket

import pytest

from moe_p2p.tools import launch
from tests.support.programs import DEADLINE_S, ignored, program, until

SMALL = ("--ranks=2", "--ranks-per-node=1", "--tokens=4", "--hidden=256", "--device=cpu")
BENCH = ("-m", "moe_p2p", "bench", *SMALL)
DISAGGREGATED = ("-m", "moe_p2p.examples.disaggregated")
SOAK = ("benchmarks/soak.py", "--over=loopback", "--minutes=10", "--replace-every-s=1")
# A program, and a line that it prints once it has processes; without one: once two have memory.
PROGRAMS = {
    "demo": (("-m", "moe_p2p", "demo", "--steps=100000"), ""),
    "bench": ((*BENCH, "--seconds=60", "--json=", "--plot="), ""),
    "bench --check": ((*BENCH, "--check"), "padded, bf16"),
    "store": (("-m", "moe_p2p", "store", "127.0.0.1:{port}"), "serving"),
    "disaggregated, starting": ((*DISAGGREGATED, "--prefill=9"), "starts prefill-1"),
    "disaggregated, serving": ((*DISAGGREGATED, "--serve"), "http://"),
    "rl": (("-m", "moe_p2p.examples.rl", "--steps=2000"), "version   2"),
    "soak": (SOAK, "died in"),
    "kv_soak": (("benchmarks/kv_soak.py", "--requests=100000"), ""),
    "kv_reclaim": (("benchmarks/kv_reclaim.py", "--cancels=10000"), ""),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_ends_all_processes_where_sigint_is_ignored(name: str) -> None:
    arguments, line = PROGRAMS[name]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = tuple(each.format(port=port) for each in arguments)
    with ignored(), program(*arguments) as running:
        if line:
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
