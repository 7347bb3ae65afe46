"""`python -m moe_p2p bench --api kv`: KV pages from a prefill to a decode process of this host.

Each page size carries the same bytes a layer, in pages that lie at random places on both sides. Two
figures of each: a whole request without compute, by several systems, and the time to the first
token (TTFT) of a model whose layers take the time of kv_compute.py. Systems and the compute alone
take turns, and begin a turn each. `more`: of the TTFT than compute alone takes, or `nothing` where
it is within the spread of compute alone, whose row shows it. The bytes of every system are compared
at decode, after each run.

`signals`: KVSignals; `graph`, on GPUs: the same, replayed from a CUDA graph of the pass; `by
layer`: KVSending.layer after each layer; `at the end`: after the last.
Spans of a layer, by a clock that both processes share (time.monotonic); times of a GPU are matched
with it before and after, and the error is printed:
    signal   its bytes are there -> `signal` has returned (a kernel on a GPU: 0), `layer` is called
    post     then, or of `signals` from when its bytes were there -> before its first write is
             given to a NIC
    wire     then -> its last completion is seen at prefill
    arrival  from the first write -> decode sees its last immediate
"""

from __future__ import annotations

import platform
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moe_p2p import version
from moe_p2p.bench import harness, kv_ranks
from moe_p2p.bench.kv_ranks import Measured, Options
from moe_p2p.tools.draw import plain_log

KIB = 1024
SPANS = ("signal", "post", "wire", "arrival")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Of one page size. Milliseconds: medians, and the least. Spans of a layer: p50, p99, p99.9."""

    page_kib: float
    system: str
    num_pages: int  # of the request, over all layers
    request_ms: float | None = None
    least_request_ms: float | None = None
    pages_per_s: float | None = None
    gbytes_per_s: float | None = None
    ttft_ms: float | None = None
    least_ttft_ms: float | None = None
    overhead_percent: float | None = None  # of the compute alone
    spread_percent: float | None = None  # of the runs of compute alone
    overhead_seen: bool = True  # more than that spread
    writes: int | None = None
    spans_us: dict[str, tuple[float, ...]] = field(default_factory=dict)
    wrong_bytes: int = 0


def main(arguments: list[str]) -> int:
    """Returns 0: all right, 1: bytes differ, 2: a process failed."""
    options = _parse(arguments)
    found: list[Measured] | None = harness.measured(kv_ranks.run, options, 2)
    if found is None:
        return 2
    figures = [figure for each in found for figure in _figures(options, each)]
    wrong = [
        f"WRONG: {each.system}, pages of {each.page_kib:g} KiB: {each.wrong_bytes} bytes"
        for each in figures
        if each.wrong_bytes
    ]
    body = {"options": asdict(options), "figures": [asdict(figure) for figure in figures]}
    return harness.ended(
        options,
        text(options, found, figures),
        body,
        wrong,
        lambda axes: _paint(axes, figures),
        nrows=2,
        figsize=(7, 8),
    )


def _figures(options: Options, measured: Measured) -> list[Figure]:
    """One for each system; the first is the compute alone."""
    pages = measured.case.num_pages * options.layers
    alone = harness.Alone.of(measured.ttft_s["compute"])
    figures = []
    named = ["compute", *kv_ranks.OURS, *measured.ttft_s]
    for system in dict.fromkeys(name for name in named if name in measured.ttft_s):
        request, ttft = measured.request_s.get(system), measured.ttft_s.get(system)
        spans = measured.spans_s.get(system, {})
        taken = statistics.median(request) if request else None
        token = statistics.median(ttft) if ttft else None
        figures.append(
            Figure(
                page_kib=measured.case.page_bytes / KIB,
                system=system,
                num_pages=pages,
                request_ms=taken and taken * 1e3,
                least_request_ms=min(request) * 1e3 if request else None,
                pages_per_s=taken and pages / taken,
                gbytes_per_s=taken and options.layers * options.layer_bytes / taken / 1e9,
                ttft_ms=token and token * 1e3,
                least_ttft_ms=min(ttft) * 1e3 if ttft else None,
                overhead_percent=token and (token / alone.median - 1) * 100,
                spread_percent=alone.spread_percent,
                overhead_seen=bool(token and alone.is_seen(token)),
                writes=measured.writes.get(system),
                spans_us={
                    name: tuple(harness.at(times, percent) * 1e6 for percent in (50, 99, 99.9))
                    for name, times in spans.items()
                },
                wrong_bytes=measured.wrong_bytes.get(system, 0),
            )
        )
    return figures


# --- output ---


def text(options: Options, found: list[Measured], figures: list[Figure]) -> str:
    heads = ("request, ms", "(least)", "pages/s", "GB/s", "writes", "TTFT, ms", "(least)", "more")
    lines = [["page system", "pages", *heads]]
    spans = [["spans of a layer, us: p50 (p99, p99.9)", *SPANS]]
    for each in figures:
        name = f"{each.page_kib:>3g} KiB {each.system}"
        lines.append([
            *(name, f"{each.num_pages:,}"),
            *(harness.cell(each.request_ms, ".2f"), harness.cell(each.least_request_ms, ".2f")),
            *(harness.cell(each.pages_per_s, ",.0f"), harness.cell(each.gbytes_per_s, ".2f")),
            *(harness.cell(each.writes, ",d"), harness.cell(each.ttft_ms, ".2f")),
            *(harness.cell(each.least_ttft_ms, ".2f"), _more(each)),
        ])  # fmt: skip
        if each.spans_us:
            shown = (each.spans_us[name] for name in SPANS)
            spans.append([name, *(f"{p50:,.1f} ({p99:,.0f}, {p:,.0f})" for p50, p99, p in shown)])
    notes = dict.fromkeys(note for each in found for note in each.notes)
    return "\n".join(
        [_title(options), *notes, "", harness.table(lines, 1), "", harness.table(spans, 1)]
    )


def _more(figure: Figure) -> str:
    if figure.system == "compute":
        return harness.cell(figure.spread_percent, ".1f", "% apart")
    if figure.ttft_ms is None or figure.overhead_seen:
        return harness.cell(figure.overhead_percent, ".1f", "%")
    return "nothing"


def _title(options: Options) -> str:
    link = f", link model {options.gbps:g} Gbit/s" if options.gbps else ""
    if options.timed:
        link = f", timed NIC {options.timed}"
    name = harness.device_name(options.device, _cpu_name())
    return (
        f"moe_p2p {version.__version__} KV transfer on {name}: "
        f"{options.layers} layers of {options.layer_bytes / KIB:g} KiB, {options.tokens} tokens"
        f"{link}; median of {options.repeats}"
    )


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _paint(axes: Any, figures: list[Figure]) -> None:
    """A system has one colour in both panels."""
    systems = list(dict.fromkeys(figure.system for figure in figures))
    pages = sorted({figure.page_kib for figure in figures})
    panels = (("request_ms", "one request, ms"), ("ttft_ms", "time to the first token, ms"))
    for axis, (name, label) in zip(axes, panels, strict=True):
        for number, system in enumerate(systems):
            of_one = [f for f in figures if f.system == system and getattr(f, name)]
            points = [(f.page_kib, getattr(f, name)) for f in of_one]
            if points:
                look = {"color": f"C{number}", "marker": "o^vDP*X"[number % 7]}
                axis.plot(*zip(*points, strict=True), **look, label=system)
        axis.set(xlabel="page of a layer, KiB", ylabel=label, xscale="log", yscale="log")
        plain_log(axis, ticks=pages)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)


# --- input ---


def _parse(arguments: list[str]) -> Options:
    parser = harness.parser_of(
        Options,
        "kv",
        "KV pages from a prefill to a decode process of this host: spans of a layer, "
        "pages/s, time to the first token with and without, beside one descriptor per page.",
    )
    parser.add_argument("--quick", action="store_true", help="two page sizes, three repeats")
    base, given = harness.parsed(parser, Options, arguments)
    if given.pop("quick"):
        base |= {"page_kib": (4, 64), "repeats": 3}
    options = Options(**base | given)
    pages = {
        f"--page-kib {kib}: a page must be whole tokens of {options.token_bytes} bytes, and a "
        f"layer of {options.layer_bytes} bytes whole pages": kib * KIB % options.token_bytes > 0
        or options.layer_bytes % (kib * KIB) > 0
        for kib in options.page_kib
    }
    even = {"--token-bytes must be even: K and V": options.token_bytes % 2 > 0}
    harness.refuse(parser, pages | even)
    return options
