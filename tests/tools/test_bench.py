"""The benchmark's parts, and the command on a tiny job: right, wrong, with a failing rank."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from moe_p2p import errors
from moe_p2p.bench import baseline, cases, command, report
from moe_p2p.bench.check import apply_experts, expect, verify
from moe_p2p.bench.options import Options, parse
from moe_p2p.bench.systems import Rows
from moe_p2p.moe.reference import Tokens
from moe_p2p.tools import demo, launch
from tests.support.recorded import assert_keys

TINY = ["--device=cpu", "--ranks=2", "--ranks-per-node=1", "--tokens=1,4", "--hidden=256"]
TINY += ["--topk=2", "--experts=4", "--checks=2", "--seconds=0.05"]
OPTIONS = Options(ranks=2, ranks_per_node=1, tokens=(4,), hidden=256, topk=2, experts=4)


def test_cpu_ranks_time_a_layer_of_torchs_products(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    layer = ["--layer", "--ffn=32", "--dtype=fp8", "--tokens=4"]
    assert command.main([*TINY, *layer, f"--json={out}", "--plot="]) == 0
    rows = json.loads(out.read_text())
    assert_keys("all_to_all", rows)
    assert all(row["correct"] for row in rows)
    layers = {(row["system"], row["what"]) for row in rows if row["gemm"] == "torch"}
    assert layers == {
        ("moe_p2p", "layer eager"), ("moe_p2p", "experts eager"), ("torch", "layer eager"),
    }  # fmt: skip
    heading, *_ = [line for line in capsys.readouterr().out.splitlines() if "products" in line]
    assert "pair's share" in heading
    for name in ("triton", "deep_gemm"):
        with pytest.raises(SystemExit):
            parse([*TINY, "--layer", f"--gemm=torch,{name}"])
        reported = capsys.readouterr().err.splitlines()[-1]
        assert f"--gemm {name}: it multiplies on GPUs alone" in reported


def test_checks_measures_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, png = tmp_path / "deep" / "rows.json", tmp_path / "rows.png"
    arguments = [*TINY, f"--json={out}", f"--plot={png}"]
    assert command.main(arguments) == 0
    rows = json.loads(out.read_text())
    assert_keys("all_to_all", rows)
    assert [(r["system"], r["what"], r["tokens"]) for r in rows] == [
        (system, what, tokens)
        for tokens in (1, 4)
        for system in ("moe_p2p", "torch")
        for what in ("pair eager", "dispatch", "combine")
    ]
    for row in rows:
        assert row["correct"] is True
        assert 0 < row["p50_us"] <= row["p99_us"]
        assert row["speedup"] > 0
        assert row["tokens_per_s"] > 0
        assert row["flat_floor_bytes"] >= row["floor_bytes"] > 0
        assert (row["ranks"], row["hidden"], row["dtype"]) == (2, 256, "bf16")
        if row["system"] == "moe_p2p":
            assert "bit for bit" in row["compared"]
            assert row["wire_bytes"] == row["expected_wire_bytes"] >= row["floor_bytes"]
            # Of each rank to its one partner, a part of each phase over each NIC.
            sent = 2 * row["nics"] * (2 if row["what"].startswith("pair") else 1)
            assert row["wire_writes"] == row["wire_immediates"] == sent
            assert row["wire_fences"] == 0
            assert row["deepep_flags"] == sent // row["nics"] * 2  # experts of the other rank
            assert 0 < row["deepep_writes"] <= sent // row["nics"] * row["tokens"] * row["topk"]
        else:
            assert row["wire_bytes"] is row["wire_writes"] is row["wire_fences"] is None
    printed = capsys.readouterr().out
    head = printed.splitlines()[1]
    for name in (
        "p90",
        "p99",
        "both",
        "vs torch",
        "wire KiB",
        "floor KiB",
        "no dedup KiB",
        "fences",
    ):
        assert name in head
    if importlib.util.find_spec("matplotlib"):
        assert png.stat().st_size > 10_000
    else:
        assert "no plot: matplotlib" in printed
    assert "pair" in printed


def test_a_failing_rank_fails_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*TINY, "--nics", "99", "--json", "", "--plot", ""]) == 2
    assert "nics_per_rank is 99" in capsys.readouterr().err


def die(rank_to_die: int) -> int:
    with launch.process_group() as (rank, _):
        if rank == rank_to_die:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.barrier()
        return rank


def test_a_killed_rank_ends_the_others() -> None:
    # Whichever the agent sees first: the dead rank, or the one that lost its peer.
    with pytest.raises(launch.RanksFailedError, match=r"rank [01] failed"):
        launch.run_ranks(die, 1, num_ranks=2)


def give_up(seconds_to_close: float) -> None:
    with launch.process_group() as (rank, _):
        torch.distributed.barrier()
        if rank == 0:
            raise errors.make(errors.AbortedError, "rank 1 of this node gave up; see its error")
        if rank == 1:
            time.sleep(seconds_to_close)  # the agent looks far more often
            raise errors.make(errors.TimeoutError, "the cause")
        torch.distributed.barrier()  # fails when another rank leaves


def test_ranks_that_fail_report_the_cause_first() -> None:
    with pytest.raises(launch.RanksFailedError) as caught:
        launch.run_ranks(give_up, 1.5, num_ranks=3)
    wrong = str(caught.value)
    assert wrong.startswith("rank 1 failed:\nTraceback")
    assert wrong.index("[timeout] the cause") < wrong.index("rank 0 failed:\nTraceback")
    assert "[aborted] rank 1 of this node gave up" in wrong


def fail_alone() -> None:
    with launch.process_group() as (rank, _):
        torch.distributed.barrier()
        if rank == 0:
            raise errors.make(errors.TransportError, "no NIC")
        signal.pause()  # until the agent ends it


def test_a_rank_that_fails_alone_ends_the_world() -> None:
    with pytest.raises(launch.RanksFailedError, match=r"^rank 0 failed:\n(.*\n)*.*no NIC$"):
        launch.run_ranks(fail_alone, num_ranks=2)


def test_results_come_in_rank_order() -> None:
    assert launch.run_ranks(die, -1, num_ranks=2) == [0, 1]


class Wrong:
    """A system that answers from the reference, with one thing wrong."""

    name = "wrong"
    num_steps = 1

    def __init__(self, what: str, right: Rows, out: torch.Tensor) -> None:
        self.what, self.rows, self.out = what, right, out

    def dispatch(self, tokens: Tokens) -> Rows:
        x, weights, counts = (
            a.clone() for a in (self.rows.x, self.rows.row_weights, self.rows.counts)
        )
        if self.what == "rows":
            x[[0, 1]] = x[[1, 0]]
        if self.what == "row_weights":
            weights[0] += 0.5
        if self.what == "counts":
            counts[0] += 1
        return Rows(x=x, scales=None, row_weights=weights, counts=counts)

    def combine(self, y: torch.Tensor) -> torch.Tensor:
        out = self.out.clone()
        if self.what == "combined":
            out[0, 0] += out[0, 0].abs() / 64 + 0.01
        return out

    def close(self) -> None:
        pass


@pytest.mark.parametrize("what", ["nothing", "rows", "row_weights", "counts", "combined"])
def test_verify_sees_what_is_wrong(what: str) -> None:
    job = cases.make_job(OPTIONS)
    tokens = job.tokens(0, [4, 4])
    expected = expect(job, OPTIONS, 0, tokens)
    got = expected.received
    right = Rows(x=got.x, scales=None, row_weights=got.row_weights, counts=got.counts)
    found = verify(Wrong(what, right, expected.out), tokens[0], expected, exact=True)
    assert [what in text for text in found] == ([] if what == "nothing" else [True]), found


def test_experts_answer_differently() -> None:
    job = cases.make_job(OPTIONS)
    counts = torch.tensor([1, 1])
    x = torch.ones(2, 256, dtype=torch.bfloat16)
    y = apply_experts(job, OPTIONS, 1, x=x, scales=None, counts=counts)
    assert float(y[0, 0]) != float(y[1, 0])


@pytest.mark.parametrize("wanted", [0.2, 1.0, 4.0])
@pytest.mark.parametrize(("experts", "topk"), [(64, 8), (256, 8), (896, 16)])
def test_routing_of_a_given_max_vio(wanted: float, experts: int, topk: int) -> None:
    job = cases.make_job(Options(routing=f"maxvio:{wanted}", experts=experts, topk=topk))
    load = job.routing(0, 0, 40_000)[0].flatten().bincount(minlength=experts).double()
    assert float(load.max() / load.mean() - 1) == pytest.approx(wanted, rel=0.1, abs=0.08)


def test_skewed_is_zipf_of_1() -> None:
    skewed, zipf, more = (
        cases.popularity(Options(routing=each)).sort(descending=True).values
        for each in ("skewed", "zipf:1", "zipf:2")
    )
    assert torch.equal(skewed, zipf)
    torch.testing.assert_close(skewed[:4] / skewed[0], 1 / torch.arange(1.0, 5.0))
    torch.testing.assert_close(more, skewed**2)


@pytest.mark.parametrize("routing", ["zipf", "zipf:-1", "maxvio:x", "even", "maxvio:7"])
def test_routings_that_there_are_not(routing: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--device", "cpu", "--experts", "64", "--topk", "8", "--routing", routing])
    assert routing in capsys.readouterr().err


@pytest.mark.parametrize("routing", ["uniform", "skewed"])
def test_routing_is_distinct_and_repeatable(routing: str) -> None:
    job = cases.make_job(Options(routing=routing))
    idx, weights = job.routing(3, 1, 200)
    assert all(len(set(row)) == 8 for row in idx.tolist())
    assert torch.equal(idx, job.routing(3, 1, 200)[0])
    assert not torch.equal(idx, job.routing(4, 1, 200)[0])
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(200))
    load = torch.bincount(idx.flatten(), minlength=64).sort(descending=True).values
    assert (load[0] > 4 * load[32]) == (routing == "skewed")


def test_counts_change_and_leave_each_rank_out_once() -> None:
    steps = [cases.changing_counts(step, 4, 32) for step in range(5)]
    assert steps[0] == [32] * 4
    assert [counts.index(0) for counts in steps[1:]] == [1, 2, 3, 0]


def test_expert_major_order() -> None:
    assert baseline._expert_major(torch.tensor([[1, 2], [1, 0]]), 4).tolist() == [0, 3, 1, 2]


def test_quantiles() -> None:
    spread = report.Spread.of(torch.arange(101, dtype=torch.float64))
    assert (spread.p50_us, spread.p90_us, spread.p99_us, spread.min_us) == (50, 90, 99, 0)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--ranks", "3"],
        ["--experts", "6"],
        ["--topk", "65"],
        ["--tokens", "0"],
        ["--seed", "1", "--gbps", "10"],
        ["--num-sms", "24"],
        ["--hidden", "3"],
    ],
)
def test_refuses_nonsense(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--device=cpu", *arguments])


def test_a_hidden_size_that_no_row_has_is_refused_in_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse(["--device=cpu", "--hidden=3"])
    reported = capsys.readouterr().err.splitlines()[-1]
    assert "--hidden 3: a row of bf16 is 6 bytes, must be a positive multiple of 16" in reported


def test_gpus_that_are_not_there_are_refused_in_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        parse(["--device=cuda"])
    reported = capsys.readouterr().err.splitlines()[-1]
    assert "--device cuda: torch" in reported
    assert "finds no GPU" in reported


@pytest.mark.parametrize(
    "option", ["--num-sms=24", "--chunk-tokens=T", "--overlap=8", "--mirror=8"]
)
def test_options_of_gpus_are_named_as_they_were_given(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["--device=cpu", option])
    assert f"{option.partition('=')[0]} is for GPUs" in capsys.readouterr().err


def test_help_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    for helped in (lambda: parse(["--help"]), lambda: demo.main(["--help"])):
        with pytest.raises(SystemExit):
            helped()
        options = re.split(r"\n  (?=--)", capsys.readouterr().out)[1:]
        for option in options:
            text = re.sub(r"^--\S+( \S+)?\s+", "", option)
            assert len(text.split()) > 1, option


def test_quick_leaves_what_was_asked_for() -> None:
    arguments = ["--device=cpu", "--quick", "--tokens", "3,5", "--dtype", "fp8", "--plot", ""]
    (options,) = parse(arguments)
    assert options.tokens == (3, 5)
    assert options.quantize
    assert options.plot is None
