"""Builds csrc (without csrc/ops, so without torch) and the C++ tests into one doctest program.

    python tests/cpp/build.py [--sanitize address|thread] [--optimize] [--debug]

prints the program's path. Ninja rebuilds only what changed; each kind of build has a folder of its
own under build/. Files of one folder of csrc, or with the same first word here, are compiled as one
unit, and the headers that most include once per build (precompiled*.h), which takes a third of the
time. That may hide an include that is missing (csrc/units.py).
Benchmarks are in the optimized program only; of the other ones, csrc and the simulation are
optimized, tests are not: that would take longer than they run.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UNITS = runpy.run_path(str(ROOT / "csrc" / "units.py"))
FLAGS = [
    "-std=c++20",
    "-Wall",
    "-Wextra",
    "-Werror",
    UNITS["FLAG"],
    "-fno-omit-frame-pointer",
    "-g1",  # lines for reports and backtraces; all of -g takes half as long again (--debug)
    "-ffp-contract=off",
    "-DMOE_P2P_TESTING",
    "-fpch-preprocess",  # ccache preprocesses without the headers that are compiled already
]
# What its manual asks for where headers are precompiled: their own contents are in its key, what
# their macros made of the time is not.
CCACHE = {"CCACHE_SLOPPINESS": "pch_defines,time_macros"}
HEADERS = "precompiled.h.gch precompiled_tests.h.gch"
SANITIZERS = {
    "address": ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
    "thread": ["-O1", "-fsanitize=thread"],
}
# Units of csrc that most of the tests' time is spent in. To optimize ASan's checks in others takes
# longer than they run.
HOT = ("csrc_engine", "csrc_moe", "csrc_moe_node", "csrc_provider_loopback")
# Checks of pointers are a third of the time that tests take to compile. ASan sees null ones.
TESTS = "-O0 -fno-sanitize=null,alignment"
# TSan has nothing to find in tests of one thread.
SINGLE_THREADED = ("simulation", "protocol", "pieces", "ledger", "library", "sha256")


def find_doctest() -> str | None:
    """The include folder that holds doctest/doctest.h (Debian and Ubuntu: doctest-dev)."""
    for folder in (os.environ.get("DOCTEST_INCLUDE", ""), "/usr/include", "/usr/local/include"):
        if folder and (Path(folder) / "doctest" / "doctest.h").exists():
            return folder
    return None


def how(unit: str, sanitize: str | None, optimize: bool) -> str:
    """Returns how this unit's edge of build.ninja differs from the others."""
    if unit == "tests_cpp_main":  # only doctest: sanitizers look for faults of ours
        return "\n  own = -O0 -fno-sanitize=all\n  header ="
    if unit == "tests_cpp_filled":  # TSan looks whether what it reads has really arrived
        no_checks = "" if sanitize == "thread" else " -fno-sanitize=all"
        return f"\n  own = -O2{no_checks}\n  header ="
    if unit.startswith("csrc_"):
        return "\n  own = -O0" if sanitize == "address" and unit not in HOT else ""
    if "simulation" in unit and sanitize == "address":  # the faults that it finds are logical
        return "\n  own = -fno-sanitize=all\n  header ="
    if optimize or "simulation" in unit:
        return ""
    return f"\n  own = {TESTS}\n  header = -include precompiled_tests.h"


def build(sanitize: str | None = None, optimize: bool = False, debug: bool = False) -> Path:
    doctest = find_doctest()
    if doctest is None:
        raise FileNotFoundError("doctest/doctest.h not found: apt-get install doctest-dev")
    folder = ROOT / "build" / f"cpp-{sanitize or ('opt' if optimize else 'debug')}"
    folder.mkdir(parents=True, exist_ok=True)
    sources = [
        source
        for part in ("csrc", "tests/cpp")
        for source in (ROOT / part).rglob("*.cpp")
        if "ops" not in source.relative_to(ROOT).parts
        and (optimize or not source.stem.endswith("_benchmark"))
        and not (
            sanitize == "thread" and part != "csrc" and source.stem.startswith(SINGLE_THREADED)
        )
    ]
    flags = [
        *FLAGS,
        *(["-O2"] if optimize else SANITIZERS.get(sanitize or "", ["-O1"])),
        *(["-g"] if debug else []),
    ]
    include = [f"-I{ROOT / 'csrc'}", f"-I{ROOT}", f"-I{ROOT / 'tests/cpp'}"]
    if doctest != "/usr/include":  # naming a default folder again breaks #include_next
        include.append(f"-isystem {doctest}")
    compiled = UNITS["units"](folder / "units", sources)
    edge = runpy.run_path(str(ROOT / "csrc" / "letter.py"))["compile_edge"]
    cxx = os.environ.get("CXX", "g++")
    lines = [
        f"cxx = {cxx}",
        f"compile = {UNITS['cached'](cxx)}",
        f"flags = {' '.join(flags + include)}",
        "header = -include precompiled.h",
        "rule precompile",
        "  command = $compile $flags $own -x c++-header -MMD -MF $out.d $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule compile",
        "  command = $compile $header $flags $own -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        "  command = $cxx $flags $in -o $out -ldl -lrt -lpthread",
        f"build precompiled.h.gch: precompile {ROOT / 'tests/cpp/precompiled.h'}",
        f"build precompiled_tests.h.gch: precompile {ROOT / 'tests/cpp/precompiled_tests.h'}",
        f"  own = {TESTS}",
        *(
            edge(o, s, HEADERS) + how(o.removesuffix(".o"), sanitize, optimize)
            for o, s in compiled.items()
        ),
        f"build moe_p2p_tests: link {' '.join(compiled)}",
    ]
    (folder / "build.ninja").write_text("\n".join(lines) + "\n")
    ninja = shutil.which("ninja") or str(Path(sys.executable).with_name("ninja"))
    with open(folder / "lock", "w") as lock:  # test_cpp.py and test_rdma.py may both build it
        fcntl.flock(lock, fcntl.LOCK_EX)
        jobs = f"-j{os.cpu_count()}"  # not more: several programs are built side by side
        command = [ninja, jobs, "-C", str(folder)]
        subprocess.run(command, check=True, stdout=sys.stderr, env={**os.environ, **CCACHE})
    return folder / "moe_p2p_tests"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sanitize", choices=sorted(SANITIZERS))
    parser.add_argument("--optimize", action="store_true")
    parser.add_argument("--debug", action="store_true", help="variables too, for a debugger")
    arguments = parser.parse_args()
    print(build(arguments.sanitize, arguments.optimize, arguments.debug))
