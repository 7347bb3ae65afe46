"""What ranks of weight updates count, as metrics (engine/metrics.py)."""

from __future__ import annotations

from collections.abc import Mapping

from moe_p2p.engine.metrics import Family, counter, gauge

_OF_TRAINER = {
    "bytes_written": ("written_bytes", "Bytes of parameters that were written to engine ranks"),
    "requests": ("requests", "Requests that wrote them"),
    "attempts": ("attempts", "Attempts of updates"),
    "failed": ("failed_attempts", "Attempts that failed"),
}
_OF_ENGINE_RANK = {
    "updates": ("updates", "Updates that the tensors were brought to"),
    "failed": ("failed_updates", "Attempts that failed here"),
    "joins": ("joins", "Versions that were read from peers to join"),
}


def of_trainer(
    rank: int, totals: Mapping[str, float], seconds: Mapping[str, float],
    stages: Mapping[str, float], version: int | None, late: int,
) -> list[Family]:  # fmt: skip
    own, staging = {"name": f"trainer {rank}"}, totals["staging_bytes"]
    parts = [({**own, "part": part}, value) for part, value in seconds.items()]
    return [
        *_counters(own, _OF_TRAINER, totals),
        gauge("weights_staging_bytes", "Most that conversions took", [(own, staging)]),
        gauge("weights_part_seconds", "Of the last update, while bytes moved", parts),
        *_of_rank(own, stages, version, late),
    ]


def of_engine_rank(
    name: str, totals: Mapping[str, float], stages: Mapping[str, float], version: int | None,
    late: int,
) -> list[Family]:  # fmt: skip
    own, buffer = {"name": name}, totals["buffer_bytes"]
    pause, join = totals["pause_ms"] / 1e3, totals["join_ms"] / 1e3
    return [
        *_counters(own, _OF_ENGINE_RANK, totals),
        gauge("weights_join_seconds", "Of the set-up in which it joined", [(own, join)]),
        gauge("weights_pause_seconds", "Of the last copy into the tensors", [(own, pause)]),
        gauge("weights_buffer_bytes", "Of the buffer beside the tensors", [(own, buffer)]),
        *_of_rank(own, stages, version, late),
    ]


def _counters(
    own: Mapping[str, str], names: Mapping[str, tuple[str, str]], totals: Mapping[str, float]
) -> list[Family]:
    return [
        counter(f"weights_{name}", about, [(own, totals[key])])
        for key, (name, about) in names.items()
    ]


def _of_rank(
    own: Mapping[str, str], stages: Mapping[str, float], version: int | None, late: int
) -> list[Family]:
    reached = [({**own, "stage": stage}, after) for stage, after in list(stages.items())]
    known = [] if version is None else [(own, float(version))]
    return [
        gauge("weights_stage_seconds", "From the last attempt's begin to each stage", reached),
        gauge("weights_version", "Version that is held", known),
        counter("weights_stragglers", "Waits in which somebody was named late", [(own, late)]),
    ]
