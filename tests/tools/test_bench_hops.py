"""What `bench` says of the timed NIC: its options, a run on CPU ranks, and hops as arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_p2p.bench import command, hops, report
from moe_p2p.bench.hops import Stamps
from moe_p2p.bench.options import parse
from tests.tools.test_bench_report import row

TIMED = ["--device=cpu", "--transport=timed"]


def test_a_preset_says_how_many_nics_of_which_rate() -> None:
    (cx7,) = parse(TIMED)
    assert (cx7.nics, cx7.gbps) == (1, 400.0)
    assert cx7.transport_settings == "preset=cx7,gbps=400"
    (efa,) = parse([*TIMED, "--preset=efa", "--latency-us=9"])
    assert (efa.nics, efa.transport_settings) == (2, "preset=efa,gbps=200,latency_us=9")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--transport=timed", "--seed=3"], "--transport timed"), (["--preset=efa"], "--preset")],
)
def test_what_does_not_go_together_is_named(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["--device=cpu", *arguments])
    assert named in capsys.readouterr().err


def test_cpu_ranks_are_right_over_it(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    small = ["--ranks=4", "--tokens=8", "--hidden=512", "--topk=2", "--experts=8", "--checks=1"]
    done = command.main([*TIMED, *small, "--seconds=0.05", f"--json={out}", "--plot="])
    assert done == 0
    ours = [each for each in json.loads(out.read_text()) if each["system"] == "moe_p2p"]
    assert ours
    assert all(each["correct"] and each["wire_bytes"] for each in ours)


def test_hops_add_up_to_the_pair_although_clocks_differ() -> None:
    """Two ranks, the second 300 ns late, its GPU's clock anywhere: the pair takes 20 us on both."""
    way = {"bell": 700, "turns": 900, "wire": 4_000, "relay": 1_400}
    far = sum(way.values())
    kernels, rings = (3_000, 2_000, 1_000 - 500), (100, 400)
    host = way["turns"] + way["wire"]

    def rank(late: int, other_late: int) -> Stamps:
        taken = (10_000 + late, 50_000 + late)
        arrived = tuple(10_000 * i + other_late + host for i in (1, 5))
        waited = far + other_late - late  # for the other's bell
        return Stamps(kernels, rings, (waited, waited), taken, (arrived[0], arrived[1]))

    found = hops.hops_of([[rank(0, 300)] * 3, [rank(300, 0)] * 3], [4_000.0, 4_000.0], 1)
    assert found["dispatch: bell and relay"] == pytest.approx(2.1)
    assert found["combine: proxies' turns"] == pytest.approx(0.9)
    assert found["dispatch: wire"] == 4.0
    assert sum(found.values()) == pytest.approx((sum(kernels) + sum(rings) + 2 * far) / 1e3)
    text = report.text([row("pair graph", 20.0, hops=found)], [])
    assert f"sum {sum(found.values()):.2f}, +0.0% of the pair's 20.00" in text
