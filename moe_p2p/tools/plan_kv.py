"""`python -m moe_p2p plan --kv`: the plan between two layouts, what one request sends, and why.

Needs no ranks, GPUs or NICs. A side is key=value,... on the command line, or a file with the bytes
of `layout_to_bytes`, for hybrid models.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moe_p2p import kv
from moe_p2p.errors import InvalidArgumentError, MoeP2pError, make, require
from moe_p2p.kv.link import measured_link
from moe_p2p.machine import tuned
from moe_p2p.tools.option_types import Parser, at_least_0, at_least_1


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split("+"))


KEYS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "order": ("order", str),
    "split": ("kv_split", str),
    "tp": ("tp", int),
    "pp": ("pp", int),
    "dcp": ("dcp", int),
    "interleave": ("dcp_interleave", int),
    "page": ("page_size", int),
    "stages": ("stages", _numbers),
}
MEASURED = "measured"  # of --link
MOST_LINES = 16
# Every pair of ranks is looked at, 10 µs each, and every layer and page of a request listed.
MOST_PAIRS, MOST_LAYERS, MOST_TOKENS = 1 << 20, 1 << 12, 1 << 24
REPEATS = 5  # of timings; the best counts


def main(arguments: list[str]) -> int:
    """Prints the plan; exit code 2 when the numbers do not fit together."""
    given = _parser().parse_args(arguments)
    try:
        require(given.layers <= MOST_LAYERS, f"--layers {given.layers}: at most {MOST_LAYERS}")
        require(given.tokens <= MOST_TOKENS, f"--tokens {given.tokens}: at most {MOST_TOKENS}")
        source, target = side_of("source", given), side_of("target", given)
        ranks = source.world_size, target.world_size
        require(
            ranks[0] * ranks[1] <= MOST_PAIRS,
            f"--source has {ranks[0]} ranks (tp * pp) and --target {ranks[1]}: more than "
            f"{MOST_PAIRS:,} pairs of them; lower tp or pp of one",
        )
        link = link_named(given.link)
        for field in ("bytes_per_s", "writes_per_s", "packed_write_bytes"):
            if getattr(given, field) is not None:
                link = dataclasses.replace(link, **{field: getattr(given, field)})
        pack = {"always": True, "never": False}.get(given.pack, "auto")
        link = dataclasses.replace(link, pack=pack)
        plan = kv.kv_plan(source, target, link=link)
        text = "\n\n".join(
            [
                table(plan, everything=given.all),
                reasons(plan),
                request_table(plan, given.prefix, given.tokens, everything=given.all),
                cost(plan, given.tokens),
                f"tuned: {tuned.describe()}",
            ]
        )
    except (MoeP2pError, OSError) as error:
        print(f"plan: {error}")
        return 2
    print(text)
    return 0


def link_named(name: str | None) -> kv.KVLink:
    """None: what was measured of RDMA devices, else ConnectX-7's published rates."""
    measured = measured_link()
    if name is None:
        return kv.CX7 if measured is None or measured.pack is False else measured
    if name != MEASURED:
        return kv.LINKS[name]
    if measured is None:
        text = "--link measured: `python -m moe_p2p tune` has measured no NICs here"
        raise make(InvalidArgumentError, text)
    return measured


def side_of(name: str, given: argparse.Namespace) -> kv.KVLayout:
    """The layout that --source or --target describes."""
    text: str = getattr(given, name)
    if text.endswith(".json"):
        return kv.layout_from_bytes(Path(text).read_bytes())
    fields: dict[str, Any] = {"page_size": 16}
    for pair in text.split(",") if text else ():
        key, _, value = pair.partition("=")
        require(key in KEYS, f"--{name}: {key!r} is not one of {', '.join(KEYS)}")
        field, parse = KEYS[key]
        fields[field] = _parsed(f"--{name}: {key}", parse, value)
    group = kv.KVGroup(
        name="kv",
        layers=tuple(range(given.layers)),
        heads=given.kv_heads,
        k_bytes=given.k_bytes,
        v_bytes=given.v_bytes,
        page_size=fields.pop("page_size"),
        kind="attention" if given.window is None else "window",
        window=given.window,
    )
    return kv.KVLayout(groups=(group,), **fields)


def _parsed(name: str, parse: Callable[[str], Any], value: str) -> Any:
    try:
        return parse(value)
    except ValueError as error:
        raise make(InvalidArgumentError, f"{name}={value!r} is not a number") from error


def table(plan: kv.KVPlan, *, everything: bool) -> str:
    """One line per move."""
    lines = [
        f"{'group':10} {'layers':>9} {'heads':>7} {'ranks':>9} {'part':4} {'row bytes':>9} "
        f"{'rows':>4} {'strides, bytes':>17} {'units':>5} {'tokens':>6} {'share':>5} via"
    ]
    lines += _cut([_line(plan, move) for move in plan.moves], everything)
    lines.append(f"{len(plan.moves)} moves; units are those of a period of so many tokens")
    return "\n".join(lines)


def _cut(lines: list[str], everything: bool) -> list[str]:
    if everything or len(lines) <= MOST_LINES:
        return lines
    return [*lines[:MOST_LINES], f"and {len(lines) - MOST_LINES} lines more; --all prints them"]


def _line(plan: kv.KVPlan, move: kv.KVMove) -> str:
    shape = move.shape
    numbers = plan.source.group(move.group).layers
    layers = f"{numbers[move.layers.start]}-{numbers[move.layers.stop - 1]}"
    strides = f"{shape.source_row_stride} -> {shape.target_row_stride}"
    via = f"{move.via}, lands" if move.lands else move.via
    return (
        f"{move.group:10} {layers:>9} {f'{move.heads[0]}-{move.heads[1] - 1}':>7} "
        f"{f'{move.source_rank} -> {move.target_rank}':>9} {shape.part:4} {shape.row_bytes:>9} "
        f"{shape.num_rows:>4} {strides if shape.num_rows > 1 else '':>17} "
        f"{len(shape.phases):>5} {move.cycle.tokens:>6} "
        f"{f'{move.share.first + 1}/{move.share.of}':>5} {via}"
    )


def reasons(plan: kv.KVPlan) -> str:
    """Why rows are packed, once for each size."""
    link = plan.link
    found = sorted({move.why_packed for move in plan.moves if move.why_packed})
    if not found and link.pack is False:
        return "all direct: pack is False"
    if not found:
        return f"all direct: no row is below the {link.small_row_bytes:,} B that {link.name} needs"
    lines = [f"pack: {reason}" for reason in found]
    runs = sorted({move.unit_bytes for move in plan.moves if move.lands})
    if runs:
        sizes = ", ".join(f"{size:,}" for size in runs)
        lines.append(f"lands: gathered into runs of {sizes} B, which are written into the pages")
    if any(move.why_packed and not move.lands for move in plan.moves):
        lines.append(
            f"others: writes of up to {link.packed_write_bytes:,} B into a ring of "
            f"{link.ring_bytes:,} B at the target, scattered there; staging of as much at the "
            f"source; {link.num_sms} multiprocessors at either side"
        )
    return "\n".join(lines)


def request_table(plan: kv.KVPlan, begin: int, end: int, *, everything: bool) -> str:
    """What each target rank gets for one request, from whom."""
    lines: list[str] = []
    head = [
        f"one request of {end} tokens, {begin} of them at the target already",
        f"{'ranks':>9} {'bytes':>15} {'rows':>10} {'units':>10} {'requests':>8} {'immediates':>10}",
    ]
    total = [0] * 5
    for rank in range(plan.target.world_size):
        for source_rank, counts in kv.counts(plan, rank, begin, end).items():
            each = (counts.nbytes, counts.rows, counts.units, counts.requests, counts.immediates)
            lines.append(_counted(f"{source_rank} -> {rank}", each))
            total = [a + b for a, b in zip(total, each, strict=True)]
    return "\n".join([*head, *_cut(lines, everything), _counted("all", total)])


def _counted(name: str, values: tuple[int, ...] | list[int]) -> str:
    nbytes, rows, units, requests, immediates = values
    return f"{name:>9} {nbytes:>15,} {rows:>10,} {units:>10,} {requests:>8,} {immediates:>10,}"


def cost(plan: kv.KVPlan, tokens: int) -> str:
    """What a new pair costs one source rank: time on this machine, bytes that travel."""
    source, target = plan.source, plan.target
    num_pages = max(-(-tokens // side.page_tokens(group)) for side in (source, target)
                    for group in side.groups)  # fmt: skip
    rank = next((move.source_rank for move in plan.moves), 0)
    made = kv.kv_plan(source, target, link=plan.link, source_rank=rank)
    peers = sorted({move.target_rank for move in made.moves})
    ours = kv.dense_memory(source, rank, num_pages)[0]
    theirs = [kv.dense_memory(target, peer, num_pages)[0] for peer in peers]
    plan_ms = _best_ms(
        lambda: kv.kv_plan(source, target, link=plan.link, source_rank=rank), kv.forget_periods
    )
    resolve_ms = _best_ms(lambda: [kv.resolve(made, ours, each) for each in theirs])
    pages = torch.arange(num_pages, dtype=torch.int32, device="cpu")
    indices_ms = _best_ms(lambda: _indices(made, tokens, pages))
    layers, memory = len(kv.layout_to_bytes(source)), len(ours.to_bytes())
    page_bytes = sum(4 * -(-tokens // source.page_tokens(group)) for group in source.groups)
    return (
        f"rank {rank} with {len(peers)} peers: plan {plan_ms:.2f} ms, resolved {resolve_ms:.2f} "
        f"ms; indices of this request {indices_ms:.2f} ms\n"
        f"sent once by each rank: layout {layers:,} B, places of layers {memory:,} B and the "
        f"memory's descriptors; per request {page_bytes:,} B of page indices"
    )


def _indices(plan: kv.KVPlan, tokens: int, pages: torch.Tensor) -> None:
    for move in plan.moves:
        span = kv.span_of(plan, plan.source.group(move.group), 0, tokens)
        kv.indices(move, span, pages, pages)


def _best_ms(work: Callable[[], object], before: Callable[[], None] = lambda: None) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        before()
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best * 1e3


def _parser() -> Parser:
    parser = Parser(
        prog="python -m moe_p2p plan --kv",
        description="The plan of a KV transfer between two layouts of one model (docs/kv.md). "
        "SOURCE and TARGET: key=value,... with the keys " + ", ".join(KEYS) + "; or a .json file.",
    )
    add = parser.add_argument
    add("--source", default="tp=8,page=64", help="layout of the prefill side")
    add("--target", default="tp=8,dcp=8,page=64", help="layout of the decode side")
    add("--layers", type=at_least_1, default=61, help="of the model")
    add("--kv-heads", type=at_least_1, default=1, help="of the model; MLA: 1")
    add("--k-bytes", type=at_least_1, default=576, help="K of one head and token; MLA: the latent")
    add("--v-bytes", type=at_least_0, default=0, help="V of one head and token; MLA: 0")
    add("--window", type=at_least_1, help="tokens of a sliding window (full attention)")
    add("--tokens", type=at_least_0, default=4096, help="of one request")
    add("--prefix", type=at_least_0, default=0, help="tokens that the target has already")
    links = "NICs of a GPU (as measured here by `tune`, else cx7)"
    add("--link", choices=[*sorted(kv.LINKS), MEASURED], help=links)
    add("--bytes-per-s", type=float, help="instead of the rate of --link (its)")
    add("--writes-per-s", type=float, help="likewise; measure it on your NIC (the link's)")
    of_writes = "most of one packed write (the link's)"
    add("--packed-write-bytes", type=at_least_1, help=of_writes)
    add("--pack", choices=["auto", "always", "never"], default="auto", help="KVLink.pack")
    add("--all", action="store_true", help="every line of the table")
    return parser
