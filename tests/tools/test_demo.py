"""The demo, a few steps of it: equal curves, a routing that replays, a judge that can say no."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest
import torch

from moe_p2p.bench.cases import make_job
from moe_p2p.bench.options import Options
from moe_p2p.tools import demo
from moe_p2p.tools.routing import RecordedRouting


def test_learns_the_same_over_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    routing, png = tmp_path / "routing.pt", tmp_path / "curves.png"
    assert demo.main(["--steps", "4", "--save-trace", str(routing), "--plot", str(png)]) == 0
    printed = capsys.readouterr().out
    assert ": equal" in printed
    assert "standard library; loss: nats per byte" in printed
    if importlib.util.find_spec("matplotlib"):
        assert png.stat().st_size > 10_000
    else:
        assert "no plot: matplotlib" in printed
    head = next(i for i, line in enumerate(printed.splitlines()) if "one process" in line)
    assert printed.splitlines()[head].endswith("(loss, nats)")
    first = float(printed.splitlines()[head + 1].split()[1])
    assert abs(first - 5.6) < 0.3  # nats: hardly better than 256 equally likely bytes, ln 256 = 5.5

    recorded = RecordedRouting.load(routing)
    settings = demo.Settings()
    tokens = settings.batch // settings.ranks * settings.sequence
    assert recorded.topk_idx.shape == (8, settings.ranks, tokens, settings.topk)
    job = make_job(Options(trace=str(routing)))
    assert (job.topology.num_experts, job.topk) == (settings.experts, settings.topk)
    topk_idx, topk_weights = job.routing(9, 2, 5)  # wraps around: the second record again
    assert torch.equal(topk_idx, recorded.topk_idx[1, 2, :5])
    assert torch.equal(topk_weights, recorded.topk_weights[1, 2, :5])


def test_judge_refuses_what_rounding_cannot_explain() -> None:
    settings = demo.Settings()
    near, far = 0.9 * settings.tolerance, 1.1 * settings.tolerance
    assert demo.judge(settings, [3.0, 2.0 + near], [3.0, 2.0]) == 0
    assert demo.judge(settings, [3.0, 2.0 + far], [3.0, 2.0]) == 1
    assert demo.judge(settings, [3.0, float("nan")], [3.0, 2.0]) == 1


def test_a_wrong_expert_is_beyond_the_tolerance() -> None:
    """The tolerance is worth something: two exchanged experts leave it at once."""
    settings = dataclasses.replace(demo.Settings(), steps=3)
    right = demo.train(settings)

    class Exchanged(demo.LanguageModel):
        def __init__(self, settings: demo.Settings, all_to_all: None = None) -> None:
            super().__init__(settings, all_to_all)
            for name, weight in self.named_parameters():
                if ".experts." in name:
                    weight.data[[0, 1]] = weight.data[[1, 0]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "LanguageModel", Exchanged)
        wrong = demo.train(settings)
    assert demo.judge(settings, wrong.losses, right.losses) == 1


def test_control_needs_no_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--steps", "2", "--control", "--plot="]) == 0
    assert ": equal" in capsys.readouterr().out


def test_refuses_ranks_that_do_not_divide() -> None:
    with pytest.raises(SystemExit):
        demo.main(["--ranks", "3"])
