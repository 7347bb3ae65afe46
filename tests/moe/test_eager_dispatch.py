"""Direct dispatches, which neither autograd, a compiler nor a mode of torch sees: their memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from moe_p2p import AllToAll, AllToAllConfig, ClosedError, DispatchOptions
from moe_p2p.moe import direct
from moe_p2p.moe.dispatched import OBJECTS, WHOLE, dispatched_of, tensors_of
from moe_p2p.moe.pool import AllToAllPool
from tests.support.cases import make, make_tokens
from tests.support.ranks import Rank

ops = torch.ops.moe_p2p
T, ROWS, MANY_ROWS = 5, 12, 1 << 16
OPTIONS = DispatchOptions(
    layout="by_rank", with_source=True, copy_topk=True, zero_padding=True, solo=True
)

direct_dispatch = direct.call_of("dispatch", *OBJECTS)


def eagerly(*given: Any) -> Any:
    """Takes what the op takes."""
    return direct_dispatch(*given, *[None] * (9 - len(given)), WHOLE)


are_direct = pytest.mark.skipif(direct.FACTS is None, reason="this torch has no direct calls")


@pytest.fixture(scope="module")
def alone() -> Iterator[AllToAll]:
    with make(Rank(0, 1, dist.HashStore())) as comm:
        yield comm


def given(comm: AllToAll, capacity: int = ROWS, *more: Any) -> tuple[Any, ...]:
    """Arguments of dispatch_inference; more: behind the weights."""
    tokens = make_tokens(0, 0, T)
    inputs = (tokens.x, tokens.topk_idx, tokens.topk_weights)
    return (comm._comm, OPTIONS.number, T, capacity, *inputs, *more)


@are_direct
@pytest.mark.parametrize("capacity", [ROWS, MANY_ROWS])
def test_all_beside_the_rows_is_one_allocation(alone: AllToAll, capacity: int) -> None:
    """Not where that is much memory, which one small result would keep."""
    with torch.no_grad():
        made = eagerly(*given(alone, capacity))
    by_op = ops.dispatch_inference(*given(alone, capacity))
    want = dispatched_of(by_op, OPTIONS.number, made.topk_idx, False, T, capacity)
    handle, *others = tensors_of(made)
    for got, expected in zip(others, tensors_of(want)[1:], strict=True):
        assert got.is_contiguous()
        set_rows = int(want.offsets[-1]) if len(got) == capacity else len(got)  # others: anything
        assert got.shape == expected.shape
        assert torch.equal(got[:set_rows], expected[:set_rows])
    beside = (handle, *(each for each in others if each is not made.x))
    places = {tensor.untyped_storage().data_ptr() for tensor in beside}
    assert (len(places) == 1) == (capacity == ROWS)
    assert places.isdisjoint({made.x.untyped_storage().data_ptr()})


@are_direct
def test_scales_share_it(alone: AllToAll) -> None:
    """But not in columns, nor where all together are much memory."""
    quantized = DispatchOptions(quantize=True)
    tokens = make_tokens(0, 0, T)
    for options, capacity, shared in (
        (quantized, ROWS, True),
        (dataclasses.replace(quantized, column_scales=True), ROWS, False),
        (quantized, MANY_ROWS, False),
    ):
        with torch.no_grad():
            got = alone.dispatch(tokens.x, tokens.topk_idx, options=options, capacity=capacity)
            alone.release(got)
        assert got.scales is not None
        places = [each.untyped_storage().data_ptr() for each in (got.scales, got.counts)]
        assert (places[0] == places[1]) == shared


@are_direct
def test_it_checks_the_others_first(alone: AllToAll) -> None:
    with make(Rank(0, 1, dist.HashStore())) as other:
        others = [other._comm]
        for call in (eagerly, ops.dispatch_inference):
            call(*given(alone, ROWS, None, others))
    for call in (eagerly, ops.dispatch_inference):
        with pytest.raises(RuntimeError, match=f"communicator {others[0]} is closed"):
            call(*given(alone, ROWS, None, others))


def test_a_pool_tells_each_which_the_others_are() -> None:
    pool = AllToAllPool(dist.HashStore(), rank=0, world_size=1)
    one, two, three = (
        pool.get(AllToAllConfig(num_experts=8, hidden_dim=hidden, topk=2, max_tokens=4))
        for hidden in (64, 128, 256)
    )
    for each in (one, two, three):
        assert {*each.others, each._comm} == {made._comm for made in (one, two, three)}
    x, idx = torch.zeros(4, 64, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 4)
    form = (DispatchOptions(), 4, 4)
    three.close()
    one.dispatch_with(form, x, idx)
    with pytest.raises(ClosedError, match=f"communicator {three._comm} is closed"):
        one.dispatch_with(form, x, idx, others=one.others)
    pool.close()
    assert not pool._comms


def test_who_watches_gets_results_with_memory_of_their_own(alone: AllToAll) -> None:
    class Watching(TorchDispatchMode):
        names: ClassVar[list[str]] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    tokens = make_tokens(0, 0, T)
    with torch.no_grad(), Watching() as watching:
        alone.dispatch(tokens.x, tokens.topk_idx, options=OPTIONS)
    assert "moe_p2p.dispatch_inference.default" in watching.names
