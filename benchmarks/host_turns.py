"""Two or more builds in turns: what eager pairs cost the host, and calls that wait for it.

    python benchmarks/host_turns.py BASE CHANGE [...]     # all; the first is the base
    python benchmarks/host_turns.py BASE CHANGE --only host --rounds 20 --json out.json

BASE, CHANGE: trees, as of benchmarks/mirror_turns.py. Ranks are processes, one for each GPU, on a
machine without GPUs one on the CPU (there a call's time has all that its op does). In each round
all trees take turns, in reverse order every second time. The slower rank counts.

host: the host's time for a pair that waits for nothing; the same under a default device; floor: as
    many ops without arguments, allocations and launches. Each rank is timed on a core of its own
    beside its GPU, the same in all trees (benchmarks/cores.py). ops, allocations, frames: of a
    pair; allocations that it returns, Python functions that it enters.
span: a pair behind an all-reduce, from its begin to its end on the GPU, with cold caches: calls
    that wait for counts, and others beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from mirror_turns import Tree, WorkerError, median, opened  # noqa: E402

WORKER = ROOT / "benchmarks" / "host_worker.py"
MAKE_S, CALL_S = 200.0, 60.0
WAYS = ("plain", "default device", "floor")
SPANS = 30  # pairs of a median


class Case(NamedTuple):
    calls: str  # of host_worker.CALLS
    tokens: int
    bar: str = ""  # what is wanted, for the reader

    @property
    def name(self) -> str:
        return f"{self.calls} {self.tokens}"


HOST = (
    Case("all_to_all", 8, "0.60 of 4f2cceb"),
    Case("low_latency", 8, "0.55 of 4f2cceb"),
    Case("normal_cached", 512, "0.70 of 4f2cceb"),
    Case("v2", 128, "0.75 of 4f2cceb"),
)
# Bars: of DeepEP's time on two H200, EP2, H 7168, fp8, 24 multiprocessors.
SPAN = (
    Case("normal_counted", 128),
    Case("normal_counted", 512, "0.9 x 188"),
    Case("normal_counted", 4096, "0.8 x 754"),
    Case("v2_counted", 128, "1.0 x 118"),
    Case("v2_counted", 512),
    Case("v2_counted", 4096, "1.15 x 415"),
    Case("v2", 128),
    Case("v2", 512),
    Case("v2", 4096),
    Case("megatron", 4096),
)


def turns(
    trees: Sequence[Tree], case: Case, rounds: int, measure: Sequence[tuple[str, Any]]
) -> list[dict[str, Any]]:
    """Returns a row for each tree: the rounds of each measurement, or why there are none.

    measure: name, and the command with its last argument.
    """
    rows: list[dict[str, Any]] = [{"tree": tree.name, "case": case.name} for tree in trees]

    def make(tree: Tree, row: dict[str, Any]) -> None:
        try:
            row |= tree.ask("make", case.calls, case.tokens, timeout_s=MAKE_S)[0]
        except WorkerError as error:
            row["failed"] = str(error).strip().splitlines()[-1]

    with ThreadPoolExecutor(len(trees)) as threads:  # kernels of all trees are compiled at once
        list(threads.map(make, trees, rows))
    alive = [pair for pair in zip(trees, rows, strict=True) if "failed" not in pair[1]]
    for name, (command, last) in measure:
        for number in range(rounds + 1):
            for tree, row in alive[:: 1 if number % 2 else -1]:
                if f"no {name}" in row:
                    continue
                try:
                    us = max(tree.ask(command, case.calls, case.tokens, last, timeout_s=CALL_S))
                except WorkerError as error:
                    row[f"no {name}"] = str(error).strip().splitlines()[-1]
                    continue
                if number:  # the first warms up
                    row.setdefault(name, []).append(us)
    return rows


def lines_of(rows: Sequence[dict[str, Any]], names: Sequence[str], bar: str) -> list[str]:
    """Table lines of one case: medians, and the median ratio to the base of the same round."""
    lines, base = [], rows[0]
    for row in rows:
        cells = [f"{row['case']:20}", f"{Path(row['tree']).name or row['tree']:12}"]
        for name in names:
            if name not in row:
                cells.append(f"{'-':>16}")
                continue
            ratio = ""
            if row is not base and len(base.get(name, ())) == len(row[name]):
                both = zip(row[name], base[name], strict=True)
                ratio = f"x{median([a / b for a, b in both]):.2f}"
            cells.append(f"{median(row[name]):9.1f} {ratio:>6}")
        cells += [f"{row.get(what, '-')!s:>7}" for what in ("ops", "allocations", "frames")]
        cells.append(row.get("failed") or next((row[k] for k in row if k.startswith("no ")), ""))
        if row is rows[-1] and bar and not cells[-1]:
            cells[-1] = f"wanted: {bar}"
        lines.append("  ".join(cells).rstrip())
    return lines


def main(arguments: Sequence[str] | None = None, show: Callable[[str], None] = print) -> int:
    given = _parser().parse_args(arguments)
    import torch

    gpus = torch.cuda.device_count()
    ranks = given.ranks or gpus or 1
    kind = torch.cuda.get_device_name() if gpus else "the CPU"
    show(
        f"{ranks} ranks on {kind}, torch {torch.__version__}; medians of {given.rounds} rounds, us"
    )
    began, found = time.monotonic(), list[dict[str, Any]]()
    kinds: dict[str, tuple[Sequence[Case], list[tuple[str, Any]]]] = {
        "host": (HOST, [(way, ("host", way)) for way in WAYS]),
        "span": (SPAN, [("span", ("span", SPANS if gpus else 5))]),
    }
    with opened(given.trees, ranks, WORKER) as trees:
        places = [tree.ask("where", timeout_s=MAKE_S) for tree in trees]
        show("; ".join(f"rank {rank}: {place}" for rank, place in enumerate(places[0])))
        assert all(each == places[0] for each in places), places
        for what in (given.only,) if given.only else tuple(kinds):
            cases, measure = kinds[what]
            names = [name for name, _ in measure]
            heads = "  ".join(f"{name:>16}" for name in names)
            show(f"\n{'':20}  {'':12}  {heads}      ops   allocs   frames")
            for case in cases:
                if given.cases and not any(case.name.startswith(c) for c in given.cases.split(",")):
                    continue
                rows = turns(trees, case, given.rounds, measure)
                found += rows
                show("\n".join(lines_of(rows, names, case.bar if gpus else "")))
                if given.json:
                    Path(given.json).write_text(json.dumps(found, indent=1))
        for tree in trees:
            with contextlib.suppress(WorkerError):  # it failed before
                tree.ask("leave")
    show(f"{time.monotonic() - began:.0f} s in all")
    return 1 if any("failed" in row for row in found) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks/host_turns.py", description=(__doc__ or "").split("\n\n")[0]
    )
    add = parser.add_argument
    add("trees", nargs="+", help="folders; the first is the base")
    add("--only", choices=["host", "span"], help="one of the two tables (both)")
    add("--cases", help='beginnings of names, with commas: "v2 128,normal" (all)')
    add("--rounds", type=int, default=10, help="of each measurement, after one to warm up (10)")
    add("--ranks", type=int, default=0, help="processes (one for each GPU; 1 without)")
    add("--json", metavar="FILE", help="all rounds (none)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
