"""vLLM's own scheduler, KV cache manager and connector classes with MoeP2pConnector: one process runs
all scenarios of vllm_kv_scenarios.py, since importing vLLM takes longer than they do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.vllm_kv_scenarios import SCENARIOS

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.engine("vllm"),
]


@pytest.fixture(name="results", scope="module")
def run_all(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    at = tmp_path_factory.mktemp("vllm_kv") / "results.json"
    ran = subprocess.run(
        [sys.executable, "-m", "tests.engines.vllm_kv_scenarios", str(at)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert at.exists(), ran.stdout + ran.stderr
    found: dict[str, str] = json.loads(at.read_text())
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(results: dict[str, str], name: str) -> None:
    assert results[name] == ""
