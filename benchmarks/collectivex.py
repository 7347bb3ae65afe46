"""CollectiveX's cells on GPUs of one host: ours beside DeepEP V1 and V2, in turns, in one run.

    python benchmarks/collectivex.py --collectivex FOLDER --ranks 4 --deepep-v1 V1 --deepep-v2 V2
    python benchmarks/collectivex.py --collectivex FOLDER --ranks 2 --only low-latency-bf16 --list

FOLDER: experimental/CollectiveX of SemiAnalysisAI/InferenceX at 843c625. V1, V2: folders that hold
a built `deep_ep` (567632d; dd758ca), each with what `--env` gives its processes beside PYTHONPATH;
without them only ours runs. Each contestant runs CollectiveX's own run_ep.py on a copy, at its
hidden size, ladders and timing, in --processes processes (groups of ranks) that take turns:

    deepep-v2   its adapter over moe_p2p.deep_ep (V2's calls in normal mode, V1's in low latency)
    uccl-ep     its adapter for UCCL over moe_p2p.deep_ep (V1's calls in both)
    moe-p2p     contrib/collectivex, over AllToAll
    DeepEP V1   the adapter for UCCL, without its argument is_intranode
    DeepEP V2   the adapter for DeepEP, normal mode only

Before a process begins, its interpreter times two bare launches (add_). Figures are medians, over
the processes whose two launches lie within 20% of the fastest of their cell, of the period of a
chained pair (p50); everything is printed, and --json keeps it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
NEAR = 1.2  # of the fastest two launches: slower ones ran on a slow core
CELL_S = 900.0
# In each process, before run_ep.py: the time of two launches that wait for nothing, in us.
LAUNCHES = """
import json, os, runpy, sys, time, torch
on_gpu = torch.cuda.is_available()
x = torch.zeros(8, device=f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu")
def two():
    on_gpu and torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(200):
        x.add_(1); x.add_(1)
    return (time.perf_counter() - began) / 200 * 1e6
two()
took = min(two() for _ in range(5))
if os.environ["RANK"] == "0":
    json.dump(took, open(sys.argv[1], "w"))
drop = sys.argv[2]
if drop:
    import deep_ep
    made = deep_ep.Buffer.__init__
    def make(self, *args, **options):
        options.pop(drop, None)
        made(self, *args, **options)
    deep_ep.Buffer.__init__ = make
sys.argv = sys.argv[3:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Cell(NamedTuple):
    mode: str
    precision: str
    phase: str

    @property
    def name(self) -> str:
        return f"{self.mode}-{self.precision}-{self.phase}"


@dataclass(frozen=True)
class Contestant:
    """backend: of run_ep.py. packages: put first on PYTHONPATH. drop: an argument of `Buffer` that
    this deep_ep does not know. modes: those that it has."""

    name: str
    backend: str
    packages: tuple[str, ...]
    drop: str = ""
    modes: tuple[str, ...] = ("normal", "low-latency")
    env: dict[str, str] = field(default_factory=dict)


@dataclass
class Run:
    """One process of a contestant. two_us: two launches. rows: by T, (correct, error, pair us)."""

    contestant: str
    cell: str
    turn: int
    two_us: float | None = None
    rows: dict[int, tuple[bool, float, float | None]] = field(default_factory=dict)
    problem: str = ""


def cells_of(sweep: dict[str, Any]) -> list[Cell]:
    return [
        Cell(mode, precision, phase)
        for mode, phases in sweep["modes"].items()
        for precision in sweep["precisions"]
        for phase in phases
    ]


def contestants_of(options: argparse.Namespace) -> list[Contestant]:
    shim = str(ROOT / "moe_p2p" / "deep_ep" / "path")
    ours = (shim, str(ROOT))
    given = dict(pair.split("=", 1) for pair in options.env)
    found = [
        Contestant("ours, deepep-v2", "deepep-v2", ours),
        Contestant("ours, uccl-ep", "uccl-ep", ours),
        Contestant("ours, moe-p2p", "moe-p2p", ours),
    ]
    if options.deepep_v1:
        v1 = (options.deepep_v1,)
        found += [Contestant("DeepEP V1", "uccl-ep", v1, "is_intranode", env=given)]
    if options.deepep_v2:
        v2 = (options.deepep_v2,)
        found += [Contestant("DeepEP V2", "deepep-v2", v2, modes=("normal",), env=given)]
    return found


def command_of(
    folder: Path, sweep: dict[str, Any], cell: Cell, contestant: Contestant, ranks: int, out: str
) -> list[str]:
    """Returns arguments of run_ep.py; the sweep's own values wherever it has some."""
    work, timing = sweep["workload"], sweep["timing"]
    case = f"{contestant.backend}-{work['name']}-{cell.mode}-{cell.phase}"
    values = {
        "backend": contestant.backend,
        "mode": cell.mode,
        "precision": cell.precision,
        "phase": cell.phase,
        "tokens-ladder": " ".join(map(str, work["token_ladders"][cell.phase])),
        "hidden": work["hidden"],
        "topk": work["topk"],
        "experts": work["routed_experts"],
        "routing": sweep["routing"],
        "case-id": f"local-{case}-ep{ranks}-{sweep['routing']}-{cell.precision}",
        "suite": sweep["suite"],
        "workload-name": work["name"],
        "seed": work["seed"],
        "version": sweep["version"],
        "warmup": timing["warmup_iters_per_trial"],
        "iters": timing["iters_per_trial"],
        "trials": timing["trials_per_point"],
        "chain-iters": timing["chain_iters_per_trial"],
        "chain-trials": timing["chain_trials_per_point"],
        "chain-drop": timing["chain_drop"],
        "runner": "local",
        "topology-class": "local",
        "transport": "nvlink",
        "scope": "scale-up",
        "scale-up-transport": "nvlink",
        "scale-out-transport": "none",
        "gpus-per-node": ranks,
        "scale-up-domain": ranks,
        "out": out,
    }
    script = str(folder / "bench" / "run_ep.py")
    return [script, *(f"--{name}={value}" for name, value in values.items())]


def rows_of(document: dict[str, Any]) -> dict[int, tuple[bool, float, float | None]]:
    """Of what run_ep.py writes: by T whether it is correct, its largest relative error, and the
    period of a chained pair in us."""
    found = {}
    for row in document["measurement"]["rows"]:
        correct = row["correctness"]
        period = row["components"]["pair_period"]["percentiles_us"]
        error = correct["max_relative_error"]
        found[row["tokens_per_rank"]] = (
            bool(correct["passed"]),
            float(error or 0.0),
            None if period is None else float(period["p50"]),
        )
    return found


def run_once(
    folder: Path, sweep: dict[str, Any], cell: Cell, contestant: Contestant, ranks: int, turn: int
) -> Run:
    """Starts the ranks of one process group, and reads what they wrote."""
    made = Run(contestant.name, cell.name, turn)
    with tempfile.TemporaryDirectory() as scratch:
        program, two, out = (f"{scratch}/{name}" for name in ("program.py", "two.json", "out.json"))
        Path(program).write_text(LAUNCHES)
        arguments = command_of(folder, sweep, cell, contestant, ranks, out)
        path = os.pathsep.join((*contestant.packages, os.environ.get("PYTHONPATH", "")))
        environment = os.environ | {"EP_JIT_CACHE_DIR": f"{scratch}/jit"} | contestant.env
        environment["PYTHONPATH"] = path
        started = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
        started += ["--standalone", program, two, contestant.drop, *arguments]
        try:
            done = subprocess.run(
                started, env=environment, capture_output=True, text=True, timeout=CELL_S
            )
            said = f"{done.stdout[-1500:]}\n{done.stderr[-1500:]}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            said = f"took more than {CELL_S:.0f} s"
        if Path(two).exists():
            made.two_us = json.loads(Path(two).read_text())
        if Path(out).exists():
            made.rows = rows_of(json.loads(Path(out).read_text()))
        # A cell that is not correct fails too, and has rows.
        made.problem = said if not made.rows else ""
    return made


Runner = Callable[[Cell, Contestant, int], Run]


def in_turns(
    cells: Iterable[Cell], contestants: Sequence[Contestant], processes: int, runner: Runner
) -> list[Run]:
    """Runs every cell; in each turn all contestants, in reverse order every second time."""
    runs = []
    for cell in cells:
        taking = [each for each in contestants if cell.mode in each.modes]
        for turn in range(processes):
            for contestant in taking if turn % 2 == 0 else taking[::-1]:
                runs.append(runner(cell, contestant, turn))
                print(line_of(runs[-1]), flush=True)
    return runs


def line_of(run: Run) -> str:
    two = "?" if run.two_us is None else f"{run.two_us:.1f}"
    rows = ", ".join(
        f"T {tokens}: {'no period' if pair is None else f'{pair:.1f} us'}"
        f"{'' if correct else f' WRONG ({error:.4f})'}"
        for tokens, (correct, error, pair) in sorted(run.rows.items())
    )
    text = rows or run.problem.strip() or "no rows"
    return f"{run.cell} {run.contestant} turn {run.turn}, two launches {two} us: {text}"


class Figure(NamedTuple):
    """kept: of the processes, those on a fast core."""

    cell: str
    tokens: int
    contestant: str
    correct: bool
    error: float
    pair_us: float | None
    kept: int
    processes: int


def figures_of(runs: Sequence[Run]) -> list[Figure]:
    """A cell's fastest two launches are those of all its contestants: the machine is the same."""
    made = []
    for cell in dict.fromkeys(run.cell for run in runs):
        of_cell = [run for run in runs if run.cell == cell]
        launches = [run.two_us for run in of_cell if run.two_us is not None]
        most = NEAR * min(launches, default=0.0)
        for name in dict.fromkeys(run.contestant for run in of_cell):
            own = [run for run in of_cell if run.contestant == name]
            ladder = sorted({tokens for run in own for tokens in run.rows})
            made += [_figure(own, tokens, most) for tokens in ladder]
    return made


def _figure(own: Sequence[Run], tokens: int, most: float) -> Figure:
    """own: processes of one contestant and cell. most: two launches of one that counts."""
    rows = [(run.two_us, *run.rows[tokens]) for run in own if tokens in run.rows]
    near = [pair for two, _, _, pair in rows if two is not None and two <= most]
    pairs = [pair for pair in near if pair is not None]
    return Figure(
        own[0].cell,
        tokens,
        own[0].contestant,
        correct=len(rows) == len(own) and all(correct for _, correct, _, _ in rows),
        error=max(error for _, _, error, _ in rows),
        pair_us=median(pairs) if pairs else None,
        kept=len(pairs),
        processes=len(own),
    )


def table_of(figures: Sequence[Figure]) -> list[str]:
    """A table for each cell: pair us, beside it the processes that count; errors at the end."""
    lines = []
    for cell in dict.fromkeys(figure.cell for figure in figures):
        of_cell = [figure for figure in figures if figure.cell == cell]
        names = list(dict.fromkeys(figure.contestant for figure in of_cell))
        lines += ["", f"{cell}: period of a chained pair in us, [processes that count]", ""]
        lines += [f"| T | {' | '.join(names)} | largest error |", "|---" * (len(names) + 2) + "|"]
        for tokens in sorted({figure.tokens for figure in of_cell}):
            by_name = {each.contestant: each for each in of_cell if each.tokens == tokens}
            texts = [_text(by_name.get(name)) for name in names]
            error = max(each.error for each in by_name.values() if each.contestant[:4] == "ours")
            lines.append(f"| {tokens} | {' | '.join(texts)} | {error:.4f} |")
    return lines


def _text(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    pair = "none on a fast core" if figure.pair_us is None else f"{figure.pair_us:.1f}"
    wrong = "" if figure.correct else " WRONG"
    return f"{pair} [{figure.kept} of {figure.processes}]{wrong}"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--collectivex", type=Path, required=True, help="experimental/CollectiveX")
    add("--ranks", type=int, required=True, help="GPUs of this host")
    add("--deepep-v1", default="", help="folder with a built deep_ep, V1")
    add("--deepep-v2", default="", help="folder with a built deep_ep, V2")
    add("--env", nargs="*", default=[], help="NAME=VALUE for DeepEP's processes")
    add("--processes", type=int, default=5, help="of each contestant and cell")
    add("--only", nargs="*", default=[], help="beginnings of names of cells")
    add("--contestants", nargs="*", default=[], help="names of contestants")
    add("--tokens", type=int, nargs="*", help="of the ladders, these alone")
    add("--trials", type=int, help="of each point, instead of the sweep's: where only sums count")
    add("--json", type=Path, help="file for every run and figure")
    add("--list", action="store_true", help="prints what would run")
    return parser.parse_args(argv)


def chosen(
    options: argparse.Namespace, sweep: dict[str, Any]
) -> tuple[list[Cell], list[Contestant]]:
    """Returns what runs, and takes what --tokens leaves out from the sweep's ladders."""
    if options.trials is not None:
        sweep["timing"]["trials_per_point"] = options.trials
    ladders, wanted = sweep["workload"]["token_ladders"], tuple(options.only)
    for phase, ladder in ladders.items():
        ladders[phase] = [tokens for tokens in ladder if tokens in (options.tokens or ladder)]
    cells = [each for each in cells_of(sweep) if ladders[each.phase]]
    cells = [each for each in cells if not wanted or each.name.startswith(wanted)]
    contestants = contestants_of(options)
    names = options.contestants or [each.name for each in contestants]
    return cells, [each for each in contestants if each.name in names]


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(sys.argv[1:] if argv is None else argv)
    sweep = json.loads((options.collectivex / "configs" / "sweep.json").read_text())
    cells, contestants = chosen(options, sweep)
    ladders = sweep["workload"]["token_ladders"]
    if options.list:
        for cell in cells:
            names = [each.name for each in contestants if cell.mode in each.modes]
            print(f"{cell.name}: T {ladders[cell.phase]}; {', '.join(names)}")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "CollectiveX"
        shutil.copytree(options.collectivex, folder, ignore=shutil.ignore_patterns(".git"))
        installer = ROOT / "contrib" / "collectivex" / "install.py"
        subprocess.run([sys.executable, str(installer), str(folder)], check=True)

        def runner(cell: Cell, contestant: Contestant, turn: int) -> Run:
            return run_once(folder, sweep, cell, contestant, options.ranks, turn)

        runs = in_turns(cells, contestants, options.processes, runner)
    figures = figures_of(runs)
    print("\n".join(table_of(figures)))
    if options.json:
        kept = {"runs": [asdict(run) for run in runs], "figures": [f._asdict() for f in figures]}
        options.json.write_text(json.dumps(kept, indent=1))
    failed = [run for run in runs if run.problem]
    print("\n".join(f"failed: {line_of(run)}" for run in failed))
    ours = [figure.correct for figure in figures if figure.contestant[:4] == "ours"]
    return 0 if all(ours) and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
