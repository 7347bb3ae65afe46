"""`python -m moe_p2p plan --weights`: models have their public sizes, sums are the plan's."""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path

import pytest
import torch

from moe_p2p.__main__ import main
from moe_p2p.weights import models, predict, weight_plan
from moe_p2p.weights.predict import totals
from tests.support.weights_oracle import as_received, check

MLA = models.Model(128, 2, 1, 256, 2, 256, 1, 4, 4, 16, q_lora=128, kv_lora=16)
GQA = models.Model(64, 1, 0, 0, 2, 192, 0, 4, 2, 16)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert main(["plan", *arguments]) == status
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-30b-a3b", 30.5), ("qwen3-235b-a22b", 235.1), ("deepseek-v3", 671.0),
     ("kimi-k2", 1026.4)],
)  # fmt: skip
def test_models_have_their_public_number_of_parameters(name: str, billions: float) -> None:
    total = sum(math.prod(each.shape) for each in models.weights(models.MODELS[name]))
    assert total / 1e9 == pytest.approx(billions, abs=0.06)


@pytest.mark.parametrize(
    ("model", "trainers", "generators"),
    [
        (MLA, {"world": 8, "ep": 2}, {"world": 2, "ep": 2}),
        (MLA, {"world": 8, "pp": 2, "tp": 2}, {"world": 2, "ep": 2, "tp": 2}),
        (GQA, {"world": 8, "replicas": 2}, {"world": 4, "tp": 4}),  # its experts are gathered
        (GQA, {"world": 6}, {"world": 2, "ep": 2, "tp": 2, "fp8": False}),
    ],
)
def test_layouts_of_models_are_carried_out(
    model: models.Model, trainers: dict[str, int], generators: dict[str, int]
) -> None:
    source = models.trainers(model, **trainers)  # type: ignore[arg-type]
    target = models.engine_ranks(model, **generators)  # type: ignore[arg-type]
    plan = weight_plan(source, target)
    torch.manual_seed(0)
    values = {each.name: torch.randn(each.shape).bfloat16() for each in models.weights(model)}
    check(as_received(plan), values)
    sums = totals(plan)
    for rank in range(source.world_size):
        writes = list(plan.of_source(rank))
        assert sums.source_bytes[rank] == sum(write.nbytes for write in writes)
        assert sums.source_writes[rank] == len(writes)
        exchanged = [4 * math.prod(size for _, size in each.blocks) for each in plan.maxima(rank)]
        assert sums.maxima_bytes[rank] == sum(exchanged)
    for rank in range(target.world_size):
        arriving = plan.of_target(rank).values()
        assert sums.target_bytes[rank] == sum(counts.nbytes for counts in arriving)


def test_the_model_of_time_gives_the_published_stages_within_a_fifth() -> None:
    """None of its rates comes from them, but for the time of a call, whose number is predicted."""
    rows = predict.paper(models.MODELS["kimi-k2"], 256, 128, predict.Rates())
    assert [row.published_ms for row in rows] == [184, 88, 26]
    for row in rows:
        assert row.predicted_ms == pytest.approx(row.published_ms, rel=0.2), row


def test_bytes_time_and_memory_are_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plot = tmp_path / "plan.png"
    arguments = ["--weights", "qwen3-30b-a3b", "--trainers", "16:fsdp,ep=8", "--plot", str(plot)]
    text = printed(capsys, *arguments, "--generators", "8:ep", "--cache", str(tmp_path / "plans"))
    assert "18,867 parameters, " in text
    assert "gathered: nothing" in text
    # 29.0e9 elements of experts on 8 ranks and 0.9e9 of attention on each, then bf16
    into = next(line for line in text.splitlines() if line.startswith("into a generator"))
    assert float(into.split()[-2]) == pytest.approx(3.624 + 0.906 + 1.27, abs=0.02)
    assert "predicted, not measured" in text
    assert re.search(
        r"memory: copies at a trainer, \d+\.\d\d GB, all at once as watermark=None", text
    )
    assert "fabric-lib" not in text  # its figures are of another model
    if importlib.util.find_spec("matplotlib"):
        assert plot.stat().st_size > 10_000
    else:
        assert "no plot: matplotlib" in text


def test_what_is_gathered_is_printed_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--weights", "qwen3-30b-a3b", "--trainers", "8:fsdp,ep=8"]
    text = printed(capsys, *arguments, "--generators", "8:tp=8")
    assert "begin inside a block of 128" in text
    assert f"gathered: {48 * 128 * 3 * 2048 * 768 * 2:,} B" in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--trainers", "x:fsdp"], "--trainers: ranks='x' is not a number"),
        (
            ["--trainers", "8:fsdp,cp=2"],
            "--trainers: 'cp' is not one of fsdp, ep, tp, pp, replicas",
        ),
        (["--trainers", "8:fsdp,ep=3"], "trainers: 8 ranks do not divide by pp=1"),
        (["--generators", "12:ep"], "generators: 12 ranks and 128 experts must divide by ep=12"),
        (["--nic", "0"], "--nic and --nics must be above 0"),
    ],
)
def test_what_does_not_fit_is_named(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text in printed(capsys, "--weights", "qwen3-30b-a3b", *arguments, status=2)
