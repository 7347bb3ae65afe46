"""`python -m moe_p2p bench --api weights`: trainers in bf16 write into engine ranks in fp8.

Shapes: a public model's, with its layers scaled down. Every byte is compared before a figure
counts. In turns with updates: a peer copy of 64 MiB, and what trainers do today: gather each
parameter, broadcast whole tensors from rank 0 in buckets (NCCL; gloo on CPUs), and load them.
`--decode` times pairs of dispatch and combine while weights move (weights_decode.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from moe_p2p import version
from moe_p2p.bench import weights_decode, weights_ranks
from moe_p2p.bench.harness import (
    Alone,
    add_options,
    cell,
    device_name,
    ended,
    measured,
    parsed,
    parser_of,
    refuse,
)
from moe_p2p.bench.weights_ranks import Measured, Options
from moe_p2p.tools.option_types import at_least_1

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
    ranks: list[Measured] | None = measured(weights_ranks.run, options, options.world_size)
    if ranks is None:
        return 2
    found = figures(options, ranks)
    wrong = [f"WRONG: {each}" for each in found.wrong]
    wrong += [f"ABOVE THE WATERMARK: {each}" for each in found.above]
    body = {"options": asdict(options), "figures": asdict(found)}
    return ended(
        options, text(options, found), body, wrong, lambda axis: _paint(axis, found), figsize=(8, 3)
    )


def _decode(options: weights_decode.Options) -> int:
    ways: list[weights_decode.Way] | None = measured(weights_decode.run, options, 2)
    if ways is None:
        return 2
    wrong = [f"WRONG: {way.name}: rows or weights differ" for way in ways if way.wrong]
    body = {"options": asdict(options), "ways": [asdict(way) for way in ways]}
    return ended(options, weights_decode.text(options, ways), body, wrong)


def figures(options: Options, ranks: Sequence[Measured]) -> Figures:
    sources = [each for each in ranks if each.role.startswith("trainer")]
    targets = [each for each in ranks if each.role.startswith("generator")]
    everybody = [*sources, *targets]
    updates = _updates(everybody)
    update = statistics.median(updates)
    stages, theirs = (_slowest([each.spans_s for each in of]) for of in (sources, targets))
    by_bytes = sum(stages.get(name, 0.0) for name in BY_BYTES) + theirs.get("copied", 0.0)
    pause = statistics.median(_longest(each.pause_s for each in targets))
    loads = _longest(each.baseline_s for each in everybody if each.baseline_s)
    baseline = statistics.median(loads) if loads else None
    joins = {each.join_s: each.joined_s for each in ranks if each.join_s}
    join = max(joins, default=None)
    return Figures(
        update_ms=update * 1e3,
        least_update_ms=min(updates) * 1e3,
        spread_ms=Alone.of(updates).spread * 1e3,
        stages_ms=stages,
        thread_ms=_slowest([each.thread_s for each in sources]),
        generator_ms=theirs,
        joiner_ms={name: s * 1e3 for name, s in joins[join].items()} if join else {},
        pause_ms=pause * 1e3,
        pause_ms_per_8gb=pause * 1e3 * 8e9 / max(each.live_bytes for each in targets),
        join_ms=join and join * 1e3,
        baseline_ms=baseline and baseline * 1e3,
        times_faster=baseline and baseline / update,
        full_model_ms=update * 1e3 + (options.full_part - 1) * by_bytes,
        wrong=[text for each in ranks for text in each.wrong],
        notes=list(dict.fromkeys(note for each in ranks for note in each.notes)),
        **_of_links(sources),
        **_of_memory({"trainers": sources, "generators": targets}),
    )


def _longest(ranks: Iterable[Sequence[float]]) -> list[float]:
    """Of the ranks, for each update."""
    return list(map(max, zip(*ranks, strict=True)))


def _updates(ranks: Sequence[Measured]) -> list[float]:
    """Seconds from the first rank's begin to the last one's end."""
    begins = _longest([-at for at in each.began] for each in ranks)
    ends = _longest(each.ended for each in ranks)
    return [end + begin for begin, end in zip(begins, ends, strict=True)]


def _of_links(sources: Sequence[Measured]) -> dict[str, Any]:
    """What trainers sent, of the busiest, and how fast."""
    sent = max((each.sent for each in sources), key=lambda each: (each.link, each.local))
    updates = list(zip(*(each.posted for each in sources), strict=True))
    posted = [max(of_ranks, key=lambda each: each.busy_s) for of_ranks in updates]
    moving = statistics.median(each.busy_s for each in posted)
    crossing = statistics.median(max(each.link_s for each in of_ranks) for of_ranks in updates)
    rate = sent.link / crossing / 1e9 if crossing else None
    copies = next((each.peer_copies for each in sources if each.peer_copies), None)
    peer = statistics.median(copies) if copies else None
    return {
        "link_gbytes": sent.link / 1e9,
        "local_gbytes": sent.local / 1e9,
        "writes": sent.writes,
        "requests": posted[0].requests,
        "submit_us": statistics.median(p.submit_s / max(p.requests, 1) for p in posted) * 1e6,
        "link_gbytes_per_s": rate,
        "both_gbytes_per_s": (sent.link + sent.local) / moving / 1e9 if moving else None,
        "peer_copy_gbytes_per_s": peer,
        "percent_of_peer_copy": rate / peer * 100 if rate and peer else None,
    }


def _of_memory(roles: dict[str, Sequence[Measured]]) -> dict[str, Any]:
    everybody = [each for of in roles.values() for each in of]
    above = [
        f"{each.role}: {each.high_water:,} bytes of device memory beside its tensors, allowed are "
        f"{each.watermark:,}"
        for each in everybody
        if each.high_water > each.watermark
    ]
    return {
        "high_water_mib": {r: max(e.high_water for e in of) / 2**20 for r, of in roles.items()},
        "watermark_mib": {r: max(e.watermark for e in of) / 2**20 for r, of in roles.items()},
        "host_mib": max(each.host_bytes for each in everybody) / 2**20,
        "above": above,
    }


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
    lines = [_title(options), *found.notes, ""]
    for heading, stages in (
        ("stage of trainers, ms", found.stages_ms),
        ("thread of trainers, while bytes move", found.thread_ms),
        ("stage of generators", found.generator_ms),
        ("stage of a generator that joins", found.joiner_ms),
    ):
        lines += [heading] if stages else []
        lines += [f"  {name:22}{ms:>10.2f}" for name, ms in stages.items()]
    rows = [
        ("update", f"{found.update_ms:.1f} ms (least {found.least_update_ms:.1f}, "
         f"{found.spread_ms:.1f} apart)"),
        ("pause_ms", f"{found.pause_ms:.2f} ({found.pause_ms_per_8gb:.1f} per 8 GB)"),
        ("join_ms", cell(found.join_ms, ".1f")),
        ("with its plan and memory", cell(sum(found.joiner_ms.values()) or None, ".1f")),
        ("over the link", f"{found.link_gbytes:.2f} GB of the busiest trainer"),
        ("on its own GPU", f"{found.local_gbytes:.2f} GB"),
        ("submit", f"{found.submit_us:.2f} us a request, of {found.requests:,} "
         f"for {found.writes:,} writes"),
        ("link", f"{cell(found.link_gbytes_per_s, '.1f')} GB/s"),
        ("with its own GPU", f"{cell(found.both_gbytes_per_s, '.1f')} GB/s"),
        ("peer copy, 64 MiB", f"{cell(found.peer_copy_gbytes_per_s, '.1f')} GB/s"),
        ("part of it", f"{cell(found.percent_of_peer_copy, '.0f')} %"),
        *((f"high water, {role}", f"{used:,.1f} of {found.watermark_mib[role]:,.1f} MiB")
          for role, used in found.high_water_mib.items()),
        ("more host memory", f"{found.host_mib:,.0f} MiB"),
        ("gather, broadcast, load", f"{cell(found.baseline_ms, '.1f')} ms"),
        ("times faster", cell(found.times_faster, ".2f")),
        ("whole model", f"{found.full_model_ms:,.0f} ms, predicted from the stages"),
    ]  # fmt: skip
    lines += [f"{name:26}{cell}" for name, cell in rows]
    return "\n".join(lines)


def _title(options: Options) -> str:
    return (
        f"moe_p2p {version.__version__} weights on {device_name(options.device, 'CPUs')}: "
        f"{options.model}, {options.layers} of {options.full.layers} layers, {options.trainers} "
        f"FSDP trainers in bf16 to {options.generators} generators in fp8 (ep={options.ep}, "
        f"tp={options.tp}), {options.mode}; median of {options.repeats}"
    )


def _paint(axis: Any, found: Figures) -> None:
    rows = [("update", found.stages_ms), ("generators", found.generator_ms)]
    if found.baseline_ms:
        rows.append(("gather, broadcast, load", {"baseline": found.baseline_ms}))
    from matplotlib import colormaps

    names = list(dict.fromkeys(name for _, stages in rows for name in stages))
    tab20, dark_then_light = colormaps["tab20"], [*range(0, 20, 2), *range(1, 20, 2)]
    colours = {name: tab20(at) for name, at in zip(names, dark_then_light, strict=False)}
    for number, (_, stages) in enumerate(rows):
        left = 0.0
        for name, ms in stages.items():
            axis.barh(number, ms, left=left, color=colours[name])
            left += ms
    for name, colour in colours.items():  # a stage has one colour in all rows
        axis.barh(0, 0, color=colour, label=name)
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.25), "ncols": 4, "fontsize": 8}
    axis.legend(**below)
    axis.set_yticks(range(len(rows)), [name for name, _ in rows])
    axis.set_xlabel("ms")
    axis.invert_yaxis()


# --- input ---


def _parse(arguments: list[str]) -> Options | weights_decode.Options:
    about = "Weights from FSDP trainers in bf16 to generators in fp8 on this host."
    parser = parser_of(Options, "weights", about)
    add_options(parser, weights_decode.Options)
    parser.add_argument(
        "--decode",
        type=at_least_1,
        nargs="?",
        const=10_000,
        metavar="PAIRS",
        help="instead: p99 of so many pairs of dispatch and combine, alone and while weights move "
        "(10000)",
    )
    base, given = parsed(parser, Options, arguments)
    of_decode = weights_decode.Options.__dataclass_fields__.keys() - base.keys()
    decode = {name: given.pop(name) for name in of_decode & given.keys()}
    pairs = given.pop("decode", None)
    refuse(parser, {"--pairs is of --decode": pairs is None and "pairs" in decode})
    complete = base | given
    if pairs is not None:
        shared = {name: complete[name] for name in ("device", "json")}
        if "experts" in given:
            shared["experts"] = given["experts"]
        hidden = weights_decode.HIDDEN // complete["narrow"]
        return weights_decode.Options(**shared, **{"pairs": pairs} | decode, hidden=hidden)
    for name in ("ep", "tp"):
        complete[name] = complete[name] or complete["generators"]
    options = Options(**complete)
    try:
        options.layouts  # noqa: B018  raises where numbers do not divide
    except (RuntimeError, ValueError) as error:
        parser.error(str(error))
    return options
