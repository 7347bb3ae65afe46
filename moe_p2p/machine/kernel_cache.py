"""Compiled kernels on disk, for jit.py: a cubin, the assembler's log and a digest of both, by key.

Anyone who can write to the folder controls what runs on the GPU. So a folder, or a file in it, is
used only when it belongs to this user or to root and nobody else may write to it. The check is made
on the open descriptor, and files are opened relative to the open folder. The digest detects damage
on disk, not an attack.

A folder that is refused or not writable is no error: kernels are then not cached. A kernel that is
not in it is looked up in two other folders, which are only read: MOE_P2P_KERNELS, for example in a
container's image, and the folder of the wheel moe_p2p_kernels. Keys name the sources and the
compiler (jit.cache_key), so a stale file is never found; names of that wheel are of the sources
alone, whose kernels are tested as the release's compiler made them.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from moe_p2p import env, log

# Too short: two processes compile the same kernel, without other harm.
_LOCK_WAIT_S = 300.0


def read(key: str) -> tuple[bytes, str] | None:
    """Returns cubin and log; None when they are missing or damaged."""
    for path in (env.cache_folder(), env.kernels_folder()):
        if path is not None and (found := _read(path, key, _folder)):
            return found
    packaged = env.packaged_kernels()
    return None if packaged is None else _read(packaged, key.partition("-")[0], _trusted)


def _read(
    path: Path, key: str, opened: Callable[[Path], AbstractContextManager[int]]
) -> tuple[bytes, str] | None:
    try:
        with opened(path) as folder:
            checked = opened is _folder
            digest, cubin, text = (
                _load(folder, key + end, checked) for end in (".sha256", ".cubin", ".log")
            )
    except OSError:
        return None
    return (cubin, text.decode()) if digest == _digest(cubin, text) else None


def write(key: str, cubin: bytes, text: str) -> None:
    """Writes each file atomically, the digest last. On a full disk nothing is cached."""
    files = {".cubin": cubin, ".log": text.encode(), ".sha256": _digest(cubin, text.encode())}
    with contextlib.suppress(OSError), _folder(env.cache_folder()) as folder:
        for end, data in files.items():
            name = f"{key}.{secrets.token_hex(8)}"
            try:
                with open(_open(folder, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as out:
                    out.write(data)
                os.replace(name, key + end, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder)
                raise


@contextlib.contextmanager
def exclusive(key: str) -> Iterator[bool]:
    """Holds the lock of one kernel; yields False when the folder cannot be written."""
    with contextlib.ExitStack() as stack:
        try:
            path = env.cache_folder()
            if path.is_absolute():
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = stack.enter_context(_folder(path))
            lock = _open(folder, f"{key}.lock", os.O_WRONLY | os.O_CREAT)
            stack.callback(os.close, lock)
        except OSError:
            yield False
            return
        end = time.monotonic() + _LOCK_WAIT_S
        while time.monotonic() < end:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # a file system without locks
                break
        yield True


@contextlib.contextmanager
def _folder(path: Path) -> Iterator[int]:
    """Opens a folder of kernels. Raises OSError when there is none, or when it is refused."""
    if not path.is_absolute():
        _refuse(path, "it depends on the working directory; name it from / on")
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if why := _distrust(folder):
            _refuse(path, why)
        yield folder
    finally:
        os.close(folder)


@contextlib.contextmanager
def _trusted(path: Path) -> Iterator[int]:
    """Likewise of the package itself: who may write there may write what Python runs, too."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield folder
    finally:
        os.close(folder)


def _distrust(descriptor: int) -> str:
    facts = os.fstat(descriptor)
    if facts.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {facts.st_uid}; name a folder of your own"
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others may write to it; take the right from them (chmod go-w) or name another one"
    return ""


def _refuse(path: Path, why: str) -> None:
    _warn_once(path, why)
    raise PermissionError(why)


@functools.cache
def _warn_once(path: Path, why: str) -> None:
    log.warning(
        f"the kernel cache {path} (MOE_P2P_CACHE, MOE_P2P_KERNELS) is not used, what it has is "
        f"compiled by each process: {why}"
    )


def _open(folder: int, name: str, flags: int) -> int:
    return os.open(name, flags | os.O_CLOEXEC, 0o600, dir_fd=folder)


def _load(folder: int, name: str, checked: bool) -> bytes:
    with open(_open(folder, name, os.O_RDONLY), "rb") as file:
        if checked and _distrust(file.fileno()):
            raise PermissionError(name)
        return file.read()


def _digest(cubin: bytes, text: bytes) -> bytes:
    parts = (hashlib.sha256(part).hexdigest() for part in (cubin, text))
    return "\n".join(parts).encode()
