"""vLLM with contrib/vllm's patch: a copy of what it touches, and the release with it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from tests.engines import packages

ROOT = Path(__file__).resolve().parents[2]
(PATCH,) = (ROOT / "contrib/vllm").glob("*.patch")
TOUCHED = re.findall(r"^\+\+\+ b/(.+)$", PATCH.read_text(), re.MULTILINE)


def source(at: Path) -> Path:
    """Fills `at` with the patched files, and with vLLM's tests of kernels."""
    found = packages.where("vllm-source")
    shutil.copytree(found / "tests/kernels", at / "tests/kernels")
    for name in TOUCHED:
        if (found / name).exists():
            (at / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(found / name, at / name)
    # git looks for no repository around the folder.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(at.parent)}
    for options in (["--check", "--whitespace=error-all"], []):
        command = ["git", "apply", *options, str(PATCH)]
        subprocess.run(command, cwd=at, check=True, env=environment)
    return at


def release(at: Path, patched: Path) -> Path:
    """Fills `at` with links to the files of the release, but for patched ones, which are copies."""
    shutil.copytree(packages.where("vllm") / "vllm", at / "vllm", copy_function=os.symlink)
    for name in TOUCHED:
        if name.startswith("vllm/"):
            (at / name).unlink(missing_ok=True)
            shutil.copyfile(patched / name, at / name)
    return at
