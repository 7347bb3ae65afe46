"""A shortened form of benchmarks/soak.py: two hosts, two interfaces each, links that flap."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import hosts
import moe_p2p

ROOT = Path(__file__).resolve().parents[1]


def test_nothing_is_lost_while_links_flap() -> None:
    try:
        moe_p2p.Engine("libfabric", 1, settings="provider=tcp,interfaces=lo").close()
    except moe_p2p.UnavailableError as error:
        pytest.skip(str(error))
    if reason := hosts.why_not():
        pytest.skip(reason)
    done = subprocess.run(
        [sys.executable, "benchmarks/soak.py", "--minutes=0.15", "--flap-every-s=2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    flaps = int(done.stdout.split(" flaps")[0].splitlines()[-1])
    assert flaps >= 2, done.stdout
