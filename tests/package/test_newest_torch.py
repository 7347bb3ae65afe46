"""A torch newer than the one that tests run with, tried where pip has it and it is asked for.

    TRY_TORCH=torch pytest tests/package/test_newest_torch.py               its newest release
    TRY_TORCH="--pre --index-url URL torch" pytest ...                      a nightly build

The value is given to pip install. The extension is built against torch's stable ABI, and is used as
it is; what the package knows of torch beyond it is moe_p2p/moe/direct.py's.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
PAIR = """
import logging
logging.basicConfig(level=logging.DEBUG)
logging.getLogger("moe_p2p").setLevel(logging.DEBUG)
import torch, torch.distributed as dist
from moe_p2p import AllToAll, AllToAllConfig
from moe_p2p.moe import direct
config = AllToAllConfig(num_experts=2, hidden_dim=16, topk=1, max_tokens=2, dtype=torch.float32)
with AllToAll(dist.HashStore(), config, rank=0, world_size=1) as comm, torch.no_grad():
    x = torch.ones(2, 16)
    received = comm.dispatch(x, torch.tensor([[0], [1]]))
    assert torch.equal(comm.combine(received.x, received), x)
print("torch", torch.__version__, "direct" if direct.FACTS else "through ops")
"""


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=1700,
    )


def why_not() -> str:
    """Why no other torch is tried where nobody asks: it is never a small download."""
    found = run(*PIP, "index", "versions", "torch", "--retries", "0", "--timeout", "15")
    newest = re.match(r"torch \((.+?)\)", found.stdout)
    if not newest:
        return "pip finds no torch here"
    ours, theirs = torch.__version__.partition("+")[0], newest[1].partition("+")[0]
    if theirs == ours:
        return f"{ours}, with which all tests run, is the newest release"
    return (
        f"torch {theirs} is newer than {ours}, but hundreds of MB, with CUDA GBs: TRY_TORCH=torch "
        "installs it into a folder of the test"
    )


@pytest.mark.more
@pytest.mark.timeout(1800)
def test_a_pair_runs_with_it(tmp_path: Path) -> None:
    wanted = os.environ.get("TRY_TORCH")
    if not wanted:
        pytest.skip(why_not())
    installed = run(*PIP, "install", "--quiet", "--target", str(tmp_path), *shlex.split(wanted))
    assert installed.returncode == 0, installed.stderr
    path = f"{tmp_path}:{ROOT}"
    done = run(sys.executable, "-c", PAIR, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    if "through ops" in done.stdout:
        pytest.skip(f"the pair is right, {done.stdout.strip()}: {done.stderr.strip()}")
    tests = ("tests/moe/test_direct_facts.py", "tests/moe/test_direct_calls.py")
    checked = run(sys.executable, "-m", "pytest", "-q", *tests, PYTHONPATH=path)
    assert checked.returncode == 0, checked.stdout
