"""DeepEP's low-latency calls on ranks of the CPU, which are threads, against plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_p2p import InvalidArgumentError
from moe_p2p.deep_ep import Buffer, streams
from moe_p2p.moe import pool
from tests.support import low_latency_cases as cases
from tests.support.deep_ep_oracle import Place, make_batches
from tests.support.low_latency_cases import FORMATS, SHAPE, SHAPES, make_buffer
from tests.support.ranks import Rank, StoreGroup, on_ranks, run_threads


def run(num_ranks: int, check: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What it returns, of each rank."""

    def body(rank: Rank) -> Any:
        place = Place(rank, "cpu", make_buffer(rank))
        result = check(place, *arguments)
        place.buffer.destroy()
        return result

    return run_threads(num_ranks, body)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("form", FORMATS)
def test_rows_and_sums_of_every_format(num_ranks: int, form: str) -> None:
    run(num_ranks, cases.steps, form)


def test_the_environment_says_how_sums_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_P2P_LOW_LATENCY_PARTIALS", "bfloat16")
    assert run(1, lambda place: place.buffer._partials) == [None]
    monkeypatch.setenv("MOE_P2P_LOW_LATENCY_PARTIALS", "int10")
    with pytest.raises(Exception, match="LOW_LATENCY_PARTIALS is 'int10', must be one"):
        run(1, cases.sums_round_once)


def test_the_format_may_change_from_call_to_call() -> None:
    def all_formats(place: Place) -> None:
        for form in (*FORMATS, *FORMATS):
            cases.steps(place, form)

    run(2, all_formats)


@pytest.mark.parametrize("mode", ["hook", "async"])
@pytest.mark.parametrize("form", ["bf16", "ue8m0"])
def test_hooks_and_events(mode: str, form: str) -> None:
    run(4, cases.steps, form, mode)


@pytest.mark.parametrize("shape", [(2, 1), (4, 2)], ids=["2-nodes-of-1", "2-nodes-of-2"])
@pytest.mark.parametrize("mode", ["sync", "hook"])
def test_between_nodes(shape: tuple[int, int], mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of this host as several nodes."""
    num_ranks, per_node = shape
    monkeypatch.setattr(pool, "find_ranks_per_node", lambda *_: per_node)
    run(num_ranks, cases.steps, "fp8", mode)
    run(num_ranks, cases.never_or_again)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_deep_ep_refuses(name: str) -> None:
    shape, counts, form = SHAPES[name]
    run(len(counts), cases.one_step, shape, counts, form)


CHECKS = {
    "ids may be of 32 bits": (2, cases.narrow_ids),
    "repeats give the same bits": (3, cases.repeats),
    "two calls in flight": (3, cases.two_in_flight),
    "a dispatch may be combined never or again": (2, cases.never_or_again),
    "sums round once": (4, cases.sums_round_once),
    "ten bits travel for logfmt": (4, cases.ten_bits_travel),
    "where results go": (2, cases.results_go),
    "ranks leave each other out until the masks are cleaned": (3, cases.masked),
}


@pytest.mark.parametrize("name", CHECKS)
def test_check(name: str) -> None:
    run(*CHECKS[name])


def test_time_waited_is_added() -> None:
    waited = sum(run(2, cases.times_waited))
    assert (waited.sum(1) > 0).all()


@pytest.mark.parametrize("per_node", [3, 1])
def test_a_rank_that_is_gone_is_masked(per_node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "find_ranks_per_node", lambda *_: per_node)

    def body(rank: Rank) -> None:
        group: Any = StoreGroup(rank)
        buffer = Buffer(group, enable_shrink=True, explicitly_destroy=True, timeout_s=3.0)
        place = Place(rank, "cpu", buffer)
        cases.step_without(place, 0, [])
        buffer._pool.meet("all to have combined")
        if rank.rank == 1:
            buffer._pool.close()  # as the end of a process does
            return
        for seed, mode in enumerate(("sync", "hook") * 3):
            cases.step_without(place, seed, [1], mode)
        cases.check_masks(place, [1])
        if rank.store.add("masked", 1) == 2:
            rank.store.set("both have masked", "")
        rank.store.wait(["both have masked"])
        buffer.low_latency_clean_mask_buffer()
        cases.check_masks(place, [])
        cases.step_without(place, 7, [1])  # masked again: in one node on the same memory, else
        cases.check_masks(place, [1])  # by the roll call of a new communicator
        buffer.destroy()  # waits for nobody

    run_threads(3, body)


@on_ranks(1)
def test_masks_must_be_enabled(rank: Rank) -> None:
    buffer = make_buffer(rank)
    with pytest.raises(AssertionError, match="enable_shrink"):
        buffer.low_latency_clean_mask_buffer()
    buffer.destroy()


# --- what is refused, and sizes ---


@on_ranks(1)
def test_arguments_that_exclude_each_other(rank: Rank) -> None:
    buffer: Any = make_buffer(rank)
    mine = make_batches(1, [3], SHAPE)[0]
    arguments: Any = (mine.x, mine.topk_idx, SHAPE.max_tokens, SHAPE.num_experts)
    with pytest.raises(AssertionError, match="exclude each other"):
        buffer.low_latency_dispatch(*arguments, async_finish=True, return_recv_hook=True)
    with pytest.raises(AssertionError, match="needs round_scale"):
        buffer.low_latency_dispatch(*arguments, use_ue8m0=True)
    with pytest.raises(AssertionError, match="needs use_fp8"):
        buffer.low_latency_dispatch(*arguments, use_fp8=False, round_scale=True)
    with pytest.raises(InvalidArgumentError, match="max_tokens of this call is 2"):
        buffer.low_latency_dispatch(mine.x, mine.topk_idx, 2, SHAPE.num_experts)
    rows, _, handle, _, _ = buffer.low_latency_dispatch(*arguments, use_fp8=False)
    with pytest.raises(AssertionError, match="pass the object itself"):
        buffer.low_latency_combine(rows, mine.topk_idx, mine.weights, tuple(handle))
    buffer.destroy()


@on_ranks(1)
def test_an_expert_named_twice_is_refused(rank: Rank) -> None:
    buffer = make_buffer(rank)
    x = torch.randn(1, SHAPE.hidden_dim).bfloat16()
    twice = torch.tensor([[4, 4, 1]])
    with pytest.raises(RuntimeError, match="twice"):
        buffer.low_latency_dispatch(x, twice, SHAPE.max_tokens, SHAPE.num_experts)
    buffer.destroy()


@pytest.mark.parametrize("num_ranks", [1, 3, 8, 16])
def test_the_size_hint_is_what_a_communicator_takes(num_ranks: int) -> None:
    hint = Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=128,
        hidden=7168,
        num_ranks=num_ranks,
        num_experts=48 * num_ranks,
    )
    assert hint % 128 == 0
    one_way = min(num_ranks, 8) * 128 * 2 * 7168
    assert 4 * one_way < hint < 24 * one_way  # both ways, two steps; between nodes more of each


def test_a_hook_on_another_stream_keeps_the_memory_that_it_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stream of its own at every look; tensors of the CPU note that they are kept for it."""
    kept: list[tuple[int, object]] = []
    numbers = itertools.count()
    monkeypatch.setattr(streams, "current", lambda _: next(numbers))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the hook's")
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, on: kept.append((tensor.data_ptr(), on))
    )

    def body(place: Place) -> None:
        buffer, count = place.buffer, 4
        x = torch.randn(count, 7168, dtype=torch.bfloat16)
        topk_idx, weights = torch.arange(count * 2).view(count, 2) % 4, torch.rand(count, 2)
        rows, counts, handle, _, hook = buffer.low_latency_dispatch(
            x, topk_idx, count, 4, use_fp8=True, return_recv_hook=True
        )
        assert not kept
        hook()
        for tensor in (x, topk_idx, *rows, counts):
            assert (tensor.data_ptr(), "the hook's") in kept
        kept.clear()
        y = torch.randn(*rows[0].shape).bfloat16()
        out, _, hook = buffer.low_latency_combine(
            y, topk_idx, weights, handle, return_recv_hook=True
        )
        assert not kept
        hook()
        for tensor in (y, weights, out):
            assert (tensor.data_ptr(), "the hook's") in kept

    run(1, body)
