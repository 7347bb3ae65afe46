"""benchmarks/gpu_bars.py: figures are found in what the tools write, under their own names."""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from moe_p2p.bench import experts, kv, megatron, weights, weights_decode
from moe_p2p.bench.report import Machine, Row, Spread
from moe_p2p.tools.probe import Links
from tests.support.recorded import assert_keys

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(name="bars")
def load(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu_bars")


def made(kind: type, **given: Any) -> Any:
    """An object of a dataclass with these fields; others are 1, nothing or empty."""
    plain = {"str": "", "bool": True}
    more = {
        each.name: plain.get(str(each.type), 1.0)
        for each in fields(kind)
        if each.name not in given and "list" not in str(each.type) and "dict" not in str(each.type)
    }
    empty = {
        each.name: [] if "list" in str(each.type) else {}
        for each in fields(kind)
        if each.name not in given and each.name not in more
    }
    return kind(**(more | empty | given))


def row(
    tokens: int, interface: str = "", what: str = "pair graph", **hops: float
) -> dict[str, Any]:
    system = "moe_p2p.deep_ep" if interface else "moe_p2p"
    spread = Spread(p50_us=40.0, p90_us=0, p99_us=0, min_us=0)
    machine = Machine(device="H200", driver="", torch="", nccl="")
    return made(
        Row, system=system, what=what, interface=interface, tokens=tokens, hops=hops,
        ranks=2, ranks_per_node=2, spread=spread, links=made(Links), machine=machine,
    ).as_json()  # fmt: skip


OTHERS = ("shim", "shim_fused", "integration")  # systems of Megatron beside its own


def written(folder: Path) -> None:
    """What the tools would write, all figures 40 or a ratio of a half but where it says so."""
    turns = importlib.import_module("turns")
    mirror, host = turns.Mirror, turns.Host
    pages = [
        made(kv.Figure, page_kib=kib, system=system, overhead_percent=4.0, ttft_ms=200.0,
             spans_us=dict.fromkeys(kv.SPANS, (4.0, 5.0, 6.0)), wrong_bytes=0)
        for kib in (4, 16, 64) for system in ("compute", "signals", "graph")
    ]  # fmt: skip
    steps = [
        made(megatron.Figure, system=system, what=what, median_ms=ms)
        for system, ms in (("alltoall", 10.0), *((name, 5.0) for name in OTHERS))
        for what in megatron.WHAT
    ]
    moved = made(weights.Figures, percent_of_peer_copy=90.0, times_faster=4.0, wrong=[], above=[])
    ways = [made(weights_decode.Way, name=name, p99_us=90.0, allowed_us=100.0, wrong=0)
            for name in weights_decode.WAYS]  # fmt: skip
    moves = {
        "alone": [asdict(made(experts.Move, gbytes_per_s=100.0))],
        "ways": [asdict(made(experts.Way, name=name, p99_us=90.0, allowed_us=100.0, wrong=0))
                 for name in experts.WAYS],
    }  # fmt: skip
    pairs = [
        {"tree": tree, "case": case.name, "pair": [us], "dispatch": [us], "combine": [us]}
        for case in mirror.cases for tree, us in (("base", 80.0), (".", 40.0))
    ]  # fmt: skip
    calls = [
        {"tree": tree, "case": case.name, "span": [us], **{way: [us] for way in host.names}}
        for case in (*host.host, *host.span) for tree, us in (("base", 80.0), (".", 40.0))
    ]  # fmt: skip
    bodies: dict[str, Any] = {
        **{f"kv-{size}": {"figures": [asdict(f) for f in pages]} for size in ("4k", "16k", "post")},
        **{f"megatron-{name}": [asdict(f) for f in steps]
           for name in OTHERS},
        **{f"weights{mode}": {"figures": asdict(moved)} for mode in ("", "-in-place")},
        "weights-decode": {"ways": [asdict(way) for way in ways]},
        "experts": moves,
        "turns": pairs,
        "host": calls,
        "span": calls,
        "nodes-2x1": [row(8, wire=20.0, kernels=19.0), row(128, wire=41.0)],
        "deep-ep-calls": [row(128), row(128, "v2"), row(4096, "v2")],
        "layer-deepseek-v3": [row(t, what="layer graph") for t in (8, 128, 4096)],
        "first-call": {"one_s": 2.0, "together_s": 6.0, "filled_s": 1.0, "filled_kernels_s": 0.05},
    }  # fmt: skip
    for step, body in bodies.items():
        (folder / f"{step}.json").write_text(json.dumps(body))
    (folder / "kv-packing.log").write_text(
        " sms     write   gather  scatter  request  GB/s\n"
        "   6 1,048,576    18.88    19.08     1.48\n   6 4,194,304    46.08    46.32    36.50\n"
        "  12 4,194,304    46.08    46.32    37.50\n  24 4,194,304    46.08    46.32    38.50\n"
    )
    (folder / "kv-reclaim.log").write_text("".join(
        f"{side:9} {case:9}   200    1.10    4.20    9.00  5 (p50)\n"
        for side in ("receiver", "sender") for case in ("healthy", "stopped", "dead")
    ))  # fmt: skip


def test_every_figure_is_found_and_judged(bars: ModuleType, tmp_path: Path) -> None:
    written(tmp_path)
    found = {bar.name: bars.value_of(bar, tmp_path) for bar in bars.BARS}
    assert [name for name, value in found.items() if value is None] == []
    assert found["KV rows of 576 B packed, 6 multiprocessors"] == 36.5
    assert found["KV cancel to pages, p99, sender dead"] == 4.2
    assert found["  hops away from it, T 8"] == pytest.approx(2.5)
    assert found["  model away from it, T 8"] == pytest.approx(3.6, abs=0.1)  # 38.6 predicted
    assert found["Megatron without experts, shim forward"] == 0.5
    table = bars.report(tmp_path, [bar.step for bar in bars.BARS])
    by_name = {line[:55].rstrip(): line.split()[-1] for line in table}
    assert by_name["EP8 mirrored, T 8"] == "MISSED"
    assert by_name["EP8 mirrored, T 128"] == "met"
    assert by_name["first call, 8 processes"] == "MISSED"
    assert by_name["weights, times gather and broadcast"] == "met"
    assert sum(len(line) + 1 for line in table) < 9000  # a terminal's last page holds all


def test_wrong_results_and_steps_that_did_not_run_have_no_figure(
    bars: ModuleType, tmp_path: Path
) -> None:
    assert {bars.value_of(bar, tmp_path) for bar in bars.BARS} == {None}
    written(tmp_path)
    rows = json.loads((tmp_path / "turns.json").read_text())
    (tmp_path / "turns.json").write_text(json.dumps([each | {"wrong": "NaN"} for each in rows]))
    body = json.loads((tmp_path / "weights.json").read_text())
    body["figures"]["wrong"] = ["generator 0"]
    (tmp_path / "weights.json").write_text(json.dumps(body))
    (tmp_path / "host.json").write_text("[{")  # ended while it wrote
    spoilt = {bar.step for bar in bars.BARS if bars.value_of(bar, tmp_path) is None}
    assert {"turns", "weights", "host"} <= spoilt
    assert "span" not in spoilt


def test_an_overhead_within_the_spread_of_compute_alone_is_nothing(
    bars: ModuleType, tmp_path: Path
) -> None:
    written(tmp_path)
    body = json.loads((tmp_path / "kv-4k.json").read_text())
    for each in body["figures"]:
        each["overhead_percent"], each["overhead_seen"] = -9.0, each["page_kib"] == 64
    (tmp_path / "kv-4k.json").write_text(json.dumps(body))
    more = {
        bar.name: bars.value_of(bar, tmp_path)
        for bar in bars.BARS
        if bar.step == "kv-4k" and bar.name.endswith("more")
    }
    assert set(more.values()) == {0.0, -9.0}
    assert more["KV 4k tokens, graph, pages of 16 KiB: more"] == 0


def test_steps_write_where_figures_are_looked_for(bars: ModuleType) -> None:
    figures = importlib.import_module("gpu_figures")
    steps = {step.name: step.command for step in figures.steps(2)}
    assert {bar.step for bar in bars.BARS} <= steps.keys()
    for name, command in steps.items():
        if "{out}/" in command.replace("{out}/tests ", "") and name != "tune-all":
            assert f"{{out}}/{name}.json" in command, name


def test_what_spoils_figures_is_named(bars: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "weights.log").write_text("a table\nWRONG: generator 0\nWRONG: generator 1\n")
    assert "weights: WRONG: generator 0" in bars.report(tmp_path, ["weights"])


def test_failed_tests_are_named(bars: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "tests-new.log").write_text(
        "  1:07    29 of 60 tests  test_gpu.py\nF\n"
        "FAILED tests/gpu/test_gpu.py::test_a - AssertionError\n"
        "!!!! xdist.dsession.Interrupted: session-timeout: 1.0 sec exceeded !!!!\n"
        "== 1 failed, 8 passed in 3.2s ==\n"
    )
    assert bars.report(tmp_path, ["tests-new"]) == [
        "FAILED tests/gpu/test_gpu.py::test_a - AssertionError",
        "tests-new: its time was over: 29 of 60 tests",
        "tests-new: 1 failed, 8 passed in 3.2s",
    ]


def test_first_calls_are_timed_alone_together_and_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bars: ModuleType
) -> None:
    first_call = importlib.import_module("first_call")
    calls: list[tuple[str, int]] = []

    def start(folder: Path, place: int, given: Any) -> tuple[float, float]:
        calls.append((folder.name, place))
        return 2.0 + place, 0.05

    monkeypatch.setattr(first_call, "start", start)
    monkeypatch.setattr(first_call.torch.cuda, "is_available", lambda: True)
    assert first_call.main(["--processes=3", f"--json={tmp_path}/first-call.json"]) == 0
    assert sorted(calls) == [("one", 0), ("one", 0), *(("together", i) for i in range(3))]
    assert_keys("first_call", json.loads((tmp_path / "first-call.json").read_text()))
    found = {bar.name: bars.value_of(bar, tmp_path) for bar in bars.BARS}
    assert found["first call, 8 processes"] == 4.0
    assert found["  kernels from a filled cache"] == 0.05


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without GPUs")
@pytest.mark.parametrize("name", ["first_call", "kv_reclaim"])
def test_what_needs_a_gpu_says_so(
    name: str, bars: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [name, *(["--gpu"] if name == "kv_reclaim" else [])])
    with pytest.raises(SystemExit):
        importlib.import_module(name).main()
    assert "torch finds no GPU" in capsys.readouterr().err
