"""`bench --api weights`: bytes are compared, figures add up; priorities decide what goes first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moe_p2p.bench import command, weights_decode, weights_loader, weights_ranks
from tests.support.recorded import assert_keys

pytestmark = pytest.mark.timeout(400)  # of runs that take 15 s beside other work
TINY = ["--api=weights", "--device=cpu", "--experts=2", "--vocab=256", "--narrow=2", "--repeats=1"]


def test_updates_are_compared_timed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "weights.json"
    assert command.main([*TINY, f"--json={out}", "--plot="]) == 0
    body = json.loads(out.read_text())
    assert_keys("weights", body)
    figures = body["figures"]
    assert figures["wrong"] == []
    assert {"converted", "written", "decided"} <= figures["stages_ms"].keys()
    assert {"copied", "offered"} <= figures["generator_ms"].keys()
    assert list(figures["joiner_ms"]) == ["planned", "registered", "read", "copied", "offered"]
    since_known = sum(figures["joiner_ms"][name] for name in ("read", "copied", "offered"))
    assert figures["join_ms"] >= since_known
    assert figures["thread_ms"].keys() == {"convert", "submit", "wait"}
    for role in ("trainers", "generators"):
        assert 0 < figures["high_water_mib"][role] <= figures["watermark_mib"][role]
    for name in ("pause_ms", "join_ms", "submit_us", "link_gbytes_per_s", "baseline_ms"):
        assert figures[name] > 0, name
    assert figures["times_faster"] == pytest.approx(figures["baseline_ms"] / figures["update_ms"])
    assert figures["full_model_ms"] > figures["update_ms"]
    assert "whole model" in capsys.readouterr().out


def wrong_loader(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = RIGHT(x)
    return values, scales * 2


RIGHT = weights_loader.quantized


def run_wrong(options: weights_ranks.Options) -> list[weights_ranks.Measured]:
    weights_loader.quantized = wrong_loader
    measured = weights_ranks.run(options)
    measured[1].high_water, measured[1].watermark = 2 << 20, 1 << 20
    return measured


def test_bytes_that_differ_and_a_rank_above_its_watermark_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(weights_ranks, "run", run_wrong)
    arguments = [*TINY, "--no-baseline", "--no-join", "--mode=in_place", "--json=", "--plot="]
    assert command.main(arguments) == 1
    out = capsys.readouterr().out
    assert "w13.weight_scale_inv" in out
    text = "ABOVE THE WATERMARK: trainer 1: 2,097,152 bytes of device memory beside its tensors"
    assert text in out


def test_decode_beside_an_update(tmp_path: Path) -> None:
    out = tmp_path / "decode.json"
    arguments = ["--api=weights", "--device=cpu", "--decode=10", "--experts=16", "--narrow=2"]
    assert command.main([*arguments, f"--json={out}"]) == 0
    body = json.loads(out.read_text())
    assert_keys("weights-decode", body)
    ways = body["ways"]
    assert [way["name"] for way in ways] == ["alone", "with priorities", "same class"]
    assert not any(way["wrong"] for way in ways)


def test_a_p99_within_the_spread_of_rounds_alone_is_nothing() -> None:
    rounds = {
        "alone": [[90.0], [100.0], [110.0]],
        "with priorities": [[115.0]],
        "same class": [[140.0]],
    }
    ways = weights_decode._figures(
        rounds, {name: [1.0] for name in rounds}, dict.fromkeys(rounds, 0)
    )
    options = weights_decode.Options(
        device="cpu", pairs=3, transport="loopback", transport_settings=""
    )
    alone, nothing, more = weights_decode.text(options, ways).splitlines()[2:5]
    assert (alone.split()[4], nothing.split()[5], more.split()[5]) == ("-", "nothing", "40.0")


@pytest.mark.parametrize(
    ("transport", "settings", "nics"),
    [
        ("timed", "preset=cx7", 1),
        ("timed", "preset=efa,hollow=1", 2),
        ("timed", "", 1),
        ("loopback", "", None),
    ],
)
def test_decode_has_the_link_of_one_gpu(transport: str, settings: str, nics: int | None) -> None:
    options = weights_decode.Options(
        device="cpu", pairs=1, transport=transport, transport_settings=settings
    )
    assert weights_decode.engine_config(options).nics_per_rank == nics


@pytest.mark.parametrize(
    ("device", "settings", "carried"),
    [
        ("cuda", "preset=cx7", True),
        ("cuda", "preset=cx7,hollow=1", False),
        ("cpu", "hollow=1", True),
    ],
)
def test_weights_that_only_take_time_on_a_link_are_not_compared(
    device: str, settings: str, carried: bool
) -> None:
    options = weights_decode.Options(
        device=device, pairs=1, transport="timed", transport_settings=settings
    )
    assert weights_decode.carries_weights(options) is carried


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--repeats=0"], "--repeats: '0' is not a whole number from 1"),
        (["--decode=0"], "--decode: '0' is not a whole number from 1"),
        (["--generators=3"], "must divide by ep=3"),
    ],
)
def test_what_makes_no_sense_is_refused(
    more: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(["--api=weights", "--device=cpu", *more])
    assert why in capsys.readouterr().err
