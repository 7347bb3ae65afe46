"""What changed since all tests passed, and the tests that `make test` leaves out for it.

    python -m tests.changed            # runs them: suites of what changed, a fifth of the rest
    python -m tests.changed --list     # prints what it would run
    python -m tests.changed --green    # notes this commit: `make test-all` has passed on it
    BASE=v0.9 python -m tests.changed  # since another commit

The commit is the one that GREEN names; where git does not know it, the one of 20 commits ago. The
fifth is the number of commits mod 5, so that five commits in a row run everything. Its last lines
say what ran, what was left out, and since which commit.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tests.left_out import FIFTHS, chosen

ROOT = Path(__file__).resolve().parents[1]
GREEN = ROOT / "tests" / "green"  # written by --green
COMMITS = 20
PYTEST = (sys.executable, "-m", "pytest")
GPU = ("gpu/", "deep_ep/")
WHOLE = ("",)
# A path below the root begins with the key: the suites that run whole, below tests/.
SUITES: dict[str, tuple[str, ...]] = {
    "kernels/": GPU,
    "kernels/abi/": (*GPU, "package/test_cpp.py", "moe/", "engine/"),
    "csrc/": ("package/", "engine/", "moe/"),
    "csrc/moe/": ("deep_ep/", "layer/", "faults/"),
    "csrc/engine/": ("kv/", "weights/", "mooncake/"),
    "csrc/provider/": ("machine/", "fleet/", "kv/", "faults/"),
    "csrc/ops/": ("deep_ep/", "kv/", "weights/"),
    "moe_p2p/": ("engine/", "moe/", "deep_ep/", "nixl_ep/", "layer/"),
    "moe_p2p/machine/": ("machine/", "fleet/", "weights/", *GPU),
    "moe_p2p/engine/": ("kv/", "weights/", "mooncake/"),
    "moe_p2p/fleet/": (
        *("fleet/", "engine/", "kv/", "weights/", "mooncake/", "faults/"),
        "package/test_strangers.py",
    ),
    "moe_p2p/moe/gpu/": GPU,
    "moe_p2p/moe/reference/": GPU,
    "moe_p2p/moe/rendezvous/": ("fleet/", "machine/", "faults/"),
    "moe_p2p/moe/elastic": ("faults/",),
    "moe_p2p/moe/epoch": ("faults/",),
    "moe_p2p/kv/": (
        *("kv/", "faults/", "integrations/"),
        *("engines/test_vllm_kv", "engines/test_sglang_kv"),
    ),
    "moe_p2p/weights/": ("weights/", "faults/", "engines/"),
    "moe_p2p/mooncake/": ("mooncake/", "engines/test_mooncake"),
    "moe_p2p/deep_ep/": ("deep_ep/", "nixl_ep/", "engines/"),
    "moe_p2p/deep_ep_v25/": ("deep_ep/test_deep_ep_v25", "engines/test_deep_ep_v25"),
    "moe_p2p/nixl_ep/": ("nixl_ep/", "engines/test_nixl_ep", "engines/test_vllm_nixl_ep"),
    "moe_p2p/integrations/": ("integrations/", "engines/"),
    "moe_p2p/integrations/serving_steps.py": ("moe/", "deep_ep/"),
    "moe_p2p/tools/": ("tools/",),
    "moe_p2p/examples/": ("tools/", "package/"),
    "benchmarks/": ("tools/", "package/"),
    "benchmarks/kv_": ("kv/", "tools/", "package/"),
    "contrib/": ("package/test_contrib.py",),
    "contrib/collectivex/": ("engines/test_collectivex",),
    "contrib/vllm/": ("engines/test_vllm_patch",),
    "contrib/sglang/": ("engines/test_sglang_customized",),
    "contrib/release/": ("package/test_release.py", "package/test_wheel.py"),
    "docs/": (),
    "setup.py": ("package/",),
    "pyproject.toml": ("package/",),
    "requirements-dev.txt": WHOLE,
    "Makefile": ("package/",),
    "tests/cpp/": ("package/test_cpp.py", "engine/test_rdma"),
    "tests/emulation/": ("gpu/",),
    "tests/support/aarch64": ("package/test_aarch64",),
    "tests/support/slurm": ("package/test_contrib.py",),
    "tests/kernel_mutations.py": ("gpu/test_emulated_gpu",),
    "tests/faults/": ("faults/",),
    "tests/rdma/": ("engine/test_rdma",),
    "tests/engines/": ("engines/",),
    "tests/support/emulated": ("gpu/test_emulated_gpu",),
    "tests/support/kv_": ("kv/",),
    "tests/support/weights_": ("weights/",),
}
# Folders of moe_p2p/ that suites of moe_p2p/ itself do not need.
PRODUCTS = (
    *("kv", "weights", "mooncake", "deep_ep", "deep_ep_v25", "nixl_ep", "integrations", "tools"),
    "examples",
)


class Step(NamedTuple):
    name: str
    command: list[str]


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def base() -> str:
    """Returns the commit since which things changed; empty: there is no history."""
    noted = GREEN.read_text().split()[0] if GREEN.exists() else ""
    first = _git("rev-list", "--max-parents=0", "HEAD").partition("\n")[0]
    for commit in filter(None, (os.environ.get("BASE"), noted, f"HEAD~{COMMITS}", first)):
        if found := _git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"):
            return found
    return ""


def files(since: str) -> list[str] | None:
    """Returns paths that differ from that commit, untracked ones too; None: git does not know."""
    if not since:
        return None
    changed = (
        _git("diff", "--name-only", since) + "\n" + _git("ls-files", "-o", "--exclude-standard")
    )
    return sorted(set(changed.split("\n")) - {""})


def suites(changed: list[str]) -> list[str]:
    """Returns the suites of these paths, below tests/; one that another one holds is left out."""
    found: set[str] = set()
    for path in changed:
        if path.startswith("tests/") and Path(path).name.startswith("test_"):
            found.add(path.removeprefix("tests/"))
        for start, whole in SUITES.items():
            if path.startswith(start) and not (start == "moe_p2p/" and _of_product(path)):
                found |= set(whole)
    return sorted(a for a in found if not any(a != b and a.startswith(b) for b in found))


def _of_product(path: str) -> bool:
    return path.split("/")[1] in PRODUCTS


def fifth() -> int:
    return int(_git("rev-list", "--count", "HEAD") or 0) % FIFTHS


def left_out() -> list[str]:
    """Returns the tests that `make test` leaves out."""
    command = [*PYTEST, "--collect-only", "-q", "--left-out"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return [line for line in done.stdout.splitlines() if "::" in line]


def steps(changed: list[str], since: str) -> list[Step]:
    whole = suites(changed)
    options = [] if "" in whole else [f"--suites={','.join(whole)}", f"--fifth={fifth()}"]
    shown = ["-rfEs", "--durations=8", "--progress", "-n", os.environ.get("WORKERS", "3")]
    made = [Step("tests", [*PYTEST, *shown, "--left-out", *options])]
    if any(engine for engine in whole if engine.startswith("engines/")):
        made.insert(0, Step("engines' files", [sys.executable, "-m", "tests.engines.packages"]))
    if any(path.startswith("kernels/") for path in changed) and since:
        mutations = [sys.executable, "-m", "tests.kernel_mutations", "--since", since]
        made.append(Step("mutations of kernels", mutations))
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print what would run")
    parser.add_argument(
        "--green", action="store_true", help="note this commit, if all is committed"
    )
    arguments = parser.parse_args()
    if arguments.green:
        return note_green()
    since = base()
    changed = files(since)
    if changed is None:
        changed = list(SUITES)  # everything
    whole, names, lines, failed = suites(changed), left_out(), [], False
    for step in steps(changed, since):
        began = time.monotonic()
        status = 0 if arguments.list else subprocess.run(step.command, cwd=ROOT).returncode
        bad = status not in (0, 5)  # 5: nothing of it is left out
        verdict = "would run" if arguments.list else "FAILED" if bad else "ok"
        took = f"{verdict} ({time.monotonic() - began:.0f} s)"
        lines.append(f"changed: {step.name} {took}: {' '.join(step.command[3:])}")
        failed |= bad
    taken = chosen(names, whole, None if "" in whole else fifth())
    missing = Counter(name.split("/")[1] for name in names if name not in taken)
    print(f"changed: since {since[:12] or 'the beginning'}: {len(changed)} files")
    print("\n".join(lines))
    print(f"changed: of {len(names)} tests that make test leaves out, {len(taken)} were chosen")
    print(f"changed: left out: {', '.join(f'{n} of {a}' for a, n in missing.items()) or 'none'}")
    return int(failed)


def note_green() -> int:
    lines = _git("status", "--porcelain").splitlines()
    head = _git("rev-parse", "HEAD")
    if not head or any(not line.endswith(f"tests/{GREEN.name}") for line in lines):
        print("not noted as green: not everything is committed")
    else:
        GREEN.write_text(f"{head} passed make test-all\n")
        print(f"tests/{GREEN.name} names {head[:12]} now: commit it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
