"""Builds moe_p2p/_C.abi3.so: csrc/ against torch's stable ABI, with ninja and g++, no CUDA toolkit.

One binary serves every Python from 3.10 and every torch from 2.10 on, CPU and CUDA builds alike:
it needs only C symbols of torch, none of Python, and no libstdc++ or libgcc newer than GCC 11's
(tests/package/test_wheel.py looks). torch is found, not imported, so a build with nothing to do
takes half a second. CXX chooses the compiler; one for another machine (aarch64-linux-gnu-g++) makes
that machine's wheel. One sentence names what is missing, before anything is copied.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError, PlatformError

ROOT = Path(__file__).resolve().parent
TORCH_LIBRARY = "libtorch_cpu.so"
TORCH_TARGET_VERSION = "0x020a000000000000"  # 2.10: the oldest torch that can load this
# The order of floating-point operations is part of the specification: no contraction to fma.
CXX_FLAGS = [
    "-std=c++20",
    "-O3",
    "-ffp-contract=off",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-subobject-linkage",  # types of unnamed namespaces in units (csrc/units.py)
    "-Wno-stringop-overread",  # g++ 12 warns falsely for comparisons of vector<std::byte>
    "-DNDEBUG",
    f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}",
]


def find_torch() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise PlatformError("torch is not installed here: its headers are needed to build")
    return Path(spec.origin).parent


def find_ninja() -> str:
    beside = Path(sys.executable).with_name("ninja")
    ninja = str(beside) if beside.exists() else shutil.which("ninja")
    if ninja is None:
        raise PlatformError("ninja is not installed here: pip install ninja")
    return ninja


def find_cxx() -> str:
    cxx = os.environ.get("CXX") or "g++"
    if shutil.which(shlex.split(cxx)[0]) is None:
        raise PlatformError(f"no C++ compiler ({cxx}): install g++ 12 or newer, or set CXX")
    return cxx


def target_of(cxx: str) -> str:
    """Returns the machine that a compiler compiles for, as platform.machine() names it."""
    command = [*shlex.split(cxx), "-dumpmachine"]
    try:
        reported = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:  # no compiler: find_cxx() says so where one is needed
        reported = ""
    return reported.strip().partition("-")[0] or platform.machine()


def shared_cxx_library(cxx: str) -> list[str]:
    """Returns linker flags for compilers that come with a static libstdc++ only.

    torch loads the shared libstdc++. A second copy inside this library would mix streams and
    exceptions with the first copy's locales and types, and printing the first number crashes.
    """
    found = subprocess.run(
        [*shlex.split(cxx), "-print-file-name=libstdc++.so"], capture_output=True, text=True
    )
    return ["-l:libstdc++.so.6"] if found.stdout.strip() == "libstdc++.so" else []


def build_file(folder: Path, sources: list[Path], output: Path) -> str:
    """Returns the text of a build.ninja of this folder that makes `output`."""
    torch = find_torch()
    include = [
        f"-I{ROOT / 'csrc'}",
        f"-I{ROOT}",
        f"-isystem {torch / 'include'}",
        f"-isystem {torch / 'include/torch/csrc/api/include'}",
    ]
    cxx = find_cxx()
    edge = runpy.run_path(str(ROOT / "csrc" / "letter.py"))["compile_edge"]
    libraries = [*shared_cxx_library(cxx), "-Wl,--no-as-needed", TORCH_LIBRARY]
    units = runpy.run_path(str(ROOT / "csrc" / "units.py"))
    compiled = units["units"](folder / "units", sources)
    lines = [
        f"cxx = {cxx}",
        f"flags = {' '.join(CXX_FLAGS + include)}",
        "rule compile",
        f"  command = {units['cached'](cxx)} $flags -MMD -MF $out.d -c $in -o $out",
        "  description = $in",
        "  depfile = $out.d",
        "  deps = gcc",
        # Stands for torch's library, of which only the name goes into ours: torch is loaded first,
        # and a build for another machine has none of that machine.
        "rule name",
        f"  command = $cxx -shared -nostdlib -Wl,-soname,{TORCH_LIBRARY} -x c++ /dev/null -o $out",
        f"build {TORCH_LIBRARY}: name",
        "rule link",
        # libgcc.a first: its 16-bit float routines are not in libgcc_s of GCC 11 and older.
        f"  command = $cxx -shared -o $out $in -lgcc {' '.join(libraries)} -lrt -ldl -lpthread",
        *(edge(o, s) for o, s in compiled.items()),
        f"build {output}: link {' '.join(compiled)} | {TORCH_LIBRARY}",
    ]
    return "\n".join(lines) + "\n"


class Build(build):
    """Checks for torch, ninja and a compiler before it copies files."""

    def run(self) -> None:
        find_torch(), find_ninja(), find_cxx()
        super().run()


class WithPath(build_py):
    """Adds lines that Python runs as it starts: with MOE_P2P_AS_DEEP_EP=1 it looks for `deep_ep` in
    this package first, in processes of any start method too; likewise for the other packages.
    Of a word that is no switch the import of that package raises (env.py)."""

    _lines = "".join(
        f'import os, sys; os.environ.get("MOE_P2P_AS_{name.upper()}", "").strip().lower() '
        f'not in ("", "0", "false", "off", "no") and '
        f'sys.path.insert(0, os.path.join(sitedir, "moe_p2p", "{name}", "path"))\n'
        for name in ("deep_ep", "deep_ep_v25", "mooncake", "nixl_ep")
    )

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        self._file.write_text(self._lines)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), str(self._file)]

    @property
    def _file(self) -> Path:
        return Path(self.build_lib, "moe_p2p_as_others.pth")


class NinjaBuild(build_ext):
    """Compiles what changed. MAX_JOBS limits the number of parallel compilers."""

    def run(self) -> None:
        if self.inplace and platform.machine() != TARGET:
            raise PlatformError(f"CXX compiles for {TARGET}: its wheel can be made, not this tree")
        super().run()

    def build_extension(self, ext: Extension) -> None:
        folder = ROOT / "build" / f"extension{'' if platform.machine() == TARGET else f'-{TARGET}'}"
        folder.mkdir(parents=True, exist_ok=True)
        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        output.parent.mkdir(parents=True, exist_ok=True)
        sources = [ROOT / source for source in ext.sources]
        (folder / "build.ninja").write_text(build_file(folder, sources, output))
        jobs = [f"-j{os.environ['MAX_JOBS']}"] if "MAX_JOBS" in os.environ else []
        quiet = [] if self.verbose else ["--quiet"]
        done = subprocess.run([find_ninja(), *quiet, *jobs, "-C", str(folder)], check=False)
        if done.returncode:
            raise CompileError("the extension did not compile, see above")


TARGET = target_of(os.environ.get("CXX") or "g++")
if platform.machine() != TARGET:  # names build/lib.* and the wheel (sysconfig.get_platform)
    os.environ["_PYTHON_HOST_PLATFORM"] = f"linux-{TARGET}"

setup(
    license="Apache-2.0",
    ext_modules=[
        Extension(
            "moe_p2p._C",
            sources=sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.cpp")),
            py_limited_api=True,
        )
    ],
    cmdclass={"build": Build, "build_py": WithPath, "build_ext": NinjaBuild},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
