"""Two or more builds of the kernels, measured in turns as EP8 on one or two GPUs.

    python benchmarks/mirror_turns.py BASE CHANGE [...]       # all cases; the first is the base
    python benchmarks/mirror_turns.py BASE CHANGE --cases "T 8,T 128" --rounds 20 --json out.json

BASE, CHANGE: trees, folders with moe_p2p/ (built: moe_p2p/_C.abi3.so) and kernels/; or folders with
kernels/ alone, for which the package of the present tree is used. "." is the present tree.

Each tree has a process for each GPU: rank 0 of a mirror world of --ranks ranks (docs/gpu.md, "The
mirror world"); with one GPU rank 0 is its own partner, and no byte crosses a link. Each case is
checked against a closed form, then timed: in each round all trees take turns, in reverse order
every second time. pair: period of a chain of pairs in a CUDA graph. dispatch, combine: each between
two events, in a chain of eager calls. The slower GPU of a round counts. The table has min and
median of the rounds, and the median of the ratio to the base of the same round.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from mirror_worker import Case  # noqa: E402

WORKER = ROOT / "benchmarks" / "mirror_worker.py"
COMPILE_S, MAKE_S, CALL_S = 300.0, 120.0, 60.0
CASES = (
    *(Case(name=f"T {t}", tokens=t) for t in (8, 32, 128)),
    Case(name="T 4096", tokens=4096, chain=6),
    Case(name="T 128 int10", tokens=128, combine_dtype="int10"),
    Case(name="T 4096 int10", tokens=4096, combine_dtype="int10", chain=6),
    *(
        Case(
            name=f"T {t} on 24 SMs by rank",
            tokens=t,
            layout="by_rank",
            given=True,
            num_sms=24,
            chain=chain,
        )
        for t, chain in ((512, 20), (4096, 6))
    ),
    Case(name="T 128 V2", calls="v2", tokens=128, num_sms=24),
    *(
        Case(name=f"EP2 T {t} V2", calls="v2", tokens=t, ranks=2, num_sms=24, chain=chain)
        for t, chain in ((128, 20), (4096, 6))
    ),
    *(Case(name=f"T {t} low latency", calls="low-latency", tokens=t) for t in (8, 32, 128)),
)
# Pairs on 8 H200, commit 9e4a91b, python -m moe_p2p bench (docs/tuning.md).
RECORDED = {"T 8": 16.8, "T 32": 25.7, "T 128": 60.1, "T 4096": 1357.0}
PADDED = ("T 8", "T 32", "T 128")
WAYS = {"pair": ("pair",), "apart": ("dispatch", "combine")}


class WorkerError(RuntimeError):
    """A worker raised, or did not answer in time."""


class Worker:
    """A process of a script that obeys commands, such as benchmarks/mirror_worker.py."""

    def __init__(self, tree: Path, place: int, count: int, key: str, script: Path) -> None:
        self.name = f"{tree}, rank {place}"
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(place), str(count), key],
            env=_environment(tree, place),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if "MIRROR_TURNS_VERBOSE" in os.environ else subprocess.DEVNULL,
            text=True,
        )

    def ask(self, command: str, *arguments: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # answer() reports it
            self._process.stdin.write(json.dumps([command, arguments]) + "\n")
            self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(f"{self.name}: ended with status {self._process.wait()}")
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerError(f"{self.name}: {reply['error']}")
        return reply["result"]

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def _command(*arguments: object) -> list[str]:
    return [sys.executable, str(WORKER), *map(str, arguments)]


def _environment(tree: Path, place: int) -> dict[str, str]:
    """A worker sees its GPU first, and the other one behind it."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    place %= len(seen)
    order = [seen[place], *(each for i, each in enumerate(seen) if i != place)]
    return os.environ | {"PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": ",".join(order)}


class Tree:
    """The workers of one tree. ask() asks all of them at once: partners wait for each other."""

    def __init__(self, name: str, tree: Path, count: int, script: Path) -> None:
        key = f"turns.{secrets.token_hex(6)}"
        self.name, self.path = name, tree
        self.workers = [Worker(tree, place, count, key, script) for place in range(count)]

    def ask(self, command: str, *arguments: Any, timeout_s: float = CALL_S) -> list[Any]:
        for worker in self.workers:
            worker.ask(command, *arguments)
        with ThreadPoolExecutor(len(self.workers)) as threads:
            answers = [threads.submit(worker.answer) for worker in self.workers]
            try:
                return [each.result(timeout_s) for each in answers]
            except concurrent.futures.TimeoutError:
                self.end()  # which ends the threads that read
                raise WorkerError(f"{self.name}: no answer to {command} in {timeout_s} s") from None

    def end(self) -> None:
        for worker in self.workers:
            worker.end()


@contextlib.contextmanager
def opened(trees: Sequence[str], count: int, script: Path | None = None) -> Iterator[list[Tree]]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mirror_turns.")))
        opened_trees = []
        for i, name in enumerate(trees):
            package = _package_of(Path(name).resolve(), folder / str(i))
            tree = Tree(name, package, count, script or WORKER)
            stack.callback(tree.end)
            opened_trees.append(tree)
        yield opened_trees


def _package_of(tree: Path, folder: Path) -> Path:
    """Returns the tree; for kernels alone, a copy of the present package with them."""
    if (tree / "moe_p2p").is_dir():
        return tree
    if not (tree / "kernels").is_dir():
        raise SystemExit(f"mirror_turns: {tree} has neither moe_p2p/ nor kernels/")
    ignored = shutil.ignore_patterns("kernels", "__pycache__")
    shutil.copytree(ROOT / "moe_p2p", folder / "moe_p2p", ignore=ignored)
    shutil.copytree(tree / "kernels", folder / "kernels")
    (folder / "moe_p2p" / "kernels").symlink_to("../kernels")
    return folder


def compile_ahead(trees: Sequence[Tree], cases: Sequence[Case]) -> None:
    """Fills the cache of kernels, a process for each tree and case. Failures show up later."""

    def one(tree: Tree, case: Case) -> None:
        key = f"ahead.{secrets.token_hex(6)}"
        command = [*_command(0, 1, key), json.dumps(asdict(case))]
        environment = _environment(tree.path, 0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                command, env=environment, capture_output=True, timeout=COMPILE_S, check=False
            )

    with ThreadPoolExecutor(max(1, min(16, len(os.sched_getaffinity(0))))) as threads:
        jobs = [threads.submit(one, tree, case) for case in cases for tree in trees]
        for job in jobs:
            job.result()


def measure(trees: Sequence[Tree], case: Case, rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each tree: the rounds of each way, or why there are none."""
    rows: list[dict[str, Any]] = [{"tree": tree.name, "case": case.name} for tree in trees]
    alive: list[tuple[Tree, dict[str, Any]]] = []
    for tree, row in zip(trees, rows, strict=True):
        try:
            tree.ask("make", asdict(case), timeout_s=MAKE_S)
            row["wrong"] = next(filter(None, tree.ask("check", case.name)), "")
            tree.ask("capture", case.name)
            alive.append((tree, row))
        except WorkerError as error:
            row["failed"] = str(error).strip().splitlines()[-1]
    for way, names in WAYS.items():
        for number in range(rounds + 1):
            for tree, row in alive[:: 1 if number % 2 else -1]:
                if "failed" in row:
                    continue
                try:
                    spans = tree.ask(way, case.name)
                except WorkerError as error:
                    row["failed"] = str(error).strip().splitlines()[-1]
                    continue
                if number:  # the first warms up
                    for i, name in enumerate(names):
                        row.setdefault(name, []).append(max(each[i] for each in spans))
    return rows


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def lines_of(rows: Sequence[dict[str, Any]], width: int) -> list[str]:
    """Table lines of one case: min and median, and the change against the first tree."""
    lines, base = [], rows[0]
    for row in rows:
        cells = [f"{row['case']:24}", f"{Path(row['tree']).name or row['tree']:{width}}"]
        for name in ("pair", "dispatch", "combine"):
            if name not in row:
                cells.append(f"{'-':>24}")
                continue
            change = ""
            if row is not base and name in base and len(base[name]) == len(row[name]):
                ratio = median([a / b for a, b in zip(row[name], base[name], strict=True)])
                change = f"{(ratio - 1) * 100:+.1f}%"
            cells.append(f"{min(row[name]):8.1f} {median(row[name]):8.1f} {change:>6}")
        text = row.get("failed") or (f"WRONG: {row['wrong']}" if row.get("wrong") else "")
        lines.append("  ".join([*cells, text]).rstrip())
    return lines


def against(rows: Sequence[dict[str, Any]], recorded_us: float) -> str:
    def away(row: dict[str, Any]) -> str:
        change = median(row["pair"]) / recorded_us - 1
        return f"{Path(row['tree']).name or row['tree']} {change * 100:+.1f}%"

    found = ", ".join(away(row) for row in rows if "pair" in row)
    return f"{'':24}  on 8 H200, 9e4a91b: {recorded_us:,.1f}: {found}"


def main(arguments: Sequence[str] | None = None, show: Callable[[str], None] = print) -> int:
    given = _parser().parse_args(arguments)
    import torch

    count = min(2, torch.cuda.device_count()) if given.gpus == 0 else given.gpus
    if not 0 < count <= torch.cuda.device_count():
        raise SystemExit(f"mirror_turns: {torch.cuda.device_count()} GPUs are here")
    wanted = given.cases.split(",") if given.cases else []
    cases = [c for c in CASES if not wanted or any(c.name.startswith(w) for w in wanted)]
    if given.recorded:
        cases = [replace(c, layout="padded") if c.name in PADDED else c for c in cases]
        cases = [
            replace(c, layout="grouped") if c.tokens > 512 and not c.given else c for c in cases
        ]
    kind = torch.cuda.get_device_name()
    show(f"mirrored EP8 on {count} {kind}" + ("" if count == 2 else " (its own partner: no link)"))
    began, found = time.monotonic(), list[dict[str, Any]]()
    with opened(given.trees, count) as trees, tempfile.TemporaryDirectory() as folder:
        if not given.no_compile:
            compile_ahead(trees, cases)
            show(f"compiled in {time.monotonic() - began:.0f} s")
        if count == 2:
            link = links_of(trees, Path(folder))
            show(f"links: {link}")
        width = max(len(Path(name).name) for name in given.trees)
        show(f"{'min, median in us':24}  {'':{width}}  {'pair':>24}  {'dispatch':>24}  combine")
        for case in cases:
            rows = measure(trees, case, given.rounds)
            found += rows
            show("\n".join(lines_of(rows, width)))
            if given.recorded and case.name in RECORDED:
                show(against(rows, RECORDED[case.name]))
            if given.json:
                Path(given.json).write_text(json.dumps(found, indent=1))
    show(f"{time.monotonic() - began:.0f} s in all")
    return 1 if any(row.get("wrong") or row.get("failed") for row in found) else 0


def links_of(trees: Sequence[Tree], folder: Path) -> dict[str, float]:
    """Measured by the last tree that can: old ones have their probe elsewhere."""
    for i, tree in enumerate(reversed(trees)):
        try:
            found: dict[str, float] = tree.ask("links", str(folder / f"store{i}"))[0]
        except WorkerError:
            continue
        return {name: round(value, 2) for name, value in found.items()}
    return {}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks/mirror_turns.py", description=(__doc__ or "").split("\n\n")[0]
    )
    add = parser.add_argument
    add("trees", nargs="+", help="folders; the first is the base")
    add("--cases", help='beginnings of names, with commas: "T 8,T 128" (all)')
    add("--rounds", type=int, default=10, help="of each way, after one to warm up (10)")
    add("--gpus", type=int, default=0, help="1: rank 0 is its own partner (2 where there are)")
    add("--recorded", action="store_true", help="layouts of, and beside, what 8 H200 had")
    add("--json", metavar="FILE", help="all rounds (none)")
    add("--no-compile", action="store_true", help="the cache of kernels is filled already")
    return parser


if __name__ == "__main__":
    sys.exit(main())
