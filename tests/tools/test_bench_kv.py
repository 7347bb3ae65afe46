"""`bench --api kv`: two processes that compare bytes; spans of layers; clocks that are matched."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_p2p.bench import command, kv, kv_compute, kv_ranks, kv_systems
from moe_p2p.bench.kv_compute import Compute, Match, between, narrowest
from moe_p2p.errors import InvalidArgumentError
from tests.support.recorded import assert_keys

TINY = ["--api=kv", "--device=cpu", "--tokens=16", "--layers=3", "--page-kib=1,4", "--repeats=2"]
TINY += ["--compute-ms=0.5", "--systems=mooncake"]
SYSTEMS = ["compute", "signals", "by layer", "at the end", "mooncake shim"]


def test_pages_are_sent_compared_timed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "kv.json"
    assert command.main([*TINY, f"--json={out}", "--plot="]) == 0
    body = json.loads(out.read_text())
    assert_keys("kv", body)
    assert body["options"]["page_kib"] == [1, 4]
    assert [(f["page_kib"], f["system"]) for f in body["figures"]] == [
        (kib, system) for kib in (1, 4) for system in SYSTEMS
    ]
    for figure in body["figures"]:
        pages = 3 * 8 // int(figure["page_kib"])
        assert (figure["num_pages"], figure["wrong_bytes"]) == (pages, 0)
        assert figure["least_ttft_ms"] >= 1.5  # three layers of half a millisecond
        if figure["system"] in ("by layer", "mooncake shim"):
            assert figure["pages_per_s"] == pytest.approx(pages / figure["request_ms"] * 1e3)
        if figure["system"] in ("signals", "by layer"):
            # Each NIC: its pages or one run of them; an immediate of each layer; the tail.
            assert 3 * 2 + 3 * 2 + 1 <= figure["writes"] <= pages + 3 * 2 + 2
            assert sorted(figure["spans_us"]) == sorted(kv.SPANS)
            assert all(0 <= p50 <= p99 <= most for p50, p99, most in figure["spans_us"].values())
    printed = capsys.readouterr().out
    assert "spans of a layer" in printed
    assert "4 KiB mooncake shim" in printed
    assert printed.count("% apart") == 2


def test_ways_take_turns_and_compute_alone_is_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    monkeypatch.setattr(kv_ranks, "_compute_alone", lambda *_: runs.append("compute"))
    monkeypatch.setattr(
        kv_ranks, "_one", lambda _, name, call, given, times: runs.append(name) if given else None
    )
    options = argparse.Namespace(repeats=4)
    side = argparse.Namespace(case=None, notes=[], systems=[], send=print)
    compute = argparse.Namespace(on_gpu=False)
    kv_ranks._measure(options, side, compute)  # type: ignore[arg-type]
    turns = [runs[at : at + 4] for at in range(0, len(runs), 4)]
    assert [turn[0] for turn in turns] == [
        "compute",
        "signals",
        "by layer",
        "at the end",
        "compute",
    ]
    assert all(sorted(turn) == sorted(turns[0]) for turn in turns)


@pytest.mark.parametrize(("ttft_s", "more"), [(1.01, "nothing"), (0.65, "-35.0%"), (1.2, "20.0%")])
def test_an_overhead_within_the_spread_of_compute_alone_is_nothing(
    ttft_s: float, more: str
) -> None:
    ttft = {"compute": [0.99, 1.0, 1.02], "by layer": [ttft_s] * 3}
    alone, other = kv._figures(
        argparse.Namespace(layers=1, layer_bytes=1024),  # type: ignore[arg-type]
        kv_ranks.Measured(kv_ranks.Case(1024, 1), ttft_s=ttft),
    )
    assert kv._more(alone) == "3.0% apart"
    assert kv._more(other) == more


class Wrong(kv_systems.Mooncake):
    """The first two pages change places."""

    def send(self, ours: list[int], theirs: list[int], nbytes: int) -> None:
        super().send([ours[1], ours[0], *ours[2:]], theirs, nbytes)


def run_wrong(options: kv_ranks.Options) -> list[kv_ranks.Measured]:
    kv_systems.NAMES["mooncake"] = Wrong
    return kv_ranks.run(options)


def test_pages_that_change_places_are_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kv_ranks, "run", run_wrong)
    arguments = [each for each in TINY if not each.startswith("--page")]
    assert command.main([*arguments, "--page-kib=1", "--json=", "--plot="]) == 1
    printed = capsys.readouterr().out
    assert "WRONG: mooncake shim, pages of 1 KiB: " in printed
    assert "WRONG: by layer" not in printed


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--tokens=0"], "--tokens: '0' is not a whole number from 1"),
        (["--page-kib=3"], "a layer of 8192 bytes whole pages"),
        (["--page-kib=0"], "--page-kib: '0' is not a whole number from 1"),
        (["--page-kib=one"], "'one' is not a number, or several"),
        (["--token-bytes=768"], "a page must be whole tokens of 768 bytes"),
        (["--systems=rdma"], "rdma is none of mooncake, nixl"),
    ],
)
def test_what_makes_no_sense_is_refused(
    more: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main([*TINY, *more])
    assert why in capsys.readouterr().err


def test_clocks_are_matched_by_the_narrowest_exchange() -> None:
    """The GPU's clock is 100 behind; it is read at some moment between two of the host's."""
    exchanges = [(110.0, 10.5, 111.0), (120.0, 20.25, 120.5), (130.0, 30.0, 134.0)]
    assert narrowest(exchanges) == Match(100.125, 0.125)  # the two that end it: 100, 100.25
    assert narrowest(exchanges[:2]) == Match(100.0, 0.25)
    before, after = Match(100.0, 0.25), Match(100.5, 0.125)
    assert between(before, after) == Match(100.25, 0.5)
    with pytest.raises(InvalidArgumentError, match="without an exchange"):
        narrowest([])


def test_a_layer_is_computed_or_slept(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(kv_compute.time, "sleep", slept.append)
    Compute(8, 2.5, torch.device("cpu")).layer()
    assert slept == [0.0025]
    calls: list[tuple[Any, ...]] = []
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *a: calls.append(tuple(a[1].shape)) or bmm(*a))
    Compute(8, 0, torch.device("cpu")).layer()
    assert calls == [(16, 512, 768), (16, 384, 512)]
