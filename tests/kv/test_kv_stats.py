"""Figures of requests: exact counts, clocks in their order, sums, and their text for Prometheus."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from typing import Any

import pytest
import torch

from moe_p2p import AbortedError, errors, kv
from moe_p2p.kv.pair import Pair
from moe_p2p.kv.stats import SECONDS, Histogram
from tests.kv.test_kv_reclaim import StoppedSender
from tests.support.kv_workers import QUICK, Workers, workers

LAYERS, TOKENS = 3, 18
GROUP = kv.KVGroup("kv", tuple(range(LAYERS)), heads=4, k_bytes=16, v_bytes=16, page_size=4)
LAYOUT = kv.KVLayout((GROUP,))
# 7 to 9 follow each other, here and there. Two NICs carry 7 and 8; 9, 20 and 3.
OURS = {"kv": torch.tensor([7, 8, 9, 20, 3]).int()}
THEIRS = {"kv": torch.tensor([11, 12, 13, 5, 30]).int()}
NICS, RUNS = 2, 4
NBYTES = LAYERS * 5 * 4 * 4 * 32  # pages are sent whole
PATIENT = dataclasses.replace(QUICK, drain_s=20)  # others may take the CPU


def both(found: Workers, *, pull: bool = False) -> tuple[kv.KVReservation, kv.KVSending]:
    reservation = found.receivers[0].reserve("r", "prefill", THEIRS, total=TOKENS, pull=pull)
    return reservation, found.senders[0].start("r", "decode", OURS, total=TOKENS)


def finish(reservation: kv.KVReservation, sending: kv.KVSending) -> None:
    for layer in range(LAYERS):
        sending.layer(layer)
    sending.commit()
    reservation.wait(20)
    sending.wait(20)


def in_order(*times: float | None) -> bool:
    known = [each for each in times if each is not None]
    return len(known) == len(times) and known == sorted(known)


def test_a_push_is_counted_on_both_sides() -> None:
    with workers(LAYOUT, LAYOUT) as found:
        began = time.monotonic()
        reservation, sending = both(found)
        finish(reservation, sending)
        sent, got = sending.stats, reservation.stats
        footer_bytes = sent.nbytes - NBYTES
        assert 0 < footer_bytes < 1024
        assert found.engines["prefill/0"].num_nics == NICS
        assert sent.writes == LAYERS * (RUNS + NICS) + NICS  # immediates; and the footer
        assert sent.merged == LAYERS * (5 - RUNS)
        assert (got.nbytes, got.writes, got.merged) == (NBYTES, 0, 0)
        for side, name in ((sent, "sender"), (got, "receiver")):
            assert (side.request, side.side, side.fence, side.failed) == ("r", name, "none", False)
            assert (side.packed, side.retries, side.reclaim_s) == (0, 0, None)
        assert in_order(
            began,
            sent.queued_at,
            sent.first_post_at,
            sent.last_completion_at,
            sent.ended_at,
            sent.reusable_at,
            time.monotonic(),
        )
        assert in_order(
            got.queued_at,
            sent.first_post_at,
            got.first_arrival_at,
            got.last_completion_at,
            got.ended_at,
            got.reusable_at,
        )
        assert got.first_post_at is None
        assert sent.first_arrival_at is None


def test_a_pull_is_counted_where_it_reads() -> None:
    with workers(LAYOUT, LAYOUT) as found:
        reservation, sending = both(found, pull=True)
        finish(reservation, sending)
        sent, got = sending.stats, reservation.stats
        assert (sent.nbytes, sent.writes, sent.first_post_at, sent.transfer_s) == (0, 0, None, None)
        assert got.nbytes == NBYTES + 8  # and the nonce
        assert got.writes == LAYERS * RUNS + 1
        assert got.merged == LAYERS * (5 - RUNS)
        assert in_order(
            got.queued_at, got.first_post_at, got.last_completion_at, got.ended_at, got.reusable_at
        )


@pytest.mark.parametrize("pull", [False, True], ids=["push", "pull"])
def test_a_cancelled_request_was_drained(pull: bool) -> None:
    with workers(LAYOUT, LAYOUT, timeouts=PATIENT) as found:
        reservation, sending = both(found, pull=pull)
        sending.layer(0)
        reservation.cancel()
        for side in (reservation, sending):
            side.wait_reusable(20)
            with pytest.raises(AbortedError):
                side.wait(20)
            stats = side.stats
            assert (stats.failed, stats.fence) == (True, "drained")
            assert in_order(stats.queued_at, stats.ended_at, stats.reusable_at)
            assert stats.reclaim_s is not None
        for worker in (found.receivers[0], found.senders[0]):
            assert (worker.totals.requests, worker.totals.failed, worker.totals.drained) == (
                1,
                1,
                1,
            )
            assert sum(worker.totals.reclaim_s.counts) == 1


class LateFence(kv.KVReceiver):
    """Its NIC cannot take the memory back the first time."""

    tries = 0

    def fence(self, pair: Pair) -> None:
        self.tries += 1
        if self.tries == 1:
            raise errors.make(errors.TimeoutError, "a read is under way")
        super().fence(pair)


def test_a_fence_and_its_retries_are_named() -> None:
    with workers(LAYOUT, LAYOUT, kinds=(StoppedSender, LateFence)) as found:
        sender, receiver = found.senders[0], found.receivers[0]
        assert isinstance(sender, StoppedSender)
        reservation, sending = both(found)
        while sending.transfers[0].state != "open":
            time.sleep(0.001)
        sending.layer(0)
        sender.stopped = True
        reservation.cancel()
        reservation.wait_reusable(20)
        stats = reservation.stats
        assert (stats.fence, stats.retries) == ("key", 1)
        assert stats.reclaim_s is not None
        assert stats.reclaim_s >= QUICK.drain_s
        assert (receiver.totals.key, receiver.totals.drained, receiver.totals.retries) == (1, 0, 1)
        sender.stopped = False


def some(**fields: Any) -> kv.KVTransferStats:
    times = {"first_post_at": 1.5, "last_completion_at": 1.75, "ended_at": 2.0, "reusable_at": 2.5}
    return kv.KVTransferStats("r", "sender", 1.0, **(times | fields))


def test_totals_add_up_and_come_apart() -> None:
    one, two = kv.KVTotals(), kv.KVTotals()
    one.observe(some(nbytes=7, writes=2, merged=1))
    two.observe(some(failed=True, fence="key", retries=3, packed=4))
    two.observe(some(first_post_at=None, last_completion_at=None))
    both = one + two
    assert (both.requests, both.failed, both.nbytes, both.writes) == (3, 1, 7, 2)
    assert (both.merged, both.packed, both.retries, both.key, both.drained) == (1, 4, 3, 1, 0)
    assert both.queue_s.sum == 1.0  # half a second, twice
    assert both.total_s.sum == 3.0
    assert both.reclaim_s.sum == 0.5
    assert both - one == two
    assert (both - both) == kv.KVTotals()
    assert kv.KVTotals.from_dict(json.loads(json.dumps(both.to_dict()))) == both
    assert one.requests == 1  # sums are new objects


def test_a_bucket_holds_what_is_not_longer_than_its_bound() -> None:
    histogram = Histogram()
    for value in (0.0, SECONDS[0], SECONDS[0] * 1.01, SECONDS[-1], SECONDS[-1] * 2, None):
        histogram.observe(value)
    assert histogram.counts[:2] == [2, 1]
    assert histogram.counts[-2:] == [1, 1]
    assert sum(histogram.counts) == 5


class Named:
    def __init__(self, name: str, role: str, *stats: kv.KVTransferStats) -> None:
        self.name, self.role, self.totals = name, role, kv.KVTotals()
        for each in stats:
            self.totals.observe(each)


SAMPLE = re.compile(r'^([a-z0-9_]+)\{((?:[a-z]+="(?:[^"\\\n]|\\.)*",?)*)\} (\S+)$')


def test_prometheus_can_read_it() -> None:
    """Each line by the grammar of the text format; metrics in one block each; buckets grow."""
    first = Named("a/0", "sender", some(nbytes=5), some(failed=True, fence="drained"))
    text = kv.prometheus_text(first, Named('b"\\\n/1', "receiver"))
    samples: dict[tuple[str, str], list[float]] = {}
    kinds: dict[str, str] = {}
    family = ""
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("# TYPE "):
            _, _, family, kind = line.split(" ")
            assert family not in kinds
            kinds[family] = kind
        elif not line.startswith("# HELP "):
            match = SAMPLE.match(line)
            assert match, line
            name, labels, value = match.groups()
            assert name.startswith(family), line
            worker = re.sub(r',le="[^"]*"', "", labels)
            samples.setdefault((name, worker), []).append(float(value))
    a, b = 'worker="a/0",role="sender"', r'worker="b\"\\\n/1",role="receiver"'
    assert samples["moe_p2p_kv_requests_total", a] == [2]
    assert samples["moe_p2p_kv_requests_total", b] == [0]
    assert samples["moe_p2p_kv_bytes_total", a] == [5]
    assert samples["moe_p2p_kv_drained_total", a] == [1]
    buckets = samples["moe_p2p_kv_queue_seconds_bucket", a]
    assert buckets == sorted(buckets)
    assert len(buckets) == len(SECONDS) + 1
    assert buckets[-1] == samples["moe_p2p_kv_queue_seconds_count", a][0] == 2
    assert samples["moe_p2p_kv_queue_seconds_sum", a] == [1.0]
    assert 'le="+Inf"' in text
    assert set(kinds.values()) == {"counter", "histogram"}
    assert len(kinds) == 14
