"""Shortened forms of benchmarks/kv_soak.py and kv_reclaim.py: processes killed, stopped, replaced.

MOE_P2P_KV_KILLS=all python -m pytest tests/kv/test_kv_soak.py --all-cells     1,000 requests each
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support import cells, warm
from tests.support.recorded import assert_keys

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 200  # of runs that take 15 s on two cores with nothing else to do

pytestmark = pytest.mark.timeout(DEADLINE_S + 20)


def run(script: str, *arguments: str) -> str:
    done = warm.run(
        f"benchmarks/{script}",
        *arguments,
        cwd=warm.ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    if done.returncode == 2:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def soak(*arguments: str) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(run("kv_soak.py", *arguments).splitlines()[-1])
    return summary


@pytest.mark.parametrize("over", cells.few(["loopback", "tcp"], keep=["loopback"]))
def test_requests_survive_trouble(over: str) -> None:
    """Each kind twice: of a prefill and of a decode worker. loopback: the NIC that reorders."""
    whole = os.environ.get("MOE_P2P_KV_KILLS") == "all"
    requests, every = (1000, 80) if whole else (260, 20)
    summary = soak(f"--requests={requests}", f"--trouble-every={every}", "--pack", f"--over={over}")
    names = {name: value for name, value in summary.items() if name != "ends"}
    assert_keys("kv_soak", names | {"ends": {}})
    assert set(summary["troubles"].values()) == {2}
    assert summary["untouched"] >= (700 if whole else 100)
    assert summary["ends"]["decode complete"] >= summary["untouched"]
    assert summary["packed"] > 100
    assert summary["preempted"] > 10


def test_pages_come_back_in_time() -> None:
    """Where the other process is stopped or dead. The bound is wide: others take the CPU."""
    lines = run("kv_reclaim.py", "--cancels=0", "--failures=1", "--margin-ms=5000").splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        [side, case] for side in ("receiver", "sender") for case in ("stopped", "dead")
    ]
