"""What a trace says, as text and as a picture: where a step's time went, beside its floor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_p2p.tools.draw import draw
from moe_p2p.tools.trace.recorded import Trace
from moe_p2p.tools.trace.steps import PAIR, PARTS, Judged, Step, parts_of

MOST_RANKS = 16  # that are shown
MOST_WAITS = 5
COLOURS = {
    ("dispatch", "send"): "#1f77b4",
    ("dispatch", "wait"): "#dbe9f6",
    ("dispatch", "receive"): "#6baed6",
    ("combine", "send"): "#d9730d",
    ("combine", "wait"): "#fde3c8",
    ("combine", "receive"): "#fdae6b",
}
BETWEEN = "#bdbdbd"
# Inches. Of a width that a phone shows, letters can still be read there.
INCH_OF_RANK, WIDTH, BELOW = 0.34, 5.6, 0.75


class Floor(NamedTuple):
    """Least microseconds of a step's phases; 0: not known. why: bytes over which rate."""

    dispatch: float = 0.0
    combine: float = 0.0
    why: str = ""

    @property
    def pair(self) -> float:
        return self.dispatch + self.combine


NOT_KNOWN = Floor()


def us(ns: float) -> str:
    value = ns / 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def text(trace: Trace, judged: Judged | None, floor: Floor = NOT_KNOWN) -> str:
    """Some lines; the last one names the straggler, if there is one."""
    lines = [_clocks(trace), _counted(trace)]
    lines += trace.without_phases()
    lines += [f"rank {each.rank}: {lost}" for each in trace.ranks for lost in each.lost]
    if judged is None:
        return "\n".join([*lines, "no step has its dispatch and its combine on all ranks"])
    took = f"{len(judged.steps)} steps: {us(judged.took)} us in the mean, {us(judged.middle.took)} "
    took += "the median one"
    if floor.pair:
        took += (
            f"; floor {us(floor.pair * 1e3)} ({us(floor.dispatch * 1e3)} + "
            f"{us(floor.combine * 1e3)}: {floor.why})"
        )
    lines += ["", took, *_table(judged), "", *_waits(judged), _straggler(judged, trace)]
    return "\n".join(lines)


def _clocks(trace: Trace) -> str:
    errors = [trace.error_ns(process) for process in range(len(trace.ranks))]
    worst = max(range(len(errors)), key=errors.__getitem__)
    if not errors[worst]:
        return f"{len(errors)} ranks on one host's clock: no error between them"
    drift = max(abs(clock.drift_ppm) for clock in trace.hosts)
    gpus = " and GPUs" if any(trace.gpus) else ""
    return (
        f"{len(errors)} ranks, clocks of hosts{gpus} matched: times are right within "
        f"{us(errors[worst])} us (of rank {trace.ranks[worst].rank}); hosts drift by at most "
        f"{drift:.1f} ppm"
    )


def _counted(trace: Trace) -> str:
    kinds: Counter[str] = Counter()
    for process, recorded in enumerate(trace.ranks):
        for engine in recorded.engines:
            kinds.update(event.kind for event in trace.events(process, engine))
    names = ("doorbell", "posted", "completed", "immediate", "published", "refused")
    counted = "events: " + ", ".join(f"{kinds[name]:,} {name}" for name in names)
    users = Counter(each.user for recorded in trace.ranks for each in recorded.busy)
    more = {"kv": "requests of KV", "weights": "attempts of weight updates"}
    return ", ".join([counted, *(f"{users[user]:,} {more[user]}" for user in sorted(users))])


def shown_ranks(judged: Judged) -> list[int]:
    ranks = sorted(judged.parts)
    first = ranks[:MOST_RANKS]
    late = None if judged.straggler is None else judged.straggler.rank
    return first if late is None or late in first else [*first[:-1], late]


def _table(judged: Judged) -> list[str]:
    """Microseconds of each rank, means."""
    head = ["rank", *(f"{part}" for _ in PAIR for part in PARTS), ""]
    head.insert(4, "between")
    rows = [head]
    for rank in shown_ranks(judged):
        parts = judged.parts[rank]
        lengths = [parts["dispatch", part] for part in PARTS]
        lengths += [judged.between[rank], *(parts["combine", part] for part in PARTS)]
        late = judged.straggler is not None and judged.straggler.rank == rank
        rows.append([str(rank), *map(us, lengths), "<- waited for" if late else ""])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    over = sum(widths[:1]) + 2
    names = " " * over + "dispatch".ljust(sum(widths[1:5]) + 8) + "combine, us"
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    more = len(judged.parts) - len(rows) + 1
    return [names, *lines, *([f"and {more} more ranks"] if more else [])]


def _waits(judged: Judged) -> list[str]:
    """The longest, by who was waited for last."""
    found = sorted(
        (
            (ns, source, rank)
            for source, of in enumerate(judged.waited)
            for rank, ns in enumerate(of)
        ),
        reverse=True,
    )
    longest = [(ns, source, rank) for ns, source, rank in found[:MOST_WAITS] if ns > 0]
    return [
        f"rank {rank} waits {us(ns)} us a step for rank {source}" for ns, source, rank in longest
    ]


def _straggler(judged: Judged, trace: Trace) -> str:
    late = judged.straggler
    if late is None:
        return "no straggler: no rank is waited for much longer than others"
    behind = f"it begins {us(late.late)} us behind the median rank"
    if late.late < late.waited / 2:
        behind = "it begins in time: its sending, or what carries it, is slow"
    return (
        f"straggler: rank {late.rank}, waited for {us(late.waited)} us a step, {late.share:.0%} of "
        f"all waiting; {behind}"
    )


# --- a picture ---


def picture(
    path: Path, title: str, trace: Trace, judged: Judged, floor: Floor = NOT_KNOWN
) -> str | None:
    """Draws the step of median length, and the means. Returns why it could not; None: it could."""
    ranks = shown_ranks(judged)
    took = f"{title}\na step takes {us(judged.took)} us"
    took += f", its floor {us(floor.pair * 1e3)}" if floor.pair else ""
    if judged.straggler is not None:
        took += f"; rank {judged.straggler.rank} is waited for"
    if len(ranks) < len(judged.parts):
        took += f" ({len(ranks)} of {len(judged.parts)} ranks)"

    if missing := len(trace.without_phases()):
        many = "s" if missing > 1 else ""
        took += f"\nnot in it: kernels of {missing} communicator{many} made before the trace"

    def paint(axes: Any) -> None:
        _timeline(axes[0], judged.middle, ranks, floor)
        _means(axes[1], judged, ranks, floor)
        handles = [
            _patch(COLOURS[name, part], f"{name}: {part}") for name in PAIR for part in PARTS
        ]
        handles.insert(3, _patch(BETWEEN, "between them"))
        below = -BELOW / (INCH_OF_RANK * (len(ranks) + 1))
        place = {"loc": "upper center", "bbox_to_anchor": (0.45, below)}
        axes[1].legend(handles=handles, ncols=2, fontsize=10, **place)

    height = 2.9 + 2 * INCH_OF_RANK * (len(ranks) + 1) + 1.2
    return draw(path, took, paint, nrows=2, figsize=(WIDTH, height))


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)


def _rows(axis: Any, ranks: Sequence[int], late: int | None = None) -> None:
    """Rank 0 above, the floor below all."""
    names = [f"rank {rank}" + (" *" if rank == late else "") for rank in ranks]
    axis.set_yticks(range(len(ranks) + 1), [*names, "floor"])
    axis.invert_yaxis()
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.set_xlim(left=0)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)


def _floor(axis: Any, row: int, floor: Floor) -> None:
    if not floor.pair:
        axis.text(0, row, " not known", va="center", fontsize=9)
        return
    axis.barh(row, floor.dispatch, color=COLOURS["dispatch", "send"], height=0.6)
    axis.barh(row, floor.combine, left=floor.dispatch, color=COLOURS["combine", "send"], height=0.6)


def _timeline(axis: Any, step: Step, ranks: Sequence[int], floor: Floor) -> None:
    for row, rank in enumerate(ranks):
        dispatch, combine = step.dispatch[rank], step.combine[rank]
        begin = (dispatch.end - step.begin) / 1e3
        axis.barh(row, (combine.begin - dispatch.end) / 1e3, left=begin, color=BETWEEN, height=0.3)
        for phase in (dispatch, combine):
            at = (phase.begin - step.begin) / 1e3
            for part, length in zip(PARTS, parts_of(phase), strict=True):
                colour = COLOURS[phase.name, part]
                axis.barh(row, length / 1e3, left=at, color=colour, height=0.7)
                at += length / 1e3
    _floor(axis, len(ranks), floor)
    axis.set(title=f"step {step.number}, of median length", xlabel="us since its first rank began")
    _rows(axis, ranks)


def _means(axis: Any, judged: Judged, ranks: Sequence[int], floor: Floor) -> None:
    late = None if judged.straggler is None else judged.straggler.rank
    for row, rank in enumerate(ranks):
        parts, at = judged.parts[rank], 0.0
        lengths = [(COLOURS["dispatch", part], parts["dispatch", part]) for part in PARTS]
        lengths.append((BETWEEN, judged.between[rank]))
        lengths += [(COLOURS["combine", part], parts["combine", part]) for part in PARTS]
        for colour, length in lengths:
            axis.barh(row, length / 1e3, left=at, color=colour, height=0.7)
            at += length / 1e3
    _floor(axis, len(ranks), floor)
    waited = " (*: others wait for it)" if late in ranks else ""
    axis.set(title=f"mean of {len(judged.steps)} steps", xlabel=f"us of each rank{waited}")
    _rows(axis, ranks, late)
