"""The example server: tokens equal one process while a worker joins and one is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_p2p.examples.small_model import SmallModel, generate
from tests.support.programs import program

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


@pytest.mark.parametrize("line", ["starts prefill-1", "http://"], ids=["starting", "serving"])
def test_ctrl_c_ends_all_processes_and_shows_no_traceback(line: str, tmp_path: Path) -> None:
    """A terminal sends it to the workers, too, some of which are importing torch."""
    picture = tmp_path / "timeline.png"
    serve = ("--serve", "--prefill", "2", "--timeline", str(picture))
    with program("moe_p2p.examples.disaggregated", *serve) as running:
        running.wait_for(line)
        workers = _children(running.process.pid)
        rest = running.interrupt(100)
    assert "Traceback" not in rest
    assert "KeyboardInterrupt" not in rest
    assert not [
        name for name in os.listdir("/dev/shm")
        if name.startswith("moe_p2p.") and name.split(".")[2] in workers
    ]  # fmt: skip
    if line == "http://":
        assert len(workers) >= 3
        pytest.importorskip("matplotlib")
        assert picture.read_bytes()[:4] == b"\x89PNG"


def _children(process: int) -> list[str]:
    found = (file.read_text().split() for file in Path(f"/proc/{process}/task").glob("*/children"))
    return [child for each in found for child in each]


def test_ctrl_c_ends_requests_under_way() -> None:
    """Their clients wait for tokens of workers that are ended."""
    with program("moe_p2p.examples.disaggregated", "--requests", "400") as running:
        running.wait_for("4 of 400")
        rest = running.interrupt(45)  # less than a client waits for a token
    assert "Traceback" not in rest
    assert "terminate called" not in rest


def test_the_model_depends_on_all_of_its_prompt_and_not_on_chunks() -> None:
    model, prompt = SmallModel("cpu"), list(b"the quick brown fox jumps over the lazy dog")
    tokens = generate(model, prompt, 8, 16)
    assert tokens == generate(model, prompt, 8, 8)
    for at in (0, 20, len(prompt) - 1):
        other = [*prompt[:at], 7, *prompt[at + 1 :]]
        assert generate(model, other, 8, 16) != tokens
