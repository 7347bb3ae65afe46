"""`python -m moe_p2p plan --weights`: models have their public sizes, sums are the plan's."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_p2p.__main__ import main
from moe_p2p.weights import models, predict, weight_plan
from moe_p2p.weights.parameters import Compressed, DeepSeekV4, Grouped, KimiK3, Latent
from moe_p2p.weights.predict import totals
from tests.support.weights_oracle import as_received, check

COMMON: dict[str, Any] = {"layers": 2, "experts": 2, "expert_inner": 256, "vocab": 16}
MLA = models.Model(
    **COMMON,
    hidden=128,
    dense_layers=1,
    inner=256,
    shared=1,
    bias=True,
    attention=Latent(heads=4, q_lora=128, kv_lora=16),
)
GQA = models.Model(
    **(COMMON | {"layers": 1, "expert_inner": 192}),
    hidden=64,
    attention=Grouped(heads=4, kv_heads=2),
)
DSA = dataclasses.replace(
    MLA, attention=Latent(heads=4, q_lora=128, kv_lora=16, nope=48, index_heads=2, index_dim=32)
)
V4 = DeepSeekV4(
    **(COMMON | {"layers": 4}),
    hidden=128,
    shared=1,
    bias=True,
    attention=Compressed(heads=4, q_lora=128, groups=2, head_dim=64, o_lora=32, index_heads=2,
                         index_dim=16),
    ratios=(0, 128),
    streams=2,
)  # fmt: skip
K3 = KimiK3(
    **(COMMON | {"layers": 4}),
    hidden=64,
    latent=128,
    dense_layers=1,
    inner=64,
    shared=1,
    bias=True,
    delta_heads=4,
    delta_dim=16,
    attention=Latent(heads=4, q_lora=32, kv_lora=16, gated=True),
)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert main(["plan", *arguments]) == status
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-30b-a3b", 30.5), ("qwen3-235b-a22b", 235.1), ("deepseek-v3", 671.0),
     ("kimi-k2", 1026.4), ("glm-5", 743.9), ("deepseek-v4-flash", 284.3),
     ("deepseek-v4-pro", 1573.0), ("kimi-k3", 2779.5)],
)  # fmt: skip
def test_models_have_their_public_number_of_parameters(name: str, billions: float) -> None:
    """Published: 744, 284, 1.6 thousand and 2.8 thousand for the last four, rounded so."""
    total = sum(math.prod(each.shape) for each in models.weights(models.MODELS[name]))
    assert total / 1e9 == pytest.approx(billions, abs=0.06)


@pytest.mark.parametrize(
    ("model", "trainers", "generators"),
    [
        (MLA, {"world": 8, "ep": 2}, {"world": 2, "ep": 2}),
        (MLA, {"world": 8, "pp": 2, "tp": 2}, {"world": 2, "ep": 2, "tp": 2}),
        (GQA, {"world": 8, "replicas": 2}, {"world": 4, "tp": 4}),  # its experts are gathered
        (GQA, {"world": 6}, {"world": 2, "ep": 2, "tp": 2, "fp8": False}),
        (DSA, {"world": 4, "ep": 2}, {"world": 2, "ep": 2, "tp": 2}),
        (V4, {"world": 4, "ep": 2}, {"world": 4, "ep": 2, "tp": 2}),
        (K3, {"world": 4, "ep": 2}, {"world": 2, "ep": 2, "tp": 2}),
        (K3, {"world": 4, "tp": 2}, {"world": 4, "ep": 2, "tp": 4, "fp8": False}),
    ],
)
def test_layouts_of_models_are_carried_out(
    model: models.Model, trainers: dict[str, Any], generators: dict[str, Any]
) -> None:
    source = models.trainers(model, **trainers)
    target = models.engine_ranks(model, **generators)
    plan = weight_plan(source, target)
    torch.manual_seed(0)
    values = {each.name: torch.randn(each.shape).to(getattr(torch, each.dtype))
              for each in models.weights(model)}  # fmt: skip
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


def test_layers_of_todays_models_have_the_attention_that_they_publish() -> None:
    """V4-Pro: 30 layers with an indexer, 31 without; Flash: 21 and 20, two of a window; Kimi-K3:
    69 of linear attention and 24 of MLA, the last one too."""
    for name, indexers, compressors in (("deepseek-v4-pro", 30, 61), ("deepseek-v4-flash", 21, 41)):
        names = [each.name for each in models.weights(models.MODELS[name])]
        assert sum(each.endswith(".attn.indexer.wq_b.weight") for each in names) == indexers
        assert sum(each.endswith(".attn.compressor.ape") for each in names) == compressors
        assert (
            sum(each.endswith(".ffn.gate.bias") for each in names)
            == len([each for each in names if each.endswith(".ffn.gate.weight")]) - 3
        )  # hash routing has none
    names = [each.name for each in models.weights(models.MODELS["kimi-k3"])]
    full = [each for each in names if each.endswith(".self_attn.kv_b_proj.weight")]
    assert len(full) == 24
    assert full[-1].startswith("language_model.model.layers.92.")
    assert sum(each.endswith(".self_attn.A_log") for each in names) == 69


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "glm-5"])
def test_what_a_model_has_besides_is_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--weights", name, "--trainers", "2:fsdp", "--generators", "2:ep")
    line = next(line for line in text.splitlines() if line.startswith("not described: "))
    assert line == "not described: " + "; ".join(models.MODELS[name].left_out)
    assert "multi-token prediction" in line
    assert ("4 bits" in line) == name.startswith("deepseek")


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
