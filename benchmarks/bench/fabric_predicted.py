"""What the model predicts beside each figure of fabric-check, and in which interval.

`python -m moe_p2p model` is of GPUs with ConnectX-7 or EFA, fp8 dispatch and bf16 combine. Its
interval is the one in which it meets all published points of DeepEP: 10% or 8 us of each phase.
CPU ranks and software NICs have the prediction beside them, too: `comparable` is false there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from moe_p2p.bench.fabric_rails import ALONE, TOGETHER
from moe_p2p.machine import transport
from moe_p2p.tools.model import command, published
from moe_p2p.tools.model.wire import NICS, Job, Nic

_RATE_MARGIN = 0.05  # of goodput: published slopes of one NIC lie within 92 and 97% of its rate
Row = Mapping[str, Any]


def nic_of(rails: Sequence[Row], facts: Sequence[Row]) -> tuple[str, Nic]:
    """The model's NIC that is nearest to those here, at their rate: all NICs of a rank as one."""
    kinds = {nic["kind"] for of_host in facts for nic in of_host["doctor"]["nics"]}
    name = "efa" if "efa" in kinds else "cx7"
    rates = [row["rate_gbps"] for row in rails if row["way"] == TOGETHER and row["rate_gbps"]]
    return name, dataclasses.replace(NICS[name], gbps=min(rates)) if rates else NICS[name]


def is_comparable(rails: Sequence[Row]) -> bool:
    """Whether ranks have GPUs and NICs that the model is of."""
    real = {transport.VERBS, transport.LIBFABRIC}
    return bool(rails) and all(
        row["memory"] == "cuda" and row["provider"] in real and row["rate_gbps"] for row in rails
    )


def of_rail(row: Row, nic: Nic) -> dict[str, list[float]]:
    """[predicted, least, most] by figure: GB/s of large pages, microseconds one way."""
    found = dict[str, list[float]]()
    top = (row["rate_gbps"] or nic.gbps) / 8
    shares = nic.goodput, nic.goodput - _RATE_MARGIN, nic.goodput + _RATE_MARGIN
    found["gbytes_per_s"] = [_cut(top * share) for share in shares]
    if row["way"] == ALONE:
        us = nic.latency_us + (row["calls_us"] or 0.0)
        margin = published.margin_us(us)
        found["latency_us"] = [_cut(us), _cut(max(0.0, us - margin)), _cut(us + margin)]
    return found


def of_pair(row: Row, nic: Nic) -> list[float] | None:
    """[predicted, least, most] us of a row of the bench; None: the model does not describe it."""
    low_latency = row["interface"] == "low-latency"
    ours = row["system"] == "moe_p2p" and (low_latency or not row["interface"])
    theirs = row["system"] == "deep_ep" and low_latency
    phase = row["what"].split()[0]
    if (
        not (ours or theirs)
        or phase not in ("pair", "dispatch", "combine")
        or "send" in row["what"]
    ):
        return None
    names = ("ranks", "tokens", "ranks_per_node", "hidden", "topk", "experts")
    job = Job(**{name: row[name] for name in names})
    fits = published.deepep_fits(published.deepep_points()) if theirs else None
    found = command.predict(job, nic, fits)
    pair = found.deepep if theirs else found.ours
    if pair is None:
        return None
    phases = list(pair) if phase == "pair" else [getattr(pair, phase)]
    us, margin = sum(phases), sum(map(published.margin_us, phases))
    return [_cut(us), _cut(us - margin), _cut(us + margin)]


def verdict(value: float, predicted: Sequence[float] | None, *, comparable: bool) -> str:
    if predicted is None or not comparable:
        return ""
    _, least, most = predicted
    return "below" if value < least else "above" if value > most else "within"


def _cut(value: float) -> float:
    return round(value, 2)
