"""`python -m moe_p2p doctor`: what this machine, or a job's hosts, have and lack for moe_p2p."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from moe_p2p import env, errors
from moe_p2p.tools import fence_probe
from moe_p2p.tools.doctor import hosts, job_text, ranks, text
from moe_p2p.tools.doctor.examine import examine, software
from moe_p2p.tools.doctor.job import Answer, Job, judge_job
from moe_p2p.tools.option_types import Parser, above_zero


def main(arguments: list[str]) -> int:
    """Prints the report. 0: usable; 1: problems were found; 2: nothing was examined."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.fence:
        return fence_probe.main()
    problems = {
        "--hosts and --ranks: pass one of them": given.hosts is not None and given.ranks,
        "--launcher and --python are of --hosts; name the hosts": given.hosts is None
        and (given.launcher, given.python) != (None, None),
    }
    for problem, holds in problems.items():
        if holds:
            parser.error(problem)
    if given.hosts is not None or given.ranks:
        try:
            return _job(given)
        except errors.MoeP2pError as error:
            print(f"doctor: {error}", file=sys.stderr)
            return 2
    report = examine(writes=not given.no_writes)
    _print(given.json, report, text.render)
    return 1 if report.problems else 0


def _job(given: argparse.Namespace) -> int:
    if given.ranks:
        errors.require(env.launched(), "--ranks: torchrun started no ranks here (RANK is not set)")
        store = ranks.meet(given.timeout)
        found = ranks.answers(store, given.timeout, writes=not given.no_writes)
        status = _judged(given, found) if found else None
        return ranks.share_status(store, status, given.timeout)
    names, launcher = (
        hosts.names_of(given.hosts),
        hosts.split_launcher("ssh" if given.launcher is None else given.launcher),
    )
    program = [given.python or sys.executable, "-m", "moe_p2p", "doctor", "--json"]
    program += ["--no-writes"] if given.no_writes else []
    return _judged(given, hosts.ask(names, launcher, program, given.timeout))


def _judged(given: argparse.Namespace, answers: dict[str, Answer]) -> int:
    job: Job = judge_job(answers, software())
    _print(given.json, job, job_text.render)
    return 1 if job.problems else 0


def _print(as_json: bool, found: Any, render: Callable[..., str]) -> None:
    if as_json:
        print(json.dumps(asdict(found), indent=2), flush=True)
    else:
        print(render(found, red=sys.stdout.isatty() and env.colour()), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m moe_p2p doctor",
        description="What this machine, or the hosts of a job, have and lack for moe_p2p.",
    )
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON")
    add("--no-writes", action="store_true", help="open no engines")
    add("--fence", action="store_true", help="only: may KV fence by queue pair?")
    add("--hosts", metavar="A,B", help="one page for these hosts (none)")
    add(
        "--launcher",
        metavar="COMMAND",
        help="that reaches them: ssh or srun, with its options: 'ssh -p 2222' (ssh)",
    )
    add(
        "--python",
        metavar="FILE",
        help="Python of these hosts, where moe_p2p is installed (this one)",
    )
    add("--ranks", action="store_true", help="one page for the hosts of torchrun's ranks")
    add(
        "--timeout",
        type=above_zero,
        default=120.0,
        metavar="SECONDS",
        help="by which hosts have answered (120)",
    )
    return parser
