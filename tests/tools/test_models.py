"""The table of models: what compile, plan, model, bench and weights take from it."""

from __future__ import annotations

from typing import Any

import pytest

from moe_p2p.__main__ import main
from moe_p2p.bench import options
from moe_p2p.machine.models import MODELS
from moe_p2p.tools import compile_kernels
from moe_p2p.weights import models as weights


def test_sizes_as_they_were_published() -> None:
    """Of the issue that asked for them, of vLLM's pull request 49636 and transformers' defaults."""
    assert MODELS["deepseek-v4-pro"] == (7168, 384, 6, 3072)
    assert MODELS["deepseek-v4-flash"] == (4096, 256, 6, 2048)
    assert MODELS["kimi-k3"] == (3584, 896, 16, 3072)
    assert MODELS["glm-5"] == (6144, 256, 8, 2048)


@pytest.mark.parametrize("name", MODELS)
def test_plan_and_model_take_its_sizes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = MODELS[name]
    numbers = ["--hidden", sizes.hidden, "--topk", sizes.topk, "--experts", sizes.experts]
    for command, more in (("plan", []), ("model", ["--ranks", "16", "--tokens", "128"])):
        printed = []
        for arguments in (["--model", name], list(map(str, numbers))):
            assert main([command, *arguments, *more]) == 0
            printed.append(capsys.readouterr().out)
        assert printed[0] == printed[1]


def test_what_is_named_itself_goes_before_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--topk", "4", "--model", "kimi-k3"]) == 0
    mixed = capsys.readouterr().out
    assert main(["plan", "--topk", "4", "--hidden", "3584", "--experts", "896"]) == 0
    assert capsys.readouterr().out == mixed


def test_compile_takes_its_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, int]] = []

    def keep(_: str, macros: dict[str, int], __: str) -> str:
        made.append(macros)
        return ""  # no reason why it does not compile

    monkeypatch.setattr(compile_kernels, "_compile", keep)
    assert main(["compile", "--model", "deepseek-v4-pro", "--tokens", "16"]) == 0
    assert made
    for macros in made:
        names = ("HIDDEN_DIM", "NUM_EXPERTS", "TOPK")
        assert [macros[f"MOE_P2P_{name}"] for name in names] == [7168, 384, 6]


@pytest.mark.parametrize("name", MODELS)
def test_bench_takes_its_sizes(name: str) -> None:
    def parsed(*more: str) -> Any:
        (found,) = options.parse(["--device", "cpu", "--ranks-per-node", "2", *more])
        return found

    found = parsed("--model", name)
    assert (found.hidden, found.experts, found.topk, found.ffn) == MODELS[name]
    assert parsed("--model", name, "--topk", "2").topk == 2


def test_weights_have_the_same_sizes() -> None:
    assert set(MODELS) - set(weights.MODELS) == {"gpt-oss-120b"}  # biases, 4 bits: not described
    for name, model in weights.MODELS.items():
        sizes = MODELS[name]
        assert (model.expert_hidden, model.experts, model.expert_inner) == (
            sizes.hidden,
            sizes.experts,
            sizes.inner,
        )
