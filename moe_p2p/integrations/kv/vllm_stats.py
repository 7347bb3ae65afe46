"""KVTotals as vLLM's connector stats, and as Prometheus metrics of its server."""

from __future__ import annotations

import functools
from typing import Any

from moe_p2p.integrations import required
from moe_p2p.kv.stats import HISTOGRAMS, KVTotals

_METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
_COUNTED = (
    "requests",
    "failed",
    "nbytes",
    "writes",
    "merged",
    "packed",
    "retries",
    "drained",
    "queue_pair",
    "key",
)


class Stats:
    """KVConnectorStats: the totals of an interval, as `KVTotals.to_dict`."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data.get("requests")

    def aggregate(self, other: Any) -> Any:
        self.data = (KVTotals.from_dict(self.data) + KVTotals.from_dict(other.data)).to_dict()
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log: counts, and means of times in milliseconds."""
        totals = KVTotals.from_dict(self.data)
        found: dict[str, int | float] = {name: getattr(totals, name) for name in _COUNTED}
        for name in HISTOGRAMS:
            histogram = getattr(totals, name)
            count = sum(histogram.counts)
            if count:
                found[f"mean {name.removesuffix('_s')} ms"] = round(1e3 * histogram.sum / count, 3)
        return found


class PromMetrics:
    """KVConnectorPromMetrics: counters. Of times, their sum; divided by requests it is the mean."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)  # type: ignore[call-arg]
        names = {name: "bytes" if name == "nbytes" else name for name in _COUNTED}
        names |= {name: f"{name.removesuffix('_s')}_seconds" for name in HISTOGRAMS}
        this: Any = self
        self._counters = {
            field: {engine: counter.labels(*values) for engine, values in per_engine.items()}
            for field, name in names.items()
            for counter in (
                this._counter_cls(
                    name=f"vllm:moe_p2p_kv_{name}",
                    documentation=f"moe_p2p.kv: {name} of requests whose pages are free again.",
                    labelnames=labelnames,
                ),
            )
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for field, counters in self._counters.items():
            value = transfer_stats_data.get(field, 0)
            counters[engine_idx].inc(value["sum"] if isinstance(value, dict) else value)


@functools.cache
def stats_class() -> Any:
    base = required(_METRICS, "vllm").KVConnectorStats
    return type(base)("MoeP2pStats", (Stats, base), {"__module__": __name__})


@functools.cache
def prom_class() -> Any:
    base = required(_METRICS, "vllm").KVConnectorPromMetrics
    return type(base)("MoeP2pPromMetrics", (PromMetrics, base), {"__module__": __name__})


def __getattr__(name: str) -> Any:
    if name == "MoeP2pStats":  # what workers send is pickled by this name
        return stats_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
