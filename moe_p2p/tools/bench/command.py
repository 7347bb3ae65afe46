"""`python -m moe_p2p bench`: starts the ranks, prints and writes what they found."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moe_p2p.tools import launch
from moe_p2p.tools.bench import (
    api_report,
    api_worker,
    gpu_plot,
    gpu_report,
    gpu_worker,
    report,
    worker,
)
from moe_p2p.tools.bench.api_report import ApiRow
from moe_p2p.tools.bench.gpu_report import GpuRow
from moe_p2p.tools.bench.options import Options, parse
from moe_p2p.tools.bench.report import Row


def main(arguments: list[str]) -> int:
    """Exit code: 0 all right, 1 a figure is not correct, 2 a rank failed."""
    worlds = parse(arguments)
    started = time.monotonic()
    on_cuda = worlds[0].device == "cuda"
    failed = False
    rows: list[Any] = []
    for options in worlds:
        try:
            rows += _world(options)(options)
        except launch.RanksFailedError as error:
            print(f"bench: {error}", file=sys.stderr)
            failed = True
    if rows:
        _write(worlds[0], rows, on_cuda=on_cuda)
    print(f"{time.monotonic() - started:.1f} s in all")
    stories = sorted({text for row in rows for text in row.story})
    for text in stories:
        print(f"WRONG: {text}", file=sys.stderr)
    return 2 if failed else 1 if stories else 0


def _world(options: Options) -> Callable[[Options], list[Any]]:
    if options.api == "deep_ep":
        return _deep_ep_world
    return _gpu_world if options.device == "cuda" else _cpu_world


def _deep_ep_world(options: Options) -> list[ApiRow]:
    results: api_worker.Results = launch.run_ranks(
        api_worker.run, options, num_ranks=options.ranks
    )[0]
    print(api_report.title(results.rows[0]))
    print(api_report.table(results.rows))
    unit = api_report.UNIT[options.device]
    print(f"{unit}, p50: {api_report.BOUNDARY[options.device]}")
    print(api_report.SAME_WORK)
    for note in results.notes:
        print(note)
    return results.rows


def _cpu_world(options: Options) -> list[Row]:
    rows: list[Row] = launch.run_ranks(worker.run, options, num_ranks=options.ranks)[0]
    print(report.title(rows[0]))
    print(report.table(rows))
    print(f"latency: {report.BOUNDARY}")
    if options.baseline:
        print(report.BASELINE)
    return rows


def _gpu_world(options: Options) -> list[GpuRow]:
    results: gpu_worker.Results = launch.run_ranks(
        gpu_worker.run, options, num_ranks=options.ranks
    )[0]
    rows = results.rows
    print(gpu_report.title(rows[0]))
    print(gpu_report.table(rows))
    print(f"links: {gpu_report.links_line(rows[0].links)}")
    print(f"microseconds, p50 unless said: {gpu_report.BOUNDARY}")
    if any(row.system == "torch" for row in rows):
        print(gpu_report.BASELINE)
    for note in results.notes:
        print(note)
    return rows


def _write(options: Options, rows: Sequence[Any], *, on_cuda: bool) -> None:
    if options.json:
        path = Path(options.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        body = ",\n".join("  " + json.dumps(row.as_json()) for row in rows)
        path.write_text(f"[\n{body}\n]\n")
        print(f"wrote {options.json}")
    if options.plot:
        draw: Callable[..., str | None] = gpu_plot.plot if on_cuda else report.plot
        if options.api == "deep_ep":
            draw = api_report.plot
        reason = draw(list(rows), Path(options.plot))
        print(f"no plot: {reason}" if reason else f"wrote {options.plot}")
