"""Figures of gpu_figures.py beside what is wanted of them, from the files that its steps wrote.

    python benchmarks/gpu_bars.py bench_out/gpu     # a folder of --out

gpu_figures.py prints it last.

Wanted are the goals in docs/figures.md on two H200 of one host. A step that did
not run, or whose result is wrong, has no figure: "-".
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

Find = Callable[[Any], float | None]
# Wrong results; memory of another GPU that goes through the host.
SPOILT = ("WRONG: ", "ABOVE THE WATERMARK", "is not mapped")
MARKS = {True: "met", False: "MISSED", None: "-"}


class Bar(NamedTuple):
    """find: of the step's JSON, or of the lines of its log where it writes none."""

    name: str
    step: str
    find: Find
    wanted: float | None = None  # None: to be read beside the others
    unit: str = "us"
    least: bool = False  # wanted or more; else at most

    def met(self, value: float | None) -> bool | None:
        if value is None or self.wanted is None:
            return None
        return value >= self.wanted if self.least else value <= self.wanted


# --- what steps wrote ---


def row_of(rows: Any, **wanted: Any) -> dict[str, Any]:
    """The first row with these values; {}: there is none."""
    return next((row for row in rows if all(row[k] == v for k, v in wanted.items())), {})


def number(row: dict[str, Any], what: str) -> float | None:
    return None if row.get(what) is None else float(row[what])


def turn(case: str, what: str = "pair", *, tree: int = -1) -> Find:
    """Median of a case of turns.py, by default of the last tree."""

    def find(rows: Any) -> float | None:
        of_case = [row for row in rows if row["case"] == case]
        row = of_case[tree] if of_case else {}
        return None if row.get("wrong") or what not in row else statistics.median(row[what])

    return find


def ratio(case: str, what: str, of: str = "") -> Find:
    """Of the last tree to the first, round by round; of: to another figure of the last tree."""

    def find(rows: Any) -> float | None:
        of_case = [row for row in rows if row["case"] == case and what in row]
        base = of_case[-1 if of else 0] if of_case else {}
        if (not of and len(of_case) < 2) or (of or what) not in base:
            return None
        both = zip(of_case[-1][what], base[of or what], strict=False)
        return statistics.median(a / b for a, b in both)

    return find


def pair(tokens: int, interface: str = "") -> Find:
    """Median of this package in `bench`; interface: of its DeepEP calls."""
    system = "moe_p2p.deep_ep" if interface else "moe_p2p"
    wanted = {"system": system, "correct": True, "tokens": tokens, "interface": interface}
    return lambda rows: number(row_of(rows, **wanted, what="pair graph"), "p50_us")


def layer(tokens: int) -> Find:
    """Median of the fastest layer, whatever its products, with or without overlap."""

    def find(rows: Any) -> float | None:
        wanted = {"system": "moe_p2p", "what": "layer graph", "correct": True, "tokens": tokens}
        found = [row["p50_us"] for row in rows if wanted.items() <= row.items()]
        return min(found, default=None)

    return find


def hops(tokens: int) -> Find:
    """Percent that the sum of hops is away from the pair."""

    def find(rows: Any) -> float | None:
        whole = pair(tokens)(rows)
        parts = row_of([row for row in rows if row.get("hops")], tokens=tokens).get("hops")
        return abs(sum(parts.values()) / whole - 1) * 100 if whole and parts else None

    return find


def model(tokens: int) -> Find:
    """Percent that the pair is away from what `python -m moe_p2p model` predicts of it."""

    def find(rows: Any) -> float | None:
        from moe_p2p.tools.model.phases import ours
        from moe_p2p.tools.model.wire import NICS, Job

        job = Job(ranks=2, tokens=tokens, ranks_per_node=1, experts=256)
        measured, predicted = pair(tokens)(rows), sum(ours(job, NICS["cx7"]))
        return abs(measured / predicted - 1) * 100 if measured else None

    return find


def megatron(system: str, what: str, of: str = "") -> Find:
    """Milliseconds; of: part of another system's."""

    def find(rows: Any) -> float | None:
        found, base = (
            number(row_of(rows, system=each, what=what), "median_ms") for each in (system, of)
        )
        return found if not of or found is None else base and found / base

    return find


def kv(system: str, what: str, page_kib: int) -> Find:
    """what: a field of kv.Figure, or a span, whose p50 is taken."""

    def find(body: Any) -> float | None:
        row = row_of(body["figures"], system=system, page_kib=page_kib, wrong_bytes=0)
        spans = {name: times[0] for name, times in row.get("spans_us", {}).items()}
        return number(spans | row, what)

    return find


def kv_more(system: str, page_kib: int) -> Find:
    """Percent above the compute alone; what is within its spread is nothing."""
    seen, more = kv(system, "overhead_seen", page_kib), kv(system, "overhead_percent", page_kib)
    return lambda body: 0.0 if seen(body) == 0 else more(body)


def weights(what: str) -> Find:
    def find(body: Any) -> float | None:
        found = body["figures"]
        counted = {what: len(found[what])} if isinstance(found.get(what), list) else found
        return None if found["wrong"] else number(counted, what)

    return find


def decode(way: str, of: str = "") -> Find:
    """p99 of pairs beside weights; of: of what is allowed."""

    def find(body: Any) -> float | None:
        row = row_of(body["ways"], name=way, wrong=0)
        p99 = number(row, "p99_us")
        return p99 / row[of] if of and p99 is not None else p99

    return find


def cells(first: Sequence[str], at: int) -> Find:
    """Largest number in column `at` of a log's lines that begin with these words."""

    def find(lines: Any) -> float | None:
        rows = [line.replace(",", "").split() for line in lines]
        found = [float(row[at]) for row in rows if row[: len(first)] == list(first)]
        return max(found, default=None)

    return find


def _few(tokens: int, what: str, wanted: float) -> Bar:
    name = f"by rank on 24, T {tokens}: {what}"
    return Bar(name, "turns", turn(f"T {tokens} on 24 SMs by rank", what), wanted)


def _host(case: str, name: str, wanted: float) -> Iterator[Bar]:
    yield Bar(f"host, {name}", "host", turn(case, "plain"))
    yield Bar("  of the first tree", "host", ratio(case, "plain"), wanted, "x")
    yield Bar("  floor", "host", turn(case, "floor"))
    yield Bar("  under a default device", "host", ratio(case, "default device", "plain"), 1.1, "x")


BARS: tuple[Bar, ...] = (
    *(Bar(f"EP8 mirrored, T {t}", "turns", turn(f"T {t}"), most)
      for t, most in ((8, 13.5), (32, 22.5), (128, 57), (4096, 1290))),
    Bar("EP8 mirrored, T 128 int10", "turns", turn("T 128 int10"), 50),
    Bar("EP8 mirrored, T 4096 int10", "turns", turn("T 4096 int10")),
    *(_few(*each) for each in ((512, "dispatch", 78), (512, "combine", 132),
                               (4096, "dispatch", 445), (4096, "combine", 835))),
    Bar("V2's calls on 24, T 128", "turns", turn("T 128 V2"), 77),
    *(Bar(f"  {case}, {what} of the first tree", "turns", ratio(case, what), None, "x")
      for case, what in (("T 8", "pair"), ("T 128", "pair"), ("T 4096", "pair"),
                         ("T 4096 on 24 SMs by rank", "dispatch"),
                         ("T 4096 on 24 SMs by rank", "combine"), ("T 128 V2", "pair"))),
    *(Bar(f"V1 low latency, T {t}", "turns", turn(f"T {t} low latency"), most)
      for t, most in ((8, 18), (32, 27), (128, 62))),
    Bar("EP2, V2's calls, T 128: 0.95 x 34.5", "deep-ep-calls", pair(128, "v2"), 32.8),
    Bar("EP2, V2's calls, T 4096: 1.13 x 405", "deep-ep-calls", pair(4096, "v2"), 458),
    Bar("EP2, V2's calls, T 4096: 0.9 x 405", "deep-ep-calls", pair(4096, "v2"), 365),
    *(Bar(f"timed NIC cx7 2x1, T {t}", "nodes-2x1", pair(t), most)
      for t, most in ((8, 34), (128, 93))),
    *(Bar(f"  hops away from it, T {t}", "nodes-2x1", hops(t), 5, "%") for t in (8, 128)),
    *(Bar(f"  model away from it, T {t}", "nodes-2x1", model(t), 10, "%") for t in (8, 128)),
    *(Bar(f"layer of DeepSeek-V3, EP8 mirrored, T {t}", "layer-deepseek-v3", layer(t), most)
      for t, most in ((8, 526), (128, None), (4096, 4300))),
    Bar("first call, one process", "first-call", lambda b: b["one_s"], 3, "s"),
    Bar("first call, 8 processes", "first-call", lambda b: b["together_s"], 5, "s"),
    Bar("  kernels from a filled cache", "first-call", lambda b: b["filled_kernels_s"], 0.1, "s"),
    *_host("all_to_all 8", "AllToAll T 8", 0.60),
    *_host("low_latency 8", "low latency T 8", 0.55),
    *_host("normal_cached 512", "V1 normal cached T 512", 0.70),
    *_host("v2 128", "V2 T 128", 0.75),
    *(Bar(f"waits for counts, {name}", "span", turn(case, "span"), most)
      for name, case, most in (("V1 T 512: 0.9 x 188", "normal_counted 512", 169),
                               ("V1 T 4096: 0.8 x 754", "normal_counted 4096", 603),
                               ("V2 T 128: 1.0 x 118", "v2_counted 128", 118),
                               ("V2 T 4096: 1.15 x 415", "v2_counted 4096", 477),
                               ("V2 T 4096: 0.9 x 415", "v2_counted 4096", 374))),
    *(Bar(f"Megatron without experts, {system} {way}", f"megatron-{system}",
          megatron(system, f"without experts {way}", "alltoall"), most, "x")
      for system, most in (("shim", 0.8), ("integration", 0.5)) for way in ("forward", "backward")),
    *(Bar(f"Megatron without experts, shim_fused {way}", "megatron-shim_fused",
          megatron("shim_fused", f"without experts {way}", "alltoall"), most, "x")
      for way, most in (("forward", 0.8), ("backward", 0.9))),
    *(Bar(f"Megatron, first step, {system}", f"megatron-{system}",
          megatron(system, "first step"), 5000, "ms") for system in ("shim", "integration")),
    *(Bar(f"KV {k} tokens, {system}, pages of {page} KiB: more", f"kv-{k}",
          kv_more(system, page), 5, "%")
      for k in ("4k", "16k") for page in (16, 64) for system in ("signals", "graph")),
    *(Bar(f"KV {k} tokens, compute alone", f"kv-{k}", kv("compute", "ttft_ms", 64), None, "ms")
      for k in ("4k", "16k")),
    *(Bar(f"KV signal to first post, p50, {system}", "kv-post", kv(system, "post", 4), 5)
      for system in ("signals", "graph")),
    Bar("KV rows of 576 B packed, 6 multiprocessors", "kv-packing", cells(["6"], 4), 35, "GB/s",
        least=True),
    *(Bar(f"  {sms} multiprocessors", "kv-packing", cells([sms], 4), None, "GB/s")
      for sms in ("12", "24")),
    *(Bar(f"KV cancel to pages, p99, {side} {case}", "kv-reclaim", cells([side, case], 4), most,
          "ms")
      for side in ("receiver", "sender")
      for case, most in (("healthy", 5), ("stopped", 350), ("dead", 350))),
    Bar("weights, part of a peer copy", "weights", weights("percent_of_peer_copy"), 85, "%",
        least=True),
    Bar("weights, submit of a request", "weights", weights("submit_us"), 5),
    Bar("weights, pause for 8 GB, shadow", "weights", weights("pause_ms_per_8gb"), 20, "ms"),
    Bar("weights, ranks above the watermark", "weights", weights("above"), 0, ""),
    Bar("weights, times gather and broadcast", "weights", weights("times_faster"), 3, "x",
        least=True),
    Bar("weights, host memory", "weights", weights("host_mib"), None, "MiB"),
    Bar("weights, a generator joins", "weights", weights("join_ms"), 1000, "ms"),
    Bar("weights in place, part of a peer copy", "weights-in-place",
        weights("percent_of_peer_copy"), 85, "%", least=True),
    Bar("decode beside weights, p99 of what is allowed", "weights-decode",
        decode("with priorities", "allowed_us"), 1, "x"),
    Bar("  p99 alone", "weights-decode", decode("alone")),
    Bar("  p99 without priorities", "weights-decode", decode("same class")),
    Bar("experts of 44 MB, a move alone", "experts",
        lambda body: number(body["alone"][0], "gbytes_per_s"), 100, "GB/s", least=True),
    Bar("pairs beside moves of experts, p99 of what is allowed", "experts",
        decode("into empty slots", "allowed_us"), 1, "x"),
)  # fmt: skip


def load(folder: Path, step: str) -> Any:
    """JSON of a step, else the lines of its log; None: it has not run."""
    for path in (folder / f"{step}.json", folder / f"{step}.log"):
        if path.exists():
            text = path.read_text(errors="replace")
            return json.loads(text) if path.suffix == ".json" else text.splitlines()
    return None


def value_of(bar: Bar, folder: Path) -> float | None:
    try:
        found = load(folder, bar.step)
        return None if found is None else bar.find(found)
    except (ValueError, KeyError, TypeError, IndexError):  # a step that was ended, an error text
        return None


def failures(folder: Path, steps: Sequence[str], most: int = 12) -> Iterator[str]:
    """Failed tests of pytest's logs, and each log's last line."""
    for path in (folder / f"{step}.log" for step in steps):
        text = path.read_text(errors="replace").splitlines() if path.exists() else []
        failed = [line for line in text if line.startswith(("FAILED ", "ERROR "))]
        yield from (line[:150] for line in failed[:most])
        if len(failed) > most:
            yield f"and {len(failed) - most} more in {path.name}"
        done = re.findall(r"\d+ of \d+ tests", "\n".join(text))
        if any("session-timeout" in line for line in text[-3:]) and done:
            yield f"{path.stem}: its time was over: {done[-1]}"
        if text and " in " in text[-1] and ("passed" in text[-1] or "failed" in text[-1]):
            yield f"{path.stem}: {text[-1].strip('= ')}"


def noticed(folder: Path, steps: Sequence[str]) -> Iterator[str]:
    """The first of each log's lines that spoil its figures."""
    for path in (folder / f"{step}.log" for step in steps):
        text = path.read_text(errors="replace").splitlines() if path.exists() else []
        spoilt = next((line for line in text if any(word in line for word in SPOILT)), "")
        if spoilt:
            yield f"{path.stem}: {spoilt.strip()[:150]}"


def report(folder: Path, steps: Sequence[str]) -> list[str]:
    """What gpu_figures.py prints last, of these steps."""
    found = [*failures(folder, steps), *noticed(folder, steps)]
    return found + (lines(folder, steps) if {bar.step for bar in BARS} & {*steps} else [])


def lines(folder: Path, steps: Sequence[str] = ()) -> list[str]:
    """The table. steps: of these alone, () of all."""
    found = []
    for bar in BARS:
        if steps and bar.step not in steps:
            continue
        value = value_of(bar, folder)
        shown = "-" if value is None else f"{value:,.2f}" if abs(value) < 100 else f"{value:,.0f}"
        wanted = "" if bar.wanted is None else f"{'>=' if bar.least else '<='} {bar.wanted:g}"
        mark = "" if bar.wanted is None else MARKS[bar.met(value)]
        found.append(f"{bar.name:55} {shown:>9} {bar.unit:4} {wanted:>8} {mark}".rstrip())
    marks = [line.split()[-1] for line in found]
    found.append(f"{marks.count('met')} met, {marks.count('MISSED')} missed")
    return found


if __name__ == "__main__":
    print("\n".join(lines(Path(sys.argv[1] if len(sys.argv) > 1 else "bench_out/gpu"))))
