"""The forms of metrics, read by Prometheus's own parser, and what an engine counts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import moe_p2p
from moe_p2p import Engine, EngineConfig
from moe_p2p.engine import metrics
from moe_p2p.engine.metrics import Buckets, Family, Sample

prometheus_client = pytest.importorskip("prometheus_client", reason="needs prometheus-client")
from prometheus_client import parser, registry  # noqa: E402

ODD = 'a"\\\n b{},='
X, Z = Sample({"a": ODD, "b": "1"}, 3), Buckets((0.5, 1.0), [2, 0, 3], 7.5)
FAMILIES = [
    Family("moe_p2p_x_total", "counter", "Of x", [X, Sample({"a": "", "b": "2"}, 2**53)]),
    Family("moe_p2p_y", "gauge", "Of y", [Sample({"a": "q"}, 0.25)]),
    Family("moe_p2p_z_seconds", "histogram", "Of z", [Sample({"a": ODD}, Z)]),
    Family("moe_p2p_none_total", "counter", "Of nobody", []),
]


def parsed(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Each sample once."""
    found = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found
            found[key] = sample.value
    return found


@pytest.fixture
def engines() -> Iterator[tuple[Engine, Engine]]:
    with (
        Engine(EngineConfig(transport="loopback"), label='one "1"') as one,
        Engine(EngineConfig(transport="loopback"), label="two") as two,
    ):
        yield one, two


def test_prometheus_reads_what_was_written() -> None:
    found = parsed(metrics.text_of(FAMILIES))
    odd = frozenset({("a", ODD)})
    assert found[("moe_p2p_x_total", odd | {("b", "1")})] == 3
    assert found[("moe_p2p_x_total", frozenset({("a", ""), ("b", "2")}))] == 2**53
    assert found[("moe_p2p_y", frozenset({("a", "q")}))] == 0.25
    buckets = {"0.5": 2, "1": 2, "+Inf": 5}
    for bound, count in buckets.items():
        assert found[("moe_p2p_z_seconds_bucket", odd | {("le", bound)})] == count
    assert found[("moe_p2p_z_seconds_sum", odd)] == 7.5
    assert found[("moe_p2p_z_seconds_count", odd)] == 5
    assert len(found) == 8


def test_names_and_labels_keep_prometheus_conventions(engines: tuple[Engine, Engine]) -> None:
    text = moe_p2p.prometheus_text(*engines)
    for family in parser.text_string_to_metric_families(text):
        assert family.documentation.endswith(".")
        assert family.name.startswith("moe_p2p_")
        for sample in family.samples:
            assert (family.type == "counter") == sample.name.endswith("_total")


def test_a_collector_gives_what_the_text_says(engines: tuple[Engine, Engine]) -> None:
    told = registry.CollectorRegistry()
    told.register(moe_p2p.prometheus_collector(*engines))
    text = prometheus_client.generate_latest(told).decode()
    assert parsed(text) == parsed(moe_p2p.prometheus_text(*engines)) != {}


def test_collectors_of_the_same_objects_count_once(engines: tuple[Engine, Engine]) -> None:
    """Prometheus refuses a page that has a series twice."""
    for objects in (engines, ()):
        told = registry.CollectorRegistry()
        told.register(moe_p2p.prometheus_collector(*objects))
        once = prometheus_client.generate_latest(told)
        told.register(moe_p2p.prometheus_collector(*reversed(objects)))
        assert prometheus_client.generate_latest(told) == once
    told.register(moe_p2p.prometheus_collector(engines[0]))
    assert prometheus_client.generate_latest(told) != once


def test_a_histogram_goes_through_the_collector_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "collected", lambda objects: FAMILIES)
    told = registry.CollectorRegistry()
    told.register(moe_p2p.prometheus_collector())
    assert parsed(prometheus_client.generate_latest(told).decode()) == parsed(
        metrics.text_of(FAMILIES)
    )


def test_bytes_are_those_that_were_written(engines: tuple[Engine, Engine]) -> None:
    one, two = engines
    theirs = two.register(torch.zeros(1000, dtype=torch.uint8))
    mine = one.register(torch.ones(1000, dtype=torch.uint8))
    one.write(mine, one.resolve(theirs.descriptor), imm=3).wait()
    two.wait_imm(3, one.num_nics)
    found = parsed(moe_p2p.prometheus_text(one, two))

    def total(name: str, engine: Engine) -> float:
        own = ("engine", str(engine.number))
        return sum(v for (n, labels), v in found.items() if n == name and own in labels)

    assert total("moe_p2p_nic_written_bytes_total", one) == 1000
    assert total("moe_p2p_nic_immediates_sent_total", one) == one.num_nics
    assert total("moe_p2p_nic_immediates_received_total", two) == one.num_nics
    assert total("moe_p2p_nic_written_bytes_total", two) == 0
    labels = {"engine": str(one.number), "name": 'one "1"', "nic": "0"}
    assert ("moe_p2p_nic_writes_total", frozenset(labels.items())) in found


def test_without_objects_it_is_all_that_this_process_has(engines: tuple[Engine, Engine]) -> None:
    def numbers() -> set[str]:
        samples = parsed(moe_p2p.prometheus_text())
        return {value for _, labels in samples for name, value in labels if name == "engine"}

    one, two = (str(each.number) for each in engines)
    assert {one, two} <= numbers()
    engines[0].close()
    assert one not in numbers()
    assert two in numbers()
    third = Engine(EngineConfig(transport="loopback"))
    number = str(third.number)
    assert number in numbers()
    del third
    gc.collect()
    assert number not in numbers()


def test_an_object_that_is_given_twice_counts_once(engines: tuple[Engine, Engine]) -> None:
    assert parsed(moe_p2p.prometheus_text(*engines, engines[0])) == parsed(
        moe_p2p.prometheus_text(*engines)
    )


@pytest.mark.parametrize("take", [moe_p2p.prometheus_text, moe_p2p.prometheus_collector])
def test_what_has_no_counters_is_refused(take: object) -> None:
    with pytest.raises(moe_p2p.InvalidArgumentError, match=r"'x' has no counters; pass an AllTo"):
        take("x")  # type: ignore[operator]


def test_without_prometheus_client_the_collector_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client.core", None)
    with pytest.raises(moe_p2p.UnavailableError, match="pip install prometheus-client, or return"):
        moe_p2p.prometheus_collector()
    moe_p2p.prometheus_text()


def test_retries_and_refusals_are_those_that_the_kernel_counts(tmp_path: Path) -> None:
    """Over all ports of the NIC; what a driver does not have, or is no number, is left out."""
    for port, events in {
        "1": {"out_of_sequence": "5", "rnr_nak_retry_err": "2", "lifespan": "10"},
        "2": {"out_of_sequence": "7", "packet_seq_err": "N/A (no PMA)"},
    }.items():
        folder = tmp_path / "sys/class/infiniband/rdmap1s0/ports" / port / "hw_counters"
        folder.mkdir(parents=True)
        for event, value in events.items():
            (folder / event).write_text(f"{value}\n")
    wanted = {"out_of_sequence": 12, "rnr_nak_retry_err": 2}
    for name in ("rdmap1s0", "rdmap1s0-rdm"):
        assert metrics.hardware_events(name, tmp_path) == wanted
    assert metrics.hardware_events("0", tmp_path) == {}
    made = metrics.of_nics({"engine": "1"}, [], [])
    assert [family.name for family in made][-1] == "moe_p2p_nic_hardware_events_total"
