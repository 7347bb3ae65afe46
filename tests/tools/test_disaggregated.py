"""The example server: tokens equal one process while a worker joins and one is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moe_p2p.examples.small_model import SmallModel, generate

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(320)  # of a run that takes 15 s on two cores with nothing else


def test_tokens_equal_one_process(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "timeline.png"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "moe_p2p.examples.disaggregated"),
            *("--requests", "16", "--timeline", str(picture)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "16 requests equal one process" in done.stdout
    assert "prefill-4" in done.stdout  # it joined
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_the_model_depends_on_all_of_its_prompt_and_not_on_chunks() -> None:
    model, prompt = SmallModel("cpu"), list(b"the quick brown fox jumps over the lazy dog")
    tokens = generate(model, prompt, 8, 16)
    assert tokens == generate(model, prompt, 8, 8)
    for at in (0, 20, len(prompt) - 1):
        other = [*prompt[:at], 7, *prompt[at + 1 :]]
        assert generate(model, other, 8, 16) != tokens
