"""A wheel of this tree, and an environment with it, torch and what torch requires.

Fixtures of conftest.py: `wheel`, `installed`. The environment has none of the development packages,
numpy among them, and not the source tree.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from tests.support import warm

ROOT = Path(__file__).resolve().parents[2]


def build_wheel(folder: Path) -> Path:
    """Builds a wheel; reuses compiled objects, so it takes seconds then."""
    options = ["--no-index", "--no-build-isolation", "--no-deps", "--quiet"]
    _pip("wheel", *options, "--wheel-dir", str(folder), str(ROOT))
    return next(folder.glob("*.whl"))


def make_environment(folder: Path, wheel: Path | None = None) -> Path:
    """Returns the Python of an environment with that wheel, or none. torch is linked from the one
    that runs the tests."""
    venv.create(folder, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    for distribution in _required_by("torch", set()):
        for name in {Path(file).parts[0] for file in distribution.files or ()}:
            if name != "__pycache__" and not (site / name).exists():  # packages may share a folder
                (site / name).symlink_to(Path(str(distribution.locate_file(name))))
    if wheel is not None:
        _pip("install", "--no-index", "--no-deps", "--quiet", "--target", str(site), str(wheel))
    return folder / "bin" / "python"


def run_installed(
    python: Path, *command: str, cwd: Path, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """Runs `command` with the environment's programs first, without the source tree."""
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", "")])
    return subprocess.run(
        command,
        cwd=cwd,
        env=_environment() | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )


def copy_installed(
    python: Path, *arguments: str, cwd: Path, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """Runs `python ARGUMENTS` there, as a copy (warm.py)."""
    done: subprocess.CompletedProcess[str] = _server(python).run(
        *arguments,
        cwd=cwd,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    return done


@functools.cache
def _server(python: Path) -> warm.Server:
    return warm.Server(python, ("torch", "moe_p2p"), path=(), environment=_environment())


def _environment() -> dict[str, str]:
    """Without the source tree."""
    without = {name: os.environ[name] for name in os.environ if not name.startswith("PYTHON")}
    if "TESTS_TORCH_IMPORTS" in os.environ:  # tests/torch_imports.py counts these, too
        without["PYTHONPATH"] = str(ROOT / "tests/support/counted")
    return without


def _required_by(name: str, seen: set[str]) -> Iterator[metadata.Distribution]:
    """The package and all that it requires."""
    distribution = metadata.distribution(name)
    if distribution.name in seen:
        return
    seen.add(distribution.name)
    yield distribution
    for text in distribution.requires or ():
        needed = Requirement(text)
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            yield from _required_by(needed.name, seen)


def _pip(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
