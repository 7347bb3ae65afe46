"""`bench --api experts`: what it prints of CPU ranks, and that it finds wrong sums and slots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_p2p.bench import command, experts
from tests.support.recorded import assert_keys

TINY = ["--api=experts", "--device=cpu", "--pairs=30", "--repeats=1", "--experts=8", "--hidden=64"]
TINY += ["--expert-kib=6", "--step-kib=2"]


def test_moves_alone_and_beside_pairs(tmp_path: Path) -> None:
    out = tmp_path / "experts.json"
    assert command.main([*TINY, f"--json={out}"]) == 0
    body = json.loads(out.read_text())
    assert_keys("experts", body)
    assert [move["experts"] for move in body["alone"]] == [1, experts.AT_ONCE]
    assert [way["name"] for way in body["ways"]] == list(experts.WAYS)
    assert [way["moves"] > 0 for way in body["ways"]] == [False, True, True]
    assert not any(way["wrong"] for way in body["ways"])


def run_wrong(options: experts.Options) -> experts.Found:
    """The first byte of a slot, and so its factor, is another one from the first round on."""
    right = experts._Bench.round

    def changed(self: experts._Bench, *how: Any) -> tuple[int, int]:
        self.tensors[0][0, 0] = 77
        return right(self, *how)

    experts._Bench.round = changed  # type: ignore[method-assign, assignment]
    return experts.run(options)


def test_wrong_sums_and_slots_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(experts, "run", run_wrong)
    assert command.main([*TINY, "--json="]) == 1
    assert "WRONG: no moves: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--experts=9"], "--experts: a multiple of --ranks"),
        (["--experts=6"], "--experts: at least 4 for each rank"),
        (["--expert-kib=7"], "--expert-kib: a multiple of 3"),
        (["--topk=9"], "--topk: at most --experts"),
        (["--ranks=1"], "--ranks: at least 2"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    given: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main([*TINY, *given])
    assert text in capsys.readouterr().err


def test_a_p99_may_be_a_tenth_or_ten_microseconds_above_that_without_moves() -> None:
    options = experts.Options()
    for alone, allowed in ((50.0, 60.0), (200.0, 220.0)):
        times = {way: [[alone], [alone + 1]] for way in experts.WAYS}
        steps = {way: [1.0] for way in experts.WAYS}
        moves = [experts.Move(1, 300.0, 1.0), experts.Move(4, 600.0, 2.0)]
        none = dict.fromkeys(experts.WAYS, 0)
        found = experts._figures(options, moves, [(times, steps)] * 2, none, none)
        assert [way.allowed_us for way in found.ways] == [None, allowed, allowed]
        assert found.more_gbytes_per_s == pytest.approx(3 * options.expert_kib * 1.024 / 300)
        assert "1.0 us apart" in experts.text(options, found)
