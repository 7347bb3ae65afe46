"""Formatters and checkers over the whole tree, for `make lint`, `make format` and pre-commit.

    python tests/lint.py [--fix] [--changed] [--only STEP]

STEP: one of STEPS.
--changed: clang-tidy looks at what changed since the last green commit (tests/changed.py) alone.
Runs everything and reports everything before it fails. A tool that is not installed is skipped with
a line that says so; so is a clang-format of another version, which would only disagree with the
pinned one.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.changed import base, files  # noqa: E402

STEPS = ("ruff", "mypy", "clang-format", "clang-tidy", "shellcheck", "hadolint")
NATIVE_FOLDERS = ("csrc", "kernels", "tests/cpp", "tests/emulation")


@dataclass(frozen=True)
class Step:
    name: str
    skip_reason: str
    commands: list[list[str]]  # may run side by side


def tool(name: str) -> str | None:
    """The program of that name beside this interpreter, or on PATH."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def native_files(*suffixes: str) -> list[str]:
    return sorted(
        str(path.relative_to(ROOT))
        for folder in NATIVE_FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in suffixes
    )


def pinned_version(package: str) -> str:
    requirements = (ROOT / "requirements-dev.txt").read_text()
    found = re.search(rf"^{re.escape(package)}==([\d.]+)", requirements, re.MULTILINE)
    assert found, f"{package} is not pinned in requirements-dev.txt"
    return found.group(1)


def torch_include() -> list[str]:
    """Only csrc/ops needs it. Found without importing torch, which takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return []
    include = Path(spec.origin).parent / "include"
    return [f"-isystem{include}", f"-isystem{include / 'torch/csrc/api/include'}"]


def clang_format_step(fix: bool) -> Step:
    program = tool("clang-format")
    if program is None:
        return Step("clang-format", "not installed", [])
    version = subprocess.run(
        [program, "--version"], capture_output=True, text=True, check=True
    ).stdout
    wanted = pinned_version("clang-format")
    if f"version {wanted}" not in version:
        return Step("clang-format", f"found {version.strip()}, the tree follows {wanted}", [])
    mode = ["-i"] if fix else ["--dry-run", "-Werror"]
    return Step("clang-format", "", [[program, *mode, *native_files(".h", ".cpp", ".cu", ".cuh")]])


def sources_of(changed: list[str]) -> list[str]:
    """Returns sources that changed, and for each header that did one that includes it."""
    texts = {file: (ROOT / file).read_text() for file in native_files(".cpp", ".h")}
    found = {path for path in changed if path.endswith(".cpp") and path in texts}
    headers = [path for path in changed if path.endswith((".h", ".cuh"))]
    for header in headers:  # grows by headers that include one, as long as no source does
        line = f'#include "{re.sub("^(csrc|tests/cpp)/", "", header)}"'
        including = [file for file, text in texts.items() if line in text]
        sources = [file for file in including if file.endswith(".cpp")]
        if sources and not found.intersection(sources):
            found.add(sources[0])
        headers += [] if sources else [file for file in including if file not in headers][:1]
    return sorted(found)


def clang_tidy_step(only_changed: bool) -> Step:
    program = tool("clang-tidy")
    if program is None:
        return Step("clang-tidy", "not installed", [])
    include = [f"-I{ROOT / 'csrc'}", f"-I{ROOT}", f"-I{ROOT / 'tests/cpp'}"]
    skipped: list[str] = []
    if not torch_include():
        skipped.append("csrc/ops")
    doctest = [os.environ.get("DOCTEST_INCLUDE", ""), "/usr/include", "/usr/local/include"]
    if not any(folder and (Path(folder) / "doctest/doctest.h").exists() for folder in doctest):
        skipped.append("tests/cpp")
    if doctest[0]:
        include.append(f"-isystem{doctest[0]}")
    defines = ["-DMOE_P2P_TESTING", "-DMOE_P2P_LETTER=1"]
    defines.append("-DTORCH_TARGET_VERSION=0x020a000000000000")
    flags = ["-std=c++20", *defines, *include, *torch_include()]
    # By units: most of the time goes into headers, which files of a unit share.
    sources = [ROOT / f for f in native_files(".cpp") if not f.startswith(tuple(skipped))]
    folder = ROOT / "build" / "tidy"
    changed = files(base()) if only_changed else None
    if changed is not None:
        wanted = [ROOT / source for source in sources_of(changed)]
        sources = [source for source in sources if source in wanted]
        folder = folder.with_name("tidy-changed")
    folder.mkdir(parents=True, exist_ok=True)
    units = runpy.run_path(str(ROOT / "csrc/units.py"))["units"](folder, sources)
    commands = [[program, "--quiet", str(file), "--", *flags] for file in units.values()]
    if skipped:
        print(f"lint: clang-tidy leaves out {', '.join(skipped)}: headers not installed")
    return Step("clang-tidy", "", commands)


def steps(fix: bool, only_changed: bool = False) -> Iterator[Step]:
    ruff = tool("ruff")
    fix_flag, check_flag = (["--fix"], []) if fix else ([], ["--check"])
    ruff_commands = [[ruff, "check", *fix_flag, "."], [ruff, "format", *check_flag, "."]]
    yield Step("ruff", "", ruff_commands) if ruff else Step("ruff", "not installed", [])
    yield clang_format_step(fix)
    mypy = tool("mypy")
    mypy_commands = [[mypy, "--strict", "moe_p2p"]]
    yield Step("mypy", "", mypy_commands) if mypy else Step("mypy", "not installed", [])
    for name, pattern in (("shellcheck", "*.sh"), ("hadolint", "Dockerfile")):
        program, found = tool(name), sorted(map(str, (ROOT / "contrib").rglob(pattern)))
        yield Step(name, "", [[program, *found]]) if program else Step(name, "not installed", [])
    yield clang_tidy_step(only_changed)


def run_command(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def run(step: Step) -> bool:
    """Prints the output of what failed, and one line for the step."""
    if step.skip_reason:
        print(f"lint: {step.name} skipped: {step.skip_reason}", flush=True)
        return True
    started = time.monotonic()
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        results = list(pool.map(run_command, step.commands))
    failed = [result for result in results if result.returncode != 0]
    for result in failed:
        print(result.stdout + result.stderr, flush=True)
    verdict = "FAILED" if failed else "ok"
    print(f"lint: {step.name} {verdict} ({time.monotonic() - started:.1f} s)", flush=True)
    return not failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fix", action="store_true", help="write what ruff and clang-format mend")
    parser.add_argument("--only", choices=STEPS)
    parser.add_argument("--changed", action="store_true", help="clang-tidy: what changed alone")
    arguments = parser.parse_args()
    verdicts = [
        run(step)
        for step in steps(arguments.fix, arguments.changed)
        if arguments.only in (None, step.name)
    ]
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
