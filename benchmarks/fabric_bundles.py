"""Reads bundles of `python -m moe_p2p fabric-check` into tables.

    python benchmarks/fabric_bundles.py BUNDLE.tar.gz [BUNDLE.tar.gz ...] [--json FILE]

A table of machines and steps, one of rails (slowest, median and fastest of each bundle and way) and
one of pairs, with the interval of the prediction and whether the figure lies within it. Bundles
come from others: one file of each is read, with a limit, and nothing is unpacked.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moe_p2p.bench.fabric import FORMAT
from moe_p2p.bench.fabric_pictures import system
from moe_p2p.bench.fabric_predicted import verdict
from moe_p2p.bench.fabric_report import between
from moe_p2p.bench.harness import table, write_json
from moe_p2p.tools.option_types import output_file

MOST_BYTES = 64 << 20  # of a bundle's figures


class RefusedError(ValueError):
    """A file that is no bundle, or one of another version."""


def read(path: Path) -> dict[str, Any]:
    """The figures of a bundle."""
    try:
        with tarfile.open(path) as archive:
            member = archive.getmember("bundle.json")
            if not member.isfile() or member.size > MOST_BYTES:
                raise RefusedError(
                    f"{path}: bundle.json is no file of up to {MOST_BYTES >> 20} MiB"
                )
            file = archive.extractfile(member)
            body = json.loads(file.read()) if file else None
    except (OSError, KeyError, ValueError, tarfile.TarError) as error:
        raise RefusedError(f"{path} is no bundle of fabric-check: {error}") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        found = body.get("format") if isinstance(body, dict) else None
        raise RefusedError(f"{path} has format {found}, this program reads {FORMAT}")
    return body


def machines(bodies: dict[str, dict[str, Any]]) -> str:
    lines = [["bundle", "made", "version", "hosts", "ranks", "GPU", "NICs", "steps", "errors"]]
    for name, body in bodies.items():
        doctors = [host["doctor"] for host in body["facts"]]
        gpus = {gpu["model"] for doctor in doctors for gpu in doctor["gpus"]}
        nics = {f"{nic['kind']} {nic['rate_gbps']:g}" for d in doctors for nic in d["nics"]}
        ended = [step["how"] for step in body["steps"] if step["how"] != "left out"]
        well = f"{ended.count('done')} of {len(ended)}"
        cells = [", ".join(sorted(gpus)) or "none", ", ".join(sorted(nics)) or "none", well]
        numbers = [str(body["hosts"]), str(body["ranks"])]
        errors = str(len(body["wrong"]))
        lines.append([name, body["made"], body["version"], *numbers, *cells, errors])
    return table(lines, left=3)


def rails(bodies: dict[str, dict[str, Any]]) -> str:
    lines = [["bundle", "rails", "figure", "least", "median", "most", "predicted", "within"]]
    for name, body in bodies.items():
        for way in dict.fromkeys(row["way"] for row in body["rails"]):
            rows = [row for row in body["rails"] if row["way"] == way]
            sizes = sorted({size for row in rows for size in row["gbytes_per_s"]}, key=int)
            for size in sizes:
                values = [(row, row["gbytes_per_s"].get(size)) for row in rows]
                largest = size == sizes[-1]
                what, key = f"GB/s, {int(size) >> 10} KiB", "gbytes_per_s" if largest else ""
                lines.append([name, way, what, *_spread(values, key)])
            values = [(row, row["latency_us"]) for row in rows]
            if way == "alone":
                lines.append([name, way, "us one way", *_spread(values, "latency_us")])
    return table(lines, left=3)


def _spread(values: Sequence[tuple[dict[str, Any], float | None]], figure: str) -> list[str]:
    """figure: of the prediction; empty: it has none."""
    known = [(row, value) for row, value in values if value is not None]
    if not known:
        return ["-"] * 5
    found = [value for _, value in known]
    cells = [f"{value:,.2f}" for value in (min(found), statistics.median(found), max(found))]
    if not figure:
        return [*cells, "", ""]
    words = [
        verdict(value, row["predicted"].get(figure), comparable=row["comparable"])
        for row, value in known
    ]
    judged = [word for word in words if word]
    within = f"{judged.count('within')} of {len(judged)}" if judged else "not comparable"
    return [*cells, between(known[0][0]["predicted"].get(figure)), within]


def pairs(bodies: dict[str, dict[str, Any]]) -> str:
    heads = [
        "bundle",
        "system",
        "what",
        "nodes",
        "T",
        "p50 us",
        "p99",
        "predicted",
        "within",
        "right",
    ]
    return table([heads, *_pairs(bodies)], left=3)


def _pairs(bodies: dict[str, dict[str, Any]]) -> Iterator[list[str]]:
    for name, body in bodies.items():
        for row in body["pairs"]:
            nodes = f"{row['ranks'] // row['ranks_per_node']} x {row['ranks_per_node']}"
            word = verdict(row["p50_us"], row["predicted"], comparable=row["comparable"])
            yield [
                *(name, system(row), row["what"], nodes, str(row["tokens"])),
                *(f"{row['p50_us']:,.1f}", f"{row['p99_us']:,.1f}", between(row["predicted"])),
                *(word or "-", "yes" if row["correct"] else "NO"),
            ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundles", nargs="+", type=Path, metavar="BUNDLE")
    parser.add_argument("--json", type=output_file, help="file for all figures, by bundle")
    given = parser.parse_args()
    try:
        bodies = {str(path).removesuffix(".tar.gz"): read(path) for path in given.bundles}
    except RefusedError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n\n".join(part(bodies) for part in (machines, rails, pairs)))
    write_json(given.json, bodies)
    return 0


if __name__ == "__main__":
    sys.exit(main())
