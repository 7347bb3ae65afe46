"""Requests of the transfer engine: cancelled."""

from __future__ import annotations

import threading

import pytest
import torch

import moe_p2p
from tests.calls.test_engine import pair

PAGES, PAGE_BYTES = 20_000, 64


@pytest.mark.parametrize("settings", ["", "seed=5"])
def test_a_cancelled_request_says_what_was_posted_and_leaves_the_rest(settings: str) -> None:
    sender, receiver = pair(2, settings)
    with sender, receiver:
        data = torch.ones(PAGES, PAGE_BYTES, dtype=torch.uint8)
        inbox = torch.zeros_like(data)
        memory = sender.register(data)
        region = sender.resolve(receiver.register(inbox).descriptor)
        order = torch.randperm(PAGES)
        posted_imms = num_cancelled = 0
        for imm in range(5):
            request = sender.write_pages(
                memory, region, page_bytes=PAGE_BYTES, pages=order, region_pages=order, imm=imm
            )
            cancelled = request.cancel()
            assert request.cancel() == cancelled
            if cancelled is None:  # it was faster
                request.wait()
                posted_imms += PAGES
                continue
            num_cancelled += 1
            assert cancelled.posted_bytes + cancelled.taken_back_bytes == PAGES * PAGE_BYTES
            assert cancelled.posted_imms == cancelled.posted_writes
            assert cancelled.posted_imms + cancelled.taken_back_imms == PAGES
            posted_imms += cancelled.posted_imms
            with pytest.raises(
                moe_p2p.CancelledError,
                match=rf"sender: write of 20000 pages of 64 bytes was cancelled; "
                rf"{cancelled.posted_bytes} bytes in {cancelled.posted_writes} work requests",
            ):
                request.wait()
            assert request.done()
            assert request.cancel() == cancelled
            receiver.wait_imm(imm, cancelled.posted_imms)
        assert num_cancelled > 0
        assert sum(nic["immediates_sent"] for nic in sender.counters()) == posted_imms
        assert sum(receiver.imm_value(imm) for imm in range(5)) == posted_imms
        done = sender.write(memory, region)
        done.wait()
        assert done.cancel() is None


def test_another_thread_may_cancel_what_one_waits_for() -> None:
    sender, receiver = pair(1, "max_in_flight=4")
    with sender:
        memory = sender.register(torch.ones(1 << 20, dtype=torch.uint8))
        region = sender.resolve(
            receiver.register(torch.zeros(1 << 20, dtype=torch.uint8)).descriptor
        )
        requests = [sender.write(memory, region, imm=3) for _ in range(50)]
        threads = [threading.Thread(target=request.cancel) for request in requests]
        for thread in threads:
            thread.start()
        outcomes = []
        for request in requests:
            try:
                request.wait()
                outcomes.append("done")
            except moe_p2p.CancelledError:
                outcomes.append("cancelled")
        for thread in threads:
            thread.join()
        assert len(outcomes) == 50
        assert all(
            (request.cancel() is None) == (outcome == "done")
            for request, outcome in zip(requests, outcomes, strict=True)
            if request.cancel() is not None or outcome == "done"
        )
        receiver.close()
