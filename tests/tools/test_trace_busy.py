"""Requests of KV and updates of weights in a trace: parts that end where the polling thread saw
immediates, what goes on, what failed, and nothing while no trace is recorded."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import moe_p2p
from moe_p2p import errors, kv
from moe_p2p.machine import phases
from moe_p2p.tools.trace.busy import Work, work
from moe_p2p.tools.trace.recorded import Recorded, Trace
from moe_p2p.weights import attempt
from tests.support import kv_workers, weights_fleet
from tests.support.kv_workers import Workers
from tests.support.weights_fleet import ENGINE_RANKS, MODELS, TRAINERS
from tests.tools.test_trace import problems

LAYERS, TOKENS = 2, 16
GROUP = kv.KVGroup("kv", tuple(range(LAYERS)), heads=4, k_bytes=16, v_bytes=16, page_size=4)
LAYOUT = kv.KVLayout((GROUP,))
PAGES = {"kv": torch.arange(4, dtype=torch.int32)}


@pytest.fixture
def pair() -> Iterator[Workers]:
    with kv_workers.workers(LAYOUT, LAYOUT) as found:
        yield found


def begun(found: Workers, name: str, first: int = 0) -> tuple[kv.KVReservation, kv.KVSending]:
    """Layers are written as they are given: the receiver has opened it. first: of its pages."""
    pages = {"kv": PAGES["kv"] + first}
    reservation = found.receivers[0].reserve(name, "prefill", pages, total=TOKENS)
    sending = found.senders[0].start(name, "decode", pages, total=TOKENS)
    while sending.transfers[0].state is not kv.TransferState.OPEN:
        time.sleep(0.001)
    return reservation, sending


def ended(reservation: kv.KVReservation, sending: kv.KVSending) -> None:
    sending.commit()
    sending.wait(20)
    reservation.wait(20)


def sides(trace: Trace | None, request: str) -> tuple[Work, Work]:
    """At its sender and at its receiver."""
    assert trace is not None
    found = {each.track: each for each in work(trace) if each.name == f"request {request}"}
    return found["KV sender prefill/0"], found["KV receiver decode/0"]


def immediates(trace: Trace | None, label: str, least: int, most: int) -> list[int]:
    """Times at which an engine's thread saw those of a range."""
    assert trace is not None
    (engine,) = [each for each in trace.ranks[0].engines if each.label == label]
    events = [each for each in trace.events(0, engine) if each.kind == "immediate"]
    return [each.time_ns for each in events if least <= each.a < most]


def names(parts: list[Any]) -> list[str]:
    return [each.name for each in parts]


def test_a_request_is_there_from_its_first_push_to_its_last_immediate(
    pair: Workers, tmp_path: Path
) -> None:
    with moe_p2p.tracing(tmp_path / "t.json") as found:
        reservation, sending = begun(pair, "r")
        for end in (8, TOKENS):
            for layer in range(LAYERS):
                sending.layer(layer, end)
        sending.commit()
        sending.wait(20)
        time.sleep(0.05)  # nobody looks, and all is there
        reservation.wait(20)
    sent, got = sides(found.trace, "r")
    assert names(sent.parts)[:2] == ["wait", "transfer"]
    assert sent.args["to"] == "decode/0"
    assert (sent.args["tokens"], sent.args["layers"], sent.args["chunks"]) == (TOKENS, LAYERS, 2)
    assert names(sent.marks) == [
        f"layer {layer}, up to token {end}, to decode/0"
        for end in (8, TOKENS)
        for layer in range(LAYERS)
    ]
    assert names(got.parts)[:3] == ["wait", "transfer", "unseen"]
    assert got.args["from"] == "prefill/0"
    assert "failed" not in {*sent.args, *got.args}
    times = immediates(found.trace, "decode/0", 1 << 30, 1 << 31)
    assert got.part("transfer")[1:] == (min(times), max(times))
    assert sent.part("transfer").begin < min(times)
    assert got.part("unseen").end > got.part("transfer").end
    stats = reservation.stats
    assert got.end == round((stats.ended_at or 0) * 1e9)
    document = json.loads((tmp_path / "t.json").read_text())
    assert problems(document) == []
    slices = [each for each in document["traceEvents"] if each.get("args", {}).get("of")]
    assert {each["name"] for each in slices} >= {"wait", "transfer", "unseen"}
    assert {each["cat"] for each in slices} == {"kv"}
    tracks = {e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    assert tracks >= {"KV sender prefill/0", "KV receiver decode/0"}


@pytest.mark.parametrize("how", ["pulled", "packed"])
def test_a_request_that_is_pulled_or_packed_has_its_parts(how: str, tmp_path: Path) -> None:
    link, order = (kv_workers.PACKED, "HND") if how == "packed" else (None, "NHD")
    with (
        kv_workers.workers(LAYOUT, kv.KVLayout((GROUP,), order), link=link) as found,
        moe_p2p.tracing(tmp_path / "t.json") as traced,
    ):
        pull = how == "pulled"
        reservation = found.receivers[0].reserve("r", "prefill", PAGES, total=TOKENS, pull=pull)
        sending = found.senders[0].start("r", "decode", PAGES, total=TOKENS)
        for layer in range(LAYERS):
            sending.layer(layer)
        sending.commit()
        reservation.wait(20)
        sending.wait(20)
    sent, got = sides(traced.trace, "r")
    assert names(got.parts) == ["wait", "transfer", "end"]
    assert names(sent.parts) == (["end"] if pull else ["wait", "transfer", "end"])
    assert (sending.stats.packed > 0) == (how == "packed")
    stats = reservation.stats
    assert got.part("transfer").end == round((stats.last_completion_at or 0) * 1e9)
    assert problems(json.loads((tmp_path / "t.json").read_text())) == []


def test_what_began_before_and_what_goes_on_is_there(pair: Workers, tmp_path: Path) -> None:
    before, after = begun(pair, "early"), begun(pair, "late", 4)
    with moe_p2p.tracing(tmp_path / "t.json") as found:
        inside = time.monotonic_ns()
        for layer in range(LAYERS):
            before[1].layer(layer)
        ended(*before)
        after[1].layer(0)
        while not after[0].stats.first_arrival_at:
            after[0].done()
        trace_ends = time.monotonic_ns()
    for each in sides(found.trace, "early"):
        assert each.begin < inside < each.end
        assert "unfinished" not in each.args
    for each in sides(found.trace, "late"):
        assert each.begin < inside
        assert each.end >= trace_ends
        assert each.args["unfinished"]
    assert sides(found.trace, "late")[1].parts[-1].name == "transfer"
    assert problems(json.loads((tmp_path / "t.json").read_text())) == []
    after[1].layer(1)
    ended(*after)


def test_a_cancelled_request_has_failed_and_its_pages_come_back(
    pair: Workers, tmp_path: Path
) -> None:
    with moe_p2p.tracing(tmp_path / "t.json") as found:
        reservation, sending = begun(pair, "r")
        sending.layer(0)
        reservation.cancel()
        reservation.wait_reusable(20)
        sending.wait_reusable(20)
    for each in sides(found.trace, "r"):
        assert each.args["failed"]
        assert each.args["fence"] == "drained"
        assert each.parts[-1].name == "reclaim"


def test_nothing_is_kept_without_a_trace(pair: Workers, tmp_path: Path) -> None:
    assert phases.take is None
    reservation, sending = begun(pair, "r")
    for layer in range(LAYERS):
        sending.layer(layer)
    ended(reservation, sending)
    assert sending.stats.submitted == []
    with moe_p2p.tracing(tmp_path / "t.json") as found:
        assert phases.take is not None
    assert phases.take is None
    assert found.trace is not None
    assert work(found.trace) == []


def test_requests_that_were_overwritten_are_reported(pair: Workers, tmp_path: Path) -> None:
    with moe_p2p.tracing(tmp_path / "t.json", num_events=2) as found:
        for name in "ab":
            reservation, sending = begun(pair, name)
            for layer in range(LAYERS):
                sending.layer(layer)
            ended(reservation, sending)
    assert found.trace is not None
    lost = found.trace.ranks[0].lost
    assert "2 events of requests and updates were overwritten; raise num_events" in lost


def test_a_rank_that_is_sent_keeps_its_phases() -> None:
    phase = phases.Phase("a", "kv", "r", 1.0, [("wait", None)], False, {"to": "b"}, [], 3, [7])
    recorded = Recorded(rank=0, busy=[phase], ended_ns=2_000_000_000)
    again = Recorded.decode(recorded.encode())
    (found,), (sent,) = (work(Trace.of([each], [None])) for each in (recorded, again))
    assert found == sent
    assert found.parts == [("wait", 1_000_000_000, 2_000_000_000)]


# --- weights ---


def test_an_update_is_there_on_trainers_and_engine_ranks(tmp_path: Path) -> None:
    with weights_fleet.fleet(MODELS["fp8"]) as fleet:
        with moe_p2p.tracing(tmp_path / "w.json") as found:
            fleet.finish(fleet.train(1))
            fleet.finish(fleet.train(2))
        fleet.check(2)
    assert found.trace is not None
    all_work = work(found.trace)
    for version in (1, 2):
        of = {e.track: e for e in all_work if e.name == f"update to version {version}"}
        trainers = [of[f"trainer {rank}"] for rank in range(TRAINERS)]
        engine_ranks = [of[f"generator {rank}"] for rank in range(ENGINE_RANKS)]
        assert len(of) == TRAINERS + ENGINE_RANKS
        for each in trainers:
            parts = names(each.parts)
            wanted = ["announce", "maxima", "await buffers", "conversion", "transfer"]
            assert parts[:5] == wanted, parts
            assert parts[-1] == "commit"
            inside = [e for e in each.marks if e.name == "convert"]
            conversion = each.part("conversion")
            assert inside
            assert all(conversion.begin <= e.begin <= e.end <= conversion.end for e in inside)
        for rank, each in enumerate(engine_ranks):
            parts = names(each.parts)
            assert [p for p in parts if p not in ("wait", "unseen")] == [
                *("transfer", "commit", "copy", "finish")
            ]
            first = attempt.FIRST_IMM
            times = immediates(found.trace, f"generator {rank}", first, first + (1 << 20))
            transfer = each.part("transfer")
            assert {transfer.begin, transfer.end} <= {*times, each.begin}
            assert transfer.end in times
            assert transfer.begin > min(e.part("conversion").begin for e in trainers)
            assert each.part("commit").end > min(e.part("commit").begin for e in trainers)
    assert problems(json.loads((tmp_path / "w.json").read_text())) == []


def test_an_update_that_failed_says_why(tmp_path: Path) -> None:
    with (
        weights_fleet.fleet(MODELS["fused"]) as fleet,
        moe_p2p.tracing(tmp_path / "w.json") as found,
    ):
        values = fleet.model.values(1)
        running = [
            fleet.pool.submit(each.update, 1, fleet.model.trainer_tensors(each.rank, values))
            for each in fleet.trainers[1:]
        ]
        fleet.trainers[0].abort("the optimizer diverged")
        for each in [*running, *(fleet.pool.submit(each.wait) for each in fleet.engine_ranks)]:
            with pytest.raises(errors.AbortedError, match="the optimizer diverged"):
                each.result(100)
    assert found.trace is not None
    failed = [each for each in work(found.trace) if each.name == "update to version 1"]
    assert {each.track for each in failed} >= {f"trainer {rank}" for rank in range(1, TRAINERS)}
    assert all("the optimizer diverged" in each.args["failed"] for each in failed)
    assert all(each.parts[-1].name == "failed" for each in failed)


def test_a_set_up_is_there(tmp_path: Path) -> None:
    with (
        moe_p2p.tracing(tmp_path / "w.json") as found,
        weights_fleet.fleet(MODELS["fused"]),
    ):
        pass
    assert found.trace is not None
    of = {each.track: names(each.parts) for each in work(found.trace) if each.name == "set-up"}
    assert of["generator 0"] == ["plan", "register", "finish"]
    assert of["trainer 0"] == ["end"]
