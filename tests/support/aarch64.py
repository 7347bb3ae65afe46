"""An aarch64 host by qemu's user emulation, for the wheel: Debian's Python with torch's own wheel.

    python -m tests.support.aarch64    # fetches 165 MB into the user's cache, once

`make test-all` does that.
Nothing is installed: Debian's packages are unpacked into a folder, by an apt that has lists of its
own, and torch and what it imports lie beside it. torch is the oldest that the wheel serves: 146 MB,
where later ones come with CUDA's libraries.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from moe_p2p import env

EMULATOR, PYTHON = "qemu-aarch64", "3.11"
DEBIAN = (f"python{PYTHON}-minimal", f"libpython{PYTHON}-stdlib", "libstdc++6")
SITE = (
    *("torch==2.10.0", "typing-extensions==4.16.0", "filelock==4.3.1", "fsspec==2026.9.0"),
    *("sympy==1.14.0", "mpmath==1.3.0", "networkx==3.6.1", "jinja2==3.1.6", "markupsafe==3.0.4"),
)
_FETCH_S = 500.0


def folder() -> Path:
    return env.cache_folder() / "aarch64" / "-".join(SITE[:1])


def why_not() -> str:
    """Returns why nothing can run; empty when it can."""
    if shutil.which(EMULATOR) is None:
        return f"{EMULATOR} is not installed (apt-get install qemu-user)"
    if not folder().is_dir():
        return f"{folder()} is not there: python -m tests.support.aarch64 fetches it"
    return ""


def run(*arguments: str, path: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Runs `python ARGUMENTS` there with one more folder on its path."""
    root, site = folder() / "root", folder() / "site"
    given = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "LD_"))}
    given |= {"PYTHONPATH": f"{site}{os.pathsep}{path}", "PYTHONDONTWRITEBYTECODE": "1"}
    python = str(root / f"usr/bin/python{PYTHON}")
    return subprocess.run(
        [EMULATOR, "-L", str(root), python, *arguments],
        env=given,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )


def fetch() -> str:
    """Returns what it did, or why it could not."""
    if folder().is_dir():
        return f"aarch64: in {folder()} already"
    began = time.monotonic()
    folder().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder().parent) as scratch:
        made = Path(scratch, "made")
        try:
            _unpack_debian(Path(scratch), made / "root")
            _pip_install(made / "site")
        except (subprocess.SubprocessError, OSError) as error:
            return f"aarch64: not fetched, the test of its wheel is skipped: {error}"
        made.rename(folder())
    return f"aarch64: fetched in {time.monotonic() - began:.0f} s"


def _quiet(*command: str, **options: str) -> None:
    subprocess.run(
        command,
        check=True,
        timeout=_FETCH_S,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | options,
    )


def _unpack_debian(scratch: Path, root: Path) -> None:
    """By an apt of that architecture, whose lists and status are in `scratch`."""
    for name in ("state/lists/partial", "cache/archives/partial"):
        (scratch / name).mkdir(parents=True)
    (scratch / "status").touch()
    root.mkdir(parents=True)
    (scratch / "conf").write_text(
        'APT::Architecture "arm64";\nAPT::Architectures { "arm64"; };\n'
        f'Dir::State "{scratch}/state";\nDir::State::status "{scratch}/status";\n'
        f'Dir::Cache "{scratch}/cache";\nAPT::Sandbox::User "root";\n'
    )
    own = {"APT_CONFIG": str(scratch / "conf")}
    _quiet("apt-get", "update", **own)
    only = ("--no-install-recommends", "--download-only", "-y")
    _quiet("apt-get", "install", *only, *DEBIAN, **own)
    for package in (scratch / "cache/archives").glob("*.deb"):
        _quiet("dpkg", "-x", str(package), str(root))


def _pip_install(site: Path) -> None:
    tags = ("--platform=manylinux_2_28_aarch64", f"--python-version={PYTHON}", "--no-compile")
    only = ("--only-binary=:all:", "--no-deps", "--no-cache-dir", "--quiet", "--target", str(site))
    _quiet(sys.executable, "-m", "pip", "install", *tags, *only, *SITE)


if __name__ == "__main__":
    print(fetch(), flush=True)
