"""The engines' own Python files, for tests: from their wheels, unpacked into the user's cache.

    python -m tests.engines.packages             # fetches what is missing; with ENGINES=newest
                                                 # in the environment the newest releases
    python -m tests.engines.packages --where     # prints the folder

CollectiveX, a benchmark of other people with an oracle of its own, and NIXL EP are folders of
repositories: git fetches them, or MOE_P2P_COLLECTIVEX and MOE_P2P_NIXL name them. Without both
their tests are skipped with that reason. vLLM's repository, with tests and docs that are in no
wheel, is the source archive of the same version, or MOE_P2P_VLLM_SOURCE names a checkout of it.

Nothing is installed. Of most only .py files are kept: compiled parts need CUDA builds of torch, and
what tests call needs none. What these files import beyond torch is in requirements.txt, installed
into the cache too, so that the test environment stays as it is.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import NamedTuple

from moe_p2p import env

PINNED = {
    "megatron-core": "0.19.2",
    "vllm": "0.33.0",
    "sglang": "0.5.23",
    "sgl-deep-ep": "0.1.2.post1",  # DeepEP 2.1.0
    "sgl-deep-ep-v25": "0.1.0rc0",  # DeepEP 2.5.0
    "verl": "0.9.1",
    "mooncake-transfer-engine-non-cuda": "0.3.13.post1",
    "checkpoint-engine": "0.4.2",
    "torchtitan": "0.3.0",
}
WHOLE = ("mooncake-transfer-engine-non-cuda",)  # its compiled part runs without CUDA and torch
# No index has them: the variable names a folder in which their package lies.
BY_FOLDER = {"slime": "MOE_P2P_SLIME"}


class Repository(NamedTuple):
    """Where git finds a project that no index has; the variable names a folder that is used first.

    path: of the project in the repository. proof: a file that the project's folder has.
    """

    url: str
    commit: str
    path: str
    variable: str
    proof: str


BY_GIT = {
    "collectivex": Repository(
        "https://github.com/SemiAnalysisAI/InferenceX",
        "843c6254ff69b567f772f6a5fd97675af3d04431",
        "experimental/CollectiveX",
        "MOE_P2P_COLLECTIVEX",
        "bench/ep_backend.py",
    ),
    "nixl": Repository(
        "https://github.com/ai-dynamo/nixl",
        "8770b655a6b17b5cdf7d2b56b6e0be5392496df5",
        "examples/device/ep",
        "MOE_P2P_NIXL",
        "tests/elastic/elastic.py",
    ),
}


class Source(NamedTuple):
    """A project's repository, from its source archive in the index; the variable comes first.

    parts: what is kept of it. proof: a file that it has.
    """

    project: str
    parts: tuple[str, ...]
    variable: str
    proof: str


BY_SOURCE = {
    "vllm-source": Source(
        "vllm",
        ("vllm", "tests/kernels", "tests/evals/gsm8k", "docs/design", "docs/serving"),
        "MOE_P2P_VLLM_SOURCE",
        "tests/kernels/moe/modular_kernel_tools/mk_objects.py",
    ),
}
_REQUIREMENTS = Path(__file__).with_name("requirements.txt")
_DOWNLOAD_S = 500.0


def folder() -> Path:
    return env.cache_folder() / "engines"


def newest_wanted() -> bool:
    return os.environ.get("ENGINES") == "newest"


def version_of(project: str) -> str | None:
    """Returns the version that tests use; None: it was not fetched."""
    if not newest_wanted():
        return PINNED[project]
    named = folder() / f"{project}-newest"
    return named.read_text() if named.exists() else None


def find(project: str) -> Path | None:
    """Returns the folder to put on sys.path; None: it is not there."""
    if project in BY_FOLDER:
        named = Path(os.environ.get(BY_FOLDER[project]) or os.devnull)
        return named if (named / project).is_dir() else None
    if project in BY_GIT:
        wanted = BY_GIT[project]
        given = os.environ.get(wanted.variable)
        at = Path(given) if given else _checkout(project) / wanted.path
        return at if (at / wanted.proof).is_file() else None
    if project in BY_SOURCE:
        source = BY_SOURCE[project]
        given = os.environ.get(source.variable)
        at = Path(given) if given else _unpacked(project)
        return at if (at / source.proof).is_file() else None
    found = folder() / f"{project}-{version_of(project)}"
    return found if found.is_dir() and dependencies().is_dir() else None


def where(project: str) -> Path:
    """Returns the folder of a project that is there."""
    found = find(project)
    assert found is not None, why_not(project)
    return found


def dependencies() -> Path:
    """Returns the folder of what the engines import; it depends on the Python version."""
    text = _REQUIREMENTS.read_bytes() + repr(sys.version_info[:2]).encode()
    return folder() / f"requirements-{hashlib.sha256(text).hexdigest()[:12]}"


def why_not(project: str) -> str:
    """Returns the reason for a skip."""
    if project in BY_FOLDER:
        return f"{project} is no package of an index: {BY_FOLDER[project]} names no folder with it"
    if project in BY_GIT:
        wanted = BY_GIT[project]
        return (
            f"{project} at {wanted.commit[:7]} is not in {_checkout(project)} (`make test-engines` "
            f"fetches it where git reaches {wanted.url}), and {wanted.variable} names no folder "
            "of it"
        )
    if project in BY_SOURCE:
        return (
            f"{project} is not in {_unpacked(project)} (`make test-engines` fetches the source "
            f"archive), and {BY_SOURCE[project].variable} names no checkout of it"
        )
    return f"{project} {version_of(project) or ''} is not in {folder()}: run `make test-engines`"


def _checkout(project: str) -> Path:
    return folder() / f"{project}-{BY_GIT[project].commit[:7]}"


def _unpacked(name: str) -> Path:
    return folder() / f"{name}-{PINNED[BY_SOURCE[name].project]}"


def fetch_source(name: str) -> str:
    """Unpacks a source archive; returns what it did, or why it could not."""
    source = BY_SOURCE[name]
    wanted = f"{source.project}=={PINNED[source.project]}"
    if find(name) is not None:
        return f"{name}: in {find(name)} already"
    with tempfile.TemporaryDirectory(dir=folder()) as scratch:
        # pip has no command that only fetches an archive: it goes on to ask the build for
        # metadata, which may fail here (Rust). What it has unpacked by then is all that is wanted.
        _run_pip(
            *("download", "--no-deps", "--no-binary", source.project, "--no-build-isolation"),
            *("--no-clean", "--no-cache-dir", "-d", scratch, wanted),
            env=os.environ | {"TMPDIR": scratch},
        )
        found = next(Path(scratch).glob(f"pip-*/{source.project}_*/{source.proof}"), None)
        if found is None:
            return f"{name}: pip did not unpack {wanted}, its tests are skipped"
        root, kept = found.parents[len(Path(source.proof).parents) - 1], Path(scratch) / "kept"
        for part in source.parts:
            shutil.copytree(root / part, kept / part)
        _place(kept, _unpacked(name))
    return f"{name} {PINNED[source.project]}: unpacked from the source archive"


def _run_pip(*arguments: str, env: dict[str, str]) -> None:
    """Whether it succeeds or not."""
    subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        capture_output=True,
        timeout=_DOWNLOAD_S,
        env=env,
        check=False,
    )


def _git(*arguments: str) -> None:
    # Never asks for a password.
    quiet = os.environ | {"GIT_TERMINAL_PROMPT": "0"}
    subprocess.run(["git", *arguments], check=True, timeout=_DOWNLOAD_S, env=quiet)


def fetch_by_git(project: str) -> str:
    """Checks a project's folder out; returns what it did, or why it could not."""
    wanted = BY_GIT[project]
    if find(project) is not None:
        return f"{project}: in {find(project)} already"
    with tempfile.TemporaryDirectory(dir=folder()) as scratch:
        made = Path(scratch) / "made"
        try:
            _git("init", "-q", str(made))
            here = ("-C", str(made))
            _git(*here, "sparse-checkout", "set", wanted.path)
            _git(*here, "remote", "add", "origin", wanted.url)
            _git(*here, "fetch", "-q", "--depth=1", "--filter=blob:none", "origin", wanted.commit)
            _git(*here, "checkout", "-q", "FETCH_HEAD")
        except (subprocess.SubprocessError, OSError) as error:
            return f"{project}: not fetched, its tests are skipped: {error}"
        _place(made, _checkout(project))
    return f"{project} {wanted.commit[:7]}: fetched from {wanted.url}"


def _pip(*arguments: str) -> None:
    quiet = ("--disable-pip-version-check", "--no-cache-dir", "-qq", "--no-deps")
    subprocess.run(
        [sys.executable, "-m", "pip", arguments[0], *quiet, *arguments[1:]],
        check=True,
        timeout=_DOWNLOAD_S,
    )


def _place(made: Path, at: Path) -> None:
    """Moves a finished folder to its place; another process may have been faster."""
    try:
        made.rename(at)
    except OSError:
        if not at.is_dir():
            raise


def _fetch(project: str) -> str:
    """Returns the version that it unpacked."""
    wanted = project if newest_wanted() else f"{project}=={PINNED[project]}"
    with tempfile.TemporaryDirectory(dir=folder()) as scratch:
        # Wheels of other Python versions are fine where only .py files are used.
        _pip("download", "--ignore-requires-python", "--only-binary=:all:", "-d", scratch, wanted)
        wheel = next(Path(scratch).glob("*.whl"))
        version = wheel.name.split("-")[1]
        unpacked = Path(scratch) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            keeps_all = project in WHOLE
            archive.extractall(unpacked, [n for n in names if keeps_all or n.endswith(".py")])
        _place(unpacked, folder() / f"{project}-{version}")
    return version


def fetch_all() -> None:
    """Fetches what is missing, and prints a line for each."""
    folder().mkdir(parents=True, exist_ok=True)
    if not dependencies().is_dir():
        with tempfile.TemporaryDirectory(dir=folder()) as scratch:
            target = Path(scratch) / "target"
            _pip("install", "--target", str(target), "-r", str(_REQUIREMENTS))
            _place(target, dependencies())
    for project in PINNED:
        began = time.monotonic()
        if newest_wanted():
            version = _fetch(project)
            (folder() / f"{project}-newest").write_text(version)
        elif find(project) is None:
            version = _fetch(project)
        else:
            print(f"{project} {PINNED[project]}: in {folder()} already")
            continue
        print(f"{project} {version}: fetched in {time.monotonic() - began:.0f} s", flush=True)


def main() -> int:
    if "--where" in sys.argv:
        print(folder())
        return 0
    try:
        fetch_all()
        for project in BY_GIT:
            print(fetch_by_git(project), flush=True)
        for name in BY_SOURCE:
            print(fetch_source(name), flush=True)
    except (subprocess.SubprocessError, OSError) as error:
        print(f"could not fetch the engines' packages: {error}; is there a network?")
        return 1
    finally:
        for left in folder().glob("tmp*"):
            shutil.rmtree(left, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
