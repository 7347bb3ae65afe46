"""benchmarks/collectivex.py: which cells run, in what turns, which processes count, the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import collectivex
from benchmarks.collectivex import Cell, Contestant, Run

SWEEP: dict[str, Any] = {
    "version": 1,
    "suite": "ep-core",
    "modes": {"normal": ["decode", "prefill"], "low-latency": ["decode"]},
    "routing": "uniform",
    "precisions": ["bf16", "fp8"],
    "timing": {
        "iters_per_trial": 8,
        "trials_per_point": 256,
        "warmup_iters_per_trial": 32,
        "chain_iters_per_trial": 128,
        "chain_trials_per_point": 4,
        "chain_drop": 16,
    },
    "workload": {
        "name": "deepseek-v3",
        "hidden": 7168,
        "topk": 8,
        "routed_experts": 256,
        "seed": 67,
        "token_ladders": {"decode": [1, 8, 128], "prefill": [1024, 8192]},
    },
}
LOW = Cell("low-latency", "bf16", "decode")
OURS = Contestant("ours, deepep-v2", "deepep-v2", ())
THEIRS = Contestant("DeepEP V2", "deepep-v2", (), modes=("normal",))


def run(name: str, turn: int, two_us: float, pair: float, *, correct: bool = True) -> Run:
    return Run(name, LOW.name, turn, two_us, {8: (correct, 0.004, pair)})


@pytest.fixture(name="folder")
def a_checkout(tmp_path: Path) -> Path:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "sweep.json").write_text(json.dumps(SWEEP))
    return tmp_path


def test_the_list_names_every_cell_and_who_runs_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--collectivex", str(folder), "--ranks", "4", "--list"]
    more = ["--deepep-v1", "/v1", "--deepep-v2", "/v2", "--tokens", "8", "128"]
    assert collectivex.main([*given, *more]) == 0
    ours = "ours, deepep-v2, ours, uccl-ep, ours, moe-p2p, DeepEP V1"
    assert capsys.readouterr().out.splitlines() == [
        f"normal-bf16-decode: T [8, 128]; {ours}, DeepEP V2",
        f"normal-fp8-decode: T [8, 128]; {ours}, DeepEP V2",
        f"low-latency-bf16-decode: T [8, 128]; {ours}",
        f"low-latency-fp8-decode: T [8, 128]; {ours}",
    ]
    assert collectivex.main([*given, "--only", "normal-fp8"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "normal-fp8-decode",
        "normal-fp8-prefill",
    ]


def test_trials_may_be_few(folder: Path) -> None:
    sweep = json.loads((folder / "configs" / "sweep.json").read_text())
    options = collectivex.parse(["--collectivex", str(folder), "--ranks", "4", "--trials", "2"])
    collectivex.chosen(options, sweep)
    command = collectivex.command_of(Path("/cx"), sweep, LOW, OURS, 4, "/out.json")
    assert "--trials=2" in command
    assert "--chain-iters=128" in command


def test_a_cell_runs_at_the_sweeps_own_shape_and_timing() -> None:
    command = collectivex.command_of(Path("/cx"), SWEEP, LOW, OURS, 4, "/out.json")
    assert command[0] == "/cx/bench/run_ep.py"
    for wanted in (
        "--backend=deepep-v2",
        "--tokens-ladder=1 8 128",
        "--hidden=7168",
        "--experts=256",
        "--case-id=local-deepep-v2-deepseek-v3-low-latency-decode-ep4-uniform-bf16",
        "--trials=256",
        "--chain-iters=128",
        "--scale-up-domain=4",
        "--out=/out.json",
    ):
        assert wanted in command


def test_contestants_take_turns_and_a_mode_that_one_lacks_leaves_it_out() -> None:
    order = []

    def runner(cell: Cell, contestant: Contestant, turn: int) -> Run:
        order.append((cell.mode, contestant.name, turn))
        return Run(contestant.name, cell.name, turn)

    normal = Cell("normal", "fp8", "decode")
    collectivex.in_turns([normal, LOW], [OURS, THEIRS], 2, runner)
    assert order == [
        ("normal", OURS.name, 0),
        ("normal", THEIRS.name, 0),
        ("normal", THEIRS.name, 1),
        ("normal", OURS.name, 1),
        ("low-latency", OURS.name, 0),
        ("low-latency", OURS.name, 1),
    ]


def test_processes_on_a_slow_core_do_not_count() -> None:
    """A fast core takes 15 us for two launches here: 18 is within 20%, 22 is not."""
    own = [run(OURS.name, turn, *pair) for turn, pair in enumerate([(15, 60), (18, 64), (22, 99)])]
    others = [run("DeepEP V1", turn, 17.9, 80 + turn) for turn in range(3)]
    mine, theirs = collectivex.figures_of([*own, *others])
    assert (mine.pair_us, mine.kept, mine.processes) == (62, 2, 3)
    assert (theirs.pair_us, theirs.kept, theirs.processes) == (81, 3, 3)
    assert mine.correct
    table = collectivex.table_of([mine, theirs])
    assert "| 8 | 62.0 [2 of 3] | 81.0 [3 of 3] | 0.0040 |" in table


def test_what_is_wrong_or_lacking_is_printed() -> None:
    wrong = run(OURS.name, 0, 15, 60, correct=False)
    lacking = Run(OURS.name, LOW.name, 1, 15.0, problem="out of memory")
    (figure,) = collectivex.figures_of([wrong, lacking])
    assert not figure.correct
    assert "60.0 [1 of 2] WRONG" in collectivex.table_of([figure])[-1]
    assert "WRONG (0.0040)" in collectivex.line_of(wrong)
    assert collectivex.line_of(lacking).endswith("two launches 15.0 us: out of memory")
    slow = [run(OURS.name, 0, 40, 60), run("DeepEP V1", 0, 15, 80)]
    text = collectivex.table_of(collectivex.figures_of(slow))[-1]
    assert "none on a fast core [0 of 1] | 80.0 [1 of 1]" in text


def test_rows_are_read_as_run_ep_writes_them() -> None:
    def row(tokens: int, period: dict[str, float] | None) -> dict[str, Any]:
        correct = {"passed": True, "max_relative_error": 0.0122}
        pair = {"pair_period": {"percentiles_us": period}}
        return {"tokens_per_rank": tokens, "correctness": correct, "components": pair}

    document = {"measurement": {"rows": [row(8, {"p50": 61.5, "p99": 70.0}), row(1, None)]}}
    assert collectivex.rows_of(document) == {8: (True, 0.0122, 61.5), 1: (True, 0.0122, None)}
