"""`python -m moe_p2p bench --api weights`: trainers in bf16 write into generators in fp8.

Shapes: a public model's, with its layers scaled down. Every byte is compared before a figure
counts. In turns with updates: a peer copy of 64 MiB, and what trainers do today: gather each
parameter, broadcast whole tensors from rank 0 in buckets (NCCL; gloo on CPUs), and load them.
`--decode` times pairs of dispatch and combine while weights move (weights_decode.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from moe_p2p import version
from moe_p2p.tools import launch
from moe_p2p.tools.bench import weights_decode, weights_ranks
from moe_p2p.tools.bench.plot import draw
from moe_p2p.tools.bench.turns import Alone
from moe_p2p.tools.bench.weights_ranks import Measured, Options
from moe_p2p.tools.option_types import above_zero, at_least_1, output_file
from moe_p2p.weights.models import MODELS

# Stages whose time follows from bytes; others take as long for the whole model.
BY_BYTES = ("maxima", "converted", "submitted", "written", "copied")


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Milliseconds: medians over updates, of the rank that took longest."""

    update_ms: float
    least_update_ms: float
    spread_ms: float  # how far updates are apart
    stages_ms: dict[str, float]  # of trainers
    thread_ms: dict[str, float]  # of a trainer's thread, while bytes move
    generator_ms: dict[str, float]
    joiner_ms: dict[str, float]  # of the joiner that takes longest
    pause_ms: float
    pause_ms_per_8gb: float
    join_ms: float | None  # since its descriptors were known
    link_gbytes: float  # of the trainer that sends most over a link
    local_gbytes: float
    writes: int
    requests: int
    submit_us: float  # of a request
    link_gbytes_per_s: float | None  # each way, while requests to the other GPU are under way
    both_gbytes_per_s: float | None  # of the trainer with most, its own GPU's too
    peer_copy_gbytes_per_s: float | None
    percent_of_peer_copy: float | None
    # Device memory beside the tensors, by role: most that a rank used, and what it was allowed.
    high_water_mib: dict[str, float]
    watermark_mib: dict[str, float]
    host_mib: float
    baseline_ms: float | None
    times_faster: float | None
    full_model_ms: float
    wrong: list[str] = field(default_factory=list)
    above: list[str] = field(default_factory=list)  # ranks above their watermark
    notes: list[str] = field(default_factory=list)


def main(arguments: list[str]) -> int:
    """Returns 0: all right, 1: bytes differ or a watermark is passed, 2: a process failed."""
    options = _parse(arguments)
    if isinstance(options, weights_decode.Options):
        return _decode(options)
    try:
        measured: list[Measured] = launch.run_ranks(
            weights_ranks.run, options, num_ranks=options.world_size
        )[0]
    except launch.RanksFailedError as error:
        print(f"bench: {error}")
        return 2
    found = figures(options, measured)
    print(text(options, found))
    for path, write in ((options.json, _write_json), (options.plot, _write_plot)):
        if path:
            print(write(options, found, Path(path)) or f"wrote {path}")
    for each in found.wrong:
        print(f"WRONG: {each}")
    for each in found.above:
        print(f"ABOVE THE WATERMARK: {each}")
    return 1 if found.wrong or found.above else 0


def _decode(options: weights_decode.Options) -> int:
    try:
        ways: list[weights_decode.Way] = launch.run_ranks(weights_decode.run, options, num_ranks=2)[
            0
        ]
    except launch.RanksFailedError as error:
        print(f"bench: {error}")
        return 2
    print(weights_decode.text(options, ways))
    if options.json:
        path = Path(options.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(weights_decode.as_json(options, ways), indent=1) + "\n")
        print(f"wrote {options.json}")
    wrong = [way.name for way in ways if way.wrong]
    for name in wrong:
        print(f"WRONG: {name}: rows or weights differ")
    return 1 if wrong else 0


def figures(options: Options, measured: Sequence[Measured]) -> Figures:
    sources = [each for each in measured if each.role.startswith("trainer")]
    targets = [each for each in measured if each.role.startswith("generator")]
    everybody = [*sources, *targets]
    updates = [max(ends) - min(begins) for begins, ends in zip(
        zip(*(each.began for each in everybody), strict=True),
        zip(*(each.ended for each in everybody), strict=True), strict=True)]  # fmt: skip
    stages, theirs = (_slowest([each.spans_s for each in of]) for of in (sources, targets))
    busiest = max(sources, key=lambda each: (each.sent.link, each.sent.local))
    posted = [max(of_ranks, key=lambda each: each.busy_s) for of_ranks in
              zip(*(each.posted for each in sources), strict=True)]  # fmt: skip
    moving = statistics.median(each.busy_s for each in posted)
    crossing = statistics.median(
        max(each.link_s for each in of_ranks)
        for of_ranks in zip(*(each.posted for each in sources), strict=True)
    )
    pause = statistics.median(map(max, zip(*(each.pause_s for each in targets), strict=True)))
    rate = busiest.sent.link / crossing / 1e9 if crossing else None
    both = (busiest.sent.link + busiest.sent.local) / moving / 1e9 if moving else None
    joiner = max(measured, key=lambda each: each.join_s or 0.0)
    copies = next((each.peer_copies for each in sources if each.peer_copies), None)
    peer = statistics.median(copies) if copies else None
    loads = [each.baseline_s for each in everybody if each.baseline_s]
    baseline = statistics.median(map(max, zip(*loads, strict=True))) if loads else None
    update = statistics.median(updates)
    more = options.full_part - 1
    by_bytes = sum(stages.get(name, 0.0) for name in BY_BYTES if name in stages)
    by_bytes += theirs.get("copied", 0.0)
    roles = {"trainers": sources, "generators": targets}
    above = [
        f"{each.role}: {each.high_water:,} bytes of device memory beside its tensors, allowed are "
        f"{each.watermark:,}"
        for each in everybody
        if each.high_water > each.watermark
    ]
    return Figures(
        update_ms=update * 1e3,
        least_update_ms=min(updates) * 1e3,
        spread_ms=Alone.of(updates).spread * 1e3,
        stages_ms=stages,
        thread_ms=_slowest([each.thread_s for each in sources]),
        generator_ms=theirs,
        joiner_ms={name: s * 1e3 for name, s in joiner.joined_s.items()},
        pause_ms=pause * 1e3,
        pause_ms_per_8gb=pause * 1e3 * 8e9 / max(each.live_bytes for each in targets),
        join_ms=max((each.join_s * 1e3 for each in measured if each.join_s), default=None),
        link_gbytes=busiest.sent.link / 1e9,
        local_gbytes=busiest.sent.local / 1e9,
        writes=busiest.sent.writes,
        requests=posted[0].requests,
        submit_us=statistics.median(each.submit_s / max(each.requests, 1) for each in posted) * 1e6,
        link_gbytes_per_s=rate,
        both_gbytes_per_s=both,
        peer_copy_gbytes_per_s=peer,
        percent_of_peer_copy=rate / peer * 100 if rate and peer else None,
        high_water_mib={r: max(e.high_water for e in of) / 2**20 for r, of in roles.items()},
        watermark_mib={r: max(e.watermark for e in of) / 2**20 for r, of in roles.items()},
        host_mib=max(each.host_bytes for each in everybody) / 2**20,
        baseline_ms=baseline and baseline * 1e3,
        times_faster=baseline and baseline / update,
        full_model_ms=update * 1e3 + more * by_bytes,
        wrong=[text for each in measured for text in each.wrong],
        above=above,
        notes=list(dict.fromkeys(note for each in measured for note in each.notes)),
    )


def _slowest(ranks: Sequence[list[dict[str, float]]]) -> dict[str, float]:
    """Milliseconds by stage: medians of the rank that took longest in each update."""
    found: dict[str, list[float]] = {}
    for of_ranks in zip(*ranks, strict=True):
        for name in dict.fromkeys(name for spans in of_ranks for name in spans):
            longest = max(spans.get(name, 0.0) for spans in of_ranks)
            found.setdefault(name, []).append(longest * 1e3)
    return {name: statistics.median(times) for name, times in found.items()}


# --- output ---


def text(options: Options, found: Figures) -> str:
    lines = [_title(options), *found.notes, f"\n{'stage of trainers':24}{'ms':>10}"]
    lines += [f"  {name:22}{ms:>10.2f}" for name, ms in found.stages_ms.items()]
    lines.append("thread of trainers, while bytes move")
    lines += [f"  {name:22}{ms:>10.2f}" for name, ms in found.thread_ms.items()]
    lines.append("stage of generators")
    lines += [f"  {name:22}{ms:>10.2f}" for name, ms in found.generator_ms.items()]
    if found.joiner_ms:
        lines.append("stage of a generator that joins")
        lines += [f"  {name:22}{ms:>10.2f}" for name, ms in found.joiner_ms.items()]
    rows = [
        ("update", f"{found.update_ms:.1f} ms (least {found.least_update_ms:.1f}, "
         f"{found.spread_ms:.1f} apart)"),
        ("pause_ms", f"{found.pause_ms:.2f} ({found.pause_ms_per_8gb:.1f} per 8 GB)"),
        ("join_ms", _cell(found.join_ms, ".1f")),
        ("with its plan and memory", _cell(sum(found.joiner_ms.values()) or None, ".1f")),
        ("over the link", f"{found.link_gbytes:.2f} GB of the busiest trainer"),
        ("on its own GPU", f"{found.local_gbytes:.2f} GB"),
        ("submit", f"{found.submit_us:.2f} us a request, of {found.requests:,} "
         f"for {found.writes:,} writes"),
        ("link", f"{_cell(found.link_gbytes_per_s, '.1f')} GB/s"),
        ("with its own GPU", f"{_cell(found.both_gbytes_per_s, '.1f')} GB/s"),
        ("peer copy, 64 MiB", f"{_cell(found.peer_copy_gbytes_per_s, '.1f')} GB/s"),
        ("part of it", f"{_cell(found.percent_of_peer_copy, '.0f')} %"),
        *((f"high water, {role}", f"{used:,.1f} of {found.watermark_mib[role]:,.1f} MiB")
          for role, used in found.high_water_mib.items()),
        ("more host memory", f"{found.host_mib:,.0f} MiB"),
        ("gather, broadcast, load", f"{_cell(found.baseline_ms, '.1f')} ms"),
        ("times faster", _cell(found.times_faster, ".2f")),
        ("whole model", f"{found.full_model_ms:,.0f} ms, predicted from the stages"),
    ]  # fmt: skip
    lines += [f"{name:26}{cell}" for name, cell in rows]
    return "\n".join(lines)


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _title(options: Options) -> str:
    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPUs"
    return (
        f"moe_p2p {version.__version__} weights on {where}: {options.model}, {options.layers} of "
        f"{options.full.layers} layers, {options.trainers} FSDP trainers in bf16 to "
        f"{options.generators} generators in fp8 (ep={options.ep}, tp={options.tp}), "
        f"{options.mode}; median of {options.repeats}"
    )


def _write_json(options: Options, found: Figures, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {"options": asdict(options), "figures": asdict(found)}
    path.write_text(json.dumps(body, indent=1) + "\n")


def _write_plot(options: Options, found: Figures, path: Path) -> str | None:
    def paint(axis: Any) -> None:
        rows = [("update", found.stages_ms), ("generators", found.generator_ms)]
        if found.baseline_ms:
            rows.append(("gather, broadcast, load", {"baseline": found.baseline_ms}))
        for number, (_, stages) in enumerate(rows):
            left = 0.0
            for name, ms in stages.items():
                axis.barh(number, ms, left=left)
                if ms > 0.05 * max(found.update_ms, found.baseline_ms or 0.0):
                    axis.text(left + ms / 2, number, name, ha="center", va="center", fontsize=7)
                left += ms
        axis.set_yticks(range(len(rows)), [name for name, _ in rows])
        axis.set_xlabel("ms")
        axis.invert_yaxis()

    reason = draw(path, _title(options), paint, figsize=(8, 3))
    return reason and f"no plot: {reason}"


# --- input ---


def _parse(arguments: list[str]) -> Options | weights_decode.Options:
    parser = argparse.ArgumentParser(
        prog="python -m moe_p2p bench --api weights",
        description="Weights from FSDP trainers in bf16 to generators in fp8 on this host.",
        epilog="Defaults in parentheses: CPU, then GPUs where they differ. MOE_P2P_TRANSPORT and "
        "MOE_P2P_TRANSPORT_SETTINGS choose the NICs.",
    )
    add = parser.add_argument
    cuda = torch.cuda.is_available()
    add("--api", choices=["weights"])
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: GPUs if any")
    add("--model", choices=[n for n in MODELS if n.startswith("qwen")], default="qwen3-30b-a3b")
    add("--layers", type=at_least_1, help="of the model (1; 8)")
    add("--experts", type=at_least_1, help="of a layer (8; the model's)")
    add("--vocab", type=at_least_1, help="rows of both embeddings (4096; the model's)")
    add("--narrow", type=int, default=1, choices=(1, 2), help="divides hidden and expert widths")
    add("--trainers", type=at_least_1, default=2, help="ranks (2)")
    add("--generators", type=at_least_1, default=2, help="ranks of one inference engine (2)")
    add("--ep", type=at_least_1, help="generators that experts are dealt to (all)")
    add("--tp", type=at_least_1, help="generators that cut the rest (all)")
    add("--mode", choices=["shadow", "in_place"], default="shadow")
    add("--repeats", type=at_least_1, default=5, help="updates that are timed (5)")
    add("--bucket-mib", type=at_least_1, default=512, help="of the broadcast (512)")
    add("--watermark-mib", type=at_least_1, help="of a trainer's conversions (16; 2048)")
    add("--no-baseline", dest="baseline", action="store_false")
    add("--no-join", dest="join", action="store_false", help="no generator joins")
    add(
        "--decode",
        type=at_least_1,
        nargs="?",
        const=10_000,
        metavar="PAIRS",
        help="instead: p99 of so many pairs of dispatch and combine, alone and while weights move "
        "(10000)",
    )
    add("--pairs", type=at_least_1, help="of --decode, the same number")
    add(
        "--way-s", type=above_zero, default=40.0, help="of --decode: seconds of each of 3 ways (40)"
    )
    add("--transport", default="auto", help="of --decode (auto)")
    add("--transport-settings", default="", help="of --decode: preset=cx7 of the timed NIC (none)")
    add("--json", type=output_file, default="bench_out/weights.json", help="figures ('': none)")
    add("--plot", type=output_file, default="bench_out/weights.png", help="PNG ('': none)")
    given = vars(parser.parse_args(arguments))
    del given["api"]
    if given["device"] == "auto":
        given["device"] = "cuda" if cuda else "cpu"
    elif given["device"] == "cuda" and not cuda:
        parser.error("--device cuda: torch finds no GPU; see python -m moe_p2p doctor")
    on_gpu = given["device"] == "cuda"
    names = ("decode", "pairs", "way_s", "transport", "transport_settings")
    decode, pairs, way_s, transport, settings = (given.pop(name) for name in names)
    if decode is None and pairs is not None:
        parser.error("--pairs is of --decode")
    pairs = decode if pairs is None else pairs
    if pairs is not None:
        experts = {"experts": given["experts"]} if given["experts"] else {}
        return weights_decode.Options(
            device=given["device"],
            pairs=pairs,
            way_s=way_s,
            transport=transport,
            transport_settings=settings,
            hidden=weights_decode.HIDDEN // given["narrow"],
            json=given["json"],
            **experts,
        )
    count = given["generators"]
    defaults: dict[str, Any] = {"layers": 8 if on_gpu else 1, "experts": 0 if on_gpu else 8}
    defaults |= {"watermark_mib": 2048 if on_gpu else 16}
    defaults |= {"vocab": 0 if on_gpu else 4096, "ep": count, "tp": count}
    options = Options(**{k: defaults[k] if v is None else v for k, v in given.items()})
    try:
        options.layouts  # noqa: B018  raises where numbers do not divide
    except (RuntimeError, ValueError) as error:
        parser.error(str(error))
    return options
