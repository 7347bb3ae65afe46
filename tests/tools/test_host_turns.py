"""benchmarks/turns.py host: its turns and table, and its calls on two CPU ranks."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.recorded import assert_keys

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(name="turns")
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("turns")
    for name in ("cores", "turns", "host_worker", "mirror_worker"):
        sys.modules.pop(name, None)


class Tree:
    """Replaces turns.Tree: two ranks, the second one slower. Fails in one way, if asked."""

    def __init__(self, name: str, us: float, asked: list[str], failing: str = "") -> None:
        self.name, self._us, self._asked, self._failing = name, us, asked, failing

    def ask(self, command: str, *arguments: Any, timeout_s: float = 0) -> list[Any]:
        if command == "make":
            return [{"ops": 2, "allocations": 4, "frames": 23}] * 2
        if arguments[-1] == self._failing:
            raise sys.modules["turns"].WorkerError("a trace\nRuntimeError: no such device")
        self._asked.append(self.name)
        return [[self._us], [self._us + 1]]


def test_trees_take_turns_and_the_slower_rank_counts(turns: Any) -> None:
    asked: list[str] = []
    trees = [Tree("base", 9.0, asked, failing="floor"), Tree("change", 7.0, asked)]
    kind = turns.Host()
    ways = [turns.Way((way,), "host", (way,)) for way in ("plain", "floor")]
    rows = turns.measure(kind, trees, kind.host[0], 2, ways)
    assert asked == ["change", "base", "base", "change", "change", "base", *["change"] * 3]
    assert rows[0]["plain"] == [10.0] * 2
    base, change = turns.lines_of(kind, rows, ("plain", "floor"), 12, "0.60 of it")
    assert base.endswith("no such device")
    assert change.split()[3:] == [
        "8.0",
        "x0.80",
        "8.0",
        "2",
        "4",
        "23",
        *["wanted:", "0.60", "of", "it"],
    ]


@pytest.mark.timeout(400)
def test_every_call_runs_on_two_ranks(
    turns: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {case.calls for case in (*turns.Host.host, *turns.Host.span)}
    cases = [turns.HostCase(name, 4) for name in sorted(calls)]
    monkeypatch.setattr(turns.Host, "host", cases)
    monkeypatch.setattr(turns.Host, "span", cases)
    lines = list[str]()
    report = tmp_path / "host.json"
    given = ["host", str(ROOT), "--ranks", "2", "--rounds", "1", "--json", str(report)]
    with warm.copies():
        assert turns.main(given, lines.append) == 0, lines
    rows = json.loads(report.read_text())
    assert_keys("host_turns", rows)
    assert len(rows) == 2 * len(cases)
    for row in rows[: len(cases)]:
        assert not [name for name in row if name.startswith("no ")], row
        assert all(row[way][0] > 0 for way in turns.Host.names)


@pytest.mark.parametrize(
    ("allowed", "near", "expected"),
    [
        (range(8), "0-1,4-5", [(-1, {0, 1, 4, 5})] * 2),  # two cores are too few for two ranks
        (range(16), "8-15", [(8, {12, 13, 14, 15}), (10, {12, 13, 14, 15})]),
        (range(8), "", [(0, {4, 5, 6, 7}), (2, {4, 5, 6, 7})]),  # nobody knows
        (range(8), "8-15", [(0, {4, 5, 6, 7}), (2, {4, 5, 6, 7})]),  # none is allowed
    ],
)
def test_each_rank_is_timed_on_a_core_of_its_own(
    turns: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    allowed: range,
    near: str,
    expected: list[tuple[int, set[int]]],
) -> None:
    """Beside its GPU, where cores have two CPUs, 0 and 1, 2 and 3, ..."""
    cores = importlib.import_module("cores")
    device = tmp_path / "0000:1b:00.0"
    device.mkdir()
    if near:
        (device / "local_cpulist").write_text(near + "\n")
    monkeypatch.setattr(cores, "PCI", tmp_path)
    monkeypatch.setattr(cores, "pci_of", lambda _: device.name)
    monkeypatch.setattr(cores, "siblings", lambda cpu: {cpu // 2 * 2, cpu // 2 * 2 + 1})
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(allowed))
    for place, (own, others) in enumerate(expected):
        found = cores.choose(place, 2)
        assert (found.own, found.others) == (own, others)


def test_trees_without_an_op_that_does_nothing_have_no_floor_alone(
    turns: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as 4f2cceb, with which the bars compare."""
    worker = importlib.import_module("host_worker")

    class Package:
        """Replaces torch.ops.moe_p2p."""

    class Place:
        device, on_gpu = "cpu", False

        def wait(self) -> None: ...

    for name in worker.CALLING:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(worker.torch, "ops", type("Ops", (), {"moe_p2p": Package()}))
    monkeypatch.setattr(worker, "CALLS", {"v2": lambda *_: list})
    monkeypatch.setattr(worker.dist, "all_reduce", lambda _: None)
    made = worker.Worker(Place(), worker.choose(0, 1))
    assert made.make("v2", 8)["ops"] == 0
    assert made.host("v2", 8, "plain")[0] > 0
    with pytest.raises(RuntimeError, match="this tree has no op"):
        made.host("v2", 8, "floor")
