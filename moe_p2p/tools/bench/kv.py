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

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from moe_p2p import version
from moe_p2p.tools import launch
from moe_p2p.tools.bench import kv_ranks, kv_systems
from moe_p2p.tools.bench.kv_ranks import Measured, Options
from moe_p2p.tools.bench.plot import draw
from moe_p2p.tools.bench.turns import Alone
from moe_p2p.tools.option_types import at_least_1, each_at_least_1, output_file, zero_or_more

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
    try:
        measured: list[Measured] = launch.run_ranks(kv_ranks.run, options, num_ranks=2)[0]
    except launch.RanksFailedError as error:
        print(f"bench: {error}")
        return 2
    figures = [figure for each in measured for figure in _figures(options, each)]
    print(text(options, measured, figures))
    for path, write in ((options.json, _write_json), (options.plot, _write_plot)):
        if path:
            print(write(options, figures, Path(path)) or f"wrote {path}")
    wrong = [figure for figure in figures if figure.wrong_bytes]
    for figure in wrong:
        print(
            f"WRONG: {figure.system}, pages of {figure.page_kib:g} KiB: {figure.wrong_bytes} bytes"
        )
    return 1 if wrong else 0


def _figures(options: Options, measured: Measured) -> list[Figure]:
    """One for each system; the first is the compute alone."""
    pages = measured.case.num_pages * options.layers
    alone = Alone.of(measured.ttft_s["compute"])
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
                    name: tuple(_at(times, percent) * 1e6 for percent in (50, 99, 99.9))
                    for name, times in spans.items()
                },
                wrong_bytes=measured.wrong_bytes.get(system, 0),
            )
        )
    return figures


def _at(values: list[float], percent: float) -> float:
    return sorted(values)[int((len(values) - 1) * percent / 100)]


# --- output ---


def text(options: Options, measured: list[Measured], figures: list[Figure]) -> str:
    lines = [_title(options)]
    lines += dict.fromkeys(note for each in measured for note in each.notes)
    heads = ("request, ms", "(least)", "pages/s", "GB/s", "writes", "TTFT, ms", "(least)", "more")
    lines.append(f"\n{'page':>7} {'system':16}{'pages':>8}" + "".join(f"{h:>12}" for h in heads))
    for each in figures:
        cells = (
            _cell(each.request_ms, ".2f"),
            _cell(each.least_request_ms, ".2f"),
            _cell(each.pages_per_s, ",.0f"),
            _cell(each.gbytes_per_s, ".2f"),
            _cell(each.writes, ",d"),
            _cell(each.ttft_ms, ".2f"),
            _cell(each.least_ttft_ms, ".2f"),
            _more(each),
        )
        lines.append(
            f"{each.page_kib:>3g} KiB {each.system:16}{each.num_pages:>8,}"
            + "".join(f"{cell:>12}" for cell in cells)
        )
    spans = "".join(f"{name:>26}" for name in SPANS)
    lines.append(f"\n{'spans of a layer, us: p50 (p99, p99.9)':38}{spans}")
    for each in figures:
        if each.spans_us:
            shown = tuple(
                f"{p50:,.1f} ({p99:,.0f}, {p999:,.0f})"
                for p50, p99, p999 in (each.spans_us[name] for name in SPANS)
            )
            lines.append(
                f"{each.page_kib:>3g} KiB {each.system:30}" + "".join(f"{c:>26}" for c in shown)
            )
    return "\n".join(lines)


def _more(figure: Figure) -> str:
    if figure.system == "compute":
        return _cell(figure.spread_percent, ".1f", "% apart")
    if figure.ttft_ms is None or figure.overhead_seen:
        return _cell(figure.overhead_percent, ".1f", "%")
    return "nothing"


def _cell(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _title(options: Options) -> str:
    where = torch.cuda.get_device_name() if options.device == "cuda" else _cpu_name()
    link = f", link model {options.gbps:g} Gbit/s" if options.gbps else ""
    if options.timed:
        link = f", timed NIC {options.timed}"
    return (
        f"moe_p2p {version.__version__} KV transfer on {where}: {options.layers} layers of "
        f"{options.layer_bytes / KIB:g} KiB, {options.tokens} tokens{link}; "
        f"median of {options.repeats}"
    )


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _write_json(options: Options, figures: list[Figure], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {"options": asdict(options), "figures": [asdict(figure) for figure in figures]}
    path.write_text(json.dumps(body, indent=1) + "\n")


def _write_plot(options: Options, figures: list[Figure], path: Path) -> str | None:
    def line(axis: Any, of: Callable[[Figure], float | None], label: str) -> None:
        for system in dict.fromkeys(figure.system for figure in figures):
            points = [(f.page_kib, of(f)) for f in figures if f.system == system and of(f)]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=system)
        axis.set(xlabel="page of a layer, KiB", ylabel=label, yscale="log")
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)

    def paint(axes: Any) -> None:
        line(axes[0], lambda figure: figure.request_ms, "one request, ms")
        line(axes[1], lambda figure: figure.ttft_ms, "time to the first token, ms")

    reason = draw(path, _title(options), paint, nrows=2, figsize=(7, 8))
    return reason and f"no plot: {reason}"


# --- input ---


def _parse(arguments: list[str]) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m moe_p2p bench --api kv",
        description="KV pages from a prefill to a decode process of this host: spans of a layer, "
        "pages/s, time to the first token with and without, beside one descriptor per page.",
        epilog="Defaults in parentheses: CPU, then GPUs where they differ. MOE_P2P_TRANSPORT and "
        "MOE_P2P_TRANSPORT_SETTINGS choose the NICs.",
    )
    add = parser.add_argument
    cuda = torch.cuda.is_available()
    add("--api", choices=["kv"])
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: GPUs if any")
    add("--quick", action="store_true", help="two page sizes, three repeats")
    add("--tokens", type=at_least_1, help="of the request (2048; 4096)")
    add("--layers", type=at_least_1, help="of the model (16; 94)")
    add("--token-bytes", type=at_least_1, default=512, help="of a layer: K and V of one head (512)")
    add("--page-kib", type=each_at_least_1, help="of a layer, with commas (1,4,16,64)")
    add("--repeats", type=at_least_1, help="of each figure (5)")
    add(
        "--compute-ms",
        type=zero_or_more,
        help="of a layer, slept, as a GPU leaves the CPU alone; 0: matmuls of the shapes of a TP4 "
        "rank of Qwen3-235B, on CPUs an eighth as wide (2; 0)",
    )
    add("--gbps", type=zero_or_more, help="link model of all NICs of a side, 0: none (0; 400)")
    add(
        "--timed",
        choices=["cx7", "efa"],
        default="",
        help="over the timed NIC instead: also its latency, and its time for each write",
    )
    add("--systems", default=",".join(kv_systems.NAMES), help="beside ours (%(default)s)")
    add("--json", type=output_file, default="bench_out/kv.json", help="figures ('': none)")
    add("--plot", type=output_file, default="bench_out/kv.png", help="PNG ('': none)")
    given = vars(parser.parse_args(arguments))
    quick = given.pop("quick")
    del given["api"]
    if given["device"] == "auto":
        given["device"] = "cuda" if cuda else "cpu"
    elif given["device"] == "cuda" and not cuda:
        parser.error("--device cuda: torch finds no GPU; see python -m moe_p2p doctor")
    defaults: dict[str, Any] = {"tokens": 2048, "layers": 16, "compute_ms": 2.0, "gbps": 0.0}
    if given["device"] == "cuda":
        defaults = {"tokens": 4096, "layers": 94, "compute_ms": 0.0, "gbps": 400.0}
    defaults |= {"page_kib": (4, 64) if quick else (1, 4, 16, 64), "repeats": 3 if quick else 5}
    complete: dict[str, Any] = {k: defaults[k] if v is None else v for k, v in given.items()}
    complete["systems"] = tuple(filter(None, complete["systems"].split(",")))
    if unknown := set(complete["systems"]) - set(kv_systems.NAMES):
        parser.error(
            f"--systems: {', '.join(sorted(unknown))} is none of {', '.join(kv_systems.NAMES)}"
        )
    options = Options(**complete)
    _refuse_nonsense(parser, options)
    return options


def _refuse_nonsense(parser: argparse.ArgumentParser, options: Options) -> None:
    for kib in options.page_kib:
        if kib * KIB % options.token_bytes or options.layer_bytes % (kib * KIB):
            parser.error(
                f"--page-kib {kib}: a page must be whole tokens of {options.token_bytes} bytes, "
                f"and a layer of {options.layer_bytes} bytes whole pages"
            )
    if options.token_bytes % 2:
        parser.error("--token-bytes must be even: K and V")
