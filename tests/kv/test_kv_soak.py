"""Shortened forms of benchmarks/kv_soak.py and kv_reclaim.py: processes killed and stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm

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


def test_requests_survive_trouble_over_the_nic_that_reorders() -> None:
    summary = soak("--requests=300", "--trouble-every=60", "--pack")
    assert summary["troubles"] == {"kill": 2, "stop": 1, "leave": 1}
    assert summary["ends"]["decode complete"] > 200
    assert summary["packed"] > 100
    assert summary["preempted"] > 10


def test_pages_come_back_in_time() -> None:
    """Where the other process is stopped or dead. The bound is wide: others take the CPU."""
    lines = run("kv_reclaim.py", "--cancels=0", "--failures=1", "--margin-ms=5000").splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        [side, case] for side in ("receiver", "sender") for case in ("stopped", "dead")
    ]
