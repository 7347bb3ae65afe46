"""Counters of objects in the forms of Prometheus: its text, and a collector of prometheus_client.

Objects say by `metrics()` what they count: Engine, moe/counts.py's communicators, KV workers,
weights' ranks. Reading makes no request to a store, waits for no step and takes no lock that one
holds while it runs. An object is left out once it is closed.
"""

from __future__ import annotations

import importlib
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from moe_p2p import errors

# Of a whole NIC, all processes; the kernel's names, of mlx5 and of EFA. Retries and refusals: what
# came out of order or was lost, answers that were late, receivers that were not ready.
_HARDWARE = (
    *("out_of_sequence", "packet_seq_err", "implied_nak_seq_err", "local_ack_timeout_err"),
    *("rnr_nak_retry_err", "req_remote_access_errors", "req_cqe_error", "np_cnp_sent"),
    *("rp_cnp_handled", "np_ecn_marked_roce_packets", "retrans_pkts", "retrans_timeout_events"),
    *("rx_drops", "unresponsive_remote_events", "impaired_remote_conn_events"),
)


class Buckets(NamedTuple):
    """A histogram. counts: of each bound of `bounds`, and of what is more; not summed up."""

    bounds: Sequence[float]
    counts: Sequence[int]
    sum: float


class Sample(NamedTuple):
    labels: Mapping[str, str]
    value: float | Buckets


class Family(NamedTuple):
    """One metric. kind: "counter", "gauge" or "histogram"."""

    name: str
    kind: str
    about: str
    samples: list[Sample]


def counter(name: str, about: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> Family:
    return Family(f"moe_p2p_{name}_total", "counter", about, [Sample(*each) for each in samples])


def gauge(name: str, about: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> Family:
    return Family(f"moe_p2p_{name}", "gauge", about, [Sample(*each) for each in samples])


class Counted(Protocol):
    """An object with counters. Its `engine`, if it has one, counts for it, too."""

    def metrics(self) -> list[Family]:
        """None once it is closed."""


# --- what is counted ---

_made: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.Lock()


def note(made: Counted) -> None:
    """It is among all objects of this process from now on."""
    with _lock:
        _made.add(made)


def noted() -> list[Any]:
    """All objects of this process that count and are not collected."""
    with _lock:
        return list(_made)


def of_each(objects: Iterable[Any]) -> list[Family]:
    """Metrics of these objects and of their engines, one after the other."""
    found = []
    for each in objects:
        for part in (each, getattr(each, "engine", None)):
            metrics = getattr(part, "metrics", None)
            errors.require(
                metrics is not None or part is not each,
                f"{each!r} has no counters; pass an AllToAll, a pool of them, an Engine, a KV "
                "worker, a WeightTrainer or a WeightEngineRank",
            )
            if metrics is not None:
                with suppress(errors.ClosedError):  # just now
                    found += metrics()
    return found


def collected(objects: Sequence[object]) -> list[Family]:
    """The same, each name and each sample once. No objects: of all that this process has made."""
    given = list(objects) or noted()
    merged: dict[str, dict[tuple[str, ...], Sample]] = {}
    kinds: dict[str, Family] = {}
    for family in of_each(given):
        kinds.setdefault(family.name, family)
        samples = merged.setdefault(family.name, {})
        for sample in family.samples:
            samples.setdefault(tuple(sample.labels.values()), sample)
    return [kinds[name]._replace(samples=list(each.values())) for name, each in merged.items()]


def prometheus_text(*objects: object) -> str:
    """Metrics of these objects in the text format of Prometheus, for an endpoint to return.

    objects: each an AllToAll or AllToAllPool, Engine, KVSender or KVReceiver, WeightTrainer or
    WeightEngineRank; engines that they use are counted with them. None: all of this process. Any
    thread may call it, at any time. Raises InvalidArgumentError for other objects.
    """
    return text_of(collected(objects))


class _Collector:
    def __init__(self, client: Any, objects: Sequence[object]) -> None:
        self._client, self._objects = client, objects

    def describe(self) -> list[Any]:
        return []  # a registry need not collect to know the names

    def collect(self) -> Iterable[Any]:
        return [_of_client(self._client, family) for family in collected(self._objects)]

    # A registry that is given the same objects twice has their series once.

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Collector) and self._identities() == other._identities()

    def __hash__(self) -> int:
        return hash(frozenset(self._identities()))

    def _identities(self) -> set[int]:
        return {id(each) for each in self._objects}


def prometheus_collector(*objects: object) -> Any:
    """The same for `prometheus_client.REGISTRY.register`. Holds the objects. Collectors of the same
    objects are equal: registered twice, they count once. Raises UnavailableError where
    prometheus_client is not installed."""
    try:
        client = importlib.import_module("prometheus_client.core")
    except ImportError as error:
        text = f"prometheus_client cannot be imported ({error}): pip install prometheus-client, or "
        text += "return prometheus_text() from an endpoint of yours, which needs nothing"
        raise errors.make(errors.UnavailableError, text) from error
    collected(objects)  # raises for what has no counters
    return _Collector(client, objects)


# --- their forms ---


def text_of(found: Iterable[Family]) -> str:
    lines = []
    for family in found:
        lines.append(f"# HELP {family.name} {family.about}.")
        lines.append(f"# TYPE {family.name} {family.kind}")
        for labels, value in family.samples:
            if not isinstance(value, Buckets):
                lines.append(f"{family.name}{_labels(labels)} {value!r}")
                continue
            for bound, below in _cumulative(value):
                lines.append(f"{family.name}_bucket{_labels({**labels, 'le': bound})} {below}")
            lines.append(f"{family.name}_sum{_labels(labels)} {value.sum!r}")
            lines.append(f"{family.name}_count{_labels(labels)} {sum(value.counts)}")
    return "\n".join([*lines, ""])


def _labels(labels: Mapping[str, str]) -> str:
    def escaped(value: str) -> str:
        return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items()) + "}"


def _cumulative(value: Buckets) -> list[tuple[str, int]]:
    found, below = [], 0
    for bound, count in zip((*value.bounds, None), value.counts, strict=True):
        below += count
        found.append(("+Inf" if bound is None else f"{bound:g}", below))
    return found


def _of_client(client: Any, family: Family) -> Any:
    kinds = {"counter": client.CounterMetricFamily, "gauge": client.GaugeMetricFamily}
    kind = kinds.get(family.kind, client.HistogramMetricFamily)
    names = list(family.samples[0].labels) if family.samples else []
    made = kind(family.name, f"{family.about}.", labels=names)
    for labels, value in family.samples:
        here = [labels[name] for name in names]
        if isinstance(value, Buckets):
            made.add_metric(here, buckets=_cumulative(value), sum_value=value.sum)
        else:
            made.add_metric(here, value)
    return made


# --- a NIC's ---

_OF_NIC = (
    ("bytes_written", "nic_written_bytes", "Bytes that this engine wrote to peers"),
    ("writes", "nic_writes", "Work requests posted, immediates included, reads not"),
    ("bytes_read", "nic_read_bytes", "Bytes that this engine read from peers"),
    ("reads", "nic_reads", "Reads posted"),
    ("immediates_sent", "nic_immediates_sent", "Immediates sent"),
    ("immediates_received", "nic_immediates_received", "Immediates that arrived"),
    ("connections_refused", "nic_refused_connections", "Connections of strangers refused"),
)


def of_nics(
    own: Mapping[str, str], names: Sequence[str], counts: Sequence[Mapping[str, Any]]
) -> list[Family]:
    """own: labels of the engine. names: of its NICs."""
    nics = [{**own, "nic": name} for name in names]
    found = [
        counter(metric, about, [(nics[i], each[key]) for i, each in enumerate(counts)])
        for key, metric, about in _OF_NIC
    ]
    about = "Retries, refusals and congestion that the whole NIC counts, for all processes"
    events = [(nic, hardware_events(nic["nic"])) for nic in nics]
    samples = [({**nic, "event": e}, n) for nic, seen in events for e, n in seen.items()]
    return [*found, counter("nic_hardware_events", about, samples)]


def hardware_events(nic: str, root: Path = Path("/")) -> dict[str, int]:
    """What the kernel shows of an RDMA device, over its ports; empty for other NICs."""
    found: dict[str, int] = {}
    device = root / "sys/class/infiniband" / nic.removesuffix("-rdm")  # of libfabric's domain
    for port in device.glob("ports/*/hw_counters"):
        for event in _HARDWARE:
            with suppress(OSError, ValueError):  # this driver does not count it
                found[event] = found.get(event, 0) + int((port / event).read_text())
    return found
