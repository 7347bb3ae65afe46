"""What is shipped: one wheel for every Python and torch, complete and working by itself."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tarfile
import zipfile
from functools import partial
from pathlib import Path

import pytest

import moe_p2p.version
from contrib.release import kernels
from moe_p2p.machine import kernel_cache
from tests.support import cells
from tests.support.installation import copy_installed, make_environment, run_installed

ROOT = Path(__file__).resolve().parents[2]
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


def test_loads_with_the_libraries_of_gcc_11() -> None:
    """RHEL 9 and Amazon Linux 2023 have no newer ones."""
    text = subprocess.run(
        ["nm", "-D", "--undefined-only", str(LIBRARY)], capture_output=True, text=True, check=True
    ).stdout
    found = set(re.findall(r"@(GLIBCXX|CXXABI|GCC)_([\d.]+)$", text, re.MULTILINE))
    newest = {"GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (11,)}
    too_new = {
        (library, version)
        for library, version in found
        if tuple(map(int, version.split("."))) > newest[library]
    }
    if too_new and gcc_version() > 12:
        pytest.skip(f"g++ {gcc_version()} asks for newer libraries: wheels are made with g++ 12")
    assert too_new == set()
    assert found


def gcc_version() -> int:
    ask = [*shlex.split(os.environ.get("CXX", "g++")), "-dumpversion"]
    reported = subprocess.run(ask, capture_output=True, text=True, check=True).stdout
    return int(reported.split(".")[0])


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
    wanted |= {f"moe_p2p/bench/{path.name}" for path in (ROOT / "benchmarks/bench").glob("*.py")}
    wanted |= {"moe_p2p/_C.abi3.so", "moe_p2p/py.typed", "moe_p2p_as_others.pth"}
    wanted |= {
        f"moe_p2p/{path.relative_to(ROOT)}"
        for path in (ROOT / "kernels").rglob("*")
        if path.suffix in {".h", ".cuh", ".cu", ".py"}
    }
    assert wanted - inside == set()
    assert not any(name.startswith(("tests", "csrc", "benchmarks")) for name in inside)


def test_auditwheel_finds_it_fit_for_systems_of_2021(wheel: Path, tmp_path: Path) -> None:
    """What `make wheel` does with it; 2_34 stands for glibc 2.34. torch brings its own library."""
    pytest.importorskip("auditwheel", reason="auditwheel is not installed")
    if gcc_version() > 12:
        pytest.skip(f"wheels are made with g++ 12, here is {gcc_version()}")
    programs = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    command = [sys.executable, "-m", "auditwheel", "repair", "--exclude", "libtorch*"]
    reported = subprocess.run(
        [*command, "--wheel-dir", str(tmp_path), str(wheel)],
        env=os.environ | {"PATH": os.pathsep.join(programs)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert reported.returncode == 0, reported.stderr
    (made,) = tmp_path.glob("*.whl")
    tag = re.fullmatch(r"moe_p2p-[\d.]+-cp310-abi3-manylinux_2_(\d+)_\w+\.whl", made.name)
    assert tag, made.name
    assert int(tag[1]) <= 34
    assert not [name for name in zipfile.ZipFile(made).namelist() if ".libs/" in name]


def test_the_version_has_one_place(wheel: Path) -> None:
    assert wheel.name.split("-")[1] == moe_p2p.__version__ == moe_p2p.version.__version__
    assert f"## {moe_p2p.__version__}" in (ROOT / "CHANGELOG.md").read_text()


# Writes what a compiler would be asked for: an object is empty, the library the one of this tree.
STUB = """#!/bin/sh
for word; do case "$last" in -o) out=$word;; esac; last=$word; done
case " $* " in *" -shared "*) cp '{library}' "$out";; *) : > "$out";; esac
"""


def test_an_sdist_has_all_that_a_wheel_is_made_of(wheel: Path, tmp_path: Path) -> None:
    """Each source is found, and the wheel has the same files; `pip install` of it compiles them."""
    make_sdist = "import sys; from setuptools import build_meta as b; b.build_sdist(sys.argv[1])"
    tree = tmp_path / "tree"  # a build leaves an egg-info, which would be part of the next one
    ignored = shutil.ignore_patterns(
        "build", ".*", "*.egg-info", "__pycache__", "bench_out", "dist"
    )
    shutil.copytree(ROOT, tree, ignore=ignored, symlinks=True)
    run = partial(subprocess.run, check=True, capture_output=True, text=True)
    run([sys.executable, "-c", make_sdist, str(tmp_path)], cwd=tree)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    for folder in ("csrc", "kernels"):
        for path in (tree / folder).rglob("*"):
            assert not path.is_file() or (unpacked / path.relative_to(tree)).exists(), path
    stub = tmp_path / "stub"
    stub.write_text(STUB.format(library=LIBRARY))
    stub.chmod(0o755)
    options = ["--no-index", "--no-build-isolation", "--no-deps", "--wheel-dir", str(tmp_path)]
    environment = os.environ | {"CXX": str(stub)}
    environment.pop("PYTHONPATH", None)
    run([sys.executable, "-m", "pip", "wheel", *options, "."], cwd=unpacked, env=environment)
    (again,) = tmp_path.glob("*.whl")
    assert again.name == wheel.name
    contents = [sorted(zipfile.ZipFile(each).namelist()) for each in (again, wheel)]
    assert contents[0] == contents[1]


@pytest.mark.timeout(400)
def test_commands_run_where_only_torch_is_installed(installed: Path, tmp_path: Path) -> None:
    """README's code runs there too: test_readme.py."""
    tiny = ["--tokens=1,4", "--seconds=0.05", "--checks=2", "--experts=8", "--hidden=256"]
    program = (
        "import importlib.util, pathlib, sys, moe_p2p;"
        "assert pathlib.Path(moe_p2p.__file__).is_relative_to(sys.prefix), moe_p2p.__file__;"
        "assert not [n for n in ('numpy', 'pytest', 'matplotlib') if importlib.util.find_spec(n)]"
    )
    for run, command in (
        (run_installed, ["python", "-c", program]),
        (copy_installed, ["-m", "moe_p2p", "bench", "--quick", "--device=cpu", *tiny]),
    ):
        ran = run(installed, *command, cwd=tmp_path)
        assert ran.returncode == 0, f"{command}\n{ran.stdout[-4000:]}\n{ran.stderr[-4000:]}"
    assert "no plot: matplotlib is not installed (pip install 'moe-p2p[bench]')" in ran.stdout
    assert list(tmp_path.rglob("*.json"))


# Ranks are the test's above, which start in the same way.
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", cells.few([["--control"], []], keep=[["--control"]]))
def test_the_demo_runs_where_only_torch_is_installed(
    installed: Path, tmp_path: Path, ranks: list[str]
) -> None:
    demo = ("-m", "moe_p2p", "demo", "--steps=2", *ranks)
    ran = copy_installed(installed, *demo, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr[-4000:]


FIRST_FIVE_MINUTES = """
import torch
import torch.multiprocessing as mp
import deep_ep
from deep_ep.utils.envs import init_dist


def main(rank, world):
    rank, world, group = init_dist(rank, world)  # a default device and type, as in DeepEP's scripts
    buffer = deep_ep.Buffer(group, int(1e8), explicitly_destroy=True)
    x = torch.full((5, 256), rank + 1.0)
    topk_idx = torch.arange(10).view(5, 2) % 4
    weights = torch.ones((5, 2), dtype=torch.float32)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, 4)
    rows, _, _, counts, handle, event = buffer.dispatch(
        x, topk_idx=topk_idx, topk_weights=weights,
        num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
    )
    assert counts == [6, 6] if rank == 0 else [4, 4]
    out, _, _ = buffer.combine(rows, handle)
    assert torch.equal(out, x * in_rank.sum(1, keepdim=True))
    buffer.destroy()
    print("done")


if __name__ == "__main__":
    mp.spawn(main, args=(2,), nprocs=2)
"""


@pytest.mark.timeout(400)
def test_a_script_for_deep_ep_runs_where_the_wheel_is_installed(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment variable is all, with spawned workers, default device and default type."""
    script = tmp_path / "script.py"
    script.write_text(FIRST_FIVE_MINUTES)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    ran = copy_installed(installed, str(script), cwd=tmp_path)
    assert ran.returncode != 0
    assert "No module named 'deep_ep'" in ran.stderr
    monkeypatch.setenv("MOE_P2P_AS_DEEP_EP", "1")
    ran = run_installed(installed, "python", str(script), cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout.splitlines() == ["done"] * 2


@pytest.mark.more
@pytest.mark.timeout(400)
def test_pip_installs_from_a_folder_of_wheels_without_a_compiler(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By names, from another folder; pip leaves the Arm host's wheel alone."""
    dist = tmp_path / "dist"
    dist.mkdir()
    shutil.copy(wheel, dist)
    machine = platform.machine()
    other = "aarch64" if machine == "x86_64" else "x86_64"
    (dist / wheel.name.replace(machine, other)).write_text("no wheel")
    compiled = tmp_path / "compiled"
    monkeypatch.setenv("MOE_P2P_CACHE", str(compiled))
    with kernel_cache.exclusive("50c3-0001"):
        kernel_cache.write("50c3-0001", b"\x7fELF", "")
    kernels.write(compiled, dist)
    monkeypatch.delenv("MOE_P2P_CACHE")
    python = make_environment(tmp_path / "environment")
    monkeypatch.setenv("PATH", str(tmp_path / "no programs"))
    options = ["--no-index", "--find-links", str(dist), "--disable-pip-version-check"]
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", *options]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_"))}
    ran = subprocess.run(
        [*install, "moe-p2p", "moe-p2p-kernels"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    program = (
        "import moe_p2p; from moe_p2p.machine import kernel_cache as cache;"
        "print(cache.read('50c3-9'), moe_p2p.__file__)"
    )
    ran = run_installed(python, "python", "-c", program, cwd=tmp_path)
    assert ran.stdout.startswith(f"(b'\\x7fELF', '') {tmp_path}"), ran.stdout + ran.stderr


# --- what is missing is said in one sentence ---


def test_another_machines_compiler_builds_nothing_in_place(tmp_path: Path) -> None:
    """This tree's library stays; its wheel is made (test_aarch64_wheel.py)."""
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho riscv64-linux-gnu\n")
    compiler.chmod(0o755)
    before = LIBRARY.stat()
    built = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=ROOT,
        env=os.environ | {"CXX": str(compiler)},
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert built.returncode == 1
    wanted = "error: CXX compiles for riscv64: its wheel can be made, not this tree"
    assert built.stderr.splitlines()[-1:] == [wanted]
    assert LIBRARY.stat() == before


def test_a_build_without_a_compiler_fails_before_it_begins(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "setup.py", "build", "--build-base", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"CXX": "no-such-g++ -m64"},
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
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
        timeout=250,
    )
    assert made.returncode == 2
    assert made.stdout.splitlines()[1:] == [
        cause,
        f"pip could not set up {tmp_path}: is there a network? PYTHON=python3 needs none, "
        "if it has torch",
    ]
    assert made.stderr.startswith("make: ***")
