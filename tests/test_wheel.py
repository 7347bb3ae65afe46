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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-index", "--no-build-isolation", "--no-deps", "--quiet"]
    made = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(folder), str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert made.returncode == 0, made.stderr
    return next(folder.glob("*.whl"))


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


def test_wheel_works_on_its_own(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    program = (
        "import torch, torch.distributed as dist, moe_p2p, pathlib;"
        f"assert pathlib.Path(moe_p2p.__file__).is_relative_to({str(tmp_path)!r});"
        "config = moe_p2p.AllToAllConfig(num_experts=2, hidden_dim=8, topk=1, max_tokens=4);"
        "comm = moe_p2p.AllToAll(dist.HashStore(), config, rank=0, world_size=1);"
        "x = torch.ones(3, 8).bfloat16();"
        "received = comm.dispatch(x, torch.tensor([[0], [1], [0]]));"
        "assert torch.equal(comm.combine(received.x, received), x);"
        "comm.close(); print('works')"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ran.stdout == "works\n", ran.stderr
