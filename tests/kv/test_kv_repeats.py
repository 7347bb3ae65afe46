"""Requests that are named twice, and fences that fail, do not end an engine: both halves of
MoeP2pConnector, called as vLLM calls them."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from types import SimpleNamespace as Named
from typing import Any

import pytest
import torch

from moe_p2p import AbortedError, errors, kv
from moe_p2p.integrations.kv.vllm_scheduler import KVScheduler, StepMeta
from moe_p2p.integrations.kv.vllm_worker import KVWorkerHalf
from moe_p2p.kv.signals import KVSignals
from tests.support.kv_workers import QUICK, Workers, random_cache, workers

GROUP = kv.KVGroup("kv", (0, 1), heads=1, k_bytes=64, v_bytes=0, page_size=16)
LAYOUT = kv.KVLayout((GROUP,))
TOKENS = 20


class Prefiller:
    """A scheduler's half and a worker's half."""

    def __init__(self, sender: kv.KVSender) -> None:
        transfer = Named(is_kv_producer=True, is_kv_consumer=False)
        parallel = Named(tensor_parallel_size=1, pipeline_parallel_size=1)
        config = Named(kv_transfer_config=transfer, parallel_config=parallel)
        groups: Any = Named(select_transfer_block_ids=lambda blocks: blocks)
        self.scheduler = KVScheduler(config, groups, "prefill", "host:1")
        self.half = half = KVWorkerHalf(config, groups, "prefill", "host:1")
        random_cache(sender.cache, 1)
        half._sender = sender
        half._cache = Named(cache=sender.cache, layers={}, pages=pages)  # type: ignore[assignment]
        half._tensors = dict.fromkeys((0, 1), sender.cache.tensors[0])
        half._signals = KVSignals(sender)
        self.requests: dict[str, Any] = {}

    def add(self, name: str, transfer_id: str | None) -> None:
        more = {} if transfer_id is None else {"transfer_id": transfer_id}
        self.requests[name] = request = Named(
            request_id=name,
            num_prompt_tokens=TOKENS,
            num_computed_tokens=TOKENS,
            kv_transfer_params={"do_remote_decode": True, **more},
            status=Named(name="FINISHED_LENGTH_CAPPED"),
        )
        self.scheduler.added(request)

    def run(self) -> StepMeta:
        """A step that computes all of every request."""
        new = [
            Named(req_id=name, block_ids=([2 * at, 2 * at + 1],), num_computed_tokens=0)
            for at, name in enumerate(self.requests)
        ]
        meta = self.scheduler.step_meta(
            Named(
                preempted_req_ids=None,
                scheduled_cached_reqs=Named(req_ids=[]),
                num_scheduled_tokens=dict.fromkeys(self.requests, TOKENS),
                scheduled_new_reqs=new,
            )
        )
        self.half.begin_step(meta)
        self.half.end_step()
        return meta

    def finish(self) -> dict[str, Any]:
        """Ends all; returns what the router gets. Returns when their blocks are free."""
        found, awaited = {}, set()
        for name, request in self.requests.items():
            waits, found[name] = self.scheduler.finished(request, ([],))
            awaited |= {name} if waits else set()
        finished, deadline = set(self.requests), self.half.sender.clock() + 20
        while awaited:
            awaited -= self.half.results(finished, by_block=False).sent
            finished = set()
            assert self.half.sender.clock() < deadline, awaited
        return found


def pages(blocks: Any) -> dict[str, torch.Tensor]:
    return {"kv": torch.tensor(blocks[0], dtype=torch.int32)}


@pytest.fixture(name="found")
def connected() -> Iterator[Workers]:
    with workers(LAYOUT, LAYOUT) as found:
        yield found


def test_samples_of_one_prompt_are_sent_each(found: Workers) -> None:
    """n=2: vLLM gives both samples the parameters of the request."""
    engine, receiver = Prefiller(found.senders[0]), found.receivers[0]
    engine.add("0_cmpl-7", "same")
    engine.add("1_cmpl-7", "same")
    steps = engine.run().sends.values()
    assert [step.name for step in steps] == ["same#0", "same+1#0"]
    for at, step in enumerate(steps):
        receiver.reserve(step.name, "prefill", pages([[at * 2, at * 2 + 1]]), total=TOKENS).wait(20)
    for params in engine.finish().values():
        assert params["transfer_id"] == "same"


def test_a_true_repeat_fails_alone_and_has_its_blocks_back(found: Workers) -> None:
    engine, receiver = Prefiller(found.senders[0]), found.receivers[0]
    engine.add("first", "same")
    engine.add("second", "same")
    engine.run()
    receiver.reserve("same#0", "prefill", pages([[0, 1]]), total=TOKENS).wait(20)
    engine.finish()
    assert not found.senders[0].sendings


def test_preemption_whose_fence_fails_does_not_end_the_engine(found: Workers) -> None:
    sender = found.senders[0]
    engine = Prefiller(sender)
    engine.add("first", None)
    engine.run()
    sending = engine.half._sends["first"]

    def late(timeout_s: float | None = None) -> None:
        raise errors.make(errors.TimeoutError, "pages are not free after 10.25 s")

    sending.wait_reusable = late  # type: ignore[method-assign]
    engine.half.preempt(StepMeta(preempted={"first"}))
    with pytest.raises(AbortedError, match="preempted"):
        sending.wait(20)


def test_one_thread_owns_a_fence_and_close_tries_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A NIC that cannot promise it at first, as for reads over libfabric."""
    calls: list[float] = []
    fence = kv.KVReceiver.fence

    def fails_twice(self: kv.KVReceiver, pair: Any) -> None:
        calls.append(self.clock())
        if len(calls) < 3:
            raise errors.make(errors.TimeoutError, "reads are under way")
        fence(self, pair)

    monkeypatch.setattr(kv.KVReceiver, "fence", fails_twice)
    with workers(LAYOUT, LAYOUT) as found:
        receiver = found.receivers[0]
        reservation = receiver.reserve("a", "prefill", pages([[0, 1]]), total=TOKENS)
        found.keepers[receiver.name].close()
        assert reservation.reusable
        assert len(calls) == 3
        assert not receiver.reservations


def test_a_fence_is_tried_again_after_close(monkeypatch: pytest.MonkeyPatch) -> None:
    fence, works = kv.KVReceiver.fence, threading.Event()

    def fails(self: kv.KVReceiver, pair: Any) -> None:
        if not works.is_set():
            raise errors.make(errors.TimeoutError, "reads are under way")
        fence(self, pair)

    monkeypatch.setattr(kv.KVReceiver, "fence", fails)
    short = dataclasses.replace(QUICK, connect_s=1)
    with workers(LAYOUT, LAYOUT, timeouts=short) as found:
        receiver = found.receivers[0]
        reservation = receiver.reserve("a", "prefill", pages([[0, 1]]), total=TOKENS)
        found.keepers[receiver.name].close()
        assert not reservation.reusable
        works.set()
        reservation.wait_reusable(20)
        assert not receiver.is_fencing
