"""Measurements of others, for comparison with the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from moe_p2p.tools.model.phases import Fit, Pair, deepep, fit
from moe_p2p.tools.model.wire import NICS, Job

_FILE = Path(__file__).with_name("deepep_v1_low_latency.json")
FITTED_RANKS = 16  # the points on which constants are fitted; larger worlds are predicted


class Point(NamedTuple):
    """Microseconds of a pair. `what`: system and machine."""

    what: str
    ranks: int
    tokens: int
    pair: Pair


def deepep_points() -> list[Point]:
    """DeepEP V1, low latency, on several nodes of 8 H100 with a ConnectX-7 of 400 Gbit/s each."""
    rows = json.loads(_FILE.read_text())["rows"]
    return [Point("DeepEP V1", ranks, t, Pair(d, c)) for _, ranks, t, d, c in rows if ranks > 8]


def deepep_fits(points: list[Point]) -> tuple[Fit, Fit]:
    """Fits both phases to the points of FITTED_RANKS ranks."""
    chosen = [point for point in points if point.ranks == FITTED_RANKS]
    jobs = [Job(ranks=point.ranks, tokens=point.tokens) for point in chosen]
    dispatch, combine = (
        fit(NICS["cx7"], jobs, phase, [point.pair[phase] for point in chosen]) for phase in (0, 1)
    )
    return dispatch, combine


def margin_us(us: float) -> float:
    """Of a phase: as far from the model as each published point of DeepEP may be."""
    return max(8.0, 0.1 * us)


class Checked(NamedTuple):
    """A published point and the model's."""

    point: Point
    model: Pair

    def holds(self, phase: int) -> bool:
        """Within 10% or 8 us, whichever is more."""
        measured = self.point.pair[phase]
        return abs(self.model[phase] - measured) <= margin_us(measured)


def check(points: list[Point], fits: tuple[Fit, Fit]) -> list[Checked]:
    nic = NICS["cx7"]
    return [Checked(p, deepep(Job(ranks=p.ranks, tokens=p.tokens), nic, fits)) for p in points]


def _points(what: str, tokens: int, pairs: dict[int, tuple[float, float]]) -> list[Point]:
    return [Point(what, ranks, tokens, Pair(*pair)) for ranks, pair in pairs.items()]


# With 128 tokens a rank, H 7168 and top-8 of 256 where nothing else is said.
OTHERS = [
    # FlashInfer's comparison of moe_ep backends.
    *_points("NCCL EP, B200 + NDR", 128, {8: (43.9, 43.8), 16: (170, 200), 32: (255, 285)}),
    # ROCm/mori, V1 low latency.
    *_points("MoRI, MI300X + CX7", 128, {16: (76, 122)}),
    *_points("MoRI, MI355X + AINIC", 128, {16: (84, 108), 32: (152, 187)}),
    # fabric-lib (pplx), arXiv 2510.27656, on EFA as AWS reproduced it.
    *_points(
        "pplx, H200 + EFA", 128, {16: (218, 245), 32: (231, 337), 64: (269, 394), 128: (425, 589)}
    ),
    # UCCL-EP on p5en.
    *_points("UCCL, H200 + EFA", 128, {16: (226, 293), 24: (386, 580), 32: (465, 694)}),
]
