"""`python -m moe_p2p bench`: starts the ranks, prints and writes their results.

Under torchrun it is one rank: rank 0 prints and writes.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from moe_p2p import env, errors
from moe_p2p.bench import conformance, experts, harness, kv, megatron, report, weights, worker
from moe_p2p.bench.options import Options, parse
from moe_p2p.bench.plot import plot
from moe_p2p.bench.report import Row
from moe_p2p.tools import launch

# With options of their own.
OF_THEIR_OWN = {
    "experts": experts.main,
    "kv": kv.main,
    "megatron": megatron.main,
    "weights": weights.main,
}


def main(arguments: list[str]) -> int:
    """Returns 0: all right, 1: a figure or a line of --check is not correct, 2: a rank failed."""
    api = _api(arguments)
    if api in OF_THEIR_OWN:
        return OF_THEIR_OWN[api](arguments)
    worlds = parse(arguments)
    with contextlib.ExitStack() as stack:
        if not env.launched():
            return _main(worlds, _start, is_first=True)
        torch.set_num_threads(launch.threads_per_rank(env.local_world_size()))
        rank, _ = stack.enter_context(launch.process_group())
        return _main(worlds, _join, is_first=rank == 0)


def _api(arguments: list[str]) -> str:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--api", default="")
    with contextlib.suppress(argparse.ArgumentError):
        return str(parser.parse_known_args(arguments)[0].api)
    return ""


def _main(worlds: list[Options], each: Callable[..., Any], *, is_first: bool) -> int:
    started = time.monotonic()
    failed, rows, wrong = False, list[Row](), list[str]()
    for options in worlds:
        try:
            if options.check:
                wrong += each(conformance.run, options)
                continue
            results: worker.Results = each(worker.run, options)
        except launch.RanksFailedError as error:
            print(f"bench: {error}", file=sys.stderr)
            failed = True
            continue
        rows += results.rows
        wrong += [text for row in results.rows for text in row.wrong]
        if is_first:
            print(report.text(results.rows, results.notes))
    if is_first:
        if rows:
            _write(worlds[0], rows)
        print(f"{time.monotonic() - started:.1f} s in all")
        for text in sorted(set(wrong)):
            print(f"WRONG: {text}", file=sys.stderr)
    return 2 if failed else 1 if wrong else 0


def _start(function: Callable[[Options], Any], options: Options) -> Any:
    return launch.run_ranks(function, options, num_ranks=options.processes)[0]


def _join(function: Callable[[Options], Any], options: Options) -> Any:
    """Runs this process as a rank. Its failure ends it: torchrun ends the others."""
    try:
        return function(options)
    except errors.MoeP2pError as error:
        print(f"bench: rank {env.rank()}: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def _write(options: Options, rows: Sequence[Row]) -> None:
    harness.write_json(options.json, report.as_json(rows))
    if options.plot:
        reason = plot(rows, Path(options.plot))
        print(f"no plot: {reason}" if reason else f"wrote {options.plot}")
