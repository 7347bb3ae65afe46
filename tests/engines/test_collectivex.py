"""CollectiveX (SemiAnalysisAI/InferenceX): its adapters for DeepEP and UCCL over our calls, and
ours, judged by its oracle, which knows no backend."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from contrib.collectivex import install
from tests.engines import packages
from tests.engines.collectivex_ranks import ADAPTERS, Cell, judge
from tests.support.ranks import run_processes

pytestmark = pytest.mark.engine("collectivex")

# Low-latency calls: each rank of experts sends one partial sum, so the error grows with
# T, to its gate of 0.03125 and over it (0.0349 at T 16). With partial sums that round once the
# largest error is that of one rounding, whatever T is.
ROUNDS_ONCE = False
MOST_ERROR = 0.006
TOKENS_NOW, TOKENS_ONCE = (1, 8), (1, 8, 16, 128)


def tokens_of(mode: str) -> tuple[int, ...]:
    if mode == "low-latency" and not ROUNDS_ONCE:
        return TOKENS_NOW
    return TOKENS_ONCE


@pytest.mark.parametrize(
    ("backend", "mode", "precision"),
    list(itertools.product(ADAPTERS, ("normal", "low-latency"), ("bf16", "fp8"))),
)
def test_its_oracle_finds_nothing_wrong(
    backend: str, mode: str, precision: str, tmp_path: Path
) -> None:
    cell = Cell(backend, mode, precision, tokens_of(mode))
    folder = str(packages.where("collectivex"))
    for verdicts in run_processes(2, judge, folder, str(tmp_path), cell):
        assert [verdict.tokens for verdict in verdicts] == list(cell.tokens)
        for verdict in verdicts:
            assert verdict.passed, verdict
            if ROUNDS_ONCE and mode == "low-latency" and precision == "bf16":
                assert verdict.error <= MOST_ERROR, verdict


def copied(tmp_path: Path) -> Path:
    at = tmp_path / "CollectiveX"
    shutil.copytree(packages.where("collectivex"), at, ignore=shutil.ignore_patterns(".git"))
    return at


def test_its_contract_tests_accept_our_adapter(tmp_path: Path) -> None:
    at = copied(tmp_path)
    install.install(at)
    install.install(at)
    run = (at / "bench" / "run_ep.py").read_text()
    assert run.count("MoeP2pBackend") == 1
    done = subprocess.run(
        [sys.executable, "-m", "unittest", "discover", "-q", "-s", "tests"],
        cwd=at,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Ran " in done.stderr


def test_a_checkout_that_does_not_fit_is_named_and_stays_as_it_was(tmp_path: Path) -> None:
    at = copied(tmp_path)
    matrix = at / "sweep_matrix.py"
    matrix.write_text(matrix.read_text().replace("BACKEND_PRECISIONS = {", "OTHERS = {"))
    before = (at / "bench" / "run_ep.py").read_text()
    with pytest.raises(ValueError, match=r"sweep_matrix.py has 'BACKEND_PRECISIONS = \{' 0 times"):
        install.install(at)
    assert (at / "bench" / "run_ep.py").read_text() == before
    assert not (at / "bench" / "ep_moe_p2p.py").exists()
