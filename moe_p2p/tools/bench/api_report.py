"""Rows of `--api deep_ep`: a table, JSON, a plot. The shim, AllToAll and DeepEP side by side."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moe_p2p.tools.bench.cases import Job
from moe_p2p.tools.bench.drawing import draw
from moe_p2p.tools.bench.gpu_measure import Timed
from moe_p2p.tools.bench.gpu_report import BOUNDARY as GPU_BOUNDARY
from moe_p2p.tools.bench.gpu_report import Spread
from moe_p2p.tools.bench.options import Options

_COLUMNS = ("pair graph", "pair eager", "dispatch", "combine")
_GPU_COLUMNS = ("SMs", "pair graph", "host", "host alone")
BOUNDARY = {
    "cuda": f"{GPU_BOUNDARY}; host: until the calls of an eager pair return, of pairs in a row; "
    "host alone: of one, the device idle before",
    "cpu": "slowest rank of each round, from a barrier to its own result",
}
UNIT = {"cuda": "microseconds", "cpu": "milliseconds"}  # of tables and plots; JSON: microseconds
SAME_WORK = (
    "each system is given the same and returns the same rows: low-latency by expert, quantized "
    "inside; normal and v2 by rank, quantized by the caller"
)


class HostTime(NamedTuple):
    """Until the calls of an eager pair return; None on CPUs, where the calls are the work."""

    us: float | None  # of pairs in a row, as an engine issues them
    alone_us: float | None  # of one when the ranks have met: caches are cold, the CPU has slept


@dataclass(frozen=True, kw_only=True)
class ApiRow:
    interface: str  # low-latency, normal or v2
    system: str
    what: str  # one of gpu_report.WAYS
    device: str
    ranks: int
    tokens: int  # of each rank
    num_sms: int  # 0: not limited
    hidden: int
    topk: int
    experts: int
    dtype: str
    routing: str
    rounds: int
    chain: int  # pairs between two events
    spread: Spread
    host_us: float | None  # as in HostTime
    host_alone_us: float | None
    correct: bool
    story: list[str] = field(default_factory=list)  # what is not

    @staticmethod
    def of(
        options: Options,
        job: Job,
        interface: str,
        timed: Timed,
        *,
        host: HostTime,
        story: list[str],
    ) -> ApiRow:
        device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
        return ApiRow(
            interface=interface,
            system=timed.calls.system.split()[0],
            what=timed.what,
            device=device,
            ranks=options.ranks,
            tokens=options.tokens[0],
            num_sms=timed.calls.num_sms,
            hidden=job.hidden_dim,
            topk=job.topk,
            experts=job.topology.num_experts,
            dtype=options.dtype,
            routing=options.trace or options.routing,
            rounds=len(timed.spans_us),
            chain=timed.chain,
            spread=Spread.of(timed.spans_us),
            host_us=host.us,
            host_alone_us=host.alone_us,
            correct=not story,
            story=story,
        )

    def as_json(self) -> dict[str, Any]:
        flat = asdict(self)
        flat |= flat.pop("spread")
        return flat | {"boundary": BOUNDARY["cpu" if self.device == "cpu" else "cuda"]}


def title(row: ApiRow) -> str:
    return (
        f"{row.ranks} ranks ({row.device}), H {row.hidden}, top-{row.topk} of {row.experts}, "
        f"{row.dtype}, routing {row.routing}"
    )


def _shown(row: ApiRow, us: float) -> str:
    return f"{us / 1000:,.2f}" if row.device == "cpu" else f"{us:,.1f}"


def table(rows: list[ApiRow]) -> str:
    """One line per system of an interface and a number of tokens; p50, in UNIT of the device.

    Columns that mean nothing on CPUs are left out there.
    """
    cases = dict.fromkeys((row.interface, row.tokens, row.system) for row in rows)
    columns = ("calls", "T", "SMs", "system", *_COLUMNS, "host", "host alone", "correct")
    lines: list[tuple[str, ...]] = [columns]
    for case in cases:
        mine = [row for row in rows if (row.interface, row.tokens, row.system) == case]
        p50 = {row.what: _shown(row, row.spread.p50_us) for row in mine}
        first = mine[0]
        host = (first.host_us, first.host_alone_us)
        lines.append(
            (
                first.interface,
                f"{first.tokens}",
                f"{first.num_sms}" if first.num_sms else "all",
                first.system,
                *(p50.get(what, "-") for what in _COLUMNS),
                *("-" if us is None else _shown(first, us) for us in host),
                "yes" if all(row.correct for row in mine) else "NO",
            )
        )
    if rows[0].device == "cpu":
        kept = [i for i, name in enumerate(columns) if name not in _GPU_COLUMNS]
        lines = [tuple(line[i] for i in kept) for line in lines]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def plot(rows: list[ApiRow], path: Path) -> str | None:
    """A group of bars for each interface and number of tokens; returns why it was not drawn."""
    pairs = [row for row in rows if row.what == "pair eager"]  # all systems and devices have it
    groups = list(dict.fromkeys((row.interface, row.tokens) for row in pairs))
    systems = list(dict.fromkeys(row.system for row in pairs))
    unit_us = 1000 if rows[0].device == "cpu" else 1

    def paint(axis: Any) -> None:
        width = 0.8 / len(systems)
        for i, system in enumerate(systems):
            mine = [row for row in pairs if row.system == system]
            at = [groups.index((r.interface, r.tokens)) + (i + 0.5) * width - 0.4 for r in mine]
            heights = [row.spread.p50_us / unit_us for row in mine]
            bars = axis.bar(at, heights, 0.95 * width, label=system)
            axis.bar_label(bars, [f"{height:,.3g}" for height in heights], fontsize=8)
        axis.set_xticks(range(len(groups)), [f"{calls}\n{count} tokens" for calls, count in groups])
        unit = UNIT["cpu" if unit_us > 1 else "cuda"]
        axis.set(ylabel=f"dispatch and combine, p50, {unit}")
        axis.margins(y=0.12)
        axis.legend(fontsize=8)

    return draw(path, title(rows[0]), paint, figsize=(3 + 1.6 * len(groups), 4.4))
