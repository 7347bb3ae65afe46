"""Rows of figures of GPUs: as a table and as JSON. The plots are in gpu_plot.py."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.cuda import nccl

from moe_p2p.gpu import driver
from moe_p2p.tools.bench.floors import Links

BOUNDARY = (
    "slowest rank of each round, CUDA events after all GPUs have met; pair: period of a chain of "
    "pairs with nothing in between, replayed from a CUDA graph or eager; dispatch and combine: one "
    "at a time, both: their sum, to which a layer with experts in between is nearer; caches are "
    "warm but with --flush, which empties them before each dispatch and combine; host: how long "
    "the host of the slowest rank works in an eager pair, its waits for the GPU taken off; bound "
    "by: the host where that is more than half of the pair, which then says little of links; rows "
    "and weights change between rounds; correct: what JSON says under compared"
)
BASELINE = (
    "torch: all_to_all_single over NCCL, one row per (token, expert), permutations and exchange of "
    "counts included; its host waits for the GPU in dispatch, so a graph cannot hold it"
)
HOST_BOUND = 0.5  # of an eager pair: where its host works longer, the GPU waits more than it works
HALVES = ("dispatch send", "dispatch receive", "combine send", "combine receive")
WAYS = ("pair graph", "pair eager", "dispatch", "combine", *HALVES, "layer graph", "layer eager")


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
        version = int(driver.call("cuDriverGetVersion"))
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
    flushed: bool  # caches, before each part that was measured apart
    spread: Spread
    nvlink_bytes: int  # that leave the busiest GPU inside its node
    nic_bytes: int  # that leave the NICs of the busiest GPU
    wire_bytes: int | None  # between nodes, all ranks, as the engines counted; None: not counted
    expected_wire_bytes: int  # the same as it must be: once per (token, node)
    payload_wire_bytes: int  # of a pair: rows and scales alone, once per (token, node)
    floor_us: float  # 0: not known
    links: Links
    machine: Machine
    correct: bool
    host_us: float = 0.0  # that the host works, without its waits for the GPU; 0: not measured
    compared: str = ""  # what `correct` is about
    story: list[str] = field(default_factory=list)  # what is not

    @property
    def percent_of_push(self) -> float | None:
        """NVLink bytes over the time, as part of what a push alone reaches."""
        if not self.links.push_gbs or self.ranks_per_node < self.ranks or "layer" in self.what:
            return None
        if self.system != "moe_p2p" or "receive" in self.what:
            return None  # others send other bytes, and a receiving half none
        return self.nvlink_bytes / self.spread.p50_us / 1e3 / self.links.push_gbs * 100

    @property
    def host_bound(self) -> bool | None:
        """Whether the GPU waits for its host more than it works; None: not measured."""
        return self.host_us > HOST_BOUND * self.spread.p50_us if self.host_us else None

    @property
    def limit_us(self) -> float | None:
        """What a pair between nodes may take: half as long again as the wire alone, and 25 us."""
        if self.ranks_per_node == self.ranks or not self.what.startswith("pair"):
            return None
        return 1.5 * self.floor_us + 25.0 if self.floor_us else None

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
        flat["host_bound"] = self.host_bound
        flat["limit_us"] = None if self.limit_us is None else round(self.limit_us, 1)
        flat["boundary"] = BOUNDARY
        return flat


def table(rows: list[GpuRow]) -> str:
    """One line per system and case of one world; microseconds."""
    columns = [_columns(rows, case) for case in dict.fromkeys(row.case for row in rows)]
    lines = [tuple(columns[0]), *(tuple(line.values()) for line in columns)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def _columns(rows: list[GpuRow], case: tuple[int, int, int, int, str]) -> dict[str, str]:
    """Cells by heading."""
    ways = {row.what: row for row in rows if row.case == case}
    pair = headline(ways.values())
    assert pair is not None
    graph, eager = ways.get("pair graph"), ways.get("pair eager")

    def p50(what: str) -> str:
        return f"{ways[what].spread.p50_us:,.1f}" if what in ways else "-"

    apart = [ways[what].spread.p50_us for what in ("dispatch", "combine") if what in ways]
    both = f"{sum(apart):,.1f}" if len(apart) == 2 else "-"

    cells = {
        "T": f"{pair.tokens}",
        "chunk": f"{pair.chunk_tokens}" if pair.chunk_tokens else "-",
        "SMs": f"{pair.num_sms}" if pair.num_sms else "all",
        "system": pair.system,
        "graph p50": p50("pair graph"),
        "p99": f"{graph.spread.p99_us:,.1f}" if graph else "-",
        "eager p50": p50("pair eager"),
        "host": f"{eager.host_us:,.1f}" if eager and eager.host_us else "-",
        "bound by": {True: "host", False: "GPU", None: "-"}[eager.host_bound if eager else None],
        "dispatch": p50("dispatch"),
        "combine": p50("combine"),
        "both": both,
        "floor": f"{pair.floor_us:,.1f}" if pair.floor_us else "-",
    }
    cells |= _against_one_node(rows, pair) if pair.ranks_per_node == pair.ranks else _wire(pair)
    if any(row.what in HALVES for row in rows):
        cells |= {what: p50(what) for what in HALVES}
    if any("layer" in row.what for row in rows):
        cells["layer"] = p50("layer graph" if "layer graph" in ways else "layer eager")
    return cells | {"correct": "yes" if all(row.correct for row in ways.values()) else "NO"}


def _against_one_node(rows: list[GpuRow], pair: GpuRow) -> dict[str, str]:
    percent = pair.percent_of_push
    same_call = [row for row in rows if row.case[:2] == pair.case[:2]]
    theirs = headline(row for row in same_call if row.system == "torch")
    return {
        "of push": f"{percent:.0f}%" if percent is not None else "-",
        "vs torch": f"{theirs.spread.p50_us / pair.spread.p50_us:.1f}x" if theirs else "-",
    }


def _wire(pair: GpuRow) -> dict[str, str]:
    """A NIC's mean share of a pair, as it was counted and without heads and padding."""
    kib = 1024 * pair.ranks * pair.nics
    return {
        "limit": f"{pair.limit_us:,.1f}" if pair.limit_us else "-",
        "KiB/NIC": f"{pair.wire_bytes / kib:,.1f}" if pair.wire_bytes is not None else "-",
        "rows alone": f"{pair.payload_wire_bytes / kib:,.1f}",
    }


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
