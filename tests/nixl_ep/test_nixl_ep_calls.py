"""moe_p2p.nixl_ep call by call: staging beside steps, masks, stores, arguments, fixed worlds."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

import moe_p2p
from moe_p2p import deep_ep, nixl_ep
from moe_p2p.nixl_ep import Buffer, worlds
from tests.faults.causes import is_over
from tests.support import nixl_ep_cases as cases
from tests.support.nixl_ep_cases import E, H, T, begin, masked, step
from tests.support.ranks import (
    DiedError,
    Rank,
    StoreGroup,
    on_ranks,
    run_processes,
    run_threads,
)

BAD = moe_p2p.InvalidArgumentError


def others(buffer: Buffer, ranks: range | list[int]) -> list[int]:
    return [rank for rank in ranks if rank != buffer.rank]


def connected(rank: Rank, num_ranks: int = 0, **options: Any) -> Buffer:
    """A buffer whose ranks are all there from the beginning."""
    buffer = begin(rank.store, rank.rank, num_ranks or rank.world_size, **options)
    buffer.connect_ranks(others(buffer, range(rank.world_size)))
    return buffer


def together(rank: Rank, name: str, count: int = 0) -> None:
    if rank.store.add(f"came to {name}", 1) == (count or rank.world_size):
        rank.store.set(name, "")
    rank.store.wait([name])


# --- ranks that come ---


@on_ranks(4)
def test_ranks_are_staged_beside_steps_and_enter_where_they_are_unmasked(rank: Rank) -> None:
    """As vLLM's manager does it; ranks that come warm up alone meanwhile."""
    store, old = rank.store, range(2)
    buffer = begin(store, rank.rank, 4)
    if rank.rank in old:
        buffer.connect_ranks(others(buffer, old))
        step(buffer, 0, 2 * E)
        buffer.connect_ranks([2, 3], activate=False)
        assert masked(buffer) == [2, 3]
        for seed in range(1, 4):  # beside the newcomers
            step(buffer, seed, 4 * E)
    else:
        buffer.connect_ranks(range(4))  # type: ignore[arg-type]
        for peer in others(buffer, range(4)):
            buffer.update_mask_buffer(peer, True)
        assert masked(buffer) == others(buffer, range(4))
        for seed in range(rank.rank):  # alone: of its own experts, as often as it likes
            step(buffer, seed, 4 * E)
        for peer in others(buffer, range(4)):
            buffer.update_mask_buffer(peer, False)
    together(rank, "commit")
    if rank.rank in old:
        for peer in (2, 3):
            buffer.update_mask_buffer(peer, False)
    assert masked(buffer) == []
    for seed in range(4, 8):
        step(buffer, seed, 4 * E)
    buffer.destroy()


@on_ranks(3)
def test_ranks_that_come_before_the_first_call_of_the_others(rank: Rank) -> None:
    buffer = begin(rank.store, rank.rank, 3)
    if rank.rank < 2:
        buffer.connect_ranks([1 - rank.rank])
        buffer.connect_ranks([2])
    else:
        buffer.connect_ranks([0, 1])
    for seed in range(2):
        step(buffer, seed, None)
    buffer.destroy()


@on_ranks(3)
def test_a_rank_that_does_not_come_to_the_first_call_is_masked(rank: Rank) -> None:
    """As one that is stopped, or cut off."""
    buffer = connected(rank, timeout_ms=5_000)
    together(rank, "connected")
    if rank.rank == 2:
        together(rank, "end")
        with pytest.raises(BAD, match="this world is there already, at epoch 1"):
            step(buffer, 0, 3 * E)
        return
    for seed in range(2):
        step(buffer, seed, 3 * E)
        assert masked(buffer) == [2]
    together(rank, "end")
    buffer.destroy()


def lost_before_calls(rank: Rank) -> None:
    """Rank 2 is killed; no deadline is waited for."""
    buffer = connected(rank)
    rank.store.set(f"pid {rank.rank}", str(os.getpid()))
    together(rank, "connected")
    if rank.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    pid = int(rank.store.get("pid 2"))
    while not is_over(pid):
        time.sleep(0.01)
    for seed in range(2):
        step(buffer, seed, 3 * E)
        assert masked(buffer) == [2]
    buffer.destroy()


def test_a_rank_that_is_killed_before_the_first_call_is_masked() -> None:
    first, second, lost = run_processes(3, lost_before_calls, return_errors=True)
    assert isinstance(lost, DiedError)
    assert first is second is None


@on_ranks(3)
def test_the_store_may_be_another_one_each_time(rank: Rank) -> None:
    """As vLLM makes one for each size of its group. Worlds stay in the first one, which ranks that
    come find by its address."""
    if rank.rank == 0:
        servers = [
            TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)
        ]
        for number, server in enumerate(servers):
            rank.store.set(f"port {number}", str(server.port))
    stores = [
        PrefixStore(
            "some",
            TCPStore("127.0.0.1", int(rank.store.get(f"port {number}")), is_master=False),
        )
        for number in range(2)
    ]
    buffer = begin(stores[rank.rank // 2], rank.rank, 3)
    if rank.rank < 2:
        buffer.connect_ranks([1 - rank.rank])
        step(buffer, 0, None)
        buffer.set_tcp_store_group(None)
        with pytest.raises(BAD, match="there is no store: pass tcp_store_group"):
            buffer.connect_ranks([2])
        buffer.set_tcp_store_group(stores[1])
        buffer.connect_ranks([2])
    else:
        buffer.connect_ranks([0, 1])
    for seed in range(1, 4):
        step(buffer, seed, 3 * E)
    together(rank, "end")
    buffer.destroy()


def test_a_store_without_an_address_has_to_stay() -> None:
    other = HashStore()

    def body(rank: Rank) -> None:
        stores = (rank.store, other)
        buffer = begin(stores[rank.rank // 2], rank.rank, 3, timeout_ms=2_000)
        if rank.rank < 2:
            buffer.connect_ranks([1 - rank.rank])
            step(buffer, 0, None)
            buffer.set_tcp_store_group(other)
            with pytest.raises(moe_p2p.TimeoutError, match="nobody has claimed seat 2"):
                buffer.connect_ranks([2])
            step(buffer, 1, 3 * E)  # they go on as they were
            assert masked(buffer) == [2]
        else:
            with pytest.raises(BAD, match="met in another store, which has no address"):
                buffer.connect_ranks([0, 1])
        buffer.destroy()

    run_threads(3, body)


def test_who_did_not_come_or_named_others_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "CONNECT_S", 1.0)

    def body(rank: Rank) -> None:
        buffer = begin(rank.store, rank.rank, 4)
        buffer.connect_ranks([[1, 2, 3], [0]][rank.rank])

    first, second = run_threads(2, body, return_errors=True)
    assert isinstance(first, moe_p2p.TimeoutError)
    for text in (
        "rank 0: connect_ranks waited 1 s for ranks [0, 1, 2, 3] to connect the same ranks",
        "rank 2 has not called; rank 3 has not called; rank 1 connects [0, 1]",
    ):
        assert text in str(first)
    assert "rank 0 connects [0, 1, 2, 3]" in str(second)


def test_buffers_that_do_not_fit_together_are_refused() -> None:
    def body(rank: Rank) -> None:
        buffer = Buffer(rank=rank.rank, tcp_store_group=rank.store)
        buffer.update_memory_buffers(2, 2 + rank.rank, 0)
        buffer.connect_ranks([1 - rank.rank])

    for error in run_threads(2, body, return_errors=True):
        assert isinstance(error, BAD)
        assert "num_ranks, num_experts_per_rank and disable_ll_nvlink" in str(error)


# --- masks ---


@on_ranks(3)
def test_masks_by_hand(rank: Rank) -> None:
    buffer = connected(rank)
    step(buffer, 0, None)
    if rank.rank == 2:  # alone, beside the others
        for peer in (0, 1):
            buffer.update_mask_buffer(peer, True)
        step(buffer, 1, None)
        for peer in (0, 1):
            buffer.update_mask_buffer(peer, False)
        together(rank, "clean")
    else:
        buffer.update_mask_buffer(2, True)
        buffer.update_mask_buffer(2, False)  # no call between: nothing was missed
        assert masked(buffer) == []
        buffer.update_mask_buffer(2, True)
        step(buffer, 1, None)
        step(buffer, 2, 3 * E)
        assert masked(buffer) == [2]
        with pytest.raises(BAD, match=r"ranks \[2\] are masked and have missed calls; clean_mask"):
            buffer.update_mask_buffer(2, False)
        together(rank, "clean")
    buffer.clean_mask_buffer()
    assert masked(buffer) == []
    for seed in range(3, 6):
        step(buffer, seed, None)
    buffer.destroy()


def test_a_barrier_masks_who_does_not_come_and_cleaning_takes_it_back() -> None:
    def body(rank: Rank) -> list[int]:
        buffer = connected(rank, timeout_ms=5_000)
        buffer.barrier()  # before there is any shape
        step(buffer, 0, None)
        buffer.barrier()
        if rank.rank == 2:
            rank.store.wait(["masked"])
        else:
            buffer.barrier()
            assert masked(buffer) == [2]
            step(buffer, 1, 3 * E)
            together(rank, "masked", 2)
        buffer.clean_mask_buffer()
        step(buffer, 2, None)
        found = masked(buffer)
        buffer.destroy()
        return found

    assert run_threads(3, body) == [[], [], []]


@on_ranks(2)
def test_a_buffer_that_was_left_out_may_come_back(rank: Rank) -> None:
    """The same process, which others have disconnected, and gone on without."""
    buffer = connected(rank)
    step(buffer, 0, None)
    for round_ in range(2):
        buffer.disconnect_ranks([1 - rank.rank])
        assert masked(buffer) == [1 - rank.rank]
        step(buffer, 1 + round_, None)
        buffer.connect_ranks([1 - rank.rank])
        assert masked(buffer) == []
        for seed in range(3, 5):
            step(buffer, seed, None)
    buffer.destroy()


# --- calls ---


@on_ranks(2)
def test_statistics_zero_copy_logfmt_and_events(rank: Rank) -> None:
    buffer = connected(rank, 4)  # room for two more
    step(buffer, 0, None)
    x, topk_idx, weights = cases.tokens_of(rank.rank, 0, 2 * E)
    counts = torch.zeros(E, dtype=torch.int32)
    waits = [torch.zeros(2, dtype=torch.int64) for _ in range(3)]
    for hooked in (False, True):
        if rank.rank == 1:  # rank 0 waits for it
            rank.store.wait([f"rank 0 begins {hooked}"])
            time.sleep(0.05)
        rank.store.set(f"rank {rank.rank} begins {hooked}", "")
        rows, got, handle, event, hook = buffer.low_latency_dispatch(
            x,
            topk_idx,
            T,
            cumulative_local_expert_recv_stats=counts,
            dispatch_wait_recv_cost_stats=waits[hooked],
            use_fp8=False,
            async_finish=not hooked,
            return_recv_hook=hooked,
        )
        assert (hook is not None) == hooked
        if hook is not None:
            hook()
        event.current_stream_wait()
        assert isinstance(rows, torch.Tensor)
        assert torch.equal(counts, got * (1 + hooked))
        assert int(waits[hooked][1]) > 0 or rank.rank == 1
        assert [type(each) for each in handle[2:]] == [int, int]
        assert tuple(handle[2:]) == (T, H)
        into = buffer.get_next_combine_buffer(handle)
        assert into.shape == rows.shape == (E, 2 * T, H)
        into.copy_(rows)
        wanted = x.float() * weights.masked_fill(topk_idx < 0, 0).sum(1, keepdim=True)
        for more in ({"zero_copy": True}, {"use_logfmt": True}, {}):
            given = torch.zeros_like(rows) if "zero_copy" in more else rows
            sums, _, hook = buffer.combine(
                given,
                topk_idx,
                weights,
                handle,
                return_recv_hook=hooked,
                combine_wait_recv_cost_stats=waits[2],
                **more,
            )
            if hook is not None:
                hook()
            torch.testing.assert_close(sums.float(), wanted, rtol=2**-6, atol=0)
    assert bool((waits[2] >= 0).all())
    buffer.destroy()


@on_ranks(1)
def test_what_is_refused(rank: Rank) -> None:
    with pytest.raises(BAD, match="timeout_ms is 0, must be an int above 0"):
        Buffer(timeout_ms=0)
    group: Any = StoreGroup(rank)
    with pytest.raises(BAD, match="group and comm are both given"):
        Buffer(group=group, comm=group)
    kept = Buffer(tcp_store_group=rank.store)
    with pytest.raises(BAD, match="needs explicitly_destroy=True"):
        kept.destroy()
    with pytest.raises(BAD, match="call update_memory_buffers first"):
        kept.connect_ranks([0])
    for wrong in ((0, 2), (2, 0)):
        with pytest.raises(BAD, match="it must be from 0 to num_ranks - 1"):
            kept.update_memory_buffers(*wrong, 0)
    buffer = begin(rank.store, 0, 4)
    with pytest.raises(BAD, match="update_memory_buffers was called"):
        buffer.update_memory_buffers(4, E, 0)
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: buffer.connect_ranks([]), "connect_ranks: no rank is given"),
        (lambda: buffer.connect_ranks([4]), r"there are no ranks \[4\]"),
        (lambda: buffer.disconnect_ranks([1]), r"ranks \[1\] are not connected to rank 0"),
        (lambda: buffer.disconnect_ranks([0]), r"ranks \[0\] are not connected to rank 0, or are"),
        (lambda: buffer.update_mask_buffer(0, True), "rank 0 cannot mask itself"),
        (lambda: buffer.update_mask_buffer(1), "rank 1 is not connected; connect_ranks connects"),
        (lambda: buffer.query_mask_buffer(torch.zeros(3)), r"must be int32 \(4,\)"),
        (lambda: dispatch(buffer, E + 1), "num_experts is 3, must be a multiple of the 2"),
        (lambda: dispatch(buffer, 5 * E), "from 2 .rank 0 is active. to 8"),
        (lambda: buffer.ht_dispatch(torch.zeros(1, H)), "ht_.* calls need low_latency_mode=False"),
        (lambda: Buffer.set_num_sms(3), "must be even"),
    ]
    for call, text in refused:
        with pytest.raises(BAD, match=text):
            call()
    handle = dispatch(buffer, None)[2]
    x, topk_idx, weights = cases.tokens_of(0, 0, E)
    with pytest.raises(BAD, match="handle"):
        buffer.combine(x, topk_idx, weights, tuple(handle))
    buffer.destroy()
    buffer.destroy()
    with pytest.raises(moe_p2p.ClosedError, match="the buffer was destroyed"):
        dispatch(buffer, None)


@on_ranks(1)
def test_ranks_that_are_none_are_refused_by_name(rank: Rank) -> None:
    buffer = begin(rank.store, 0, 4)
    dispatch(buffer, None)
    lists: list[tuple[Any, str]] = [
        (None, r"{} is None, must be ranks, as"),
        (1, "{} is 1, must be ranks, as"),
        ([None], "a rank of {} is None, must be an int"),
        ([1.0], "a rank of {} is 1.0, must be an int"),
        ("12", "a rank of {} is '1', must be an int"),
        ("", "{}: no rank is given"),
        ([[1]], "a rank of {} is of type list, must be an int"),
        ([True], "a rank of {} is True, must be an int"),
        (torch.tensor([1, 2]), "a rank of {} is of type Tensor, must be an int"),
        ([1, 2, 1], r"{}: ranks \[1\] are given more than once"),
        ([1, -1], r"{}: there are no ranks \[-1\]; update_memory_buffers has 4"),
        ([1, 4], r"{}: there are no ranks \[4\]; update_memory_buffers has 4"),
        ([1 << 70], r"{}: there are no ranks \[1180591620717411303424\]"),
    ]
    calls: dict[str, Callable[[Any], None]] = {
        "connect_ranks": buffer.connect_ranks,
        "disconnect_ranks": buffer.disconnect_ranks,
    }
    for name, call in calls.items():
        for given, text in lists:
            with pytest.raises(BAD, match=text.format(name)):
                call(given)
    for one in (None, 1.0, "1", True, [1], torch.tensor(1), -1, 4):
        for mask in (False, True):
            with pytest.raises(BAD, match="update_mask_buffer"):
                buffer.update_mask_buffer(one, mask)  # type: ignore[arg-type]
    with pytest.raises(BAD, match=r"mask_status is of type list, must be a torch.Tensor"):
        buffer.query_mask_buffer([0] * 4)  # type: ignore[arg-type]
    for wrong in (None, "0", 0.0, True, torch.tensor(0)):
        with pytest.raises(BAD, match=r"rank is .*, must be an int"):
            Buffer(rank=wrong)  # type: ignore[arg-type]
        with pytest.raises(BAD, match=r"num_ranks is .*, must be an int"):
            Buffer().update_memory_buffers(wrong, E, 0)  # type: ignore[arg-type]
        with pytest.raises(BAD, match=r"num_experts_per_rank is .*, must be an int"):
            Buffer().update_memory_buffers(4, wrong, 0)  # type: ignore[arg-type]
    assert masked(buffer) == [1, 2, 3]  # nothing has changed
    dispatch(buffer, None)
    buffer.destroy()


def dispatch(buffer: Buffer, num_experts: int | None) -> Any:
    x, topk_idx, _ = cases.tokens_of(buffer.rank, 0, E)
    return buffer.dispatch(x, topk_idx, T, num_experts, use_fp8=False)


@on_ranks(2)
def test_steps_of_the_others_go_on_while_one_waits_to_connect(rank: Rank) -> None:
    """connect_ranks of a rank that comes early waits until the others name it."""
    buffer = begin(rank.store, rank.rank, 2)
    if rank.rank == 0:
        for seed in range(3):
            step(buffer, seed, None)
        while not rank.store.check(["moe_p2p/nixl_ep/wants/1"]):
            time.sleep(0.01)
        step(buffer, 3, None)
    buffer.connect_ranks([1 - rank.rank])
    step(buffer, 4, None)
    buffer.destroy()


# --- high-throughput calls ---


@on_ranks(2)
def test_high_throughput_calls_are_those_of_deep_ep(rank: Rank) -> None:
    group: Any = StoreGroup(rank)
    buffer = Buffer(rank=rank.rank, low_latency_mode=False, group=group, explicitly_destroy=True)
    buffer.update_memory_buffers(2, E, 1 << 24, 1 << 24)
    with pytest.raises(ValueError, match="needs low_latency_mode=True"):
        buffer.connect_ranks([0, 1], activate=False)
    with pytest.raises(BAD, match="and there are 2: connect all"):
        buffer.connect_ranks([rank.rank])
    buffer.connect_ranks([0, 1])
    with pytest.raises(BAD, match="they stay the same"):
        buffer.connect_ranks([0, 1])
    theirs = deep_ep.Buffer(group, 1 << 24, explicitly_destroy=True)
    x, topk_idx, weights = cases.tokens_of(rank.rank, 0, 2 * E)
    results = []
    both: list[tuple[Any, ...]] = [
        (buffer, buffer.ht_dispatch, buffer.ht_combine),
        (theirs, theirs.dispatch, theirs.combine),
    ]
    for each, dispatch_, combine in both:
        per_rank, _, per_expert, in_rank, _ = each.get_dispatch_layout(topk_idx, 2 * E)
        rows, idx, row_weights, counts, handle, _ = dispatch_(
            x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=topk_idx,
            topk_weights=weights,
        )
        again, *_ = dispatch_(x, handle=handle)
        assert torch.equal(again, rows)
        sums, summed, _ = combine(rows, handle, topk_weights=row_weights)
        results.append((rows, idx, row_weights, torch.tensor(counts), sums, summed))
    for ours, wanted in zip(*results, strict=True):
        assert torch.equal(ours, wanted)
    buffer.barrier()
    with pytest.raises(BAD, match="was made with low_latency_mode=False"):
        buffer.query_mask_buffer(torch.zeros(2, dtype=torch.int32))
    theirs.destroy()
    buffer.destroy()


def test_what_it_has_besides() -> None:
    assert nixl_ep.topk_idx_t == torch.int64
    hint = Buffer.get_rdma_size_hint(8, 256, 4, 8)
    assert hint == Buffer.get_low_latency_buffer_size_hint(8, 256, 4, 8) > 0
    assert hint == deep_ep.Buffer.get_low_latency_rdma_size_hint(8, 256, 4, 8)
    assert Buffer.get_dispatch_config(8).num_sms == Buffer.num_sms == 20
    assert Buffer.get_combine_config(8).num_sms == 20
    assert Buffer.is_sm90_compiled()
    Buffer.capture().current_stream_wait()
    tensor = Buffer().get_local_buffer_tensor(torch.int8, use_rdma_buffer=True)
    assert (tensor.dtype, tensor.numel()) == (torch.int8, 0)


@on_ranks(2)
def test_ranks_are_not_staged_before_there_are_calls(rank: Rank) -> None:
    buffer = begin(rank.store, rank.rank, 2)
    with pytest.raises(BAD, match="no call was made yet: connect them with activate=True"):
        buffer.connect_ranks([1 - rank.rank], activate=False)
    buffer.destroy()


@on_ranks(2)
def test_it_ends_with_its_last_reference(rank: Rank) -> None:
    buffer = connected(rank, explicitly_destroy=False)
    step(buffer, 0, None)
    made = next(iter(buffer._worlds._made.values()))  # type: ignore[union-attr]
    closing = made._communicator._closing
    del made
    together(rank, "made")
    gc.disable()
    try:
        del buffer
        assert closing.why_closed == "closed"
    finally:
        gc.enable()
