"""`python -m moe_p2p model`: predicted times of a pair, beside published ones.

python -m moe_p2p model                             EP8 to EP1024 over ConnectX-7
python -m moe_p2p model --nic efa --tokens 128      over EFA
python -m moe_p2p model --check                     the model of DeepEP against 39 measurements
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

from moe_p2p.tools import output
from moe_p2p.tools.draw import draw, plain_log
from moe_p2p.tools.model import phases, published
from moe_p2p.tools.model.phases import Pair
from moe_p2p.tools.model.wire import NICS, Job, Nic
from moe_p2p.tools.option_types import (
    Parser,
    above_zero,
    at_least_1,
    output_file,
    parsed_for_model,
    zero_or_more,
)

_RANKS, _TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024), (1, 8, 32, 128, 512, 4096)
_MOST_RANKS = 8192  # of a communicator
_MOST_DRAWN = 1 << 16  # tokens of a job whose routing is drawn: DeepEP's model
MARKERS = "o^vDP*X"  # a line for each number of tokens
PREDICTION = "a prediction, not a measurement"


class Row(NamedTuple):
    """One size. None: not computed."""

    job: Job
    ours: Pair
    flat: Pair | None
    deepep: Pair | None
    measured: Pair | None  # DeepEP's, published
    wire: float  # of ours: bytes of one rank at the NIC's goodput, both phases


def predict(job: Job, nic: Nic, fits: tuple[phases.Fit, phases.Fit] | None = None) -> Row:
    """fits: of DeepEP; None leaves it out."""
    several = job.nodes > 1
    known = {(p.ranks, p.tokens): p.pair for p in published.deepep_points()}
    drawn = fits is not None and several and job.ranks * job.tokens <= _MOST_DRAWN
    copies = job.tokens * job.distinct(job.nodes) * (job.nodes - 1) / job.nodes
    return Row(
        job,
        phases.ours(job, nic),
        phases.ours(job, nic, flat=True) if several and job.ranks <= 128 else None,
        phases.deepep(job, nic, fits) if drawn and fits is not None else None,
        known.get((job.ranks, job.tokens)),
        sum(nic.microseconds(copies * slot) for slot in phases.slot_bytes(job)) if several else 0.0,
    )


def _cell(pair: Pair | None) -> str:
    return f"{pair.dispatch:.0f} + {pair.combine:.0f}" if pair is not None else "-"


def table(rows: list[Row]) -> str:
    lines = [
        f"{'EP':>5}{'T':>6}{'ours':>16}{'pair':>7}{'wire':>7}{'a copy per rank':>18}"
        f"{'DeepEP V1':>16}{'published':>16}"
    ]
    lines += [
        f"{row.job.ranks:5}{row.job.tokens:6}{_cell(row.ours):>16}{row.ours.total:7.0f}"
        f"{row.wire:7.0f}{_cell(row.flat):>18}{_cell(row.deepep):>16}{_cell(row.measured):>16}"
        for row in rows
    ]
    return "\n".join(lines)


def checked(found: list[published.Checked]) -> tuple[str, bool]:
    """Returns a line per published point, and whether the model holds at all of them."""
    lines = [f"{'EP':>5}{'T':>6}{'dispatch':>10}{'model':>7}{'':>7}{'combine':>9}{'model':>7}"]
    good = True
    for each in found:
        cells = ""
        for phase in (0, 1):
            measured, modelled = each.point.pair[phase], each.model[phase]
            good &= each.holds(phase)
            mark = "" if each.holds(phase) else " !"
            cells += f"{measured:10.1f}{modelled:7.1f}{modelled - measured:+6.1f}{mark}"
        lines.append(f"{each.point.ranks:5}{each.point.tokens:6}{cells}")
    return "\n".join(lines), good


def main(arguments: list[str]) -> int:
    """Exit status 1: --check found a point outside 10% and 8 us."""
    given = parsed_for_model(parser := _parser(), arguments)
    nic = dataclasses.replace(NICS[given.nic], **_given(given, "gbps", "latency_us"))
    sizes = _given(given, "ranks_per_node", "hidden", "topk", "experts")
    jobs = [
        Job(ranks=ranks, tokens=tokens, **sizes) for ranks in given.ranks for tokens in given.tokens
    ]
    for job in jobs:
        if problem := _problem(job):
            parser.error(problem)
    points = published.deepep_points()
    fits = published.deepep_fits(points)
    print("fitted on DeepEP's points of 16 ranks, all else from other sources:")
    for name, fitted in zip(("dispatch", "combine"), fits, strict=True):
        goodput = f"{fitted.goodput:.1%} of 400 Gbit/s"
        print(f"  {name}: {fitted.fixed_us:.1f} us beside the wire, {goodput}")
    if given.check:
        text, good = checked(published.check(points, fits))
        print(f"DeepEP V1, low latency, published and modelled, us; ! outside 10% and 8 us\n{text}")
        return 0 if good else 1
    rows = [predict(job, nic, fits) for job in jobs]
    print(f"\ndispatch + combine, us, {given.nic} at {nic.gbps:g} Gbit/s: {PREDICTION}")
    print(table(rows))
    print("\nmeasured by others, 128 tokens a rank:")
    for point in published.OTHERS:
        print(f"{point.ranks:5}  {_cell(point.pair):>10}  {point.what}")
    if given.json:
        output.write(given.json, json.dumps([_as_json(row) for row in rows], indent=1) + "\n")
    if given.plot:
        heading = f"Dispatch + combine, {given.nic}, {nic.gbps:g} Gbit/s a GPU: {PREDICTION}"
        missing = draw(Path(given.plot), heading, lambda axis: _paint(axis, rows), figsize=(7, 6))
        print(missing or f"plot: {given.plot}")
    return 0


def _problem(job: Job) -> str:
    """Why there is no such job; empty: there is."""
    if job.ranks > _MOST_RANKS:
        return f"--ranks {job.ranks}: at most {_MOST_RANKS}"
    if job.ranks > job.ranks_per_node and job.ranks % job.ranks_per_node:
        return f"--ranks {job.ranks} is not a multiple of --ranks-per-node {job.ranks_per_node}"
    if job.topk > job.num_experts:
        return f"--topk {job.topk} is more than the {job.num_experts} experts (--experts)"
    return ""


def _several(numbers: tuple[int, ...]) -> str:
    return " ".join(map(str, numbers))


def _given(given: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(given, name)) is not None}


def _as_json(row: Row) -> dict[str, Any]:
    pairs = {name: getattr(row, name) for name in ("ours", "flat", "deepep", "measured")}
    named = {name: pair and pair._asdict() for name, pair in pairs.items()}
    return dataclasses.asdict(row.job) | named | {"wire": row.wire}


def _paint(axis: Any, rows: list[Row]) -> None:
    """Pairs against the number of ranks, a line for each number of tokens."""
    for number, tokens in enumerate(sorted({row.job.tokens for row in rows})):
        of_one = [row for row in rows if row.job.tokens == tokens]
        color, marker = f"C{number}", MARKERS[number % len(MARKERS)]
        ranks, label = [row.job.ranks for row in of_one], f"ours, T {tokens:,}"
        axis.plot(
            ranks, [row.ours.total for row in of_one], color=color, marker=marker, label=label
        )
        theirs = [(row.job.ranks, row.measured.total) for row in of_one if row.measured]
        if theirs:
            axis.scatter(*zip(*theirs, strict=True), color=color, marker="s", s=60, fc="none")
    axis.scatter([], [], color="grey", marker="s", s=60, fc="none", label="DeepEP V1, published")
    node = rows[0].job.ranks_per_node
    axis.set(xscale="log", yscale="log", ylabel="µs")
    axis.set_xlabel(f"ranks (up to {node}: one node, NVLink alone)")
    plain_log(axis, ticks=sorted({row.job.ranks for row in rows}))
    axis.grid(visible=True, alpha=0.3)
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.12), "ncols": 3}
    axis.legend(**below, fontsize=9, title="T: tokens of a rank")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m moe_p2p model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Defaults in parentheses.",
    )
    parser.add_argument(
        "--ranks",
        type=at_least_1,
        nargs="+",
        default=_RANKS,
        help=f"of a world ({_several(_RANKS)})",
    )
    parser.add_argument(
        "--tokens",
        type=at_least_1,
        nargs="+",
        default=_TOKENS,
        help=f"per rank ({_several(_TOKENS)})",
    )
    parser.add_argument("--nic", choices=sorted(NICS), default="cx7", help="one per GPU (cx7)")
    parser.add_argument("--gbps", type=above_zero, help="its rate, Gbit/s (400)")
    parser.add_argument(
        "--latency-us", type=zero_or_more, help="one way of a small write (the NIC's)"
    )
    parser.add_argument("--ranks-per-node", type=at_least_1, help="ranks of a node (8)")
    parser.add_argument("--hidden", type=at_least_1, help="hidden size (7168)")
    parser.add_argument("--topk", type=at_least_1, help="experts per token (8)")
    parser.add_argument(
        "--experts",
        type=at_least_1,
        help="of all ranks (256, or one of each rank if there are more)",
    )
    parser.add_argument("--check", action="store_true", help="DeepEP's points, one by one")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="rows (none)")
    parser.add_argument("--plot", type=output_file, metavar="FILE", help="PNG (none)")
    return parser
