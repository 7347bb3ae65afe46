"""Rows of figures: as a table and as JSON. The plot is in plot.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.cuda import nccl

from moe_p2p.bench import harness
from moe_p2p.machine import driver
from moe_p2p.tools.probe import Links

BOUNDARY = {
    "cuda": "slowest rank of each round, CUDA events after all GPUs have met; pair: period of a "
    "chain of pairs with nothing in between, replayed from a CUDA graph or eager; dispatch and "
    "combine: one at a time, both: their sum, to which a layer with experts in between is nearer; "
    "caches are warm but with --flush, which empties them before each dispatch and combine; rows "
    "and weights change between rounds; correct: what JSON says under compared",
    "cpu": "slowest rank of each round, from a barrier's end to its own result; pair: dispatch and "
    "combine with nothing in between; inputs change between rounds; bytes: of all ranks between "
    "nodes, of a pair",
}
BASELINE = {
    "cuda": "torch: all_to_all_single over NCCL, one row per (token, expert), permutations and "
    "exchange of counts included; its host waits for the GPU in dispatch, so a graph cannot hold "
    "it",
    "cpu": "torch: all_to_all_single over gloo, one row per (token, expert); TCP, where on one "
    "host moe_p2p's nodes talk through its software NIC",
}
HOST = (
    "host: how long the host of the slowest rank works in an eager pair, its waits for the GPU "
    "taken off; bound by: the host where that is more than half of the pair, which then says "
    "little of links"
)
HOST_OF_CALLS = (
    "host: until the calls of an eager pair return, of pairs in a row; two add_: until two bare "
    "launches of the same process do, in turns with them, and host divided by that; host alone: of "
    "one pair, the device idle before"
)
MESSAGES = (
    "writes, imms, fences: work requests of a pair between nodes, of all ranks; arrival is a count "
    "of immediates, which needs no fence (docs/protocol.md); DeepEP's: a write for each (token, "
    "expert on another node) and a flag for each (source, such expert), each of which takes a "
    "fence where a proxy orders flags by fences"
)
# Until a waiting block sees a word that was stored into its own GPU's memory.
FLAG_US = 0.5
HOST_BOUND = 0.5  # of an eager pair: longer host work means that the GPU mostly waits
SAME_WORK = (
    "each system is given the same and returns the same rows: low-latency by expert, quantized "
    "inside; normal and v2 by rank, quantized by the caller"
)
MIRROR = (
    "mirrored: each GPU is rank 0 of all ranks and its partner plays the others; without skew of "
    "many ranks and without several senders to one GPU (docs/gpu.md); floor: bytes of all ranks "
    "over the push bandwidth of this run"
)
HALVES = ("dispatch send", "dispatch receive", "combine send", "combine receive")
LAYER = (
    "layer: dispatch, experts, combine; experts: alone, on rows of an earlier dispatch, and what "
    "they leave of the layer is the pair's share; weights: least time in which this GPU's memory "
    "gives all weights of the rank's experts once, by its clock and width; overlap: "
    "multiprocessors on which combine sends while the last product runs; each layer was compared "
    "with plain products in fp32 before timing"
)
# "experts": alone.
WAYS = (
    *("pair graph", "pair eager", "dispatch", "combine", *HALVES),
    *("layer graph", "layer eager", "experts graph", "experts eager"),
)


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
    device: str  # name of the GPU, or cpu
    driver: str  # CUDA version that it supports
    torch: str
    nccl: str
    hosts: int = 1
    memory_gbs: float = 0.0  # of its memory at its highest clock; 0: not known

    @staticmethod
    def here(*, on_cuda: bool, hosts: int) -> Machine:
        if not on_cuda:
            return Machine(device="cpu", driver="", torch=torch.__version__, nccl="", hosts=hosts)
        version_of_nccl: Any = nccl.version
        version = int(driver.call("cuDriverGetVersion"))
        return Machine(
            device=torch.cuda.get_device_name(),
            driver=f"{version // 1000}.{version % 1000 // 10}",
            torch=torch.__version__,
            nccl=".".join(map(str, version_of_nccl())),
            hosts=hosts,
            memory_gbs=_memory_gbs(torch.cuda.current_device()),
        )


def _memory_gbs(device: int) -> float:
    """Returns GB/s: twice a clock, as all memory of GPUs, and its width."""
    khz = driver.attribute(device, "MEMORY_CLOCK_RATE")
    return round(2 * khz * driver.attribute(device, "GLOBAL_MEMORY_BUS_WIDTH") / 8e6, 1)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way of timing one system."""

    system: str
    what: str  # one of WAYS
    interface: str = ""  # DeepEP's: low-latency, normal or v2
    ranks: int
    ranks_per_node: int
    mirrored_on: int = 0  # GPUs that play all ranks (docs/gpu.md, "The mirror world"); 0: none do
    tokens: int  # of each rank
    chunk_tokens: int
    num_steps: int
    num_sms: int  # 0: not limited
    layout: str
    gemm: str = ""  # products of a layer
    overlap_sms: int = 0  # multiprocessors that combine held beside the last product
    weights_us: float = 0.0  # least time of reading the weights of the experts once; 0: not known
    hidden: int
    topk: int
    experts: int
    dtype: str
    routing: str
    settings: str  # of the transport
    nics: int
    rounds: int
    chain: int  # pairs between two events
    flushed: bool  # caches were cleared before each part that was measured apart
    spread: Spread
    host_us: float | None = None  # HOST, or with an interface HOST_OF_CALLS; None: not measured
    adds_us: float | None = None  # of two bare launches, beside host_us
    host_alone_us: float | None = None
    nvlink_bytes: int  # that leave the busiest GPU inside its node
    nic_bytes: int  # that leave the NICs of the busiest GPU
    wire_bytes: int | None  # between nodes, all ranks, as the engines counted; None: not counted
    expected_wire_bytes: int  # the same by routing: once per (token, node)
    floor_bytes: int  # of expected_wire_bytes, rows and scales alone
    flat_floor_bytes: int  # the same, were a token sent once for each expert on another node
    # Between nodes, all ranks: as the engines counted them, and by DeepEP V1's scheme (floors.py).
    wire_writes: int | None = None
    wire_immediates: int | None = None
    deepep_writes: int = 0
    deepep_flags: int = 0
    floor_us: float  # of the busiest rank; 0: not known
    max_vio: float = 0.0  # of the routing, and how much more the busiest rank gets than the mean
    busiest: float = 1.0
    links: Links
    machine: Machine
    correct: bool
    compared: str = ""  # what `correct` compares
    wrong: list[str] = field(default_factory=list)  # its errors
    hops: dict[str, float] = field(default_factory=dict)  # of a pair over the timed NIC, hops.py

    @property
    def on_cuda(self) -> bool:
        return self.machine.device != "cpu"

    @property
    def of_layer(self) -> bool:
        return self.what.split()[0] in ("layer", "experts")

    @property
    def percent_of_push(self) -> float | None:
        """NVLink bytes over the time, as a percentage of what a push alone reaches."""
        if not self.links.push_gbs or self.ranks_per_node < self.ranks or self.of_layer:
            return None
        if self.system != "moe_p2p" or "receive" in self.what:
            return None  # others send other bytes, a receiving half sends none
        return self.nvlink_bytes / self.spread.p50_us / 1e3 / self.links.push_gbs * 100

    @property
    def host_bound(self) -> bool | None:
        """Whether the GPU waits for its host more than it works; None: not measured."""
        if self.interface or self.host_us is None:
            return None
        return self.host_us > HOST_BOUND * self.spread.p50_us

    @property
    def limit_us(self) -> float | None:
        """Limit of a pair between nodes: half as long again as the wire alone, and 25 us."""
        if self.ranks_per_node == self.ranks or not self.what.startswith("pair"):
            return None
        return 1.5 * self.floor_us + 25.0 if self.floor_us and self.on_cuda else None

    @property
    def wire_fences(self) -> int | None:
        """Work requests that wait for others of their queue: no provider posts any."""
        return None if self.wire_writes is None else 0

    @property
    def world(self) -> tuple[int, int, str]:
        return self.ranks, self.ranks_per_node, self.interface

    @property
    def case(self) -> tuple[Any, ...]:
        """One line of the table."""
        return *self.world, self.tokens, self.chunk_tokens, self.num_sms, self.system

    def as_json(self) -> dict[str, Any]:
        flat = asdict(self)
        for name in ("spread", "links", "machine"):
            flat |= flat.pop(name)
        if not self.hops:
            del flat["hops"]
        percent, limit = self.percent_of_push, self.limit_us
        return flat | {
            "arrival_us": round(self.links.arrival_us, 2),
            "tokens_per_s": round(self.ranks * self.tokens / self.spread.p50_us * 1e6),
            "percent_of_push": None if percent is None else round(percent, 1),
            "host_bound": self.host_bound,
            "wire_fences": self.wire_fences,
            "limit_us": None if limit is None else round(limit, 1),
            "boundary": BOUNDARY["cuda" if self.on_cuda else "cpu"],
        }


def baseline_of(row: Row, rows: Iterable[Row]) -> Row | None:
    """Returns torch's row of the same job; for a chained pair the eager one: no graph holds it."""
    what = "pair eager" if row.what == "pair graph" else row.what
    for other in rows:
        same = (other.world, other.tokens, other.gemm) == (row.world, row.tokens, row.gemm)
        same = same and other.what == what
        if same and other.system == "torch":
            return other
    return None


def speedup(row: Row, rows: Iterable[Row]) -> float | None:
    theirs = baseline_of(row, rows)
    return theirs.spread.p50_us / row.spread.p50_us if theirs else None


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Adds how much longer the baseline takes."""
    found = []
    for row in rows:
        against = speedup(row, rows)
        found.append(row.as_json() | {"speedup": against and round(against, 3)})
    return found


def table(rows: Sequence[Row]) -> str:
    """One line per system and case; microseconds, p50 unless named. Leaves out empty columns.

    rows: of one world.
    """
    return _table([_cells(rows, case) for case in dict.fromkeys(row.case for row in rows)])


def layers(rows: Sequence[Row]) -> str:
    """One line for each layer: products, with and without overlap. rows: of one world."""
    of_layers = [row for row in rows if row.of_layer]
    return _table([_layer_cells(of_layers, each) for each in dict.fromkeys(map(_layer, of_layers))])


def _layer(row: Row) -> tuple[Any, ...]:
    return *row.case, row.gemm, row.overlap_sms


def _layer_cells(rows: Sequence[Row], layer: tuple[Any, ...]) -> list[tuple[str, str | None]]:
    ways = {row.what: row for row in rows if _layer(row) == layer}
    alone = {row.what: row for row in rows if _layer(row) == (*layer[:-1], 0)}
    graph, eager = (ways.get(f"layer {how}") for how in ("graph", "eager"))
    row = graph or eager
    assert row is not None
    how = "graph" if graph else "eager"
    experts = alone.get(f"experts {how}")
    took = row.spread.p50_us

    def us(found: Row | None) -> str | None:
        return None if found is None else _us(found.spread.p50_us)

    return [
        ("T", f"{row.tokens}"),
        ("chunk", f"{row.chunk_tokens}" if row.chunk_tokens and row.on_cuda else None),
        ("SMs", None if not row.on_cuda else f"{row.num_sms}" if row.num_sms else "all"),
        ("system", row.system),
        ("products", row.gemm),
        ("overlap", f"{row.overlap_sms} SMs" if row.overlap_sms else None),
        ("rows", row.layout),
        ("layer graph", us(graph)),
        ("eager", us(eager)),
        ("experts", us(experts)),
        ("pair's share", pair_share(took, experts.spread.p50_us if experts else None)),
        ("weights", _us(row.weights_us or None)),
        ("of them", f"{took / row.weights_us:.2f}x" if row.weights_us else None),
        ("correct", "yes" if row.correct else "NO"),
    ]


def _table(cases: Sequence[Sequence[tuple[str, str | None]]]) -> str:
    kept = [i for i in range(len(cases[0])) if any(cells[i][1] is not None for cells in cases)]
    heads = [cases[0][i][0] for i in kept]
    return harness.table([heads, *([cells[i][1] or "-" for i in kept] for cells in cases)])


def _us(value: float | None) -> str | None:
    """None: not measured."""
    return None if value is None else f"{value:,.1f}" if value < 10_000 else f"{value:,.0f}"


def _cells(rows: Sequence[Row], case: tuple[Any, ...]) -> list[tuple[str, str | None]]:
    """Returns (heading, text) pairs of one line."""
    ways = {row.what: row for row in rows if row.case == case}
    pair = headline(ways.values())
    assert pair is not None
    on_cuda, against, percent = pair.on_cuda, speedup(pair, rows), pair.percent_of_push

    def spread(what: str, name: str = "p50_us") -> str | None:
        return _us(getattr(ways[what].spread, name)) if what in ways else None

    def tails(what: str, *names: str) -> list[tuple[str, str | None]]:
        return [(name, spread(what, f"{name}_us")) for name in names]

    of_cpus = () if on_cuda else ("p90", "p99")
    apart = [ways[what].spread.p50_us for what in ("dispatch", "combine") if what in ways]
    beside = pair.host_us / pair.adds_us if pair.host_us and pair.adds_us else None
    return [
        ("calls", pair.interface or None),
        ("T", f"{pair.tokens}"),
        ("chunk", f"{pair.chunk_tokens}" if pair.chunk_tokens and on_cuda else None),
        ("SMs", None if not on_cuda else f"{pair.num_sms}" if pair.num_sms else "all"),
        ("system", pair.system),
        ("graph p50", spread("pair graph")),
        *tails("pair graph", "p99"),
        ("eager p50", spread("pair eager")),
        *tails("pair eager", *of_cpus),
        *_host(ways.get("pair eager")),
        ("dispatch", spread("dispatch")),
        *tails("dispatch", *of_cpus),
        ("combine", spread("combine")),
        *tails("combine", *of_cpus),
        ("both", _us(sum(apart)) if len(apart) == 2 else None),
        *_skew(pair),
        ("floor", _us(pair.floor_us or None)),
        ("of push", None if percent is None else f"{percent:.0f}%"),
        ("vs torch", f"{against:.1f}x" if against else None),
        ("limit", _us(pair.limit_us)),
        *_wire(pair),
        *_messages(pair),
        *((what, spread(what)) for what in HALVES),
        ("host", _us(pair.host_us) if pair.interface else None),
        ("two add_", _us(pair.adds_us)),
        ("of them", f"{beside:.2f}x" if beside else None),
        ("host alone", _us(pair.host_alone_us)),
        ("correct", "yes" if all(row.correct for row in ways.values()) else "NO"),
    ]


def _skew(pair: Row) -> list[tuple[str, str | None]]:
    """Reports how unequal loads are, where they were meant to be."""
    meant = pair.routing != "uniform"
    return [
        ("MaxVio", f"{pair.max_vio:.2f}" if meant else None),
        ("busiest rank", f"{pair.busiest:.2f}x" if meant else None),
    ]


def pair_share(layer: float, experts: float | None) -> str | None:
    """Returns the part of a layer that its experts do not take."""
    return None if experts is None else f"{(1 - experts / layer) * 100:.0f}%"


def _host(eager: Row | None) -> list[tuple[str, str | None]]:
    """Reports whether the host bounds an eager pair."""
    bound = eager.host_bound if eager else None
    worked = eager.host_us if eager and bound is not None else None
    return [("host", _us(worked)), ("bound by", {True: "host", False: "GPU", None: None}[bound])]


def _wire(pair: Row) -> list[tuple[str, str | None]]:
    """Bytes of a pair: counted, without heads and padding, and with a copy for each expert.

    On CPUs the sum of all ranks; on GPUs a NIC's mean share, to be compared with its rate.
    """
    names: tuple[str, ...] = ("wire KiB", "floor KiB", "no dedup KiB")
    kib = 1024.0
    if pair.on_cuda:
        names, kib = ("KiB/NIC", "rows alone", "no dedup"), 1024.0 * pair.ranks * max(1, pair.nics)
    bytes_: tuple[int | None, ...] = pair.wire_bytes, pair.floor_bytes, pair.flat_floor_bytes
    if pair.ranks_per_node == pair.ranks or pair.system != "moe_p2p":
        bytes_ = None, None, None
    texts = [None if value is None else f"{value / kib:,.1f}" for value in bytes_]
    rate = None if pair.on_cuda else f"{pair.as_json()['tokens_per_s']:,}"
    return [*zip(names, texts, strict=True), ("tokens/s", rate)]


def _messages(pair: Row) -> list[tuple[str, str | None]]:
    """Work requests of a pair between nodes, all ranks, and DeepEP's of the same routing."""
    if pair.wire_writes is None or pair.ranks_per_node == pair.ranks:
        counts: tuple[str | None, ...] = None, None, None, None
    else:
        ours = pair.wire_writes, pair.wire_immediates or 0, pair.wire_fences or 0
        counts = *map("{:,}".format, ours), f"{pair.deepep_writes:,}+{pair.deepep_flags:,}"
    return list(zip(("writes", "imms", "fences", "DeepEP's"), counts, strict=True))


def headline(rows: Iterable[Row]) -> Row | None:
    """Returns the row of the chained pair: replayed if there is one, else eager."""
    pairs = {row.what: row for row in rows if row.what.startswith("pair")}
    return pairs.get("pair graph") or pairs.get("pair eager")


def title(row: Row) -> str:
    nodes, hosts = row.ranks // row.ranks_per_node, row.machine.hosts
    world = f"{row.ranks} GPUs ({row.machine.device})" if row.on_cuda else f"{row.ranks} CPU ranks"
    if row.mirrored_on:
        world = f"mirrored EP{row.ranks} on {row.mirrored_on} GPU{'s' * (row.mirrored_on > 1)}"
        world += f" of {row.machine.device}"
    if nodes > 1:
        emulated = "" if nodes == hosts else " emulated"
        world += f", {nodes}{emulated} nodes of {row.ranks_per_node}, {row.nics} NICs a rank"
    if hosts > 1:
        world += f", {hosts} hosts"
    settings = f", {row.settings}" if row.settings else ""
    return (
        f"{world}, H {row.hidden}, top-{row.topk} of {row.experts}, {row.dtype}, "
        f"routing {row.routing}{settings}"
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


def flags_text(row: Row) -> str:
    """Returns what arrival flags would save of a pair over the timed NIC, computed."""
    saved = 2 * (row.links.arrival_us - FLAG_US)
    return (
        "computed, not in these figures: with arrival flags in GPU memory (docs/protocol.md) a "
        f"pair takes {saved:.2f} us less, two arrivals through the relay block of "
        f"{row.links.arrival_us:.2f} us against {FLAG_US} us each for a word of the GPU's own "
        "memory"
    )


def hops_text(row: Row) -> str:
    """Returns the hops of a pair and their sum beside its time."""
    total = sum(row.hops.values())
    parts = "; ".join(f"{name} {us:.2f}" for name, us in row.hops.items())
    whole = row.spread.p50_us
    return f"hops, us: {parts}; sum {total:.2f}, {total / whole - 1:+.1%} of the pair's {whole:.2f}"


def text(rows: Sequence[Row], notes: Sequence[str]) -> str:
    """Returns the printed text of a world."""
    first = rows[0]
    device = "cuda" if first.on_cuda else "cpu"
    lines = [title(first), table(rows)]
    if any(row.of_layer for row in rows):
        lines += [layers(rows), LAYER]
    if first.on_cuda:
        lines.append(f"links: {links_line(first.links)}")
    lines.append(f"microseconds, p50 unless said: {BOUNDARY[device]}")
    if first.on_cuda:
        lines.append(HOST_OF_CALLS if first.interface else HOST)
    lines += [f"T {row.tokens}: {hops_text(row)}" for row in rows if row.hops]
    if first.hops and first.links.arrival_us > FLAG_US:
        lines.append(flags_text(first))
    if any(row.wire_writes and row.ranks_per_node < row.ranks for row in rows):
        lines.append(MESSAGES)
    if first.interface:
        lines.append(SAME_WORK)
    if any(row.system == "torch" for row in rows):
        lines.append(BASELINE[device])
    return "\n".join([*lines, *notes])
