"""What is shipped: one wheel for every Python and torch, complete and working by itself."""

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
from installation import run_installed

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = Path(moe_p2p.__file__).with_name("_C.abi3.so")


def symbols(*options: str) -> list[str]:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm is not installed (binutils)")
    listed = subprocess.run(
        [nm, "-D", *options, str(LIBRARY)], capture_output=True, text=True, check=True
    ).stdout
    return [line.split()[-1].split("@")[0] for line in listed.splitlines()]


def test_needs_only_c_symbols_of_torch_and_none_of_python() -> None:
    needed = symbols("--undefined-only")
    of_torch = [name for name in needed if re.search(r"torch|c10|N2at", name)]
    assert of_torch
    assert [name for name in of_torch if not re.fullmatch(r"(aoti_)?torch_\w+", name)] == []
    assert [name for name in needed if re.match(r"_?Py[A-Z_]", name)] == []
    assert [name for name in needed if "moe_p2p" in name] == []


def test_exports_nothing_of_its_own() -> None:
    assert [name for name in symbols("--defined-only") if "moe_p2p" in name] == []


@pytest.mark.timeout(600)
def test_one_wheel_for_every_python(wheel: Path) -> None:
    assert re.fullmatch(r"moe_p2p-[\d.]+-cp310-abi3-linux_\w+\.whl", wheel.name)


def test_wheel_is_complete(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "moe_p2p").rglob("*.py")
        if "kernels" not in path.parts
    }
    wanted |= {"moe_p2p/_C.abi3.so", "moe_p2p/py.typed"}
    wanted |= {
        f"moe_p2p/{path.relative_to(ROOT)}"
        for path in (ROOT / "kernels").rglob("*")
        if path.suffix in {".h", ".cuh", ".cu", ".py"}
    }
    assert wanted - inside == set()
    assert not any(name.startswith(("tests", "csrc", "benchmarks")) for name in inside)


@pytest.mark.timeout(150)
def test_commands_run_where_only_torch_is_installed(installed: Path, tmp_path: Path) -> None:
    """README's code runs there too: test_readme.py."""
    tiny = ["--tokens=1,4", "--seconds=0.05", "--checks=2", "--experts=8", "--hidden=256"]
    program = (
        "import importlib.util, pathlib, sys, moe_p2p;"
        "assert pathlib.Path(moe_p2p.__file__).is_relative_to(sys.prefix), moe_p2p.__file__;"
        "assert not [n for n in ('numpy', 'pytest', 'matplotlib') if importlib.util.find_spec(n)]"
    )
    for command in (
        ["python", "-c", program],
        ["python", "-m", "moe_p2p", "demo", "--steps=2"],
        ["python", "-m", "moe_p2p", "bench", "--quick", "--device=cpu", *tiny],
    ):
        ran = run_installed(installed, *command, cwd=tmp_path)
        assert ran.returncode == 0, f"{command}\n{ran.stdout[-4000:]}\n{ran.stderr[-4000:]}"
    assert "no plot: matplotlib is not installed (pip install 'moe-p2p[bench]')" in ran.stdout
    assert list(tmp_path.rglob("*.json"))


# --- what is missing is said in one sentence ---


def test_a_build_without_a_compiler_says_so_before_it_begins(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "setup.py", "build", "--build-base", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"CXX": "no-such-g++ -m64"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert built.returncode == 1
    assert built.stdout.splitlines() == ["running build"]
    assert built.stderr.splitlines()[-1:] == [
        "error: no C++ compiler (no-such-g++ -m64): install g++ 12 or newer, or set CXX"
    ]
    assert list(tmp_path.iterdir()) == []


def test_make_without_network_names_the_cause_and_what_to_do(tmp_path: Path) -> None:
    """A Python whose pip finds nobody stands for the one that make sets up."""
    cause = "WARNING: Retrying after connection broken by 'NewConnectionError: no name server'"
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        f"""#!/bin/sh
case "$*" in
  *pip*) printf "%s\\n" "{cause}" "{cause}" "ERROR: no torch" "ERROR: conflicts" >&2;;
  *) echo "No module named torch" >&2;;
esac
exit 1
"""
    )
    python.chmod(0o755)
    made = subprocess.run(
        ["make", f"VENV={tmp_path}", f"{tmp_path}/.ready"],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k not in ("PYTHON", "MAKEFLAGS", "MAKELEVEL")},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert made.returncode == 2
    assert made.stdout.splitlines()[1:] == [
        cause,
        f"pip could not set up {tmp_path}: is there a network? PYTHON=python3 needs none, "
        "if it has torch",
    ]
    assert made.stderr.startswith("make: ***")
