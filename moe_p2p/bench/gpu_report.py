"""Rows of figures of GPUs: as a table and as JSON. The plots are in gpu_plot.py."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.cuda import nccl

from moe_p2p import cuda_driver
from moe_p2p.bench.floors import Links

BOUNDARY = (
    "slowest rank of each round, CUDA events after all GPUs have met; pair: period of a chain of "
    "pairs, replayed from a CUDA graph or eager; dispatch and combine: one at a time"
)
BASELINE = (
    "torch: all_to_all_single over NCCL, one row per (token, expert), permutations and exchange of "
    "counts included; its host waits for the GPU in dispatch, so a graph cannot hold it"
)
WAYS = ("pair graph", "pair eager", "dispatch", "combine", "layer graph", "layer eager")


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Microseconds over the rounds."""

    p50_us: float
    p90_us: float
    p99_us: float
    min_us: float

    @staticmethod
    def of(spans_us: Tensor) -> Spread:
        at = torch.quantile(spans_us, torch.tensor([0.5, 0.9, 0.99, 0.0], dtype=spans_us.dtype))
        p50, p90, p99, least = (round(float(v), 2) for v in at)
        return Spread(p50_us=p50, p90_us=p90, p99_us=p99, min_us=least)


@dataclass(frozen=True, kw_only=True)
class Machine:
    device: str
    driver: str  # version of CUDA that it serves
    torch: str
    nccl: str

    @staticmethod
    def here() -> Machine:
        version_of_nccl: Any = nccl.version
        version = int(cuda_driver.call("cuDriverGetVersion"))
        return Machine(
            device=torch.cuda.get_device_name(),
            driver=f"{version // 1000}.{version % 1000 // 10}",
            torch=torch.__version__,
            nccl=".".join(map(str, version_of_nccl())),
        )


@dataclass(frozen=True, kw_only=True)
class GpuRow:
    system: str
    what: str  # one of WAYS
    ranks: int
    ranks_per_node: int
    tokens: int  # of each rank
    chunk_tokens: int
    num_steps: int
    num_sms: int  # 0: not limited
    layout: str
    hidden: int
    topk: int
    experts: int
    dtype: str
    routing: str
    settings: str  # of the transport
    nics: int
    rounds: int
    chain: int  # pairs between two events
    spread: Spread
    nvlink_bytes: int  # that leave the busiest GPU inside its node
    nic_bytes: int  # that leave the NICs of the busiest GPU
    wire_bytes: int | None  # between nodes, all ranks, as the engines counted; None: not counted
    expected_wire_bytes: int  # the same as it must be: once per (token, node)
    floor_us: float  # 0: not known
    links: Links
    machine: Machine
    correct: bool
    story: list[str] = field(default_factory=list)  # what is not

    @property
    def percent_of_push(self) -> float | None:
        """NVLink bytes over the time, as part of what a push alone reaches."""
        if not self.links.push_gbs or self.ranks_per_node < self.ranks or "layer" in self.what:
            return None
        return self.nvlink_bytes / self.spread.p50_us / 1e3 / self.links.push_gbs * 100

    @property
    def case(self) -> tuple[int, int, int, int, str]:
        """One line of the table."""
        return self.ranks_per_node, self.tokens, self.chunk_tokens, self.num_sms, self.system

    def as_json(self) -> dict[str, Any]:
        flat = asdict(self)
        for name in ("spread", "links", "machine"):
            flat |= flat.pop(name)
        flat["arrival_us"] = round(self.links.arrival_us, 2)
        percent = self.percent_of_push
        flat["percent_of_push"] = None if percent is None else round(percent, 1)
        flat["boundary"] = BOUNDARY
        return flat


def table(rows: list[GpuRow]) -> str:
    """One line per system and case; microseconds."""
    head = (
        "T", "chunk", "SMs", "system", "graph p50", "p99", "eager p50", "dispatch", "combine",
        "floor", "of push", "vs torch", "layer", "correct",
    )  # fmt: skip
    lines = [head, *(_line(rows, case) for case in dict.fromkeys(row.case for row in rows))]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def _line(rows: list[GpuRow], case: tuple[int, int, int, int, str]) -> tuple[str, ...]:
    ways = {row.what: row for row in rows if row.case == case}
    pair = headline(ways.values())
    assert pair is not None
    theirs = headline(row for row in rows if row.case[:2] == case[:2] and row.system == "torch")

    def p50(what: str) -> str:
        return f"{ways[what].spread.p50_us:,.1f}" if what in ways else "-"

    percent = pair.percent_of_push
    return (
        f"{pair.tokens}",
        f"{pair.chunk_tokens}" if pair.chunk_tokens else "-",
        f"{pair.num_sms}" if pair.num_sms else "all",
        pair.system,
        p50("pair graph"),
        f"{ways['pair graph'].spread.p99_us:,.1f}" if "pair graph" in ways else "-",
        p50("pair eager"),
        p50("dispatch"),
        p50("combine"),
        f"{pair.floor_us:,.1f}" if pair.floor_us else "-",
        f"{percent:.0f} %" if percent is not None else "-",
        f"{theirs.spread.p50_us / pair.spread.p50_us:.1f}x" if theirs else "-",
        p50("layer graph" if "layer graph" in ways else "layer eager"),
        "yes" if all(row.correct for row in ways.values()) else "NO",
    )


def headline(rows: Iterable[GpuRow]) -> GpuRow | None:
    """The row of the chained pair: replayed where that exists, else eager."""
    pairs = {row.what: row for row in rows if row.what.startswith("pair")}
    return pairs.get("pair graph") or pairs.get("pair eager")


def title(row: GpuRow) -> str:
    nodes = row.ranks // row.ranks_per_node
    world = f"{row.ranks} GPUs" if nodes == 1 else f"{nodes} emulated nodes of {row.ranks_per_node}"
    settings = f", {row.nics} NICs a GPU, {row.settings}" if nodes > 1 else ""
    return (
        f"{world} ({row.machine.device}), H {row.hidden}, top-{row.topk} of {row.experts}, "
        f"{row.dtype}, routing {row.routing}{settings}"
    )


def links_line(links: Links) -> str:
    parts = []
    if links.push_gbs:
        parts += [
            f"push {links.push_gbs:.0f} GB/s a GPU, {links.push_24_gbs:.0f} with 24 blocks",
            f"flag between GPUs and back {links.flag_us:.2f} us",
        ]
    parts += [
        f"host word to a kernel and back {links.pinned_us:.2f} us",
        f"arrival through the relay block {links.arrival_us:.2f} us",
    ]
    return "; ".join(parts)
