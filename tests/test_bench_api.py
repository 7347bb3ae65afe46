"""`bench --api deep_ep` on a tiny job over CPU ranks: ours, AllToAll and another module."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_p2p.bench import command
from moe_p2p.bench.options import INTERFACES, INTERFACES_ON_CUDA, parse

TINY = ["--api=deep_ep", "--device=cpu", "--ranks=2", "--hidden=512", "--topk=2", "--experts=4"]
TINY += ["--seconds=0.05", "--plot="]


def test_checks_and_measures_every_interface(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    assert command.main([*TINY, f"--json={out}"]) == 0
    rows = json.loads(out.read_text())
    systems = ("moe_p2p", "moe_p2p.deep_ep")
    assert [(r["interface"], r["tokens"], r["system"], r["what"]) for r in rows] == [
        (interface, tokens, system, what)
        for interface, counts in INTERFACES.items()
        for tokens in counts
        for system in systems
        for what in ("pair eager", "dispatch", "combine")
    ]
    for row in rows:
        assert row["correct"] is True
        assert 0 < row["min_us"] <= row["p50_us"] <= row["p99_us"]
        assert row["host_us"] is None
        assert (row["dtype"], row["device"], row["hidden"]) == ("fp8", "cpu", 512)
    assert "low-latency" in capsys.readouterr().out


def test_another_module_runs_beside_ours_and_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    arguments = [*TINY, "--tokens=4", "--dtype=bf16", "--deep-ep-module=tests.fakes.deep_ep"]
    assert command.main([*arguments, f"--json={out}"]) == 1  # a figure that is not correct
    rows = json.loads(out.read_text())
    right = {(r["interface"], r["system"]): r["correct"] for r in rows}
    others = ("moe_p2p", "moe_p2p.deep_ep")
    assert right == {
        **{(interface, system): True for interface in INTERFACES for system in others},
        ("low-latency", "tests.fakes.deep_ep"): False,
        ("normal", "tests.fakes.deep_ep"): True,
    }
    printed = capsys.readouterr()
    assert "tests.fakes.deep_ep v2: this deep_ep has no V2" in printed.out
    assert "WRONG: tests.fakes.deep_ep low-latency" in printed.err


def test_defaults_are_those_of_the_targets() -> None:
    (options,) = parse(["--api", "deep_ep", "--device", "cpu"])
    assert (options.dtype, options.ranks_per_node, options.tokens) == ("fp8", options.ranks, ())
    assert INTERFACES_ON_CUDA["low-latency"] == (8, 32, 128)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--deep-ep-module=x"], "--deep-ep-module is for --api deep_ep"),
        (["--api=deep_ep", "--deep-ep-module=no.such"], "no module is named no.such"),
        (["--api=deep_ep", "--dtype=fp16"], "DeepEP's calls take fp8 and bf16"),
        (["--api=deep_ep", "--ranks-per-node=2"], "ranks of this machine are one node"),
    ],
)
def test_refuses_what_makes_no_sense(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["--device=cpu", *arguments])
    assert text in capsys.readouterr().err
