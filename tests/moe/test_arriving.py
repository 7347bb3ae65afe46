"""Rows that are here while others are still arriving: dispatch_recv counts them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_p2p import AllToAll, Dispatched, InvalidArgumentError, TimeoutError
from moe_p2p.moe.dispatched import PendingDispatch
from tests.moe import test_ready
from tests.support import cases
from tests.support.cases import Wanted
from tests.support.ranks import Rank, run_threads

NUM_EXPERTS, MAX_TOKENS, CHUNK_TOKENS = 4, 64, 24  # several blocks of rows, and several chunks
GROUPS = [(1, 1), (2, 2), (4, 2)]
OPTIONS: dict[str, dict[str, Any]] = {
    "rows": {},
    "quantized": {"quantize": True, "with_ranges": True},
}


def steps_of(world_size: int, ranks_per_node: int, options: dict[str, Any]) -> list[Wanted]:
    sizes: dict[str, Any] = {"most": MAX_TOKENS, "num_experts": NUM_EXPERTS}
    return test_ready.steps_of(world_size, ranks_per_node, first=(64, 3, 0, 50), **sizes, **options)


class Consumer(threading.Thread):
    """Takes what the counters say is here, and nothing again later."""

    def __init__(self, into: Dispatched) -> None:
        super().__init__()
        assert into.ready is not None
        self.into, self.ready = into, into.ready
        self.x, self.counts = torch.full_like(into.x.view(torch.uint8), 7), into.counts.clone()
        self.scales = None if into.scales is None else into.scales.clone()
        self.missing = ""

    def until(self, expert: int, block: int, want: int) -> None:
        end = time.monotonic() + 60
        while self.ready.counters[expert, block] < want:
            if time.monotonic() > end:
                self.missing += f"[{expert}, {block}] "
                return
            time.sleep(0)

    def run(self) -> None:
        into, rows = self.into, self.ready.rows
        assert rows is not None
        for expert in reversed(range(len(self.counts))):
            self.until(expert, 0, rows + 1)
            self.counts[expert] = into.counts[expert]
            for block in reversed(range(self.ready.counters.shape[1])):
                self.until(expert, block, self.ready.want)
                part = expert, slice(block * rows, (block + 1) * rows)
                self.x[part] = into.x.view(torch.uint8)[part]
                if self.scales is not None and into.scales is not None:
                    self.scales[part] = into.scales[part]


def receive(comm: AllToAll, pending: PendingDispatch) -> Dispatched:
    into = comm.make_outputs(pending, num_sms=0)
    assert into.ready is not None
    into.x.view(torch.uint8).fill_(0xFF)
    into.counts.fill_(-7)
    taken = Consumer(into)
    taken.start()
    try:
        time.sleep(0.002)
        assert not into.ready.counters.any()
        received = comm.dispatch_recv(pending, into)
    finally:
        taken.join()
    assert not taken.missing
    assert received.ready is into.ready
    assert (into.ready.counters == into.ready.want).all(), into.ready.counters
    x = taken.x.view(into.x.dtype)
    return received._replace(x=x, scales=taken.scales, counts=taken.counts)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_rows_are_here_once_their_counters_are_up(
    group: tuple[int, int], options: dict[str, Any]
) -> None:
    steps = steps_of(*group, options)

    def body(rank: Rank) -> None:
        with cases.make(
            rank,
            num_experts=NUM_EXPERTS,
            ranks_per_node=group[1],
            max_tokens=MAX_TOKENS,
            chunk_tokens=CHUNK_TOKENS,
            steps_in_flight=4,
            dtype=torch.bfloat16,
        ) as comm:
            for wanted in steps:
                pending = comm.dispatch_send(**cases.dispatch_arguments(comm, wanted))
                got = receive(comm, pending)
                cases.assert_received(got, wanted.received[comm.rank])
                out = comm.combine(dispatched=got, **cases.combine_arguments(comm, wanted))
                cases.assert_combined(out, wanted.out[comm.rank])

    run_threads(group[0], body)


@pytest.fixture(name="alone")
def one_rank() -> Any:
    with cases.make(
        Rank(0, 1, dist.HashStore()), num_experts=4, topk=2, dtype=torch.bfloat16, timeout_s=0.3
    ) as comm:
        yield comm


def sent(comm: AllToAll, **options: Any) -> PendingDispatch:
    x = torch.ones(3, comm.config.hidden_dim, dtype=torch.bfloat16)
    given = cases.in_options(
        x=x, topk_idx=torch.tensor([[1, 3], [2, -1], [0, 1]]), **{"layout": "padded"} | options
    )
    return comm.dispatch_send(**given)


def test_counters_are_cleared_for_each_dispatch(alone: AllToAll) -> None:
    for _ in range(3):
        pending = sent(alone)
        into = alone.make_outputs(pending, num_sms=1)
        assert into.ready is not None
        assert not into.ready.counters.any()
        got = alone.dispatch_recv(pending, into)
        assert into.ready.counters.tolist() == [[into.ready.want]] * 4
        alone.release(got)


def test_without_num_sms_nothing_is_counted(alone: AllToAll) -> None:
    pending = sent(alone)
    into = alone.make_outputs(pending)
    assert into.ready is None
    assert alone.dispatch_recv(pending, into).ready is None


def test_counters_of_an_earlier_dispatch_are_refused(alone: AllToAll) -> None:
    pending = sent(alone)
    earlier = alone.dispatch_recv(pending, alone.make_outputs(pending, num_sms=1))
    alone.release(earlier)
    pending = sent(alone)
    with pytest.raises(InvalidArgumentError, match=r"out\.ready counts rows of another dispatch"):
        alone.dispatch_recv(pending, earlier)
    alone.release(alone.dispatch_recv(pending, earlier._replace(ready=None)))


BAD: dict[str, tuple[dict[str, Any], object, str]] = {
    "grouped": ({"layout": "grouped"}, 1, "layout 'padded' .* this dispatch has layout 'grouped'"),
    "by rank": ({"layout": "by_rank"}, 1, "layout 'padded' .* this dispatch has layout 'by_rank'"),
    "zeros": ({"zero_padding": True}, 1, "without zero_padding"),
    "no number": ({}, 1.5, "num_sms is 1.5, must be an integer"),
    "a truth": ({}, True, "num_sms is True, must be an integer"),
    "below zero": ({}, -1, "num_sms is -1, must be an integer of at least 1"),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_what_cannot_be_counted_is_refused(
    alone: AllToAll, bad: tuple[dict[str, Any], Any, str]
) -> None:
    pending = sent(alone, **bad[0])
    with pytest.raises(InvalidArgumentError, match=bad[2]):
        alone.make_outputs(pending, num_sms=bad[1])
    alone.release(alone.dispatch_recv(pending))


def test_the_op_refuses_counters_that_do_not_fit(alone: AllToAll) -> None:
    pending = sent(alone)
    into = alone.make_outputs(pending, num_sms=1)
    assert into.ready is not None
    wrong: list[tuple[Callable[[Tensor], Tensor], str]] = [
        (lambda counters: counters[:3], r"must be \[4, 1\]: a counter for each 128 of"),
        (lambda counters: counters.float(), "must be of torch.int32 or torch.uint32"),
        (lambda counters: counters.repeat(1, 2)[:, :1], "must be contiguous"),
    ]
    for change, text in wrong:
        ready = into.ready.__class__(counters=change(into.ready.counters), want=1)
        with pytest.raises(InvalidArgumentError, match=text):
            alone.dispatch_recv(pending, into._replace(ready=ready))
    alone.release(alone.dispatch_recv(pending, into))


def test_masks_are_refused() -> None:
    fields = {"num_experts": 4, "topk": 2, "dtype": torch.bfloat16, "mask_lost_ranks": True}
    with cases.make(Rank(0, 1, dist.HashStore()), **fields) as masking:
        pending = sent(masking)
        with pytest.raises(InvalidArgumentError, match="only where no rank is masked"):
            masking.make_outputs(pending, num_sms=1)


def test_a_product_that_waited_in_vain_is_an_error_of_check(alone: AllToAll) -> None:
    into = alone.make_outputs(sent(alone), num_sms=1)
    alone.check()
    assert into.ready is not None
    assert into.ready.late is not None
    into.ready.late.fill_((2 + 1) << 32 | 37)
    with pytest.raises(
        TimeoutError, match=r"rank 0: counter 2 of `received.ready` stands at 37, .* in 0.3 s"
    ):
        alone.check()
