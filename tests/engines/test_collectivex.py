"""CollectiveX (SemiAnalysisAI/InferenceX): its adapters for DeepEP and UCCL over our calls, and an
adapter of ours, judged by its oracle, which knows no backend."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import collectivex as benchmark
from contrib.collectivex import install
from tests.engines import packages
from tests.engines.collectivex_ranks import ADAPTERS, Cell, judge
from tests.support.ranks import run_processes

pytestmark = pytest.mark.engine("collectivex")

# Of low-latency bfloat16, whose gate is 0.03125: partial sums round once (block16), so the largest
# error is that of one rounding, whatever T is. As bfloat16 they gave 0.0349 at T 16.
MOST_ERROR = 0.006
TOKENS = (1, 8, 16, 128)


@pytest.mark.parametrize(
    ("backend", "mode", "precision"),
    list(itertools.product(ADAPTERS, ("normal", "low-latency"), ("bf16", "fp8"))),
)
def test_its_oracle_finds_nothing_wrong(
    backend: str, mode: str, precision: str, tmp_path: Path
) -> None:
    cell = Cell(backend, mode, precision, TOKENS)
    folder = str(packages.where("collectivex"))
    for verdicts in run_processes(2, judge, folder, str(tmp_path), cell):
        assert [verdict.tokens for verdict in verdicts] == list(cell.tokens)
        for verdict in verdicts:
            assert verdict.passed, verdict
            if mode == "low-latency" and precision == "bf16":
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


# Of a test's copy of run_ep.py: CPU ranks in place of GPUs, and events that the host's clock sets.
ON_CPUS = """
import time
import torch
class Event:
    def __init__(self, **_): pass
    def record(self, *_): self.at = time.perf_counter()
    def elapsed_time(self, end): return 1e3 * (end.at - self.at)
torch.cuda.Event = Event
torch.cuda.synchronize = torch.cuda.set_device = lambda *_: None
torch.cuda.get_device_name = lambda *_: "CPU"
torch.compile = lambda made=None, **_: made or (lambda given: given)
torch.set_num_threads(1)
"""


def test_the_command_runs_its_own_driver(tmp_path: Path) -> None:
    at = copied(tmp_path)
    script = at / "bench" / "run_ep.py"
    text = script.read_text().replace("import argparse\n", f"import argparse\n{ON_CPUS}", 1)
    for there, instead in (
        ('torch.device(f"cuda:{local_rank}")', 'torch.device("cpu")'),
        ('"nccl", device_id=device', '"gloo"'),
        ('backend="nccl"', 'backend="gloo"'),
        ("                device_id=device,\n", ""),
    ):
        assert there in text
        text = text.replace(there, instead)
    script.write_text(text)
    install.install(at)
    work = {"hidden": 256, "topk": 2, "routed_experts": 8, "seed": 67, "name": "small"}
    work["token_ladders"] = {"decode": [1, 4], "prefill": [8]}
    timing = {"iters_per_trial": 1, "trials_per_point": 1, "warmup_iters_per_trial": 1}
    timing |= {"chain_iters_per_trial": 4, "chain_trials_per_point": 1, "chain_drop": 1}
    sweep = {"version": 1, "suite": "ep-core", "routing": "uniform"}
    sweep |= {"workload": work, "timing": timing}
    given = ["--collectivex", str(at), "--ranks", "2"]
    cell = benchmark.Cell("low-latency", "bf16", "decode")
    for contestant in benchmark.contestants_of(benchmark.parse(given)):
        run = benchmark.run_once(at, sweep, cell, contestant, 2, 0)
        assert not run.problem, run.problem
        assert run.two_us is not None
        assert sorted(run.rows) == [1, 4]
        for correct, error, pair in run.rows.values():
            assert correct, run
            assert 0 < error < 0.03125
            assert pair is not None
        figures = benchmark.figures_of([run])
        assert all(figure.correct and figure.kept == 1 for figure in figures)
