"""What a request of the transfer engine was: its times, its work requests, its merged rows."""

from __future__ import annotations

import time

import pytest
import torch

import moe_p2p
from moe_p2p import Engine, EngineConfig, PageRows
from moe_p2p.engine.transfers import Memory, Region, Request
from tests.engine.test_engine import pair

ROW, PAGES = 64, 64


def ends(sender: Engine, receiver: Engine) -> tuple[Memory, Region]:
    memory = sender.register(torch.ones(PAGES, 4 * ROW, dtype=torch.uint8))
    inbox = receiver.register(torch.zeros(PAGES, 4 * ROW, dtype=torch.uint8))
    return memory, sender.resolve(inbox.descriptor)


def until_done(request: Request) -> None:
    deadline = time.monotonic() + 20
    while not request.done():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


@pytest.mark.parametrize("num_nics", [1, 2])
@pytest.mark.parametrize("is_read", [False, True], ids=["write", "read"])
def test_a_report_counts_rows_that_travelled_together(num_nics: int, is_read: bool) -> None:
    sender, receiver = pair(num_nics, "seed=3")
    with sender, receiver:
        memory, region = ends(sender, receiver)
        pages = torch.tensor([9, 10, 11, 30, 4, 20, 21, 22])
        rows = PageRows(page_bytes=2 * ROW, row_bytes=ROW)
        before = time.monotonic()
        if is_read:
            request = sender.read_pages(memory, region, pages=pages, region_pages=pages, rows=rows)
        else:
            request = sender.write_pages(
                memory,
                region,
                pages=pages,
                region_pages=pages,
                imm=1,
                imm_per_page=False,
                rows=rows,
            )
        until_done(request)
        report = request.report()
        assert request.report() == report
        # Runs: 9 to 11, 30, 4, 20 to 22. Two NICs have two each: pages 9 to 30, and 4 to 22.
        assert report.imms == (0 if is_read else num_nics)
        assert report.writes == 4 + report.imms
        assert report.merged == 2 * len(pages) - 4
        assert report.nbytes == len(pages) * 2 * ROW
        assert report.first_post_at is not None
        assert before <= report.first_post_at <= report.ended_at <= time.monotonic()
        request.wait()
        with pytest.raises(moe_p2p.InvalidArgumentError, match=r"request \d+ is not known here"):
            request.report()


def test_an_immediate_per_page_merges_nothing_and_a_shard_is_no_row() -> None:
    sender, receiver = pair(2)
    with sender, receiver:
        memory, region = ends(sender, receiver)
        pages = torch.arange(PAGES)
        request = sender.write_pages(
            memory,
            region,
            rows=PageRows(page_bytes=4 * ROW),
            pages=pages,
            region_pages=pages,
            imm=1,
        )
        until_done(request)
        assert request.report()[2:] == (PAGES * 4 * ROW, PAGES, PAGES, 0)
        request = sender.write(memory, region, imm=1)
        until_done(request)
        assert request.report()[2:] == (PAGES * 4 * ROW, 2, 2, 0)


def test_a_report_of_a_request_that_is_under_way_is_refused() -> None:
    sender, receiver = pair(1, "latency_us=200000")
    with sender, receiver:
        memory, region = ends(sender, receiver)
        request = sender.write(memory, region)
        began = time.monotonic()
        with pytest.raises(moe_p2p.InvalidArgumentError, match=r"write of 16384 bytes is not done"):
            request.report()
        until_done(request)
        report = request.report()
        assert report.first_post_at is not None
        assert report.first_post_at - began < 0.15  # when it was posted, not when it arrived
        assert report.ended_at - report.first_post_at >= 0.19


def test_a_report_of_a_cancelled_request_has_what_was_posted() -> None:
    sender, receiver = pair(1, "max_in_flight=4,latency_us=100000")
    with sender, receiver:
        memory, region = ends(sender, receiver)
        order = torch.randperm(PAGES)
        posted, waiting = (
            sender.write_pages(
                memory,
                region,
                rows=PageRows(page_bytes=ROW),
                pages=order,
                region_pages=order,
                imm=1,
            )
            for _ in range(2)
        )
        deadline = time.monotonic() + 20
        while sender.counters()[0]["writes"] < 4:
            assert time.monotonic() < deadline
        cancelled = posted.cancel()
        nothing = waiting.cancel()
        assert cancelled is not None
        assert nothing is not None
        for request, amount in ((posted, cancelled), (waiting, nothing)):
            until_done(request)
            report = request.report()
            assert (report.nbytes, report.writes, report.imms, report.merged) == (
                amount.posted_bytes,
                amount.posted_writes,
                amount.posted_imms,
                0,
            )
            assert (report.first_post_at is None) == (amount.posted_writes == 0)
        assert cancelled.posted_writes == 4


def test_what_needs_no_write_has_no_first_post() -> None:
    config = EngineConfig(transport="null")
    with Engine(config) as engine:
        memory, region = ends(engine, engine)
        request = engine.write(memory, region, nbytes=0)
        until_done(request)
        report = request.report()
        assert report.first_post_at is None
        assert report[2:] == (0, 0, 0, 0)
