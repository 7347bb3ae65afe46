"""DeepEP 2.5's EPBuffer on ranks of the CPU, which are threads, against plain torch: V2's checks,
with calls at once and deferred to the wait for their event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_p2p import InvalidArgumentError, deep_ep_v25
from moe_p2p.deep_ep_v25 import EPBuffer, comm
from moe_p2p.moe import pool
from tests.support import deep_ep_oracle
from tests.support import elastic_cases as cases
from tests.support.deep_ep_oracle import Place, make_batches
from tests.support.elastic_cases import CALLS, SHAPE, Call
from tests.support.elastic_order import deep_ep_order
from tests.support.ranks import Rank, on_ranks, run_threads

DEFERRED = {
    name: call._replace(mode="deferred") for name, call in CALLS.items() if "async" not in name
}


def run(num_ranks: int, check: Callable[..., None], *arguments: Any) -> None:
    def body(rank: Rank) -> None:
        place = Place(rank, "cpu", cases.make_buffer(rank, EPBuffer))
        check(place, *arguments)
        place.buffer.destroy()

    run_threads(num_ranks, body)


@pytest.mark.parametrize("name", CALLS)
def test_rows_sums_and_handles(name: str) -> None:
    run(3, cases.steps, CALLS[name])


@pytest.mark.parametrize("name", DEFERRED)
def test_a_deferred_call_returns_at_its_wait_what_it_returns_at_once(name: str) -> None:
    run(3, cases.steps, DEFERRED[name])


def test_deferred_calls_of_one_rank_and_of_all_kinds_in_turns() -> None:
    def all_calls(place: Place) -> None:
        for call in (*CALLS.values(), *DEFERRED.values()):
            cases.steps(place, call, counts=[[7] * 4])

    run(1, cases.steps, DEFERRED["rows by rank"])
    run(2, all_calls)


@pytest.mark.parametrize("name", ["rows by rank", "expanded, fp8, biases"])
@pytest.mark.parametrize("deferred", [False, True])
def test_between_nodes(name: str, deferred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "find_ranks_per_node", lambda *_: 2)
    run(4, cases.steps, (DEFERRED if deferred else CALLS)[name])


@pytest.mark.parametrize("call", [Call(mode="deferred"), Call(do_expand=True, mode="deferred")])
def test_deferred_calls_of_more_steps_than_may_be_under_way(call: Call) -> None:
    shape = SHAPE._replace(max_tokens=1100)
    run(2, cases.steps, call, shape, [[1100, 3]])


@pytest.mark.parametrize("allowed", [False, True])
def test_sums_are_in_deep_eps_order(allowed: bool) -> None:
    for mode in ("sync", "deferred"):
        run(2, deep_ep_order, Call(do_expand=True, num_bias=1, mode=mode), allowed)


def test_sums_are_rounded_once_where_no_more_is_allowed() -> None:
    run(2, cases.one_rounding, True)


@pytest.mark.parametrize("mode", ["sync", "deferred"])
def test_a_handle_repeats_its_routing(mode: str) -> None:
    run(2, cases.cached, Call(mode=mode))
    run(2, cases.cached, Call(do_expand=True, fp8=True, mode=mode))


def both_halves_apart(place: Place) -> None:
    """Nothing is received before the wait: statistics and bias are looked at there."""
    rank, _, buffer = place
    batches = make_batches(3, [6, 9], SHAPE)
    mine = batches[rank.rank]
    stats = torch.zeros(SHAPE.num_experts // 2, dtype=torch.int32)
    call = Call(mode="deferred")
    later = cases.later(buffer, "deferred")
    event = buffer.dispatch(
        mine.x,
        mine.topk_idx,
        mine.weights,
        stats,
        SHAPE.num_experts,
        SHAPE.max_tokens,
        **later,
    )
    assert not stats.any()
    result = (*event.wait(), event)
    assert stats.sum() > 0
    assert event.current_stream_wait() is None  # the hook runs once
    y = cases.check_by_rank(result, batches, rank.rank, SHAPE, call)
    bias = torch.zeros_like(mine.x)
    event = buffer.combine(y, result[3], bias=bias, **later)
    bias.fill_(2.0)
    sums, weights = event.current_stream_wait()
    assert weights is None
    wanted = deep_ep_oracle.combined(mine) + 2
    assert deep_ep_oracle.difference(sums, wanted) < deep_ep_oracle.BF16_DIFFERENCE


def test_the_receiving_half_runs_at_the_wait() -> None:
    run(2, both_halves_apart)


def sent_at_the_call(place: Place) -> None:
    """Rank 1 has rank 0's rows and sums before rank 0 waits for either."""
    rank, _, buffer = place
    batches = make_batches(3, [6, 9], SHAPE)
    call = Call(mode="deferred", do_cpu_sync=False)
    x, topk_idx, topk_weights = batches[rank.rank]
    how = {"num_experts": SHAPE.num_experts, "do_cpu_sync": False}
    late = cases.later(buffer, "deferred")
    event = buffer.dispatch(x, topk_idx, topk_weights, **how, **late)

    def in_turn(what: str) -> tuple[Any, ...]:
        if rank.rank == 0:
            rank.store.wait([what])
        result = event.current_stream_wait()
        rank.store.set(what, "received")
        return result

    result = (*in_turn("rows"), event)
    y = cases.check_by_rank(result, batches, rank.rank, SHAPE, call)
    event = buffer.combine(y, result[3], **late)
    sums, _ = in_turn("sums")
    wanted = deep_ep_oracle.combined(batches[rank.rank])
    assert deep_ep_oracle.difference(sums, wanted) < deep_ep_oracle.BF16_DIFFERENCE


def test_the_sending_half_runs_at_the_call() -> None:
    run(2, sent_at_the_call)


def by_reference(place: Place) -> None:
    rank, _, buffer = place
    batches = make_batches(6, [5, 7], SHAPE)
    for call in (Call(), Call(do_cpu_sync=False), Call(mode="deferred")):
        mine = batches[rank.rank]
        topk_idx = mine.topk_idx.clone()
        result = cases.dispatch(buffer, mine._replace(topk_idx=topk_idx), SHAPE, call)
        handle = result[3]
        assert handle.topk_idx.data_ptr() == topk_idx.data_ptr()
        y = result[0]
        buffer.combine(y, handle)
        topk_idx[:1] = -1
        for use in (
            lambda y=y, handle=handle: buffer.combine(y, handle),
            lambda mine=mine, handle=handle: buffer.dispatch(mine.x, handle=handle),
            lambda handle=handle: handle.topk_idx,
        ):
            with pytest.raises(AssertionError, match="topk_idx was changed in place"):
                use()
    for bound in (SHAPE.max_tokens, 2000):  # sent at the call, or as a whole at the wait
        topk_idx = mine.topk_idx.clone()
        how = {"num_experts": SHAPE.num_experts, "num_max_tokens_per_rank": bound}
        event = buffer.dispatch(mine.x, topk_idx, **how, **cases.later(buffer, "deferred"))
        topk_idx[:1] = -1
        with pytest.raises(AssertionError, match="in place between a deferred dispatch and the w"):
            event.wait()
    with torch.inference_mode():  # no versions there
        topk_idx = mine.topk_idx.clone()
        handle = cases.dispatch(buffer, mine._replace(topk_idx=topk_idx), SHAPE, Call())[3]
        assert handle.topk_idx.data_ptr() == topk_idx.data_ptr()


def test_handles_hold_topk_idx_by_reference_and_notice_changes() -> None:
    run(2, by_reference)


def named(buffer: Any) -> None:
    assert comm.get_physical_domain_size(buffer) == buffer.get_physical_domain_size() == (1, 2)
    assert comm.get_logical_domain_size(buffer.group) == buffer.get_logical_domain_size() == (1, 2)
    assert deep_ep_v25.get_physical_domain_size(buffer.group) == (1, 2)
    comm.barrier(buffer)
    buffer.barrier(False, with_cpu_sync=True, sequential=False)
    deep_ep_v25.destroy_all_managed_nccl_comm()
    assert buffer.main_context is buffer.context is None
    assert buffer.get_theoretical_num_sms(8, 2) > 0
    assert buffer.get_theoretical_num_qps(8) == buffer.lb_get_theoretical_num_sms() == 0
    buffer.check()


@on_ranks(2)
def test_calls_beside_dispatch_and_combine(rank: Rank) -> None:
    buffer = cases.make_buffer(rank, EPBuffer)
    named(buffer)
    buffer.destroy()
    buffer.destroy()  # idempotent
    assert buffer.runtime is None


def test_memory_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    def body(rank: Rank) -> None:
        buffer = cases.make_buffer(rank, EPBuffer, lb_allocation_plan_or_num_bytes=2 << 20)
        buffer.prepare(64, 8, 2)
        buffer.print_memory_usage()
        buffer.destroy()

    run_threads(1, body)
    text = capsys.readouterr().out
    assert "rank_idx=0, num_ranks=1, communicators " in text
    assert "communicators 0 " not in text
    assert "balanced experts 2097152 bytes" in text


@on_ranks(1)
def test_what_is_refused_by_name(rank: Rank) -> None:
    def refused(text: str, run: Callable[[], object], kind: type = InvalidArgumentError) -> None:
        with pytest.raises(kind, match=text):
            run()

    make = cases.make_buffer
    for name, value, text in (
        ("num_bytes", 5, "num_bytes is 5, must be a multiple of 2097152"),
        ("num_bytes", -(2 << 20), "num_bytes is -2097152, must be at least 0"),
        ("num_bytes", "1", "num_bytes is '1', must be an int"),
        ("lb_allocation_plan_or_num_bytes", 4096, "lb_allocation_plan_or_num_bytes is 4096, must"),
        ("num_allocated_qps", -1, "num_allocated_qps is -1"),
    ):
        refused(text, lambda name=name, value=value: make(rank, EPBuffer, **{name: value}))
    buffer = make(rank, EPBuffer, num_allocated_qps=4)
    mine = make_batches(1, [4], SHAPE)[0]

    def dispatch(**options: Any) -> Any:
        call = {"num_experts": SHAPE.num_experts, "num_max_tokens_per_rank": SHAPE.max_tokens}
        return buffer.dispatch(mine.x, mine.topk_idx, mine.weights, **(call | options))

    refused("do_handle_copy is True", lambda: dispatch(do_handle_copy=True))
    refused("defer_epilogue=True needs async", lambda: dispatch(defer_epilogue=True))
    refused("previous_event needs alloc", lambda: dispatch(previous_event=buffer.capture()))
    refused("num_sms is -2", lambda: dispatch(num_sms=-2))
    refused("num_qps is 5, and num_allocated_qps 4", lambda: dispatch(num_qps=5))
    refused("do_zero_padding needs", lambda: dispatch(do_zero_padding=True), AssertionError)
    rows, *_, handle, _ = dispatch(num_qps=4, num_sms=2)
    refused("defer_epilogue", lambda: buffer.combine(rows, handle, defer_epilogue=True))
    refused("handle", lambda: buffer.combine(rows, None), Exception)
    late = {"async_with_compute_stream": True, "defer_epilogue": True}
    refused("a handle was given", lambda: dispatch(handle=handle, **late), AssertionError)
    padding = {"handle": handle, "do_zero_padding": True}
    for more in ({}, late):
        refused(
            "do_zero_padding needs do_expand",
            lambda more=more: buffer.dispatch(mine.x, **padding, **more),
            AssertionError,
        )
    refused("no CPU sync", lambda: buffer.dispatch(
        mine.x, handle=handle, do_cpu_sync=True, **late), AssertionError)  # fmt: skip
    refused("num_scaleout_topk is 1", lambda: buffer.get_theoretical_num_sms(8, 2, 1))
    refused("context_idx is 1", lambda: buffer.barrier(context_idx=1))
    refused("buffer is None, must be an EPBuffer", lambda: comm.barrier(None))
    buffer.destroy()
    held = make(rank, EPBuffer, explicitly_destroy=False)
    refused("destroy.. needs explicitly_destroy", held.destroy)


def test_a_service_level_is_a_setting_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: Rank) -> None:
        with pytest.raises(InvalidArgumentError, match="service_level=3"):
            cases.make_buffer(rank, EPBuffer, sl_idx=3)

    monkeypatch.setattr(pool, "find_ranks_per_node", lambda *_: 1)
    run_threads(2, body)


@pytest.mark.parametrize("name", ["BucketBuffer", "BucketSession", "EngramBuffer", "PPBuffer"])
def test_other_buffers_of_the_wheel_say_why_they_are_missing(name: str) -> None:
    text = f"deep_ep_v25.{name} is not served by moe_p2p, which has EPBuffer: "
    with pytest.raises(NotImplementedError, match=text):
        getattr(deep_ep_v25, name)(None, 1, num_sms=2)


def test_calls_without_an_object_of_what_is_missing() -> None:
    engram: Any = deep_ep_v25.EngramBuffer
    for call in (engram.get_storage_size_hint, engram.get_theoretical_config):
        with pytest.raises(NotImplementedError, match=f"EngramBuffer.{call.__name__} is not"):
            call(None, 1)
    for make in (comm.get_nccl_comm_handle, lambda _: comm.NCCLCommHandle(1, True)):
        with pytest.raises(NotImplementedError, match="no communicator of NCCL"):
            make(None)  # type: ignore[arg-type]
