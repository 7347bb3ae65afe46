"""What an engine records of its polling thread, against its own counters."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch

import moe_p2p
from moe_p2p import Engine, EngineConfig, PageRows
from moe_p2p.engine import NicCounters
from moe_p2p.engine.recording import Event, Recording, imm_key
from tests.engine.test_engine import ends, pair
from tests.support import cases
from tests.support.gpu_ranks import meet
from tests.support.ranks import Rank, repeated, run_threads

MANY = 1 << 14


def counted(events: list[Event]) -> dict[str, int]:
    """The figures of `Engine.counters`, summed over NICs, as the events have them."""
    posted = [event for event in events if event.kind == "posted"]
    reads = [event for event in posted if event.detail & 2]
    return {
        "bytes_written": sum(event.b for event in posted if not event.detail & 2),
        "writes": len(posted) - len(reads),
        "bytes_read": sum(event.b for event in reads),
        "reads": len(reads),
        "immediates_sent": sum(event.detail & 1 for event in posted),
        "immediates_received": sum(event.kind == "immediate" for event in events),
    }


def summed(nics: list[NicCounters]) -> Counter[str]:
    total: Counter[str] = Counter()
    for nic in nics:
        total.update({key: int(value) for key, value in nic.items()})  # type: ignore[call-overload]
    return total


def counters(engine: Engine) -> Counter[str]:
    return summed(engine.counters())


def test_nothing_is_recorded_unless_it_is_switched_on() -> None:
    sender, receiver = pair()
    with sender, receiver:
        memory, _, region = ends(sender, receiver)
        sender.write(memory, region, imm=3).wait()
        receiver.wait_imm(3, 2)
        for engine in (sender, receiver):
            first = engine.record(0)
            assert (first.events.shape, first.overwritten) == ((0, 5), 0)
            engine.record(MANY)
            assert len(engine.record(0).events) == 0
        sender.write(memory, region, imm=3).wait()
        receiver.wait_imm(3, 4)
        assert len(sender.record(0).events) == len(receiver.record(0).events) == 0


@pytest.mark.parametrize("settings", ["", "seed=5", "channels=2,ring_kib=16"])
def test_events_of_transfers_are_what_the_counters_count(settings: str) -> None:
    sender, receiver = pair(2, settings)
    with sender, receiver:
        data = torch.ones(500, 64, dtype=torch.uint8)
        inbox = receiver.register(torch.zeros_like(data))
        memory, region = sender.register(data), sender.resolve(inbox.descriptor)
        before = counters(sender), counters(receiver)
        for engine in (sender, receiver):
            engine.record(MANY)
        pages = torch.arange(500)
        rows = PageRows(page_bytes=64)
        sender.write_pages(memory, region, rows=rows, pages=pages, region_pages=pages, imm=9).wait()
        sender.write(memory, region, nbytes=999, imm=8).wait()
        sender.read(memory, region, nbytes=777).wait()
        assert receiver.wait_imm(9, 500) == 500
        assert receiver.wait_imm(8, 2) == 2
        records = sender.record(0), receiver.record(0)
        for engine, start, record in zip((sender, receiver), before, records, strict=True):
            assert record.overwritten == 0
            grown = counters(engine)
            grown.subtract(start)
            events = record.decoded()
            assert {key: grown[key] for key in counted(events)} == counted(events)
        sent, received = (record.decoded() for record in records)
        completed = [event for event in sent if event.kind == "completed"]
        assert sum(event.b for event in completed) == sum(e.kind == "posted" for e in sent)
        assert {event.detail for event in completed} == {0}
        assert Counter(e.a for e in received if e.kind == "immediate") == {9: 500, 8: 2}
        assert all(e.detail == 1 for e in received if e.kind == "immediate")
        times = [event.time_ns for event in sent if event.kind != "posted"]
        assert times == sorted(times)


def test_posts_and_completions_have_the_id_of_their_request() -> None:
    sender, receiver = pair()
    with sender, receiver:
        memory, _, region = ends(sender, receiver, 4096)
        sender.record(MANY)
        one = sender.write(memory, region, imm=1)
        other = sender.write(memory, region, imm=2)
        one.wait(), other.wait()
        events = sender.record(0).decoded()
        ids = {e.c: e.a for e in events if e.kind == "posted"}
        assert len(set(ids.values())) == 2
        done = Counter[int]()
        for event in events:
            if event.kind == "completed":
                done[event.a] += event.b
        assert done == {ids[1]: 2, ids[2]: 2}


def test_a_full_nic_is_recorded_as_a_refusal() -> None:
    sender, receiver = pair(1, "ring_kib=16")
    with sender, receiver:
        data = torch.ones(4000, 64, dtype=torch.uint8)
        region = sender.resolve(receiver.register(torch.zeros_like(data)).descriptor)
        memory, pages = sender.register(data), torch.arange(3999, -1, -1)
        sender.record(1 << 16)
        sender.write_pages(
            memory, region, rows=PageRows(page_bytes=64), pages=pages, region_pages=pages
        ).wait()
        events = sender.record(0).decoded()
        refused = [event for event in events if event.kind == "refused"]
        assert refused
        assert all(event.b < event.a for event in refused)
        assert sum(event.kind == "posted" for event in events) == 4000


def test_a_ring_keeps_the_newest_and_counts_the_others() -> None:
    sender, receiver = pair(1)
    with sender, receiver:
        memory, _, region = ends(sender, receiver)
        sender.record(5)
        for imm in range(10):
            sender.write(memory, region, imm=imm).wait()
        record = sender.record(MANY)
        assert (len(record.events), record.overwritten) == (5, 15)
        events = record.decoded()
        assert [e.kind for e in events] == ["completed", *["posted", "completed"] * 2]
        assert [e.c for e in events if e.kind == "posted"] == [8, 9]
        assert [e.time_ns for e in events] == sorted(e.time_ns for e in events)
        assert len(sender.record(0).events) == 0  # that ring was new


def test_counters_of_a_recording_count_its_events_while_transfers_go_on() -> None:
    sender, receiver = pair(2)
    with sender, receiver:
        memory, _, region = ends(sender, receiver)
        with repeated(lambda: sender.write(memory, region, imm=3).wait()):
            for engine in (sender, receiver) * 20:
                before = summed(engine.record(MANY).counters)
                time.sleep(0.002)
                found = engine.record(0)
                after = summed(found.counters)
                after.subtract(before)
                events = counted(found.decoded())
                assert events == {key: after[key] for key in events}


@pytest.mark.parametrize("num_events", [-1, (1 << 24) + 1])
def test_bad_sizes_are_refused_and_the_recording_goes_on(num_events: int) -> None:
    sender, receiver = pair(1)
    with sender, receiver:
        memory, _, region = ends(sender, receiver)
        sender.record(8)
        with pytest.raises(moe_p2p.InvalidArgumentError, match=f"num_events is {num_events}, must"):
            sender.record(num_events)
        sender.write(memory, region, imm=0).wait()
        assert len(sender.record(0).events) == 2
    with pytest.raises(moe_p2p.ClosedError):
        sender.record(8)


STEPS, NICS = len(cases.COUNTS), 2


def record_steps(rank: Rank) -> tuple[Recording, Counter[str], Counter[str]]:
    config = EngineConfig(transport="loopback", nics_per_rank=NICS)
    with (
        Engine(config, label=f"rank {rank.rank}") as engine,
        cases.make(rank, ranks_per_node=1, engine=engine) as comm,
    ):
        cases.steps(comm)
        meet(rank, "ready")  # nothing is under way
        before = counters(engine)
        engine.record(MANY)
        meet(rank, "recording")
        cases.steps(comm)
        meet(rank, "done")
        found = engine.record(0), before, counters(engine)
        meet(rank, "counted")  # farewells are immediates, too
        return found


def test_a_communicator_records_doorbells_immediates_and_arrivals() -> None:
    for me, (record, before, after) in enumerate(run_threads(2, record_steps)):
        events = record.decoded()
        after.subtract(before)
        assert counted(events) == {key: after[key] for key in counted(events)}
        for kind, num in (("doorbell", 2 * STEPS), ("published", 2 * STEPS)):
            found = [event for event in events if event.kind == kind]
            assert len(found) == num
            assert {event.peer for event in found} == {1 - me}
            for phase in ("dispatch", "combine"):
                steps = [event.a for event in found if event.lane[1] == phase]
                assert steps == list(range(steps[0], steps[0] + STEPS))
                assert [e.nic for e in found if e.lane[1] == phase] == [step % 2 for step in steps]
        keys = [imm_key(event.a) for event in events if event.kind == "immediate"]
        named = Counter((key.phase, key.source) for key in keys if key is not None)
        assert named["dispatch", 1 - me] == named["combine", 1 - me] == NICS * STEPS
        assert None not in keys
        # An arrival is published after its immediates, and its last event says so.
        assert all(event.c == 1 for event in events if event.kind == "published")
