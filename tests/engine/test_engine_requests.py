"""Requests of the transfer engine: cancelled, awaited in event loops, polled by the thousand."""

from __future__ import annotations

import asyncio
import concurrent.futures
import select
import threading
import time

import pytest
import torch

import moe_p2p
from moe_p2p import Engine, PageRows
from moe_p2p.engine.transfers import Request
from tests.engine.test_engine import ends, loopback, pair

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
                memory,
                region,
                rows=PageRows(page_bytes=PAGE_BYTES),
                pages=order,
                region_pages=order,
                imm=imm,
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
        memory, _, region = ends(sender, receiver, 1 << 20)
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


def test_waiting_again_for_a_request_that_failed_fails_again() -> None:
    sender, receiver = pair(1)
    with sender, receiver:
        memory, theirs, region = ends(sender, receiver)
        theirs.unregister()
        request = sender.write(memory, region)
        for _ in range(2):
            with pytest.raises(moe_p2p.RemoteAccessError):
                request.wait()


def test_thousands_are_awaited_in_one_event_loop_without_threads() -> None:
    sender, receiver = pair(2)
    with sender, receiver:
        data = torch.randint(0, 255, (4000, 64), dtype=torch.uint8)
        inbox = torch.zeros_like(data)
        memory = sender.register(data)
        region = sender.resolve(receiver.register(inbox).descriptor)

        async def one(row: int) -> int:
            await sender.write(memory, region, offset=row * 64, region_offset=row * 64, nbytes=64)
            assert torch.equal(inbox[row], data[row])
            return row

        async def everything() -> list[int]:
            before = set(threading.enumerate())
            rows = asyncio.gather(*(one(row) for row in range(4000)))
            await asyncio.sleep(0)
            assert set(threading.enumerate()) <= before  # some of other tests may have ended
            return list(await rows)

        for _ in range(2):  # each in a loop of its own
            assert asyncio.run(everything()) == list(range(4000))
            inbox.zero_()
        assert len(sender._awaiting._queues) == 1  # the first loop's was used again


def test_event_loops_of_several_threads_share_an_engine() -> None:
    sender, receiver = pair(1, "seed=3")
    with sender, receiver:
        memory, _, region = ends(sender, receiver, 1 << 16)
        together = threading.Barrier(3)

        async def some() -> None:
            together.wait(30)
            for _ in range(100):
                await asyncio.gather(*(sender.write(memory, region, imm=1) for _ in range(3)))

        with concurrent.futures.ThreadPoolExecutor(3) as threads:
            for ended in [threads.submit(asyncio.run, some()) for _ in range(3)]:
                ended.result(60)
        assert receiver.wait_imm(1, 900) == 900


def test_an_awaited_request_raises_what_it_ended_with() -> None:
    sender, receiver = pair(1)
    with sender, receiver:
        memory, theirs, region = ends(sender, receiver)
        theirs.unregister()

        async def twice() -> None:
            request = sender.write(memory, region)

            async def fails() -> None:
                with pytest.raises(moe_p2p.RemoteAccessError, match="write of 64 bytes"):
                    await request

            await asyncio.gather(fails(), fails())
            await fails()

        asyncio.run(twice())


def stuck() -> tuple[Engine, Engine, Request]:
    """A request that no one completes: each write takes a second."""
    config = loopback(1, 0.1, transport_settings="latency_us=1000000")
    sender, receiver = Engine(config, label="sender"), Engine(config, label="receiver")
    memory, _, region = ends(sender, receiver)
    return sender, receiver, sender.write(memory, region)


def test_an_await_ends_at_the_deadline_of_the_engine_and_may_be_repeated() -> None:
    sender, receiver, request = stuck()
    with sender, receiver:

        async def late() -> None:
            for _ in range(2):
                with pytest.raises(moe_p2p.TimeoutError, match=r"not done within 0\.1 s") as late:
                    await request
                assert "of 1 work requests that are posted, 1 have not ended" in str(late.value)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(_wait(request), 0.01)  # the task's own, shorter

        asyncio.run(late())


async def _wait(request: Request) -> None:
    await request


@pytest.mark.parametrize("inside", [True, False])
def test_closing_the_engine_wakes_who_awaits(inside: bool) -> None:
    sender, receiver, request = stuck()
    sender.timeout_s = 60

    async def awaits() -> None:
        if inside:
            asyncio.get_running_loop().call_later(0.05, sender.close)
        else:
            threading.Timer(0.05, sender.close).start()
        with pytest.raises(moe_p2p.ClosedError):
            await request

    asyncio.run(asyncio.wait_for(awaits(), 30))
    receiver.close()


def test_watched_requests_are_polled_through_one_descriptor() -> None:
    sender, receiver = pair(1)
    with sender, receiver:
        memory, _, region = ends(sender, receiver)
        gone = receiver.register(torch.zeros(64, dtype=torch.uint8))
        nowhere = sender.resolve(gone.descriptor)
        gone.unregister()
        assert sender.poll() == []
        early = sender.write(memory, region)
        early.wait()  # ended before it is watched: no record is left, nothing to poll
        with pytest.raises(moe_p2p.InvalidArgumentError, match="not known"):
            sender.watch(early)
        requests = [sender.write(memory, nowhere if i % 10 == 0 else region) for i in range(2000)]
        sender.watch(*requests)
        polled: list[Request] = []
        while len(polled) < 2000:
            assert select.select([sender], [], [], 20)[0]
            polled += sender.poll()
        assert set(polled) == set(requests)
        assert len(set(polled)) == 2000
        assert all(request.done() for request in polled)
        for i, request in enumerate(requests):
            if i % 10:
                request.wait(0)
            else:
                with pytest.raises(moe_p2p.RemoteAccessError):
                    request.wait(0)
        assert sender.poll(0.01) == []


def test_polling_waits_and_ends_when_the_engine_is_closed() -> None:
    sender, receiver, request = stuck()
    sender.watch(request)
    began = time.monotonic()
    assert sender.poll(0.05) == []
    assert time.monotonic() - began >= 0.05
    with pytest.raises(moe_p2p.InvalidArgumentError, match="awaited or polled elsewhere"):
        asyncio.run(_wait(request))
    threading.Timer(0.05, sender.close).start()
    with pytest.raises(moe_p2p.ClosedError):
        sender.poll(60)
    receiver.close()


def test_a_priority_is_0_to_2_and_connects_apart() -> None:
    sender, receiver = pair(1)
    with sender, receiver:
        memory = sender.register(torch.ones(64, dtype=torch.uint8))
        theirs = torch.zeros(64, dtype=torch.uint8)
        descriptor = receiver.register(theirs).descriptor
        regions = [sender.resolve(descriptor, priority=priority) for priority in range(3)]
        requests = [
            sender.write(memory, region, priority=priority, imm=1)
            for region in regions
            for priority in range(3)
        ]
        for request in requests:
            request.wait()
        assert receiver.wait_imm(1, 9) == 9
        peer = sender.connect(receiver.address, priority=0)
        sender.send_imm(peer, 2, priority=0).wait()
        peer.disconnect()
        sender.write(memory, regions[0], priority=0).wait()  # resolve() had a connection of its own
        for bad in (-1, 3):
            with pytest.raises(moe_p2p.InvalidArgumentError, match=f"priority is {bad}, must be"):
                sender.write(memory, regions[0], priority=bad)
            with pytest.raises(moe_p2p.InvalidArgumentError, match=f"priority is {bad}, must be"):
                sender.connect(receiver.address, priority=bad)
