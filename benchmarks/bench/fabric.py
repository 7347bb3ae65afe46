"""`python -m moe_p2p fabric-check`: ten minutes on two hosts, and a report that can be sent back.

Each rank is started by torchrun or srun, as the bench is. Steps are processes beside the ranks, one
step after the other, each with a deadline (fabric_ranks.py): facts of each host (`doctor`),
`bench --check`, each rail, pairs beside NCCL, DeepEP's calls beside DeepEP and UCCL. A step that
fails is a line of the report; Ctrl-C leaves the report of what was measured. What is measured is
the bench's: the same functions, options and rows.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from moe_p2p import env, errors
from moe_p2p.bench import command, fabric_predicted, fabric_rails, fabric_report, harness
from moe_p2p.bench.fabric_private import Private, names_here, own_secrets
from moe_p2p.bench.fabric_ranks import (
    DONE,
    FAILED,
    LATE,
    SILENT,
    STOPPED,
    Ended,
    Ranks,
    StoppedError,
)
from moe_p2p.bench.options import CHECK
from moe_p2p.machine.models import MODELS
from moe_p2p.tools.doctor.examine import examine
from moe_p2p.tools.option_types import (
    Parser,
    above_zero,
    at_least_1,
    each_at_least_1,
    output_file,
    some_of,
)
from moe_p2p.version import __version__

FORMAT = 1  # of bundle.json; benchmarks/fabric_bundles.py reads it
STEPS = ("facts", "check", "rails", "pairs", "deep_ep")
LEFT_OUT, INTERRUPTED = "left out", "interrupted"
SHOWN = 4000  # characters of the output of a step that did not end well
PAGES = [8 << 10, 64 << 10, 1 << 20]
# A line of `bench --check`; log lines of any rank may stand before its verdict.
LINE = re.compile(
    r"^([^\n]+?) \.\.\. (?:.*?)(ok, [\d.]+ s|WRONG, [\d.]+ s|skipped: [^\n]*)$", re.M | re.S
)
# What the bench prints: an interface that a deep_ep does not serve, and what is wrong.
NOTE = re.compile(r"^deep_ep (?:low-latency|normal|v2): .*$", re.M)
WRONG = re.compile(r"^WRONG: (.*)$", re.M)
LAUNCH = (
    "start it on each host, as many ranks as it has GPUs: torchrun --nnodes 2 --nproc-per-node 8 "
    "--node-rank 0 --master-addr HOST -m moe_p2p fabric-check (--node-rank 1 on the second); srun "
    "needs RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT of each rank"
)


class Limits(NamedTuple):
    """Seconds: of the run, of each step, of all rails' figures, of pairs of one token count."""

    total_s: float
    of_step: dict[str, float]
    rails_s: float
    wait_s: float  # of a wait of rails
    pair_s: dict[str, float]  # by device
    request_bytes: int  # of a rail's request
    tokens: dict[str, tuple[int, ...]]

    def within(self, minutes: float) -> Limits:
        """The same figures, with deadlines in proportion."""
        times = 60 * minutes / self.total_s
        of_step = {kind: seconds * times for kind, seconds in self.of_step.items()}
        return self._replace(
            total_s=60 * minutes, of_step=of_step, wait_s=self.wait_s * max(1.0, times)
        )


WHOLE = Limits(
    total_s=600.0,
    of_step={"facts": 60.0, "check": 240.0, "rails": 90.0, "pairs": 150.0, "deep_ep": 120.0},
    rails_s=60.0,
    wait_s=10.0,
    pair_s={"cpu": 6.0, "cuda": 0.5},
    request_bytes=16 << 20,
    tokens={"cpu": (1, 8, 32, 128), "cuda": (8, 32, 128, 4096)},
)
QUICK = Limits(
    total_s=120.0,
    of_step={"facts": 20.0, "check": 70.0, "rails": 25.0, "pairs": 45.0, "deep_ep": 30.0},
    rails_s=8.0,
    wait_s=10.0,
    pair_s={"cpu": 1.5, "cuda": 0.2},
    request_bytes=4 << 20,
    tokens={"cpu": (8, 128), "cuda": (8, 128)},
)


@dataclass(frozen=True, kw_only=True)
class Options:
    quick: bool
    minutes: float | None  # of the whole run; None: as many as `Limits` has
    device: str
    out: str
    only: tuple[str, ...]
    beside: dict[str, str]  # label: folder of a `deep_ep`
    sizes: dict[str, Any]  # of the bench's pairs

    @property
    def limits(self) -> Limits:
        limits = QUICK if self.quick else WHOLE
        return limits.within(self.minutes) if self.minutes else limits


class Step(NamedTuple):
    """One step: what its processes call. left_out: why it does not run here."""

    kind: str  # one of STEPS
    name: str
    function: Callable[[Any], Any]
    given: Any
    left_out: str = ""


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """How a step ended, of the rank at which it ended worst, as the report shows it."""

    kind: str
    name: str
    how: str
    rank: int = 0
    seconds: float = 0.0
    why: str = ""
    output: str = ""  # its end


def main(arguments: list[str]) -> int:
    """0: all right; 1: results are wrong; 2: a step did not end well; 130: interrupted."""
    options = _parse(arguments)
    with _Signals() as signals:
        ranks: Ranks | None = None
        run: Run | None = None
        interrupted = ""
        try:
            cleaned = own_secrets().all_of
            ranks = Ranks(__name__, most_s=options.limits.total_s, cleaned=cleaned)
            if ranks.rank == 0:
                run = Run(options, ranks.size)
                run.measure(ranks)
            else:
                _follow(ranks, options)
        except (KeyboardInterrupt, StoppedError) as error:
            interrupted = str(error)
        signals.ignore()
        if interrupted and ranks is not None:
            ranks.stop()
        if run is not None:
            return run.finish(interrupted)
        if interrupted:
            print(f"fabric-check: {interrupted}", file=sys.stderr)
        return 130 if signals.seen else 2 if ranks is None else 0  # of the rest rank 0 reports


class _Signals:
    """The first of SIGINT, SIGTERM and SIGHUP raises KeyboardInterrupt; launchers send several."""

    _NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    seen = False

    def __enter__(self) -> _Signals:
        self._ignored = False
        self._before = [signal.signal(number, self._handle) for number in self._NUMBERS]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in zip(self._NUMBERS, self._before, strict=True):
            signal.signal(number, handler)

    def ignore(self) -> None:
        self._ignored = True

    def _handle(self, number: int, _: FrameType | None) -> None:
        if not self._ignored:
            self.seen = self._ignored = True
            raise KeyboardInterrupt(f"interrupted by {signal.Signals(number).name}")


def _follow(ranks: Ranks, options: Options) -> None:
    """What ranks other than the first do."""
    ranks.gather(names_here())
    ranks.begin()
    for step in _steps(options):
        if not step.left_out:
            ranks.run(step.function, step.given, 0.0)


class Run:
    """What rank 0 has so far, and the report of it."""

    def __init__(self, options: Options, num_ranks: int) -> None:
        self._options, self._began = options, time.monotonic()
        self._hosts = num_ranks // env.local_world_size()
        self._private = Private((), (), ())
        self._all, self._steps = list(_steps(options)), list[Stepped]()
        names = ("facts", "check", "wrong", "rails", "pairs")
        self._found: dict[str, list[Any]] = {name: [] for name in names}
        self._ranks = num_ranks

    def measure(self, ranks: Ranks) -> None:
        self._know(ranks.gather(names_here()))
        ranks.begin()
        self._began = time.monotonic()
        for number, step in enumerate(self._all):
            print(f"[{number + 1}/{len(self._all)}] {step.name}", end=" ", flush=True)
            self._take(step, self._run(ranks, step))

    def _run(self, ranks: Ranks, step: Step) -> list[Ended]:
        limits = self._options.limits
        left = limits.total_s - (time.monotonic() - self._began)
        if step.left_out:
            return [Ended(how=LEFT_OUT, output=step.left_out)]
        deadline_s = max(1.0, min(limits.of_step[step.kind], left))
        print(f"(at most {deadline_s:.0f} s) ...", end=" ", flush=True)
        return ranks.run(step.function, step.given, deadline_s)

    def _know(self, everyone: Sequence[dict[str, list[str]]]) -> None:
        local = env.local_world_size()
        hosts = [
            [name for rank in everyone[first : first + local] for name in rank["hosts"]]
            for first in range(0, len(everyone), local)
        ]
        users = [name for rank in everyone for name in rank["users"]]
        self._private = Private(env.private()["secret"], users, hosts)
        for number, rank in enumerate(everyone[::local]):
            print(f"host-{number} is {rank['hosts'][0]}, here alone: the report does not name it")

    def _take(self, step: Step, ended: list[Ended]) -> None:
        worst = next((each for each in ended if each.how == FAILED), None)
        worst = worst or next((each for each in ended if each.how != DONE), ended[0])
        first, local = ended[0], env.local_world_size()
        notes = NOTE.findall(first.output) if step.kind == "deep_ep" else []
        stepped = Stepped(
            kind=step.kind,
            name=step.name,
            how=worst.how,
            rank=ended.index(worst),
            seconds=max(each.seconds for each in ended),
            why="; ".join(dict.fromkeys(notes)) if worst.how == DONE else _why(worst),
            output=worst.output[-SHOWN:] if worst.how not in (DONE, LEFT_OUT) else "",
        )
        # Before the step counts as ended: a signal in between loses nothing.
        if step.kind == "facts":
            self._found["facts"] = [each.value for each in ended[::local] if each.value]
        elif step.kind == "check":
            self._found["check"] = _lines(first.output)
            self._found["wrong"] = list(dict.fromkeys(WRONG.findall(first.output)))
        elif step.kind == "rails":
            self._found["rails"] = first.value or []
        elif first.value:
            self._found["pairs"] += first.value["rows"]
        self._steps.append(stepped)
        print(f"{stepped.how}, {stepped.seconds:.1f} s {stepped.why}", flush=True)

    def finish(self, interrupted: str) -> int:
        """Writes the report and the bundle; returns the exit status."""
        if interrupted:
            for step in self._all[len(self._steps) :][:1]:
                self._steps.append(Stepped(kind=step.kind, name=step.name, how=INTERRUPTED))
        body = self._private.all_of(self._body(interrupted))
        out = Path(self._options.out)
        paths = fabric_report.write(body, out)
        print("\n".join(f"wrote {path}" for path in paths))
        print("the bundle has no secrets, names of hosts and users, or addresses; send it back")
        for text in body["wrong"]:
            print(f"WRONG: {text}", file=sys.stderr)
        if interrupted:
            return 128 + signal.SIGINT
        unwell = any(step.how not in (DONE, LEFT_OUT) for step in self._steps)
        return 1 if body["wrong"] else 2 if unwell else 0

    def _body(self, interrupted: str) -> dict[str, Any]:
        found = self._found
        name, nic = fabric_predicted.nic_of(found["rails"], found["facts"])
        comparable = fabric_predicted.is_comparable(found["rails"])
        rails = [
            row | {"predicted": fabric_predicted.of_rail(row, nic), "comparable": comparable}
            for row in found["rails"]
        ]
        pairs = [
            row | {"predicted": fabric_predicted.of_pair(row, nic), "comparable": comparable}
            for row in found["pairs"]
        ]
        told = [f"{line['name']}: {line['how']}" for line in found["check"] if line["wrong"]]
        wrong = found["wrong"] or told  # a check that was stopped has not said all
        wrong = wrong + [
            f"rank {row['rank']}, {row['way']}: {row['problem']}" for row in rails if row["problem"]
        ]
        wrong += sorted({text for row in pairs for text in row["wrong"]})
        return {
            "format": FORMAT,
            "version": __version__,
            "made": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
            "options": asdict(self._options) | {"beside": [*self._options.beside], "out": ""},
            "hosts": self._hosts,
            "ranks": self._ranks,
            "seconds": round(time.monotonic() - self._began, 1),
            "interrupted": interrupted,
            "model": {"nic": name} | nic.__dict__,
            "steps": [asdict(step) for step in self._steps],
            "facts": found["facts"],
            "check": found["check"],
            "rails": rails,
            "pairs": pairs,
            "wrong": wrong,
        }


def _why(ended: Ended) -> str:
    if ended.how == LEFT_OUT:
        return ended.output
    if ended.how == SILENT:
        return "the rank does not answer"
    lines = [line for line in ended.output.splitlines() if line.strip()]
    last = lines[-1][-300:] if lines else "no output"
    return {LATE: f"not done by its deadline; last: {last}", STOPPED: "another rank failed"}.get(
        ended.how, last
    )


def _lines(output: str) -> list[dict[str, Any]]:
    """Lines of `bench --check`."""
    return [
        {"name": name, "how": how, "wrong": how.startswith("WRONG")}
        for name, how in LINE.findall(output)
    ]


# --- steps ---


def _steps(options: Options) -> Iterator[Step]:
    """The same on all ranks."""
    limits, device, sizes = options.limits, options.device, dict(options.sizes)
    on, tokens = f"--device={device}", sizes.pop("tokens", None)
    shape = [f"--{name}={value}" for name, value in sizes.items()]
    check = [on, "--check", *shape, f"--hidden={min(sizes.get('hidden', 7168), CHECK['hidden'])}"]
    if options.quick:
        check += ["--checks=1", f"--ranks-per-node={env.local_world_size()}"]
    rails = fabric_rails.Given(device, PAGES, limits.request_bytes, limits.rails_s, limits.wait_s)
    timed = [on, *shape, f"--seconds={limits.pair_s[device]}"]
    timed += [f"--tokens={tokens}"] if tokens else []
    by_default = ",".join(map(str, limits.tokens[device]))
    pairs = [*timed, "--checks=2", *([] if tokens else [f"--tokens={by_default}"])]
    others = "NCCL" if device == "cuda" else "gloo (NCCL needs GPUs)"
    found = [
        Step("facts", "facts of each host", facts, None),
        Step("check", "correctness", checked, check),
        Step("rails", "each rail by the engine", fabric_rails.measure, rails),
        Step("pairs", f"dispatch and combine beside {others}", timed_pairs, ("", "", pairs)),
    ]
    for label, folder in options.beside.items():
        name, given = f"DeepEP's calls beside {label}", (label, folder, ["--api=deep_ep", *timed])
        found.append(Step("deep_ep", name, timed_pairs, given, _why_no_deep_ep(label, folder)))
    return (step for step in found if step.kind in options.only)


def _why_no_deep_ep(label: str, folder: str) -> str:
    if folder:
        return "" if Path(folder, "deep_ep").exists() else "its folder has no deep_ep"
    name = label.lower()
    if importlib.util.find_spec(name) is None:
        return f"{name} is not installed"
    return "" if name == "deep_ep" else f"--beside {name}=FOLDER says where its deep_ep is"


def facts(_: None) -> dict[str, Any]:
    """Of this host; of other ranks than its first, nothing."""
    if env.local_rank():
        return {}
    found = asdict(examine())
    return {"doctor": found, "settings": env.shown(), "python": sys.version.split()[0]}


def checked(arguments: list[str]) -> int:
    """Its lines are what it prints."""
    return command.main(arguments)


def timed_pairs(given: tuple[str, str, list[str]]) -> dict[str, Any]:
    """Rows of the bench, on rank 0. given: a label, the folder of its deep_ep, arguments."""
    label, folder, arguments = given
    if label:
        if folder:
            sys.path.insert(0, folder)
        label, arguments = f"{label} {_deep_ep_of()}", [*arguments, "--deep-ep-module=deep_ep"]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "rows.json")
        command.main([*arguments, f"--json={path}", "--plot="])
        rows = json.loads(path.read_text()) if path.exists() else []
    return {"rows": [row | {"beside": label} for row in rows]}


def _deep_ep_of() -> str:
    """Whose `deep_ep` is imported here."""
    import deep_ep  # type: ignore[import-not-found]  # another package, or none

    errors.require(
        not deep_ep.Buffer.__module__.startswith("moe_p2p"),
        "deep_ep is moe_p2p's own here: unset MOE_P2P_AS_DEEP_EP, and remove its link",
    )
    version = getattr(deep_ep, "__version__", "of no version")
    return f"{version}, UCCL's" if "uccl" in sys.modules else str(version)


# --- the command line ---


def _parse(arguments: list[str]) -> Options:
    parser = Parser(
        prog="python -m moe_p2p fabric-check",
        description="Correctness, each rail, and dispatch and combine beside others on the hosts "
        "of a job, in ten minutes: a report (HTML) and a bundle to send back.",
        epilog=f"To {LAUNCH}.",
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="two minutes: fewer checks and shapes")
    add(
        "--minutes",
        type=above_zero,
        help="for slow hosts: of the whole run, and with it the deadlines of its steps "
        "(10, with --quick 2)",
    )
    devices = ["auto", "cpu", "cuda"]
    add("--device", choices=devices, default="auto", help="auto: GPUs if any (auto)")
    add("--out", default="fabric_check", metavar="FOLDER", help="of the report (fabric_check)")
    add(
        "--only", type=some_of(STEPS), default=STEPS, help=f"steps, with commas ({','.join(STEPS)})"
    )
    add(
        *("--beside", "-b"),
        action="append",
        metavar="LABEL=FOLDER",
        help="a deep_ep that lies in this folder, under this name; several may be given",
    )
    add("--tokens", help="of each rank, with commas", type=each_at_least_1)
    add("--model", choices=list(MODELS), help="gives hidden, topk and experts")
    for name in ("hidden", "topk", "experts"):
        add(f"--{name}", type=at_least_1, help=f"as of bench: --{name}")
    given = parser.parse_args(arguments)
    beside = {"deep_ep": "", "UCCL": ""}
    for each in given.beside or []:
        label, _, folder = each.partition("=")
        if not (label and folder):
            parser.error(f"--beside {each}: give LABEL=FOLDER, the folder that holds deep_ep")
        beside[next((name for name in beside if name.lower() == label.lower()), label)] = folder
    if not env.launched() or env.world_size() < 2:
        parser.error(f"it needs two ranks or more: {LAUNCH}")
    sizes = {
        name: value
        for name in ("model", "hidden", "topk", "experts")
        if (value := getattr(given, name)) is not None
    }
    if given.tokens:
        sizes["tokens"] = ",".join(map(str, given.tokens))
    try:
        if env.rank() == 0:  # others would remove what it tries
            output_file(f"{given.out}/report.html")
    except argparse.ArgumentTypeError as error:
        parser.error(f"--out: {error}")
    return Options(
        quick=given.quick,
        minutes=given.minutes,
        device=harness.device_of(parser, given.device),
        out=given.out,
        only=given.only,
        beside=beside,
        sizes=sizes,
    )
