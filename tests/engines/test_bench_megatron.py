"""`python -m moe_p2p bench --api megatron` on CPU ranks, with Megatron-Core's own files."""

from __future__ import annotations

import json
import shlex
import sys
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_p2p import UnavailableError
from moe_p2p.bench import command, megatron, megatron_layer
from moe_p2p.bench.megatron_layer import SYSTEMS
from tests.support.recorded import assert_keys

SIZES = "--tokens=8 --hidden=32 --ffn=16 --experts=4 --topk=2"
SMALL = ["--device=cpu", "--steps=2", *shlex.split(SIZES)]


@pytest.mark.engine("megatron-core")
@pytest.mark.timeout(400)
def test_all_dispatchers_are_timed_and_compared(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    files = [f"--json={tmp_path / 'm.json'}", f"--plot={tmp_path / 'm.png'}"]
    given = [*SMALL, "--empty-cache", "--parts", *files]
    # Ranks print too; a fork server of an earlier test would do so where that test looked.
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    assert command.main(["--api", "megatron", *given]) == 0, capfd.readouterr().out
    rows = json.loads((tmp_path / "m.json").read_text())
    assert_keys("megatron", rows)
    assert {(row["system"], row["what"]) for row in rows} == {
        (system, what) for system in SYSTEMS for what in megatron.WHAT
    }
    for row in rows:
        assert row["median_ms"] >= row["least_ms"] > 0
        assert row["difference"] < 1e-6  # fp32 sums in another order
        assert row["difference"] == 0 or row["system"] != SYSTEMS[0]
    out = capfd.readouterr().out
    assert "Megatron-Core" in out
    assert "EP2 on CPU ranks: 8 tokens, hidden 32, top-2 of 4, empty kernel cache" in out
    assert "fused permutation: moe_p2p's" in out
    assert "first step" in out
    assert out.count("kernels: ours") == 2 * len(SYSTEMS)
    assert "alltoall, without experts forward" in out
    assert (tmp_path / "m.png").stat().st_size > 1000 or "no plot" in out


def figures(difference: float) -> list[megatron.Figure]:
    numbers: dict[str, Any] = {"median_ms": 2.0, "least_ms": 1.0, "difference": difference}
    return [megatron.Figure(system=system, what="step", **numbers) for system in SYSTEMS]


@pytest.mark.engine("megatron-core")
@pytest.mark.parametrize("difference", [0.5, float("nan")])
def test_other_results_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], difference: float
) -> None:
    monkeypatch.setattr(megatron.launch, "run_ranks", lambda *_, **__: [figures(difference)])
    assert megatron.main(["--api", "megatron", *SMALL]) == 1
    assert "WRONG: shim differs by" in capsys.readouterr().out
    apart = megatron._difference([torch.ones(4)], [torch.full((4,), 2.0)])
    assert apart == 0.5


def test_without_megatron_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("MOE_P2P_CACHE", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert command.main(["--api=megatron", *SMALL]) == 2
    assert "megatron-core is not installed, and not in" in capsys.readouterr().out


def test_what_megatron_imports_and_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its wheel does not ask for Triton; a traceback of its own modules is no help."""
    (tmp_path / "megatron/core").mkdir(parents=True)
    (tmp_path / "megatron/core/__init__.py").write_text("import no_triton_here\n")
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UnavailableError, match="megatron-core needs no_triton_here, which is not"):
        megatron_layer._modules()


NONSENSE = {
    "--tokens 7": "--tokens 7 must be even",
    "--experts 5": "--experts 5 is not a multiple of --ranks 2",
    "--systems alltoall,deepep": "--systems: deepep is none of alltoall, alltoall_fused, shim",
    "--topk 9": "--topk 9 is more than --experts 4",
}


@pytest.mark.parametrize("given", NONSENSE)
def test_nonsense_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--api", "megatron", *SMALL, *given.split()])
    assert NONSENSE[given] in capsys.readouterr().err
