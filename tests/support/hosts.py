"""Hosts that are network namespaces of this machine, with interfaces and /dev/shm of their own.

    with Hosts(2, num_interfaces=2) as hosts:
        hosts.start(0, "program.py", "argument")      # eth0 has 10.77.0.1, eth1 10.77.1.1
        hosts.place(1).enter()                        # in a process that shall run there
        hosts.flap(1, "eth1", down_s=0.5)

Interfaces i of all hosts share one link layer: a bridge in a namespace of its own. Needs root and
iproute2; why_not() returns what is missing.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import warm

_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000  # <sched.h>
_MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18  # <sys/mount.h>


def why_not() -> str:
    """Returns why hosts cannot be made here; empty when they can."""
    if shutil.which("ip") is None:
        return "ip is not installed (apt-get install iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"moe_p2p_{os.getpid()}_probe"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"ip netns add: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


def why_no_tcp() -> str:
    """The same for hosts that libfabric's tcp connects."""
    from moe_p2p import Engine, EngineConfig, UnavailableError

    tcp = {"transport": "libfabric", "transport_settings": "provider=tcp,interfaces=lo"}
    try:
        Engine(EngineConfig(**tcp, nics_per_rank=1)).close()
    except UnavailableError as error:
        return str(error)
    return why_not()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def _call(name: str, *arguments: Any) -> None:
    """Calls a function of libc."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)


def own_shm(of: Path | int) -> None:
    """Gives this process, which has one thread, a /dev/shm of its own: a folder, or so many KiB."""
    _call("unshare", _CLONE_NEWNS)
    _call("mount", b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)
    if isinstance(of, Path):
        bind(of, "/dev/shm")
    else:
        _call("mount", b"tmpfs", b"/dev/shm", b"tmpfs", ctypes.c_ulong(0), b"size=%dk" % of)


def bind(of: Path, place: str) -> None:
    """Puts a file or folder in the place of another one, for this process and its children. Behind
    own_shm: mounts are its own then."""
    _call("mount", os.fsencode(of), place.encode(), None, ctypes.c_ulong(_MS_BIND), None)


class Place(NamedTuple):
    """A host, for processes that move to it. Processes of one host share its /dev/shm."""

    name: str
    shm: Path

    def enter(self) -> None:
        """Moves this process, which has one thread, to the host."""
        with open(f"/run/netns/{self.name}") as network:
            _call("setns", network.fileno(), _CLONE_NEWNET)
        own_shm(self.shm)


class Hosts:
    """Hosts made by the constructor; the end of the `with` removes them and ends their programs."""

    def __init__(self, num_hosts: int, *, num_interfaces: int = 1) -> None:
        stem = f"moe_p2p_{os.getpid()}_{time.monotonic_ns() % 10**6}"
        self.names = [f"{stem}_{host}" for host in range(num_hosts)]
        self._switch = f"{stem}_switch"
        self._processes: list[subprocess.Popen[str]] = []
        self._shm = tempfile.TemporaryDirectory(prefix="hosts.", dir="/dev/shm")
        try:
            self._build(num_interfaces)
        except subprocess.CalledProcessError as error:
            self.close()
            raise RuntimeError(f"{' '.join(error.cmd)}: {error.stderr}") from error

    def _build(self, num_interfaces: int) -> None:
        if not self.names:
            return
        for name in [self._switch, *self.names]:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        for i in range(num_interfaces):
            _ip("-n", self._switch, "link", "add", f"bridge{i}", "type", "bridge")
            _ip("-n", self._switch, "link", "set", f"bridge{i}", "up")
            for host, name in enumerate(self.names):
                port = f"port{i}_{host}"
                _ip(
                    *("-n", self._switch, "link", "add", port, "type", "veth"),
                    *("peer", "name", f"eth{i}", "netns", name),
                )
                _ip("-n", self._switch, "link", "set", port, "master", f"bridge{i}", "up")
                _ip("-n", name, "addr", "add", f"{self.address(host, i)}/24", "dev", f"eth{i}")
                _ip("-n", name, "link", "set", f"eth{i}", "up")

    @staticmethod
    def address(host: int, interface: int = 0) -> str:
        return f"10.77.{interface}.{host + 1}"

    def place(self, host: int) -> Place:
        shm = Path(self._shm.name, str(host))
        shm.mkdir(exist_ok=True)
        return Place(self.names[host], shm)

    def start(self, host: int, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """Starts `python ARGUMENTS` on a host; its standard output and error are one pipe."""
        process = warm.popen(
            *arguments,
            preexec_fn=self.place(host).enter,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **options,
        )
        self._processes.append(process)
        return process

    def outcomes(self, deadline_s: float) -> list[tuple[int, str]]:
        """Exit status and output of each program that was started."""
        ends, found = time.monotonic() + deadline_s, []
        for process in self._processes:
            try:
                output, _ = process.communicate(timeout=max(1.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                output = f"did not end within {deadline_s} s\n{process.communicate()[0]}"
            found.append((process.returncode, output))
        return found

    def flap(self, host: int, interface: str, *, down_s: float) -> None:
        """Takes an interface down and up again."""
        _ip("-n", self.names[host], "link", "set", interface, "down")
        try:
            time.sleep(down_s)
        finally:
            _ip("-n", self.names[host], "link", "set", interface, "up")

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for name in [*self.names, self._switch] if self.names else []:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        self._shm.cleanup()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
