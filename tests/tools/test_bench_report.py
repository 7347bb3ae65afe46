"""What the benchmark prints, writes and draws."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from moe_p2p.bench import plot, report
from moe_p2p.bench.report import Row, Spread
from moe_p2p.tools.probe import Links
from tests.tools.test_bench_gpu import LINKS, MACHINE


def row(what: str, p50_us: float, **changes: Any) -> Row:
    given: dict[str, Any] = {
        "system": "moe_p2p", "what": what, "ranks": 4, "ranks_per_node": 4, "tokens": 128,
        "chunk_tokens": 128, "num_steps": 1, "num_sms": 0, "layout": "padded", "hidden": 7168,
        "topk": 8, "experts": 256, "dtype": "fp8", "routing": "uniform", "settings": "", "nics": 2,
        "rounds": 10, "chain": 20, "flushed": False, "nvlink_bytes": 6_000_000, "nic_bytes": 0,
        "wire_bytes": None, "expected_wire_bytes": 0, "floor_bytes": 0, "flat_floor_bytes": 0,
        "floor_us": 20.0,
        "links": LINKS, "machine": MACHINE, "correct": True,
        "spread": Spread(p50_us=p50_us, p90_us=p50_us, p99_us=p50_us + 1, min_us=p50_us),
    }  # fmt: skip
    return Row(**(given | changes))


def test_percent_counts_bytes_over_time() -> None:
    assert row("pair graph", 40.0).percent_of_push == pytest.approx(50.0)
    assert row("pair graph", 40.0, ranks_per_node=2).percent_of_push is None
    assert row("layer graph", 40.0).percent_of_push is None
    assert row("pair graph", 40.0, links=Links()).percent_of_push is None


def test_the_table_has_a_line_per_system() -> None:
    rows = [
        row("pair graph", 40.0), row("pair eager", 50.0, host_us=24.0), row("dispatch", 18.0),
        row("combine", 24.0),
        row("pair eager", 200.0, system="torch", chunk_tokens=0, host_us=101.0),
        row("pair graph", 80.0, num_sms=24, correct=False),
    ]  # fmt: skip
    head, ours, theirs, few = report.table(rows).splitlines()
    assert ours.split() == [
        "128", "128", "all", "moe_p2p", "40.0", "41.0", "50.0", "24.0", "GPU", "18.0", "24.0",
        "42.0", "20.0", "50%", "5.0x", "yes",
    ]  # fmt: skip
    # Half of a pair and more: what bounds it is measured, not said of all baselines.
    found = ["128", "-", "all", "torch", "-", "-", "200.0", "101.0", "host"]
    assert theirs.split()[:9] == found
    assert few.split()[2] == "24"
    assert few.split()[6:9] == ["-", "-", "-"]
    assert few.split()[-1] == "NO"
    assert head.split()[0] == "T"


def test_a_panel_of_one_token_count_has_lengths_from_zero(tmp_path: Path) -> None:
    """An axis from 5,190 to 5,215 shows a difference of 0.4% as all there is."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure, axis = pyplot.subplots()
    series = {"moe_p2p": [row("pair eager", 5215.0)], "torch": [row("x", 5190.0, system="torch")]}
    plot._latency(axis, series, "pair")
    assert axis.get_xlim()[0] == 0
    assert [bar.get_width() for bar in axis.patches] == [5215.0, 5190.0]
    assert "128 tokens per rank" in axis.get_title()
    pyplot.close(figure)


def test_labels_name_sms_on_gpus_alone() -> None:
    on_cpus = dataclasses.replace(MACHINE, device="cpu")
    assert plot._label(row("pair eager", 1.0, num_sms=24)).endswith("24 SMs")
    assert "SMs" not in plot._label(row("pair eager", 1.0, num_sms=24, machine=on_cpus))


def test_the_table_of_nodes_has_the_wire() -> None:
    wire = {
        "ranks_per_node": 2,
        "wire_bytes": 8 << 20,
        "flat_floor_bytes": 12 << 20,
        "floor_bytes": 6 << 20,
    }
    head, line = report.table(
        [row("pair graph", 40.0, **wire), row("layer graph", 90.0, **wire)]
    ).splitlines()
    found = dict(
        zip(
            head.replace("graph p50", "pair")
            .replace("rows alone", "least")
            .replace("no dedup", "flat")
            .split(),
            line.split(),
            strict=True,
        )
    )
    assert (found["limit"], found["KiB/NIC"], found["least"]) == ("55.0", "1,024.0", "768.0")
    assert found["flat"] == "1,536.0"
    assert "push" not in found  # a column of nothing


def test_the_table_of_layers_has_their_products_and_the_weights() -> None:
    """An overlapped layer is held against its products alone, which overlap with nothing."""
    of_ours = {"gemm": "triton", "layout": "padded", "weights_us": 40.0}
    of_torch = {"gemm": "torch", "weights_us": 40.0}
    text = report.layers(
        [
            row("pair graph", 20.0),
            row("layer graph", 100.0, **of_ours),
            row("experts graph", 75.0, **of_ours),
            row("layer graph", 80.0, overlap_sms=8, **of_ours),
            row("layer eager", 120.0, **of_torch),
            row("experts eager", 60.0, **of_torch),
        ]
    )
    lines = [re.split(r"  +", line.strip()) for line in text.splitlines()]
    found = [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
    assert [(each["products"], each["overlap"]) for each in found] == [
        ("triton", "-"), ("triton", "8 SMs"), ("torch", "-"),
    ]  # fmt: skip
    assert [each["pair's share"] for each in found] == ["25%", "6%", "50%"]
    assert [each["of them"] for each in found] == ["2.50x", "2.00x", "3.00x"]
    assert [each["layer graph"] for each in found] == ["100.0", "80.0", "-"]


def test_a_row_is_flat_in_json() -> None:
    found = row("pair graph", 40.0).as_json()
    assert found["p50_us"] == 40.0
    assert found["push_gbs"] == 300.0
    assert found["arrival_us"] == 2.5
    assert found["percent_of_push"] == 50.0
    assert found["host_bound"] is None
    assert row("pair eager", 40.0, host_us=21.0).as_json()["host_bound"] is True
    assert found["device"] == "a clock"
    assert not any(isinstance(value, dict) for value in found.values())


def test_the_plot_has_every_world(tmp_path: Path) -> None:
    rows = [row("pair graph", 10.0 * t, tokens=t) for t in (8, 32)]
    rows += [row("pair graph", 99.0, ranks_per_node=2), row("pair eager", 70.0, system="torch")]
    assert list(plot.lines(rows)) == ["moe_p2p EP4", "moe_p2p EP4 2x2", "torch EP4"]
    path = tmp_path / "deep" / "rows.png"
    reason = plot.plot(rows, path)
    if importlib.util.find_spec("matplotlib"):
        assert path.stat().st_size > 10_000
    else:
        assert reason == "matplotlib is not installed (pip install 'moe-p2p[bench]')"


def test_a_picture_of_many_panels_fits_a_screen(tmp_path: Path) -> None:
    """Three kinds of calls with their halves were a column nearly five times as high as wide."""
    image = pytest.importorskip("matplotlib.image")
    rows = [
        row(what, 40.0 + tokens, tokens=tokens, interface=calls)
        for calls, counts in (("low-latency", (8, 32)), ("normal", (64,)), ("v2", (32,)))
        for tokens in counts
        for what in ("pair graph", "dispatch", "combine")
    ]
    path = tmp_path / "rows.png"
    assert plot.plot(rows, path) is None
    high, wide, _ = image.imread(path).shape
    assert 0.6 < high / wide < 1.4


def test_what_flags_in_gpu_memory_would_save_is_computed_beside() -> None:
    timed = row("pair graph", 40.0, links=Links(pinned_us=2.0, relayed_us=3.5), hops={"wire": 3.0})
    assert "pair takes 4.00 us less" in report.text([timed], [])
    for other in (
        row("pair graph", 40.0),
        row("pair graph", 40.0, hops={"wire": 3.0}, links=Links()),
    ):
        assert "arrival flags" not in report.text([other], [])
