"""Shortened forms of benchmarks/soak.py: links that flap, peers that are killed and replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import hosts, warm
from tests.support.recorded import assert_keys

ROOT = Path(__file__).resolve().parents[2]
MOMENTS = ("dispatch", "between", "combine", "set-up", "connected", "closing", "masked")
DEADLINE_S = 300  # of a run that takes 15 s on two cores with nothing else to do

pytestmark = pytest.mark.timeout(DEADLINE_S + 20)


def soak(*arguments: str) -> dict[str, Any]:
    """What a run that ends well has counted."""
    done = warm.run(
        "benchmarks/soak.py",
        *arguments,
        cwd=warm.ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line[:1] == "{"]
    summary: dict[str, Any] = json.loads(lines[-1])
    return summary


@pytest.mark.more  # deaths are the next test's; what a lost link does is tests/moe/test_hosts.py's
def test_links_flap_and_peers_are_replaced_over_tcp() -> None:
    if reason := hosts.why_no_tcp():
        pytest.skip(reason)
    summary = soak(
        *("--minutes=0.1", "--least-deaths=2", "--least-flaps=1"),
        *("--replace-every-s=4", "--flap-every-s=1", "--moments", "dispatch", "combine"),
    )
    assert summary["deaths"]["dispatch"] + summary["deaths"]["combine"] >= 2, summary


def test_peers_are_replaced_over_the_software_nic() -> None:
    """One killed at each moment; else ranks leave one by one, while last words are under way."""
    summary = soak(
        *("--over=loopback", "--minutes=0.02", f"--least-deaths={len(MOMENTS)}"),
        *("--replace-every-s=0.5", "--keep-s=0.5", "--timeout-s=5"),
    )
    assert_keys("soak", summary)
    assert set(summary["deaths"]) == set(MOMENTS)
    assert min(summary["deaths"].values()) >= 1, summary
    assert summary["left_behind"] == []


@pytest.mark.more  # fewer deaths than in the test before, and communicators that are kept
def test_peers_are_replaced_at_any_moment_over_the_software_nic() -> None:
    summary = soak(
        *("--over=loopback", "--minutes=0.1", "--least-deaths=3"),
        *("--replace-every-s=1.2", "--timeout-s=5"),
    )
    assert sum(summary["deaths"].values()) >= 3, summary
    assert summary["left_behind"] == []


@pytest.mark.more  # four deaths at a moment that the test before has once
def test_the_rank_that_announces_a_round_never_dies() -> None:
    """Rank 0 said it, and the others waited in the store when it died right after set-up."""
    summary = soak(
        *("--over=loopback", "--minutes=0.02", "--least-deaths=4", "--moments=connected"),
        *("--replace-every-s=0.5", "--keep-s=0.3", "--timeout-s=5", "--seed=4"),
    )
    assert summary["deaths"]["connected"] >= 4, summary


@pytest.mark.more  # what a run that fails prints
def test_a_rank_shows_where_it_is() -> None:
    program = """
import sys
sys.argv[1:] = ["--over=loopback"]
sys.path.insert(0, "benchmarks")
import moe_soak
with moe_soak.hosts.Hosts(0, num_interfaces=2) as network:
    run = moe_soak.Run(moe_soak.parse(''), network)
    run.start()
    run._show_where(run.ranks[1])
    run.close()
"""
    done = warm.run("-c", program, cwd=warm.ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 1 is here; its threads: python" in done.stdout
    assert "soak_rank.py" in done.stderr
    assert "in run" in done.stderr
