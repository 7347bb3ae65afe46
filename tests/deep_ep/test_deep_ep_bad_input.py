"""Arguments of DeepEP's calls that mean nothing are refused by name; a buffer that was destroyed
makes no communicator."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

import moe_p2p
from moe_p2p.deep_ep import Buffer, ElasticBuffer, HybridEPBuffer
from moe_p2p.moe import pool
from tests.support.deep_ep_cases import layout_of
from tests.support.ranks import Rank, StoreGroup, run_threads

X = torch.ones(4, 128, dtype=torch.bfloat16)
TOPK_IDX = torch.tensor([[0, 1]] * 4)
WEIGHTS = torch.ones(4, 2)


class Alone:
    """A group of one rank."""

    def __init__(self) -> None:
        self.store = HashStore()

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def get_group_store(self) -> Any:
        return self.store


def make(kind: Any = Buffer, **more: Any) -> Any:
    return kind(Alone(), **more)


def dispatched(buffer: Any, x: Any = X, **more: Any) -> Any:
    counts, _ = layout_of(buffer, TOPK_IDX, 8)
    return buffer.dispatch(x, topk_idx=TOPK_IDX, topk_weights=WEIGHTS, **counts, **more)


@pytest.mark.parametrize("alignment", [0, -1, 1.5, "1"])
def test_rows_are_aligned_to_a_number_from_1_on(alignment: Any) -> None:
    """0 ended the process: the op divides by it."""
    text = "expert_alignment is .*, must be an int of at least 1"
    with pytest.raises(moe_p2p.InvalidArgumentError, match=text):
        dispatched(make(), expert_alignment=alignment)


def test_v2_aligns_rows_to_a_number_from_1_on() -> None:
    buffer = make(ElasticBuffer, num_max_tokens_per_rank=8, hidden=128, num_topk=2)
    with pytest.raises(moe_p2p.InvalidArgumentError, match="expert_alignment is -1, must be an"):
        buffer.dispatch(
            X, topk_idx=TOPK_IDX, topk_weights=WEIGHTS, num_experts=8, expert_alignment=-1
        )
    with pytest.raises(moe_p2p.InvalidArgumentError, match="handle is None, must be what dispatch"):
        buffer.combine(X, handle=None)


def test_what_is_no_tensor_and_no_handle_is_named() -> None:
    buffer = make()
    tensor = "the first argument is None, must be a torch.Tensor"
    with pytest.raises(moe_p2p.InvalidArgumentError, match=tensor):
        buffer.get_dispatch_layout(None, 8)
    with pytest.raises(moe_p2p.InvalidArgumentError, match=tensor):
        dispatched(buffer, None)
    rows, handle = dispatched(buffer)[0], dispatched(buffer)[4]
    for wrong in (None, tuple(handle), 3):
        with pytest.raises(
            moe_p2p.InvalidArgumentError, match="must be what dispatch returned, th"
        ):
            buffer.combine(rows, wrong)
    with pytest.raises(moe_p2p.InvalidArgumentError, match="handle is 3, must be what dispatch"):
        buffer.dispatch(X, handle=3)
    buffer.combine(rows, handle)  # still usable


def test_low_latency_calls_name_what_is_no_tensor() -> None:
    buffer = make()
    for wrong in (None, TOPK_IDX[0]):
        with pytest.raises(moe_p2p.InvalidArgumentError, match=r"topk_idx is .*, must be a tensor"):
            buffer.low_latency_dispatch(X, wrong, 8, 8)
    with pytest.raises(moe_p2p.InvalidArgumentError, match="x_global_scale is 3, must be a torch"):
        buffer.low_latency_dispatch(X, TOPK_IDX, 8, 8, use_nvfp4=True, x_global_scale=3)


def test_a_buffer_that_was_destroyed_makes_no_communicator() -> None:
    buffer = make(explicitly_destroy=True)
    dispatched(buffer)
    buffer.destroy()
    with pytest.raises(moe_p2p.ClosedError, match="rank 0: the pool, or its buffer, was closed"):
        dispatched(buffer)
    with pytest.raises(moe_p2p.ClosedError, match="make another one"):
        buffer.low_latency_dispatch(X, TOPK_IDX, 8, 8)


def test_uccls_additions_are_taken_or_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_intranode in (True, False, None):
        make(is_intranode=is_intranode, low_latency_mode=True).reset_rdma_buffer()
    buffer = make(low_latency_mode=True)
    arguments = {"use_fp8": False}
    rows, _, handle, _, _ = buffer.low_latency_dispatch(X, TOPK_IDX, 4, 8, **arguments)
    given = (rows, TOPK_IDX, WEIGHTS, handle)
    sums, _, _ = buffer.low_latency_combine(*given, overlap=False, src_signals=None, block_m=64)
    assert torch.equal(sums, 2 * X)
    monkeypatch.setattr(pool.AllToAllPool, "meet", lambda *_: ['["here"]\n\n', '["there"]\n\n'])
    monkeypatch.setattr(pool, "store_of", lambda *_: (HashStore(), 0, 2))
    with pytest.raises(moe_p2p.InvalidArgumentError, match="2 ranks are on several hosts, 1 on"):
        make(is_intranode=True)


@pytest.mark.parametrize("hook", [False, True])
def test_odd_tensors_for_the_sums_of_low_latency_calls_are_refused(hook: bool) -> None:
    buffer = make(low_latency_mode=True)
    freed = torch.empty_like(X)
    freed.untyped_storage().resize_(0)
    for out, text in (
        (torch._neg_view(torch.empty_like(X)), "out is a negative view, whose memory holds other"),
        (freed, "out is torch.bfloat16 .*, and its storage was freed"),
    ):
        rows, _, handle, _, _ = buffer.low_latency_dispatch(X, TOPK_IDX, 4, 8, use_fp8=False)
        given = (rows, TOPK_IDX, WEIGHTS, handle)
        with pytest.raises(moe_p2p.InvalidArgumentError, match=text):
            buffer.low_latency_combine(*given, out=out, return_recv_hook=hook)
        assert torch.equal(buffer.low_latency_combine(*given)[0], 2 * X)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("num_max_dispatch_tokens_per_rank", "low latency"),
        ("enable_shrink", "low latency"),
        ("num_max_tokens_per_rank", "elastic"),
        ("max_num_of_tokens_per_rank", "hybrid"),
    ],
)
def test_what_ranks_do_not_agree_in_has_the_name_that_they_gave_it(name: str, call: str) -> None:
    """It had the name of a field of AllToAllConfig, which no caller of these had passed."""

    def body(rank: Rank) -> None:
        group: Any = StoreGroup(rank)
        x, ids, tokens = X.clone(), TOPK_IDX, 8 + 8 * rank.rank * (name != "enable_shrink")
        if call == "elastic":
            ElasticBuffer(group, num_max_tokens_per_rank=tokens).dispatch(x, ids, num_experts=8)
        elif call == "hybrid":
            HybridEPBuffer(group, x.shape[1], tokens, 4).dispatch_with_permute(
                hidden=x, topk_idx=ids, num_of_experts=8
            )
        else:
            shrinks = name == "enable_shrink" and rank.rank == 1
            Buffer(
                group, low_latency_mode=True, enable_shrink=shrinks, timeout_s=10.0
            ).low_latency_dispatch(x, ids, tokens, 8)

    for error in run_threads(2, body, return_errors=True):
        assert isinstance(error, moe_p2p.InvalidArgumentError)
        assert f"[invalid argument] {name} differs between ranks: rank 0 has " in str(error)


def test_bounds_of_v2s_calls_that_differ_are_named_at_the_first_call() -> None:
    """Few tokens, which fit into both."""

    def body(rank: Rank) -> None:
        buffer = ElasticBuffer(
            StoreGroup(rank), num_max_tokens_per_rank=16, hidden=X.shape[1], num_gpu_timeout_secs=5
        )
        bound = 16 if rank.rank == 0 else 8
        buffer.dispatch(X, topk_idx=TOPK_IDX, num_experts=8, num_max_tokens_per_rank=bound)

    said = r"call is (8|16), of rank .'s (8|16); .* \(of DeepEP's V2: num_max_tokens_per_rank\)"
    for error in run_threads(2, body, return_errors=True):
        assert isinstance(error, moe_p2p.MoeP2pError)
        assert re.search(said, str(error)), error
