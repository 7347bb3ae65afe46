"""Rows of `--api deep_ep`: as a table and as JSON. The shim, AllToAll and DeepEP side by side."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from moe_p2p.bench.cases import Job
from moe_p2p.bench.gpu_measure import Timed
from moe_p2p.bench.gpu_report import BOUNDARY as GPU_BOUNDARY
from moe_p2p.bench.gpu_report import Spread
from moe_p2p.bench.options import Options

_COLUMNS = ("pair graph", "pair eager", "dispatch", "combine")
BOUNDARY = {
    "cuda": f"{GPU_BOUNDARY}; host: until the calls of an eager pair return, of pairs in a row; "
    "host alone: of one, the device idle before",
    "cpu": "slowest rank of each round, from a barrier to its own result",
}


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


def table(rows: list[ApiRow]) -> str:
    """One line per system of an interface and a number of tokens; microseconds, p50."""
    cases = dict.fromkeys((row.interface, row.tokens, row.system) for row in rows)
    columns = ("calls", "T", "SMs", "system", *_COLUMNS, "host", "host alone", "correct")
    lines: list[tuple[str, ...]] = [columns]
    for case in cases:
        mine = [row for row in rows if (row.interface, row.tokens, row.system) == case]
        p50 = {row.what: f"{row.spread.p50_us:,.1f}" for row in mine}
        first = mine[0]
        host = (first.host_us, first.host_alone_us)
        lines.append(
            (
                first.interface,
                f"{first.tokens}",
                f"{first.num_sms}" if first.num_sms else "all",
                first.system,
                *(p50.get(what, "-") for what in _COLUMNS),
                *("-" if us is None else f"{us:,.1f}" for us in host),
                "yes" if all(row.correct for row in mine) else "NO",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
