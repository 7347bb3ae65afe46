"""Python programs that begin as copies of a process which has imported torch.

An interpreter that imports torch takes 2 to 3 s of CPU before its program begins, a copy some
milliseconds. A server has imported what programs need, has one thread, and starts a program as a
copy of itself:

    warm.run("-m", "moe_p2p", "plan", capture_output=True)    # as subprocess.run, behind `python`
    warm.popen("-c", program, stdin=subprocess.PIPE)          # as subprocess.Popen
    with warm.copies():                                       # what others start is a copy, too
        multiprocessing.get_context("forkserver").Process(target=...).start()

The program is a child of the caller, a subprocess.Popen as any other, with the session, folder,
environment, signals, mask, umask, CPUs, pipes, sys.argv, sys.path and __main__ that an interpreter
would have, and it ends as an interpreter does. Interpreters that it starts, ranks of torchrun and
fork servers among them, are copies too: by a server of its own, which ends with it.

Not for programs whose start is what is tested, and for what is read before a program begins:
variables of READ_AT_START are refused, packages that are hidden or replaced should be.

As a program, this file is the server. It must import nothing but the standard library.
"""

from __future__ import annotations

import _posixsubprocess
import atexit
import builtins
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import io
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("torch", "moe_p2p", "pytest", "moe_p2p.tools.launch")
# How names of variables begin that are read by the loader, by libraries as they are loaded, by the
# interpreter, or when the modules above are imported.
READ_AT_START = (
    "GLIBC_",
    "LD_",
    "MALLOC_",
    "MOE_P2P_AS_",
    "MOE_P2P_DIRECT",
    "PYTHON",
    "TORCH_LOGS",
)
READ_HERE = ("PYTHONPATH", "PYTHONUNBUFFERED")
# <sys/prctl.h>
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37
_ALL_SIGNALS = signal.valid_signals()
_fork_exec = _posixsubprocess.fork_exec
_starting = threading.RLock()


# --- of the process that wants a program ---------------------------------------------------------


class RefusedError(ValueError):
    """What is asked for needs an interpreter of its own."""


class Server:
    """Of the interpreter `python`, with these modules. It ends with the process that made it.

    path: where it finds them, too. environment: in which it starts, see READ_AT_START.
    """

    def __init__(
        self,
        python: str | Path = sys.executable,
        modules: tuple[str, ...] = MODULES,
        path: tuple[Path, ...] = (ROOT,),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.python = str(python)
        ours, theirs = socket.socketpair()
        with theirs:
            command = [self.python, __file__, str(theirs.fileno()), os.pathsep.join(map(str, path))]
            self._process = subprocess.Popen(
                [*command, *modules],
                # Threads of numpy's BLAS would be there once it is imported.
                env={**(environment or os.environ), "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._client = _Client(ours, self.python)
        atexit.register(self.close)

    def popen(self, *arguments: str, **options: Any) -> subprocess.Popen[Any]:
        """Starts `python ARGUMENTS`; options of subprocess.Popen."""
        with self.copies(otherwise=None):
            return subprocess.Popen([self.python, *arguments], **options)

    @contextlib.contextmanager
    def copies(self, otherwise: Callable[..., int] | None = _fork_exec) -> Iterator[None]:
        """Interpreters that this thread starts meanwhile are copies. otherwise: starts others."""
        thread = threading.get_ident()

        def start(*given: Any) -> int:
            if threading.get_ident() != thread:
                return before(*given)
            return self._client.start(*given, otherwise=otherwise)

        with _starting:
            before = _install(start)
            try:
                yield
            finally:
                _install(before)

    def run(
        self,
        *arguments: str,
        timeout: float | None = None,
        check: bool = False,
        capture_output: bool = False,
        **options: Any,
    ) -> subprocess.CompletedProcess[Any]:
        """As subprocess.run, without `input`."""
        if capture_output:
            options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with self.popen(*arguments, **options) as process:
            try:
                printed = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        done = subprocess.CompletedProcess(process.args, process.returncode, *printed)
        if check:
            done.check_returncode()
        return done

    def close(self) -> None:
        self._client.close()
        self._process.wait()


def _server() -> Server:
    with _starting:  # threads that come first would make one each
        return _first_server()


@functools.cache
def _first_server() -> Server:
    return Server()


@functools.cache
def without_moe_p2p() -> Server:
    """It has imported torch alone: for programs whose import of moe_p2p is tested."""
    return Server(modules=("torch",))


def popen(*arguments: str, **options: Any) -> subprocess.Popen[Any]:
    """Starts `python ARGUMENTS`; options of subprocess.Popen."""
    return _server().popen(*arguments, **options)


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[Any]:
    """Runs `python ARGUMENTS`; options of subprocess.run, but for `input`."""
    return _server().run(*arguments, **options)


def copies() -> contextlib.AbstractContextManager[None]:
    """Interpreters that are started meanwhile are copies, where they can be."""
    return _server().copies()


def _install(start: Callable[..., int]) -> Callable[..., int]:
    """What subprocess and multiprocessing start programs by; returns what it was."""
    before: Callable[..., int] = _posixsubprocess.fork_exec
    _posixsubprocess.fork_exec = start
    if hasattr(subprocess, "_fork_exec"):  # Python 3.11 and later
        subprocess._fork_exec = start
    return before


class _Client:
    """Asks a server, which is a child of this process."""

    def __init__(self, connection: socket.socket, python: str) -> None:
        self._connection, self._python, self._owner = connection, python, os.getpid()

    def close(self) -> None:
        if self._owner == os.getpid():
            self._connection.close()

    def start(
        self,
        args: list[Any],
        executables: list[Any],
        *more: Any,
        otherwise: Callable[..., int] | None,
    ) -> int:
        """In the place of _posixsubprocess.fork_exec. otherwise: for what a server cannot start."""
        try:
            if os.getpid() != self._owner:
                raise RefusedError("a forked process has no server")
            with _starting:
                return self._start(list(map(os.fsdecode, args)), executables, *more)
        except (RefusedError, ConnectionError):
            if otherwise is None:
                raise
            return otherwise(args, executables, *more)

    def _start(
        self,
        args: list[str],
        executables: list[Any],
        close_fds: bool,
        keep: tuple[int, ...],
        cwd: Any,
        env: list[bytes] | None,
        *more: Any,
    ) -> int:
        ends, (_, errors_to, restore_signals, new_session), rest = more[:6], more[6:10], more[10:]
        if isinstance(rest[-1], bool):  # from Python 3.11 on: vfork may be used
            rest = rest[:-1]
        *group, gid, groups, uid, umask, preexec = rest
        given = [ends[0], ends[3], ends[5]]  # what standard input, output and error shall be
        fds = {at: fd if fd >= 0 else at for at, fd in enumerate(given)}
        fds |= {fd: fd for fd in keep if fd != errors_to}
        if not close_fds or (gid, groups, uid) != (None, None, None):
            raise RefusedError("descriptors that are not named, or another user")
        if [os.fsdecode(each) for each in executables] != [self._python]:
            raise RefusedError(f"{executables} is not {self._python}")
        if any("multiprocessing.resource_tracker" in each for each in args):
            raise RefusedError("the resource tracker imports little")
        status = Path("/proc/self/status").read_text()
        ignored = _field(status, "SigIgn", 16)
        request = {
            "args": args,
            "cwd": os.fsencode(cwd) if cwd is not None else os.getcwdb(),
            "env": [name + b"=" + value for name, value in os.environb.items()]
            if env is None
            else env,
            "new session": new_session,
            "group": group[0] if group else -1,
            "umask": umask if umask >= 0 else _field(status, "Umask", 8),
            "ignored": [each for each in _ALL_SIGNALS if ignored >> (each - 1) & 1],
            "mask": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            "cpus": os.sched_getaffinity(0),
            "preexec": preexec and pickle.dumps(preexec),
            "fds": list(fds),
        }
        if restore_signals:
            request["ignored"] = set(request["ignored"]) - {signal.SIGPIPE, signal.SIGXFSZ}
        before = ctypes.c_int()
        _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(before))
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # the program's parent is the next such one above it
        try:
            _send(self._connection, request, list(fds.values()))
            answer, _ = _receive(self._connection)
        finally:
            _prctl(_PR_SET_CHILD_SUBREAPER, before.value)
        if isinstance(answer, str):
            raise RefusedError(answer)
        return int(answer)


def _field(status: str, name: str, base: int) -> int:
    return int(status.partition(f"\n{name}:")[2].split()[0], base)


# --- of both -------------------------------------------------------------------------------------


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value)):
        raise OSError(ctypes.get_errno(), "prctl")


def _send(connection: socket.socket, message: Any, fds: list[int]) -> None:
    data = pickle.dumps(message)
    socket.send_fds(connection, [len(data).to_bytes(8, "little")], fds)
    connection.sendall(data)


def _receive(connection: socket.socket) -> tuple[Any, list[int]]:
    head, fds, _, _ = socket.recv_fds(connection, 8, 250, socket.MSG_WAITALL)
    if len(head) < 8:
        raise ConnectionResetError("the process that starts programs has ended")
    size, parts = int.from_bytes(head, "little"), []
    while size:
        parts.append(connection.recv(size))
        if not parts[-1]:
            raise ConnectionResetError("the process that starts programs has ended")
        size -= len(parts[-1])
    return pickle.loads(b"".join(parts)), fds


# --- of the server, and of a program before it begins ---------------------------------------------


def serve(connection: socket.socket, path: list[str]) -> list[str]:
    """Returns in programs alone, with their arguments: sys.argv behind `-m` or `-c`, if any.

    path: sys.path of an interpreter without PYTHONPATH.
    """
    environment = {name: os.environ[name] for name in os.environ if _is_read_at_start(name)}
    while True:
        try:
            request, fds = _receive(connection)
        except ConnectionError:
            os._exit(0)
        wanted = dict(each.split(b"=", 1) for each in request["env"])
        names = {os.fsdecode(name): os.fsdecode(value) for name, value in wanted.items()}
        try:
            unbuffered, arguments = _understood(request["args"])
            unbuffered |= bool(names.get("PYTHONUNBUFFERED"))
            if environment != {name: names[name] for name in names if _is_read_at_start(name)}:
                raise RefusedError(f"a variable of {READ_AT_START} is another one here")
        except RefusedError as error:
            answer: int | str = str(error)
        else:
            answer = _fork(connection)
        if answer != 0:
            for fd in fds:
                os.close(fd)
            _send(connection, answer, [])
            continue
        _become(request, fds, wanted)
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        if os.fork() == 0:  # the server of what this program starts
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(0)
            ours.close()
            connection = theirs
            nothing = os.open(os.devnull, os.O_RDWR)
            for fd in {*map(int, os.listdir("/proc/self/fd"))} - {theirs.fileno(), nothing}:
                _close(fd)
            for fd in range(3):
                os.dup2(nothing, fd)
            continue
        theirs.close()
        with ours:  # descriptors of the program begin as usual
            above = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, 100)
        client = _Client(socket.socket(fileno=above), sys.executable)
        _install(functools.partial(client.start, otherwise=_fork_exec))
        _set_up_streams(unbuffered)
        sys.orig_argv = request["args"]
        _set_up_path(arguments, names, path)
        _set_up_torch(names)
        _set_up_signals(request["ignored"], request["mask"])
        return arguments


def _is_read_at_start(name: str) -> bool:
    if name.startswith(("MOE_P2P_AS_", "MOE_P2P_DIRECT")) and "moe_p2p" not in sys.modules:
        return False
    return name.startswith(READ_AT_START) and name not in READ_HERE


def _understood(args: list[str]) -> tuple[bool, list[str]]:
    """Whether output is not buffered, and sys.argv with -m or -c and what comes behind."""
    arguments, flags = args[1:], subprocess._args_from_interpreter_flags()
    if arguments[: len(flags)] == flags:  # multiprocessing hands on what the environment sets
        arguments = arguments[len(flags) :]
    unbuffered = arguments[:1] == ["-u"]
    arguments = arguments[unbuffered:]
    if not arguments or (arguments[0][:1] == "-" and arguments[0] not in ("-c", "-m")):
        raise RefusedError(f"options of Python that are not known here: {args}")
    return unbuffered, arguments


def _fork(connection: socket.socket) -> int:
    """Returns 0 in the program, which is a child of the process that asked, else its number."""
    numbers, number = os.pipe()
    go, ready = os.pipe()
    between = os.fork()
    if between == 0:
        if program := os.fork():
            os.write(number, str(program).encode())
            os._exit(0)
        os.close(ready)
        os.read(go, 1)  # until its parent is the one that it shall have
        for fd in (numbers, number, go):
            os.close(fd)
        connection.close()
        return 0
    os.close(go)
    os.close(number)
    program = int(os.read(numbers, 20))
    os.waitpid(between, 0)
    os.close(ready)
    os.close(numbers)
    return program


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):  # of the list of descriptors itself
        os.close(fd)


def _become(request: dict[str, Any], fds: list[int], environment: dict[bytes, bytes]) -> None:
    """All that a program has from its parent, but for signals."""
    if request["new session"]:
        os.setsid()
    if request["group"] >= 0:
        os.setpgid(0, request["group"])
    above = max(request["fds"]) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in fds]
    for fd, at in zip(moved, request["fds"], strict=True):
        os.dup2(fd, at)
    for fd in {*map(int, os.listdir("/proc/self/fd"))} - {*request["fds"]}:
        _close(fd)
    os.umask(request["umask"])
    os.chdir(request["cwd"])
    os.sched_setaffinity(0, request["cpus"])
    os.environb.clear()
    os.environb.update(environment)
    if request["preexec"]:
        pickle.loads(request["preexec"])()


def _set_up_streams(unbuffered: bool) -> None:
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        before, mode = getattr(sys, name), "w" if fd else "r"
        try:
            file: Any = io.FileIO(fd, mode, closefd=False)
        except OSError:  # it is closed
            stream = None
        else:
            if fd == 0 or not unbuffered:
                file = io.BufferedWriter(file) if fd else io.BufferedReader(file)
            stream = io.TextIOWrapper(
                file,
                before.encoding,
                before.errors,
                newline="\n",
                line_buffering=not unbuffered and (fd == 2 or file.isatty()),
                write_through=unbuffered,
            )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _set_up_path(arguments: list[str], names: dict[str, str], path: list[str]) -> None:
    first = {"-m": os.getcwd(), "-c": ""}.get(arguments[0])
    if first is None:
        first = str(Path(arguments[0]).resolve().parent)
    given = names.get("PYTHONPATH", "")
    more = [os.path.abspath(each) for each in given.split(os.pathsep)] if given else []
    sys.path[:] = [first, *dict.fromkeys([*more, *path])]
    sys.path_importer_cache.clear()
    sys.argv = [arguments[0], *arguments[2:]] if arguments[0] in ("-m", "-c") else [*arguments]
    from multiprocessing import process

    process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]


def _set_up_torch(names: dict[str, str]) -> None:
    """What it draws and counts as it is loaded."""
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()
        threads = names.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
        if threads.isdecimal() and int(threads) != torch.get_num_threads():
            torch.set_num_threads(int(threads))


def _set_up_signals(ignored: set[int], mask: list[int]) -> None:
    """What Python sets is set; what waits since this program was started comes now."""
    for number in _ALL_SIGNALS - {signal.SIGKILL, signal.SIGSTOP}:
        wanted: Any = signal.SIG_IGN if number in ignored else signal.SIG_DFL
        if number in (signal.SIGPIPE, signal.SIGXFSZ):
            wanted = signal.SIG_IGN
        if number == signal.SIGINT and number not in ignored:
            wanted = signal.default_int_handler
        if signal.getsignal(number) != wanted:
            signal.signal(number, wanted)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def begin(arguments: list[str]) -> None:
    """Runs the program as the interpreter does."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    if arguments[0] == "-m":
        name = arguments[1]
        if not hasattr(sys.modules.get(name, sys), "__path__"):
            sys.modules.pop(name, None)  # imported by the server: it warns of that
        runpy._run_module_as_main(name)  # type: ignore[attr-defined]
    elif arguments[0] == "-c":
        exec(compile(arguments[1], "<string>", "exec", dont_inherit=True), main.__dict__)
    else:
        file = os.path.abspath(arguments[0])
        main.__file__, main.__dict__["__cached__"] = file, None
        main.__loader__ = loader = SourceFileLoader("__main__", file)
        exec(compile(loader.get_data(file), file, "exec", dont_inherit=True), main.__dict__)


def _main(fd: str, path: str, *modules: str) -> list[str]:
    """Returns in programs alone, with their arguments."""
    own = {os.path.abspath(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    before = [each for each in sys.path[1:] if each not in own]  # [0] is this file's folder
    sys.path[:] = [*filter(None, path.split(os.pathsep)), *before]
    signal.pthread_sigmask(signal.SIG_SETMASK, _ALL_SIGNALS)
    for name in modules:
        importlib.import_module(name)
    until = time.monotonic() + 20
    while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < until:
        time.sleep(0.001)  # one that was joined may be on its way out
    threads = os.listdir("/proc/self/task")
    assert len(threads) == threading.active_count() == 1, "a copy would lack threads of this one"
    os.dup2(os.open(os.devnull, os.O_RDWR), 2)
    connection = socket.socket(fileno=int(fd))
    gc.collect()
    gc.freeze()  # or each copy would touch, and so have, all of them
    return serve(connection, before)


if __name__ == "__main__":
    begin(_main(*sys.argv[1:]))
