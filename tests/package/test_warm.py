"""Programs that are copies of a process which has imported torch: as those of an interpreter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.programs import Program

DEADLINE_S = 60.0
FINDS = """
import json, multiprocessing.process, os, signal, sys, threading

status = open("/proc/self/status").read()
streams = [sys.stdin, sys.stdout, sys.stderr]
print(json.dumps({
    "arguments": [sys.argv, sys.orig_argv, sys.executable, sys.path, sys.flags[:]],
    "main": [__name__, globals().get("__file__"), str(__spec__).partition(" object")[0]],
    "is main": sys.modules["__main__"].__dict__ is globals(),
    "names": sorted(name for name in globals() if name != "__annotations__"),
    "folder": [os.getcwd(), multiprocessing.process.ORIGINAL_DIR],
    "environment": dict(os.environ),
    "group": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid(), os.getppid()],
    "umask": os.umask(0),
    "cpus": sorted(os.sched_getaffinity(0)),
    "handlers": {int(n): str(signal.getsignal(n)) for n in signal.valid_signals()},
    "ignored": status.partition("SigIgn:")[2].split()[0],
    "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
    "threads": [threading.active_count(), threading.current_thread() is threading.main_thread()],
    "descriptors": [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd < 100],
    "given": os.read(int(os.environ["GIVEN"]), 10).decode(),
    "streams": [
        [each.encoding, each.errors, each.line_buffering, each.write_through, each.isatty()]
        for each in streams
    ],
}))
"""
FIRST = """
import threading
from tests.support import warm

made, begun = [], threading.Barrier(8)

class Counted(warm.Server):
    def __init__(self) -> None:
        made.append(self)
        super().__init__(modules=())

def come() -> None:
    begun.wait()
    warm._server()

warm.Server = Counted
threads = [threading.Thread(target=come) for _ in range(8)]
for each in threads:
    each.start()
for each in threads:
    each.join()
print(len(made))
"""


def found(start: Callable[..., Any], arguments: list[str], folder: Path, **more: str) -> Any:
    reader, writer = os.pipe()
    os.write(writer, b"a word")
    os.close(writer)
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONUNBUFFERED"}
    environment |= {"PYTHONPATH": f"{folder}:/usr", "GIVEN": str(reader), **more}
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    try:
        done = start(
            *arguments, cwd=folder, env=environment, pass_fds=[reader], umask=0o27,
            start_new_session=True, capture_output=True, text=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGHUP, before)
        os.close(reader)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def interpreter(*arguments: str, **options: Any) -> subprocess.CompletedProcess[Any]:
    return subprocess.run([sys.executable, *arguments], **options)


@pytest.mark.parametrize(
    ("arguments", "more"),
    [
        (["-c", FINDS, "-x"], {}),
        (["-m", "finds", "one"], {"PYTHONUNBUFFERED": "1"}),
        (["finds.py", "-m"], {}),
        (["-u", "-m", "finds"], {}),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else "",
)
def test_a_program_finds_what_an_interpreter_gives_it(
    arguments: list[str], more: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "finds.py").write_text(FINDS)
    theirs = found(interpreter, arguments, tmp_path, **more)
    ours = found(warm.run, arguments, tmp_path, **more)
    assert ours == theirs
    assert ours["group"][-1] == os.getpid()


def test_it_has_imported_torch_and_draws_other_numbers_than_others() -> None:
    program = "import sys; assert 'torch' in sys.modules; import torch; print(torch.initial_seed())"
    drawn = [warm.run("-c", program, check=True, capture_output=True).stdout for _ in range(2)]
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize(("set_to", "count"), [({"OMP_NUM_THREADS": "3"}, 3), ({}, None)])
def test_torch_has_the_threads_of_its_environment_and_cores(
    set_to: dict[str, str], count: int | None
) -> None:
    environment = {name: os.environ[name] for name in os.environ if name != "OMP_NUM_THREADS"}
    program = "import torch; print(torch.get_num_threads())"
    done = warm.run(
        "-c", program, env=environment | set_to, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == count or len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("program", "status", "error"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("import sys; sys.exit('a word')", 1, "a word"),
        ("import os; os._exit(4)", 4, ""),
        ("assert not 'true'", 1, "AssertionError"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("import atexit, os; atexit.register(os.write, 2, b'at the end')", 0, "at the end"),
        ("import threading; threading.Timer(0.1, print, ['late'], {'file': "
         "__import__('sys').stderr}).start()", 0, "late"),
    ],
)  # fmt: skip
def test_it_ends_as_an_interpreter_does(program: str, status: int, error: str) -> None:
    for run in (interpreter, warm.run):
        done = run("-c", program, capture_output=True, text=True, timeout=DEADLINE_S)
        assert done.returncode == status, run
        assert done.stderr.strip().rpartition("\n")[2] == error, run


def test_a_module_that_is_not_there_is_named() -> None:
    texts = [run("-m", "no.such", capture_output=True, text=True).stderr
             for run in (interpreter, warm.run)]  # fmt: skip
    assert texts[0] == texts[1] != ""


def test_signals_before_it_begins_are_not_lost() -> None:
    for _ in range(10):
        process = warm.popen("-c", "import time; time.sleep(60)")
        process.terminate()
        assert process.wait(DEADLINE_S) == -signal.SIGTERM


def test_where_sigint_is_ignored_it_is_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        program = "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
        done = warm.run("-c", program, capture_output=True, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.stdout == "True\n"


def test_pipes_end_with_it() -> None:
    with warm.popen("-c", "print(input()[::-1])", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    text=True) as process:  # fmt: skip
        assert process.communicate("abc\n", timeout=DEADLINE_S)[0] == "cba\n"


def test_it_is_killed_at_its_deadline() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        warm.run("-c", "import time; time.sleep(60)", timeout=0.2)


STARTS = """
import multiprocessing, os, subprocess, sys

def look(how, parent):
    print(how, "torch" in sys.modules, parent in (None, os.getppid()), flush=True)

if __name__ == "__main__":
    for how in ("fork", "forkserver", "spawn"):
        process = multiprocessing.get_context(how).Process(
            target=look, args=(how, None if how == "forkserver" else os.getpid()))
        process.start()
        process.join()
        assert process.exitcode == 0
    look_again = f"import starts; starts.look('program', {os.getpid()})"
    done = subprocess.run([sys.executable, "-u", "-c", look_again], check=True)
"""


def test_what_it_starts_is_a_copy_too_and_its_child(tmp_path: Path) -> None:
    (tmp_path / "starts.py").write_text(STARTS)
    done = warm.run("starts.py", cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S)
    kinds = ("fork", "forkserver", "spawn", "program")
    assert done.stdout.splitlines() == [f"{how} True True" for how in kinds], done.stderr


def test_nothing_is_left_of_one_that_is_killed() -> None:
    program = "print('here', flush=True); import time; time.sleep(60)"
    process = warm.popen("-c", program, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout
    process.stdout.readline()
    process.kill()
    process.communicate(timeout=DEADLINE_S)
    Program(process).wait_until_gone()


@pytest.mark.parametrize("name", ["LD_PRELOAD", "MOE_P2P_AS_DEEP_EP", "PYTHONHASHSEED"])
def test_what_is_read_before_a_copy_begins_is_refused(name: str) -> None:
    with pytest.raises(warm.RefusedError, match="is another one here"):
        warm.run("-c", "pass", env=os.environ | {name: "1"})
    with pytest.raises(warm.RefusedError, match="options of Python"):
        warm.run("-I", "-c", "pass")


def test_threads_that_come_first_share_a_server() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST],
        env=os.environ | {"PYTHONPATH": str(warm.ROOT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.stdout == "1\n", done.stderr


def test_a_thread_starts_what_it_wants_while_another_starts_a_copy() -> None:
    """As `ip` of one run of the fault matrix, beside a worker of another."""
    server = warm.Server(modules=())
    begun = threading.Event()
    statuses: list[int] = []

    def other() -> None:
        begun.wait(DEADLINE_S)
        statuses.append(subprocess.run(["true"], check=False, timeout=DEADLINE_S).returncode)

    thread = threading.Thread(target=other)
    thread.start()
    with server.copies(otherwise=None):
        begun.set()
        thread.join(DEADLINE_S)
        with pytest.raises(warm.RefusedError):
            subprocess.run(["true"], check=False)
    server.close()
    assert statuses == [0]
