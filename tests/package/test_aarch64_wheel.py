"""The wheel for Arm hosts, made on this machine: what it needs, and that it runs (by qemu)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import moe_p2p
from tests.package.test_aarch64 import COMPILER
from tests.support import aarch64

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "moe_p2p/_C.abi3.so"
ARM = 183  # <elf.h>: EM_AARCH64


def needed_of_torch(library: Path) -> set[str]:
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True
    ).stdout
    return {name for name in re.findall(r"U (\w+)$", listed, re.MULTILINE) if "torch" in name}


def make_wheel(folder: Path) -> Path:
    """As `make release` does."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    given = os.environ | {"CXX": COMPILER, "PATH": programs}
    plain, tagged = folder / "plain", folder / "tagged"
    for command in (
        ("pip", "wheel", "--no-index", "--no-build-isolation", "--no-deps", "-w", str(plain), "."),
        ("auditwheel", "repair", "--exclude", "libtorch*", "-w", str(tagged)),
    ):
        extra = [str(wheel) for wheel in plain.glob("*.whl")] if "repair" in command else []
        ran = subprocess.run(
            [sys.executable, "-m", *command, *extra],
            cwd=ROOT,
            env=given,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    return next(tagged.glob("*.whl"))


@pytest.mark.more
@pytest.mark.timeout(1800)
def test_the_wheel_for_arm_hosts_runs_there(tmp_path: Path) -> None:
    pytest.importorskip("auditwheel", reason="auditwheel is not installed")
    if shutil.which(COMPILER) is None:
        pytest.skip(f"{COMPILER} is not installed (apt-get install g++-aarch64-linux-gnu)")
    wheel = make_wheel(tmp_path)
    tag = re.fullmatch(r"moe_p2p-[\d.]+-cp310-abi3-manylinux_2_(\d+)_aarch64\.whl", wheel.name)
    assert tag, wheel.name
    assert int(tag[1]) <= 34
    unpacked = tmp_path / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    library = unpacked / LIBRARY
    assert library.read_bytes()[18] == ARM
    here = Path(moe_p2p.__file__).with_name("_C.abi3.so")
    assert needed_of_torch(library) == needed_of_torch(here) != set()
    if reason := aarch64.why_not():
        pytest.skip(f"made, not run: {reason}")
    program = str(ROOT / "tests/support/aarch64_pair.py")
    ran = aarch64.run(program, path=unpacked, timeout_s=1500)
    assert ran.returncode == 0, ran.stderr[-4000:]
    said = [f"rank {rank}: aarch64, torch 2.10.0+cpu" for rank in range(2)]
    assert sorted(ran.stdout.splitlines()) == said
