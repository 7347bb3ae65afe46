"""`bench` on GPUs: the check on one that ranks share, figures where each has its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moe_p2p.bench import command

pytestmark = pytest.mark.gpu

SMALL = ["--device=cuda", "--ranks=2", "--hidden=512", "--topk=2", "--experts=8", "--nics=1"]


@pytest.mark.parametrize("per_node", [2, 1])
def test_a_check_of_ranks_that_share_a_gpu(per_node: int) -> None:
    arguments = [*SMALL, "--check", "--checks=2", "--tokens=8", f"--ranks-per-node={per_node}"]
    program = [sys.executable, "-m", "moe_p2p", "bench", *arguments]
    done = subprocess.run(program, capture_output=True, text=True, timeout=900)
    printed = done.stdout
    assert done.returncode == 0, printed + done.stderr
    for layout in ("padded", "grouped", "by_rank"):
        assert f"{layout}, fp8, quantized inside, replayed from a CUDA graph ... ok" in printed
        assert f"{layout}, both in halves, two calls open ... ok" in printed
        assert f"{layout}, gradients ... ok" in printed
    assert "a rank that stays away is masked, the others go on ... ok" in printed
    assert "a rank that closes is named ... ok" in printed
    assert "a process that is killed is named ... ok" in printed


@pytest.mark.multi_gpu
@pytest.mark.parametrize("per_node", [2, 1])
def test_figures_of_two_gpus(per_node: int, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    figures = ["--tokens=8", "--checks=1", "--seconds=0.05", f"--ranks-per-node={per_node}"]
    assert command.main([*SMALL, *figures, f"--json={out}", "--plot="]) == 0
    rows = [row for row in json.loads(out.read_text()) if row["system"] == "moe_p2p"]
    assert {row["what"] for row in rows} == {"pair graph", "pair eager", "dispatch", "combine"}
    assert all(row["correct"] for row in rows)
    assert all(row["wire_bytes"] == row["expected_wire_bytes"] for row in rows)


@pytest.mark.multi_gpu
def test_hops_of_two_gpus_add_up(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    figures = ["--tokens=8", "--checks=1", "--seconds=0.1", "--ranks-per-node=1"]
    assert command.main([*SMALL, *figures, "--transport=timed", f"--json={out}", "--plot="]) == 0
    (pair,) = [row for row in json.loads(out.read_text()) if row["what"] == "pair graph"]
    assert pair["hops"]["dispatch: wire"] == pytest.approx(2.9, abs=0.2)
    assert all(us > 0 for us in pair["hops"].values())


@pytest.mark.parametrize("api", ["all_to_all", "deep_ep"])
def test_figures_of_a_mirror_world(api: str, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    sizes = ["--device=cuda", "--mirror=4", "--hidden=512", "--topk=2", "--experts=8"]
    figures = ["--tokens=8", "--checks=1", "--seconds=0.05", f"--api={api}"]
    assert command.main([*sizes, *figures, f"--json={out}", "--plot="]) == 0
    rows = json.loads(out.read_text())
    assert rows
    assert all(row["correct"] and row["ranks"] == 4 and row["mirrored_on"] > 0 for row in rows)
