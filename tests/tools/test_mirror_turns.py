"""benchmarks/turns.py mirror without GPUs: its turns and table, with workers that only count."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.recorded import assert_keys

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(name="turns")
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("turns")
    for name in ("turns", "mirror_worker"):
        sys.modules.pop(name, None)


class Tree:
    """Replaces turns.Tree: two GPUs, the second one slower."""

    def __init__(self, name: str, us: float, asked: list[tuple[str, str]]) -> None:
        self.name, self._us, self._asked = name, us, asked

    def ask(self, command: str, *arguments: Any, timeout_s: float = 0) -> list[Any]:
        self._asked.append((self.name, command))
        if command in ("pair", "apart"):
            spans = [self._us] * (1 if command == "pair" else 2)
            return [spans, [us + 1 for us in spans]]
        return ["", "a sum"] if command == "check" and self.name == "change" else ["", ""]


def mirror(turns: Any, *, recorded: bool = False) -> Any:
    kind = turns.Mirror()
    kind.given = argparse.Namespace(recorded=recorded)
    return kind


def measured(turns: Any, kind: Any, trees: list[Any], rounds: int) -> list[dict[str, Any]]:
    case = kind.cases[0]
    rows: list[dict[str, Any]] = turns.measure(kind, trees, case, rounds, kind.ways(case))
    return rows


def test_trees_take_turns_and_the_slower_gpu_counts(turns: Any) -> None:
    asked: list[tuple[str, str]] = []
    trees = [Tree("base", 9.0, asked), Tree("change", 7.0, asked)]
    kind = mirror(turns, recorded=True)
    rows = measured(turns, kind, trees, rounds=3)
    assert [name for name, command in asked if command == "pair"] == [
        *("change", "base"),
        *("base", "change"),
        *("change", "base"),
        *("base", "change"),
    ]
    assert rows[0]["pair"] == rows[0]["combine"] == [10.0] * 3
    base, change = turns.lines_of(kind, rows, kind.names, 8)
    assert "%" not in base
    assert change.count("-20.0%") == 3
    assert change.endswith("WRONG: a sum")
    assert "change -52.4%" in kind.more(rows)[0]


def test_a_tree_that_fails_does_not_stop_the_others(turns: Any) -> None:
    class Failing(Tree):
        def ask(self, command: str, *arguments: Any, timeout_s: float = 0) -> list[Any]:
            if command == "make":
                raise turns.WorkerError("a trace\nRuntimeError: no such kernel")
            return super().ask(command, *arguments)

    trees = [Tree("base", 9.0, []), Failing("change", 7.0, [])]
    kind = mirror(turns)
    rows = measured(turns, kind, trees, rounds=2)
    base, change = turns.lines_of(kind, rows, kind.names, 8)
    assert "10.0" in base
    assert change.endswith("RuntimeError: no such kernel")


def test_workers_see_their_tree_and_their_gpu_first(
    turns: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    environment = turns._environment(ROOT, 1)
    assert environment["PYTHONPATH"] == str(ROOT)
    assert environment["CUDA_VISIBLE_DEVICES"] == "5,4"


def test_kernels_alone_get_the_present_package(turns: Any, tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "dispatch.cu").write_text("// changed")
    made = turns._package_of(tmp_path, tmp_path / "made")
    assert (made / "moe_p2p" / "moe" / "all_to_all.py").is_file()
    assert (made / "moe_p2p" / "kernels" / "dispatch.cu").read_text() == "// changed"
    assert turns._package_of(ROOT, tmp_path) == ROOT
    with pytest.raises(SystemExit, match="neither moe_p2p/ nor kernels/"):
        turns._package_of(tmp_path / "kernels", tmp_path)


COUNTING = """
import json, pathlib, sys
log = pathlib.Path(__file__).with_name("log")
with log.open("a") as out:
    out.write(" ".join(sys.argv[1:3]) + (" ahead" if len(sys.argv) > 4 else "") + "\\n")
answers = {"make": None, "check": "", "capture": None, "pair": [10.0], "apart": [4.0, 6.0]}
answers |= {"links": {"push_gbs": 350.123}, "leave": None}
for line in sys.stdin if len(sys.argv) < 5 else ():
    print(json.dumps({"result": answers[json.loads(line)[0]]}), flush=True)
"""


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_whole_command_on_gpus_that_only_count(
    turns: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    (tmp_path / "worker.py").write_text(COUNTING)
    monkeypatch.setattr(turns.Mirror, "script", tmp_path / "worker.py")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    lines = list[str]()
    report = tmp_path / "turns.json"
    given = [".", str(ROOT), "--rounds", "3", "--cases", "T 512 on,T 4096 on"]
    assert turns.main(["mirror", *given, "--json", str(report)], lines.append) == 0, lines
    started = (tmp_path / "log").read_text().splitlines()
    assert started.count("0 1 ahead") == 4, "kernels of two trees and cases"
    assert sum(not line.endswith("ahead") for line in started) == 2 * gpus
    printed = "\n".join(lines)
    assert f"mirrored EP8 on {gpus} a GPU" in printed
    assert ("links: {'push_gbs': 350.12}" in printed) == (gpus == 2)
    assert printed.count("+0.0%") == 6
    rows = json.loads(report.read_text())
    assert_keys("mirror_turns", rows)
    assert [row["pair"] for row in rows] == [[10.0] * 3] * 4
