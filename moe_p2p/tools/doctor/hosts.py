"""The reports of other hosts, over ssh or Slurm's srun: each runs `doctor --json` there.

A launcher is a command with its options: "ssh -p 2222" or "srun --partition=gpu". All hosts are
asked at once, each by a process of its own, so one that hangs keeps no other. Used by command.py.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_p2p import errors
from moe_p2p.tools.doctor.job import Answer, read_answer
from moe_p2p.tools.doctor.report import Problem
from moe_p2p.version import __version__

LAUNCHERS = ("ssh", "srun")
END_S = 2.0  # until a launcher that was asked to end is killed
_HOST = re.compile(r"[A-Za-z0-9_.:%@][A-Za-z0-9_.:%@-]*")  # no option, no glob, no second word
_NOT_INSTALLED = re.compile(r"No module named '?moe_p2p")
_SSH_FAILED = 255


def names_of(text: str) -> list[str]:
    """Hosts of "a,b". Raises InvalidArgumentError."""
    hosts = [name.strip() for name in text.split(",") if name.strip()]
    errors.require(bool(hosts), f"--hosts is {text!r}, must be names with commas: a,b")
    for host in hosts:
        errors.require(
            _HOST.fullmatch(host) is not None,
            f"--hosts: {host!r} is no name of a host; a Slurm range is named in full by "
            "--hosts $(scontrol show hostnames | paste -sd,)",
        )
        errors.require(hosts.count(host) == 1, f"--hosts names {host} more than once")
    return hosts


def command_for(launcher: Sequence[str], host: str, program: Sequence[str]) -> list[str]:
    """The command that runs `program` on a host.

    ssh joins words with blanks and gives them to the host's shell, so they are quoted for it; srun
    passes words on as they are.
    """
    name = Path(launcher[0]).name
    if name == "ssh":
        options = ["-o", "BatchMode=yes", "-T"]
        return [*launcher, *options, host, shlex.join(program)]
    return [*launcher, "--nodes=1", "--ntasks=1", "--overlap", f"--nodelist={host}", *program]


def split_launcher(text: str) -> list[str]:
    """Raises InvalidArgumentError, UnavailableError where it is not installed."""
    words = shlex.split(text)
    errors.require(
        bool(words) and Path(words[0]).name in LAUNCHERS,
        f"--launcher is {text!r}, must be {' or '.join(LAUNCHERS)}, and options of it",
    )
    if shutil.which(words[0]) is None:
        raise errors.make(errors.UnavailableError, f"--launcher: {words[0]} is not installed here")
    return words


class _Asked(NamedTuple):
    process: subprocess.Popen[bytes]
    command: list[str]
    folder: Path
    at_s: float


def ask(
    hosts: Sequence[str], launcher: Sequence[str], program: Sequence[str], timeout_s: float
) -> dict[str, Answer]:
    """Runs `program`, which prints a report as JSON, on each host."""
    with tempfile.TemporaryDirectory(prefix="moe_p2p_doctor_") as folder:
        asked: dict[str, _Asked] = {}
        try:
            for number, host in enumerate(hosts):
                command = command_for(launcher, host, program)
                asked[host] = _start(command, Path(folder, str(number)))
            ends = time.monotonic() + timeout_s
            return {host: _answer(host, each, ends, timeout_s) for host, each in asked.items()}
        finally:
            for each in asked.values():
                _end(each.process)


def _start(command: list[str], folder: Path) -> _Asked:
    folder.mkdir()
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        at_s = time.time()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )
    return _Asked(process, command, folder, at_s)


def _answer(host: str, asked: _Asked, ends: float, timeout_s: float) -> Answer:
    try:
        status = asked.process.wait(max(0.0, ends - time.monotonic()))
    except subprocess.TimeoutExpired:
        said = _last_line(asked.folder / "err")
        return _none(
            f"did not answer within {timeout_s:g} s" + (f" ({said})" if said else ""),
            f"{_shown(asked.command)} shows what it waits for; --timeout for a longer wait",
        )
    out = asked.folder / "out"
    found = _json_in(out.read_text(errors="replace"))
    if found is None:
        return _why_none(asked, status)
    mend = _shown(_install(asked.command))
    return read_answer(found, asked.at_s, out.stat().st_mtime, mend)


def _json_in(text: str) -> dict[str, Any] | None:
    """The report in what a host printed: its shell may greet first."""
    for at in re.finditer(r"^\{", text, re.MULTILINE):
        try:
            found, _ = json.JSONDecoder().raw_decode(text, at.start())
        except ValueError:
            continue
        if isinstance(found, dict) and "machine" in found:
            return found
    return None


def _why_none(asked: _Asked, status: int) -> Answer:
    errors_of = (asked.folder / "err").read_text(errors="replace")
    said = _last_line(asked.folder / "err") or _last_line(asked.folder / "out")
    if _NOT_INSTALLED.search(errors_of):
        return _none("moe_p2p is not installed there", _shown(_install(asked.command)))
    if Path(asked.command[0]).name == "ssh" and status == _SSH_FAILED:
        return _none(f"cannot be reached: {said or 'ssh ended without a word'}",
                     _shown([*asked.command[:-1], "true"]))  # fmt: skip
    return _none(
        f"gave no report (status {status}): {said or 'it printed nothing'}",
        f"{_shown(asked.command)}; --python names another Python there",
    )


def _install(command: list[str]) -> list[str]:
    """The same launcher and host, but pip."""
    words = ["-m", "pip", "install", f"moe_p2p=={__version__}"]
    if Path(command[0]).name == "ssh":
        return [*command[:-1], shlex.join([shlex.split(command[-1])[0], *words])]
    return [*command[: command.index("-m")], *words]


def _shown(command: Sequence[str]) -> str:
    return shlex.join(command)


def _none(what: str, remedy: str) -> Answer:
    return Answer(None, Problem(what, remedy))


def _last_line(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines()]
    return next(filter(None, reversed(lines)), "")[:300]


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
