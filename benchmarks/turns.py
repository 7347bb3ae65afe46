"""Two or more builds in turns: kernels as EP8 on one or two GPUs, or what calls cost the host.

    python benchmarks/turns.py mirror BASE CHANGE [...]       # all cases; the first is the base
    python benchmarks/turns.py mirror BASE CHANGE --cases "T 8,T 128" --rounds 20 --json out.json
    python benchmarks/turns.py host BASE CHANGE --only host --rounds 20 --json out.json

mirror_turns.py and host_turns.py are these two under their old names. BASE, CHANGE: trees, folders
with moe_p2p/ (built: moe_p2p/_C.abi3.so) and kernels/; or folders with kernels/ alone, for which
the package of the present tree is used. "." is the present tree. In each round all trees take
turns, in reverse order every second time; the slower rank of a round counts. Ratios are medians of
the ratio to the base of the same round.

mirror: each tree has a process for each GPU: rank 0 of a mirror world (docs/gpu.md, "The mirror
    world"); with one GPU rank 0 is its own partner, and no byte crosses a link. Each case is
    checked against a closed form, then timed. pair: period of a chain of pairs in a CUDA graph.
    dispatch, combine: each between two events, in a chain of eager calls.
host: ranks are processes, one for each GPU, on a machine without GPUs one on the CPU (there a
    call's time has all that its op does). The host's time for a pair that waits for nothing; the
    same under a default device; floor: as many ops without arguments, allocations and launches.
    Each rank is timed on a core of its own beside its GPU, the same in all trees (cores.py). ops,
    allocations, frames: of a pair; allocations that it returns, Python functions that it enters.
    span: a pair behind an all-reduce, from its begin to its end on the GPU, with cold caches: calls
    that wait for counts, and others beside them.
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
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from mirror_worker import Case  # noqa: E402

COMPILE_S, MAKE_S, CALL_S = 300.0, 200.0, 60.0
Row = dict[str, Any]


# --- trees and their workers ---


class WorkerError(RuntimeError):
    """A worker raised, or did not answer in time."""

    @property
    def last_line(self) -> str:
        return str(self).strip().splitlines()[-1]


class Worker:
    """A process of a script that obeys commands, such as mirror_worker.py."""

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
def opened(trees: Sequence[str], count: int, script: Path) -> Iterator[list[Tree]]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="turns.")))
        opened_trees = []
        for i, name in enumerate(trees):
            package = _package_of(Path(name).resolve(), folder / str(i))
            opened_trees.append(Tree(name, package, count, script))
            stack.callback(opened_trees[-1].end)
        yield opened_trees


def _package_of(tree: Path, folder: Path) -> Path:
    """Returns the tree; for kernels alone, a copy of the present package with them."""
    if (tree / "moe_p2p").is_dir():
        return tree
    if not (tree / "kernels").is_dir():
        raise SystemExit(f"turns: {tree} has neither moe_p2p/ nor kernels/")
    ignored = shutil.ignore_patterns("kernels", "__pycache__")
    shutil.copytree(ROOT / "moe_p2p", folder / "moe_p2p", ignore=ignored)
    shutil.copytree(tree / "kernels", folder / "kernels")
    (folder / "moe_p2p" / "kernels").symlink_to("../kernels")
    return folder


# --- turns ---


class Way(NamedTuple):
    """A command of a worker whose answer has a time for each of `names`."""

    names: tuple[str, ...]
    command: str
    arguments: tuple[Any, ...]


def measure(
    kind: Any, trees: Sequence[Tree], case: Any, rounds: int, ways: Sequence[Way]
) -> list[Row]:
    """Returns a row for each tree: the rounds of each way, or why there are none."""
    rows: list[Row] = [{"tree": tree.name, "case": case.name} for tree in trees]

    def make(tree: Tree, row: Row) -> None:
        try:
            row |= kind.make(tree, case)
        except WorkerError as error:
            row["failed"] = error.last_line

    with ThreadPoolExecutor(len(trees) if kind.at_once else 1) as threads:
        list(threads.map(make, trees, rows))
    for names, command, arguments in ways:
        lost = f"no {names[0]}" if kind.goes_on else "failed"
        for number in range(rounds + 1):
            for tree, row in list(zip(trees, rows, strict=True))[:: 1 if number % 2 else -1]:
                if row.keys() & {"failed", lost}:
                    continue
                try:
                    spans = tree.ask(command, *arguments)
                except WorkerError as error:
                    row[lost] = error.last_line
                    continue
                if number:  # the first warms up
                    for i, name in enumerate(names):
                        row.setdefault(name, []).append(max(each[i] for each in spans))
    return rows


def lines_of(
    kind: Any, rows: Sequence[Row], names: Sequence[str], width: int, bar: str = ""
) -> list[str]:
    """Table lines of one case: each name's figure, and the ratio to the first tree."""
    lines, base = [], rows[0]
    for row in rows:
        cells = [f"{row['case']:{kind.width}}", f"{_name(row):{width}}"]
        for name in names:
            ratio = None
            if row is not base and len(base.get(name, ())) == len(row.get(name, "-")):
                ratio = median(a / b for a, b in zip(row[name], base[name], strict=True))
            cells.append(kind.cell(row.get(name), ratio))
        cells += [f"{row.get(what, '-')!s:>7}" for what in kind.counts]
        text = row.get("failed") or next((row[k] for k in row if k.startswith("no ")), "")
        text = text or (f"WRONG: {row['wrong']}" if row.get("wrong") else "")
        wanted = f"wanted: {bar}" if bar and row is rows[-1] else ""
        lines.append("  ".join([*cells, text or wanted]).rstrip())
    return lines


def _name(row: Row) -> str:
    return Path(row["tree"]).name or str(row["tree"])


class Mirror:
    """Kernels: rank 0 of a mirror world."""

    script = ROOT / "benchmarks" / "mirror_worker.py"
    width, counts, at_once, goes_on = 24, (), False, False
    names = ("pair", "dispatch", "combine")
    # Pairs on 8 H200, commit 9e4a91b, python -m moe_p2p bench (docs/figures.md).
    recorded = {"T 8": 16.8, "T 32": 25.7, "T 128": 60.1, "T 4096": 1357.0}  # noqa: RUF012
    padded = ("T 8", "T 32", "T 128")
    cases = (
        *(Case(name=f"T {t}", tokens=t) for t in (8, 32, 128)),
        Case(name="T 4096", tokens=4096, chain=6),
        Case(name="T 128 int10", tokens=128, combine_dtype="int10"),
        Case(name="T 4096 int10", tokens=4096, combine_dtype="int10", chain=6),
        *(Case(name=f"T {t} on 24 SMs by rank", tokens=t, layout="by_rank", given=True, num_sms=24,
               chain=chain) for t, chain in ((512, 20), (4096, 6))),
        *(Case(name=f"EP4 T {t} {'long' if chunk else 'own'} chunk", tokens=t,
               chunk=chunk, layout="by_rank", given=True, num_sms=24, ranks=4)
          for t in (8, 32, 64, 128) for chunk in (0, 4096)),
        Case(name="T 128 V2", calls="v2", tokens=128, num_sms=24),
        *(Case(name=f"EP2 T {t} V2", calls="v2", tokens=t, ranks=2, num_sms=24, chain=chain)
          for t, chain in ((128, 20), (4096, 6))),
        *(Case(name=f"T {t} low latency", calls="low-latency", tokens=t) for t in (8, 32, 128)),
    )  # fmt: skip

    def add_options(self, add: Callable[..., Any]) -> None:
        add("--gpus", type=int, default=0, help="1: rank 0 is its own partner (2 where there are)")
        add("--recorded", action="store_true", help="layouts of, and beside, what 8 H200 had")
        add("--no-compile", action="store_true", help="the cache of kernels is filled already")

    def begin(self, given: argparse.Namespace, show: Callable[[str], None]) -> int:
        """Returns how many workers a tree has."""
        import torch

        count = min(2, torch.cuda.device_count()) if given.gpus == 0 else given.gpus
        if not 0 < count <= torch.cuda.device_count():
            raise SystemExit(f"turns: {torch.cuda.device_count()} GPUs are here")
        link = "" if count == 2 else " (its own partner: no link)"
        show(f"mirrored EP8 on {count} {torch.cuda.get_device_name()}{link}")
        self.given = given
        return count

    def tables(self) -> Iterator[tuple[Sequence[Case], Callable[[Case], list[Way]], str]]:
        head = f"{'min, median in us':24}  {{}}  {'pair':>24}  {'dispatch':>24}  combine"
        yield [*map(self.as_recorded, self.cases)], self.ways, head

    def as_recorded(self, case: Case) -> Case:
        if self.given.recorded and case.name in self.padded:
            return replace(case, layout="padded")
        grouped = self.given.recorded and case.tokens > 512 and not case.given
        return replace(case, layout="grouped") if grouped else case

    def ways(self, case: Case) -> list[Way]:
        apart = Way(("dispatch", "combine"), "apart", (case.name,))
        return [Way(("pair",), "pair", (case.name,)), apart]

    def prepare(
        self, trees: Sequence[Tree], cases: Sequence[Case], show: Callable[[str], None]
    ) -> None:
        began = time.monotonic()
        if not self.given.no_compile:
            self.compile_ahead(trees, cases)
            show(f"compiled in {time.monotonic() - began:.0f} s")
        if len(trees[0].workers) == 2:
            with tempfile.TemporaryDirectory() as folder:
                show(f"links: {self.links_of(trees, Path(folder))}")

    def compile_ahead(self, trees: Sequence[Tree], cases: Sequence[Case]) -> None:
        """Fills the cache of kernels, a process for each tree and case. Failures show up later."""

        def one(tree: Tree, case: Case) -> None:
            key = f"ahead.{secrets.token_hex(6)}"
            command = [sys.executable, str(self.script), "0", "1", key, json.dumps(asdict(case))]
            environment = _environment(tree.path, 0)
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    command, env=environment, capture_output=True, timeout=COMPILE_S, check=False
                )

        with ThreadPoolExecutor(max(1, min(16, len(os.sched_getaffinity(0))))) as threads:
            list(threads.map(one, [*trees] * len(cases), [c for c in cases for _ in trees]))

    def links_of(self, trees: Sequence[Tree], folder: Path) -> dict[str, float]:
        """Measured by the last tree that can: old ones have their probe elsewhere."""
        for i, tree in enumerate(reversed(trees)):
            with contextlib.suppress(WorkerError):
                found: dict[str, float] = tree.ask("links", str(folder / f"store{i}"))[0]
                return {name: round(value, 2) for name, value in found.items()}
        return {}

    def make(self, tree: Tree, case: Case) -> Row:
        tree.ask("make", asdict(case), timeout_s=MAKE_S)
        wrong = next(filter(None, tree.ask("check", case.name)), "")
        tree.ask("capture", case.name)
        return {"wrong": wrong}

    def cell(self, spans: Sequence[float] | None, ratio: float | None) -> str:
        """Min and median, and the change against the first tree."""
        change = "" if ratio is None else f"{(ratio - 1) * 100:+.1f}%"
        found = "-" if spans is None else f"{min(spans):8.1f} {median(spans):8.1f} {change:>6}"
        return f"{found:>24}"

    def more(self, rows: Sequence[Row]) -> list[str]:
        """The recorded figure, and how far the trees are from it."""
        known = self.recorded.get(rows[0]["case"])
        if not self.given.recorded or known is None:
            return []
        away = {_name(row): median(row["pair"]) / known - 1 for row in rows if "pair" in row}
        found = ", ".join(f"{name} {change * 100:+.1f}%" for name, change in away.items())
        return [f"{'':24}  on 8 H200, 9e4a91b: {known:,.1f}: {found}"]


class HostCase(NamedTuple):
    calls: str  # of host_worker.CALLS
    tokens: int
    bar: str = ""  # what is wanted, for the reader

    @property
    def name(self) -> str:
        return f"{self.calls} {self.tokens}"


class Host:
    """What eager pairs cost the host, and calls that wait for it."""

    script = ROOT / "benchmarks" / "host_worker.py"
    # Kernels of all trees are compiled at once; a way that fails leaves others.
    width, counts, at_once, goes_on = 20, ("ops", "allocations", "frames"), True, True
    names = ("plain", "default device", "floor")
    spans = 30  # pairs of a median
    host = (
        HostCase("all_to_all", 8, "0.60 of 4f2cceb"),
        HostCase("low_latency", 8, "0.55 of 4f2cceb"),
        HostCase("normal_cached", 512, "0.70 of 4f2cceb"),
        HostCase("v2", 128, "0.75 of 4f2cceb"),
    )
    # Bars: of DeepEP's time on two H200, EP2, H 7168, fp8, 24 multiprocessors.
    span = (
        HostCase("normal_counted", 128),
        HostCase("normal_counted", 512, "0.9 x 188"),
        HostCase("normal_counted", 4096, "0.8 x 754"),
        HostCase("v2_counted", 128, "1.0 x 118"),
        HostCase("v2_counted", 512),
        HostCase("v2_counted", 4096, "1.15 x 415"),
        *(HostCase("v2", tokens) for tokens in (128, 512, 4096)),
        HostCase("megatron", 4096),
    )

    def add_options(self, add: Callable[..., Any]) -> None:
        add("--only", choices=["host", "span"], help="one of the two tables (both)")
        add("--ranks", type=int, default=0, help="processes (one for each GPU; 1 without)")

    def begin(self, given: argparse.Namespace, show: Callable[[str], None]) -> int:
        import torch

        self.given, self.gpus = given, torch.cuda.device_count()
        ranks = given.ranks or self.gpus or 1
        where = torch.cuda.get_device_name() if self.gpus else "the CPU"
        rounds = f"medians of {given.rounds} rounds, us"
        show(f"{ranks} ranks on {where}, torch {torch.__version__}; {rounds}")
        return int(ranks)

    def tables(self) -> Iterator[tuple[Sequence[HostCase], Callable[[HostCase], list[Way]], str]]:
        for what, cases in (("host", self.host), ("span", self.span)):
            if self.given.only in (None, what):
                names = self.names if what == "host" else ("span",)
                heads = "  ".join(f"{name:>16}" for name in names)
                head = f"\n{'':20}  {{}}  {heads}      ops   allocs   frames"
                yield cases, self.of_host if what == "host" else self.of_span, head

    def of_host(self, case: HostCase) -> list[Way]:
        return [Way((way,), "host", (*case[:2], way)) for way in self.names]

    def of_span(self, case: HostCase) -> list[Way]:
        return [Way(("span",), "span", (*case[:2], self.spans if self.gpus else 5))]

    def prepare(self, trees: Sequence[Tree], _: object, show: Callable[[str], None]) -> None:
        places = [tree.ask("where", timeout_s=MAKE_S) for tree in trees]
        show("; ".join(f"rank {rank}: {place}" for rank, place in enumerate(places[0])))
        assert all(each == places[0] for each in places), places

    def make(self, tree: Tree, case: HostCase) -> Row:
        found: Row = tree.ask("make", *case[:2], timeout_s=MAKE_S)[0]
        return found

    def cell(self, spans: Sequence[float] | None, ratio: float | None) -> str:
        """The median, and the ratio to the first tree."""
        shown = "" if ratio is None else f"x{ratio:.2f}"
        return f"{'-':>16}" if spans is None else f"{median(spans):9.1f} {shown:>6}"

    def more(self, _: Sequence[Row]) -> list[str]:
        return []


KINDS: dict[str, type[Mirror] | type[Host]] = {"mirror": Mirror, "host": Host}


def main(
    arguments: Sequence[str] | None = None,
    show: Callable[[str], None] = print,
    kind: str | None = None,
) -> int:
    """kind: of KINDS, where the arguments do not begin with it."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if kind is None:
        wanted = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
        wanted.add_argument("kind", choices=KINDS)
        kind = wanted.parse_args(words[:1]).kind
        words = words[1:]
    of = KINDS[kind]()
    given = _parser(kind).parse_args(words)
    began, found = time.monotonic(), list[Row]()
    count = of.begin(given, show)
    with opened(given.trees, count, of.script) as trees:
        tables = [(_chosen(cases, given.cases), ways, head) for cases, ways, head in of.tables()]
        of.prepare(trees, [case for cases, _, _ in tables for case in cases], show)
        width = max(12 * of.at_once, *(len(Path(name).name) for name in given.trees))
        for cases, ways, head in tables:
            show(head.format(" " * width))
            for case in cases:
                rows = measure(of, trees, case, given.rounds, ways(case))
                found += rows
                names = [name for way in ways(case) for name in way.names]
                bar = getattr(case, "bar", "") if getattr(of, "gpus", 0) else ""
                show("\n".join([*lines_of(of, rows, names, width, bar), *of.more(rows)]))
                if given.json:
                    Path(given.json).write_text(json.dumps(found, indent=1))
        for tree in trees:
            with contextlib.suppress(WorkerError):  # it failed before, or has nothing to leave
                tree.ask("leave")
    show(f"{time.monotonic() - began:.0f} s in all")
    return 1 if any(row.get("wrong") or "failed" in row for row in found) else 0


def _chosen(cases: Sequence[Any], names: str | None) -> list[Any]:
    return [c for c in cases if not names or c.name.startswith(tuple(names.split(",")))]


def _parser(kind: str) -> argparse.ArgumentParser:
    about = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog=f"benchmarks/turns.py {kind}", description=about)
    add = parser.add_argument
    add("trees", nargs="+", help="folders; the first is the base")
    add("--cases", help='beginnings of names, with commas: "T 8,T 128", "v2 128,normal" (all)')
    add("--rounds", type=int, default=10, help="of each way, after one to warm up (10)")
    add("--json", metavar="FILE", help="all rounds (none)")
    KINDS[kind]().add_options(add)
    return parser


if __name__ == "__main__":
    sys.exit(main())
