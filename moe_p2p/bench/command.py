"""`python -m moe_p2p bench`: starts the ranks, prints and writes what they found."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from moe_p2p import launch
from moe_p2p.bench import report, worker
from moe_p2p.bench.options import parse


def main(arguments: list[str]) -> int:
    """Exit code: 0 all right, 1 a figure is not correct, 2 a rank failed."""
    options = parse(arguments)
    started = time.monotonic()
    try:
        rows = launch.run_ranks(worker.run, options, num_ranks=options.ranks)[0]
    except launch.RanksFailedError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    print(report.title(rows[0]))
    print(report.table(rows))
    print(f"latency: {report.BOUNDARY}")
    if options.baseline:
        print(report.BASELINE)
    if options.json:
        report.write_json(rows, Path(options.json))
        print(f"wrote {options.json}")
    if options.plot:
        reason = report.plot(rows, Path(options.plot))
        print(f"no plot: {reason}" if reason else f"wrote {options.plot}")
    print(f"{time.monotonic() - started:.1f} s in all")
    stories = sorted({text for row in rows for text in row.story})
    for text in stories:
        print(f"WRONG: {text}", file=sys.stderr)
    return 1 if stories else 0
